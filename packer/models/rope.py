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


def rope_table(config: Fields, head_dim: int) -> dict[str, Any]:
    """The program's rope table: ``inv_freq`` float32 ``[head_dim/2]`` and the factor on cos and sin.

    Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.
    Raises CheckpointError for scalings that are not supported.
    """
    parameters = _parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in SUPPORTED:
        raise CheckpointError(
            f"{config.where}: rope scaling {kind!r} is not supported (supported: {', '.join(SUPPORTED)}); "
            "ignoring it would give wrong text on long prompts"
        )
    theta = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    base = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = Fields(parameters, f"{config.where}: rope parameters")
    if kind == "linear":
        base = base / scaling.number("factor")
    elif kind == "llama3":
        base = _llama3(base, scaling)
    elif kind == "yarn":
        base = _yarn(base, scaling, theta, head_dim, config)
    if "rope_freqs" in parameters:
        base = base / np.asarray(parameters["rope_freqs"], dtype=np.float64)
    scale = _yarn_attention(scaling) if kind == "yarn" else 1.0
    return {"kind": "rope", "inv_freq": base.astype(np.float32).tolist(), "scale": scale}


def _parameters(config: Fields) -> Mapping[str, Any]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"{config.where}: rope_parameters is {parameters!r}, expected an object")
    if config.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise CheckpointError(f"{config.where}: partial_rotary_factor other than 1 is not supported")
    return parameters


def _llama3(base: np.ndarray, scaling: Fields) -> np.ndarray:
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    original = scaling.number("original_max_position_embeddings")
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = np.where(wavelength > original / low, base / factor, base)
    medium = (wavelength <= original / low) & (wavelength >= original / high)
    return np.where(medium, blended, scaled)


def _yarn(base: np.ndarray, scaling: Fields, theta: float, head_dim: int, config: Fields) -> np.ndarray:
    factor = scaling.number("factor")
    original = scaling.get("original_max_position_embeddings") or config.integer("max_position_embeddings")

    def correction(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(scaling.get("beta_fast") or 32), correction(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return base / factor * ramp + base * (1 - ramp)


def _yarn_attention(scaling: Fields) -> float:
    """YaRN's factor on cos and sin: 0.1 ln(factor) + 1 unless the config gives one."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = scaling.number("factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return mscale(one) / mscale(all_dim) if one and all_dim else mscale(1.0)
