"""Qwen3 graph (``model_type: qwen3``), as Ternary-Bonsai has it: Llama with a norm for each head of q and k.

Config fields read: those of ``llama.py``, and the windows of ``qwen2.py``. What a config leaves out is as in
transformers ``models/qwen3/configuration_qwen3.py``. Source of the graph: ``modeling_qwen3.py`` there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import qwen2
from .fields import Fields
from .llama import decoder
from .transformer import Transformer

DEFAULTS: dict[str, Any] = {**qwen2.DEFAULTS, "head_dim": 128}


def build(config: Fields) -> Transformer:
    """The decoder that a config describes. Raises CheckpointError for missing or unsupported fields."""
    config = config.with_defaults(DEFAULTS)
    model = decoder(config, "qwen3", read=qwen2.WINDOW_FIELDS, default_theta=10_000.0)
    return replace(model, head_norms=True, windows=qwen2.layer_windows(config, model.layers))
