"""BitNet b1.58 graph (``model_type: bitnet``): Llama with norms before the o and down projections.

Reads the fields of ``llama.py``. Source of the graph: transformers ``models/bitnet/modeling_bitnet.py``. 1bitLLM's
models are of it too, as ``model_type: llama`` and with other names of the two norms; what their config says of
weights is read in ``linears.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .fields import Fields
from .llama import decoder
from .transformer import Transformer

#: Names of the norms before o and down: transformers', and those of 1bitLLM's own code.
SUB_NORMS, SUB_NORMS_1BITLLM = ("attn_sub_norm", "ffn_sub_norm"), ("inner_attn_ln", "ffn_layernorm")


def build(config: Fields) -> Transformer:
    """The decoder that a config describes. Raises CheckpointError for missing or unsupported fields."""
    return replace(decoder(config, "bitnet", default_theta=500_000.0), sub_norms=SUB_NORMS)


def build_1bitllm(config: Fields) -> Transformer:
    """The decoder of 1bitLLM's checkpoints. Raises CheckpointError for missing or unsupported fields."""
    return replace(decoder(config, "bitnet", default_theta=10_000.0), sub_norms=SUB_NORMS_1BITLLM)


def is_1bitllm(names: Collection[str]) -> bool:
    """Whether tensors of a checkpoint are named as 1bitLLM names them."""
    return f"model.layers.0.self_attn.{SUB_NORMS_1BITLLM[0]}.weight" in names
