"""Shapes of a few thousand weights, to be synthesized in no time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from packer.models import bitnet, llama
from packer.models.fields import Fields
from packer.shapes import Shape

_CONFIG: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 301,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def tiny_shape(family: str = "bitnet", **changes: Any) -> Shape:
    """A tiny BitNet (a8, scales by part) or Llama (a16, groups of 64, a head of its own); changes: fields of Shape."""
    if family == "bitnet":
        shape = Shape("tiny", "Tiny", bitnet.build(Fields({**_CONFIG, "hidden_act": "relu2"}, "tiny")), "a8")
    else:
        config = {**_CONFIG, "hidden_act": "silu", "tie_word_embeddings": False}
        shape = Shape("tiny-group", "Tiny", llama.build(Fields(config, "tiny")), "a16", 64)
    return replace(shape, **changes)
