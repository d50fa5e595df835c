"""Tiny models of each family, with windows that a short prompt exceeds; tests run them on every executor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .checkpoints import tiny_config, tiny_tensors

GEMMA3: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

#: More tokens than any of these windows, after which no model of these cases hesitates between two tokens for long.
FAMILY_PROMPT = [int(i) for i in np.random.default_rng(16).integers(0, 256, size=21)]
#: name -> family, changes of its config
FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", QWEN_WINDOW),
    "qwen3": ("qwen3", {**QWEN_WINDOW, "head_dim": 16}),
    "gemma3": ("gemma3_text", GEMMA3),
}

#: Ternary-Bonsai: Qwen3 with groups of 128 columns, ternary everywhere.
BONSAI: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "head_dim": 64,
}
BONSAI_GROUP = 128


def bonsai_matrices(tensors: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Trits int8 ``[N, K]`` and scales f16 ``[N, K/128]`` for every matrix of a model with these tensors."""
    random = np.random.default_rng(3)
    found = {}
    for name, array in tensors.items():
        if array.ndim == 2:
            rows, columns = array.shape
            scales = random.uniform(0.8, 1.2, (rows, columns // BONSAI_GROUP)) / (0.8 * columns**0.5)
            found[name] = random.integers(-1, 2, array.shape).astype(np.int8), scales.astype(np.float16)
    return found


def bonsai_tensors(**changes: Any) -> dict[str, np.ndarray]:
    """Every tensor of a tiny Bonsai, f32."""
    tensors = tiny_tensors(tiny_config("qwen3", **{**BONSAI, **changes}))
    for name, (trits, scales) in bonsai_matrices(tensors).items():
        tensors[name] = trits * np.repeat(scales.astype(np.float32), BONSAI_GROUP, axis=1)
    return tensors
