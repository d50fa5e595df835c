"""Mistral graph (``model_type: mistral``): Llama in which every token sees the last ``sliding_window`` keys.

Config fields read: those of ``llama.py`` without biases, and sliding_window (null: all keys). What a config leaves
out is as in transformers ``models/mistral/configuration_mistral.py``. Source of the graph: ``modeling_mistral.py``
there, which gives all layers the same window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import CheckpointError
from .fields import Fields
from .llama import decoder
from .refused import windows
from .transformer import Transformer

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def build(config: Fields) -> Transformer:
    """The decoder that a config describes. Raises CheckpointError for missing or unsupported fields."""
    config = config.with_defaults(DEFAULTS)
    model = decoder(config, "mistral", read=("sliding_window", "layer_types"), default_theta=10_000.0)
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    all_alike = (window is not None,) * model.layers
    found = windows(config, model.layers, window, all_alike)
    if any((size > 0) != slides for size, slides in zip(found, all_alike, strict=True)):
        raise CheckpointError(
            f"{config.where}: field 'layer_types' says that layers differ from what 'sliding_window' {window} says of "
            "all; which one counts cannot be told (transformers takes sliding_window)"
        )
    return replace(model, windows=found)
