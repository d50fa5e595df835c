"""Rotary frequencies from a config: default, linear, llama3 and yarn scaling.

Formulas: transformers ``modeling_rope_utils.py``; the tests ask that module for the expected values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .fields import Fields

SUPPORTED = ("default", "linear", "llama3", "yarn")
#: Parameters that are read below; rope_freqs comes from GGUF, finetuned says nothing about the mathematics.
_READ = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "truncate", "beta_fast",
    "beta_slow", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim",
    "partial_rotary_factor", "rope_freqs", "finetuned",
}  # fmt: skip


def rope_table(config: Fields, head_dim: int, default_theta: float) -> dict[str, Any]:
    """The program's rope table: ``inv_freq`` float32 ``[head_dim/2]`` and the factor on cos and sin.

    Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.
    default_theta: the family's, for configs that do not write it.
    Raises CheckpointError for scalings that are not supported.
    """
    scaling = _parameters(config)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SUPPORTED:
        raise CheckpointError(
            f"{config.where}: rope scaling {kind!r} is not supported (supported: {', '.join(SUPPORTED)}); "
            "ignoring it would give wrong text on long prompts"
        )
    for name in sorted(set(map(str, scaling.values)) - _READ):  # mrope_section, parameters by kind of layer
        scaling.refuse(name, ())
    theta = scaling.number("rope_theta", config.number("rope_theta", default_theta))
    if theta <= 1:
        raise CheckpointError(f"{config.where}: rope_theta is {theta}, expected a number above 1")
    base = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    original, scale = _original_context(config, scaling), 1.0
    if kind == "linear":
        base = base / scaling.positive("factor")
    elif kind == "llama3":
        base = _llama3(base, scaling, original)
    elif kind == "yarn":
        factor = scaling.positive("factor", config.integer("max_position_embeddings") / original)
        base = _yarn(base, scaling, theta, factor, original)
        scale = _yarn_attention(scaling, factor)
    if scaling.get("rope_freqs") is not None:  # from GGUF: the file's own divisors
        base = base / np.asarray(scaling.get("rope_freqs"), dtype=np.float64)
    return {"kind": "rope", "inv_freq": base.astype(np.float32).tolist(), "scale": scale}


def still_table(head_dim: int) -> dict[str, Any]:
    """Of a model without rotary embedding: no position turns anything."""
    return {"kind": "rope", "inv_freq": [0.0] * (head_dim // 2), "scale": 1.0}


def _parameters(config: Fields) -> Fields:
    """The older field first, as transformers has it."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"{config.where}: rope parameters are {parameters!r}, expected an object")
    fields = Fields(parameters, f"{config.where}: rope parameters")
    if fields.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1:
        raise CheckpointError(f"{config.where}: partial_rotary_factor other than 1 is not supported")
    return fields


def _original_context(config: Fields, scaling: Fields) -> float:
    """Context that scaled models were first trained on; beside the parameters it wins over the one among them."""
    within = scaling.positive("original_max_position_embeddings", config.integer("max_position_embeddings"))
    return config.positive("original_max_position_embeddings", within)


def _llama3(base: np.ndarray, scaling: Fields, original: float) -> np.ndarray:
    factor = scaling.positive("factor")
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"{scaling.where}: high_freq_factor {high} must be above low_freq_factor {low}")
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = np.where(wavelength > original / low, base / factor, base)
    medium = (wavelength <= original / low) & (wavelength >= original / high)
    return np.where(medium, blended, scaled)


def _yarn(base: np.ndarray, scaling: Fields, theta: float, factor: float, original: float) -> np.ndarray:
    half = len(base)

    def correction(rotations: float) -> float:
        return half * math.log(original / (rotations * 2 * math.pi)) / math.log(theta)

    low = correction(scaling.positive("beta_fast", 32))
    high = correction(scaling.positive("beta_slow", 1))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = np.clip((np.arange(half) - low) / (high - low or 0.001), 0, 1)
    mixed: np.ndarray = base / factor * ramp + base * (1 - ramp)
    return mixed


def _yarn_attention(scaling: Fields, factor: float) -> float:
    """YaRN's factor on cos and sin: 0.1 ln(factor) + 1 unless the config gives one."""
    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_dim = scaling.number("mscale", 0), scaling.number("mscale_all_dim", 0)
    return mscale(one) / mscale(all_dim) if one and all_dim else mscale(1.0)
