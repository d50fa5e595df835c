"""The public recipe FareedKhan-dev/train-llm-from-scratch (``model_type: recipe_gpt``), as examples/train imports it.

Llama's graph with learned positions instead of rotary embedding, an MLP without gate, and biases everywhere, the head's
included. Config fields read: those of ``llama.py`` but for biases and rotary embedding. Source of the graph:
``examples/train/import_recipe.py``, whose RMSNorms give what the recipe's LayerNorms do.
"""

from __future__ import annotations

from dataclasses import replace

from .fields import Fields
from .llama import decoder
from .rope import still_table
from .transformer import Transformer

_ACTS = {"relu": "relu", "silu": "silu", "relu2": "relu2", "gelu_pytorch_tanh": "gelu_tanh"}


def build(config: Fields) -> Transformer:
    """The decoder that a config describes. Raises CheckpointError for missing or unsupported fields."""
    model = decoder(config, "recipe_gpt", default_theta=10_000.0, acts=_ACTS)
    config.refuse("tie_word_embeddings", (False,))
    for field in ("rope_theta", "rope_scaling", "rope_parameters"):  # it rotates nothing
        config.refuse(field, ())
    return replace(
        model,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        rope=still_table(model.head_dim),
        positions=True,
        gated=False,
        head_bias=True,
    )
