"""Qwen2 graph (``model_type: qwen2``): Llama with biases on q, k and v, and a window for some layers.

Config fields read: those of ``llama.py`` without its biases, and use_sliding_window, sliding_window,
max_window_layers, layer_types. What a config leaves out is as in transformers
``models/qwen2/configuration_qwen2.py``. Source of the graph: ``modeling_qwen2.py`` there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .fields import Fields
from .llama import decoder
from .refused import windows
from .transformer import Transformer

#: Fields of windows, which Qwen3 has as well.
WINDOW_FIELDS = ("use_sliding_window", "sliding_window", "layer_types")
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def build(config: Fields) -> Transformer:
    """The decoder that a config describes. Raises CheckpointError for missing or unsupported fields."""
    config = config.with_defaults(DEFAULTS)
    model = decoder(config, "qwen2", read=WINDOW_FIELDS, default_theta=10_000.0)
    return replace(model, qkv_bias=True, o_bias=False, windows=layer_windows(config, model.layers))


def layer_windows(config: Fields, layers: int) -> tuple[int, ...]:
    """The window of each layer, 0: none. Layers from max_window_layers on slide, unless layer_types says which."""
    window = None
    if config.flag("use_sliding_window", False) and config.get("sliding_window") is not None:
        window = config.integer("sliding_window")
    first = config.count("max_window_layers")
    return windows(config, layers, window, tuple(window is not None and layer >= first for layer in range(layers)))
