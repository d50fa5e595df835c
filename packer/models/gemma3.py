"""Gemma 3 graph (``model_type: gemma3_text``; of a ``gemma3`` folder the text part).

Against Llama: embeddings are multiplied by sqrt(hidden_size), gains are 1 + weight, heads of q and k have norms, and
what attention and MLP give goes through a norm before it is added. Most layers see the last ``sliding_window`` keys
and rotate by rope_local_base_freq, the others see all keys and rotate by rope_theta and its scaling.

Config fields read: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
head_dim, vocab_size, max_position_embeddings, hidden_activation, rms_norm_eps, tie_word_embeddings, attention_bias,
query_pre_attn_scalar, sliding_window, layer_types, sliding_window_pattern, rope_theta, rope_local_base_freq,
rope_scaling, rope_parameters, dtype (or torch_dtype); and norm_gain_offset, which the GGUF reader writes, for its
files hold 1 + weight. What a config leaves out is as in transformers ``models/gemma3/configuration_gemma3.py``:
published ones leave out much. Source of the graph: ``modeling_gemma3.py`` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .fields import Fields
from .llama import decoder
from .refused import windows
from .rope import rope_table
from .transformer import Transformer

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_PATTERN, _THETA, _LOCAL_THETA = 6, 1_000_000.0, 10_000.0
_READ = ("sliding_window", "layer_types", "query_pre_attn_scalar")
_DTYPES = ("bfloat16", "float16", "float32")


def build(config: Fields) -> Transformer:
    """The decoder that a config describes. Raises CheckpointError for missing or unsupported fields."""
    config = config.with_defaults(DEFAULTS)
    whole, local = _ropes(config)
    model = decoder(whole, "gemma3_text", read=_READ, default_theta=_THETA, act="hidden_activation")
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    pattern = config.integer("sliding_window_pattern", _PATTERN)
    return replace(
        model,
        head_norms=True,
        post_norms=True,
        gain_offset=config.number("norm_gain_offset", 1.0),
        multiplier=_multiplier(config, model.hidden),
        scale=config.positive("query_pre_attn_scalar") ** -0.5,
        windows=windows(config, model.layers, window, tuple((i + 1) % pattern != 0 for i in range(model.layers))),
        local_rope=rope_table(local, model.head_dim, _LOCAL_THETA),
    )


def _multiplier(config: Fields, hidden: int) -> float:
    """sqrt(hidden) in the type of the weights: sqrt(1152), 33.94, is 34 in bf16, and so the model was trained."""
    import ml_dtypes  # noqa: F401  late: it teaches NumPy bfloat16, which plans do not need

    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"{config.where}: dtype is {name!r}, expected one of {', '.join(_DTYPES)}")
    return float(np.float32(hidden**0.5).astype(name))


def _ropes(config: Fields) -> tuple[Fields, Fields]:
    """The config as layers that see all keys have it, and as the sliding ones have it."""
    by_kind = config.get("rope_parameters") or {}
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(by_kind, Mapping) or not set(by_kind) <= set(kinds):
        raise CheckpointError(
            f"{config.where}: field 'rope_parameters' is {str(by_kind)[:200]}, expected parameters for each of "
            f"{', '.join(kinds)}"
        )
    whole, local = (by_kind.get(kind) or {} for kind in kinds)
    scaling = config.get("rope_scaling") or {}
    if isinstance(whole, Mapping) and isinstance(scaling, Mapping):
        whole = {**whole, **scaling}
    elif scaling:
        whole = scaling  # neither is looked at here; rope_table says what is wrong
    theta, local_theta = config.get("rope_theta"), config.get("rope_local_base_freq")
    return (
        Fields({**config.values, "rope_scaling": None, "rope_parameters": whole, "rope_theta": theta}, config.where),
        Fields(
            {**config.values, "rope_scaling": None, "rope_parameters": local, "rope_theta": local_theta}, config.where
        ),
    )
