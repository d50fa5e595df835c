"""Reads a checkpoint's linear weights: ternary in whatever form they are stored, or float."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .checkpoints import Checkpoint
from .errors import CheckpointError
from .ternarize import Ternary, detect, from_master, unpack_bitnet


@dataclass(frozen=True)
class BitNetScheme:
    """What BitNet's ``quantization_config`` says of stored weights.

    divide: stored scales are 1 / mean|W| (``bitlinear``), not mean|W| (``autobitlinear`` offline).
    online: weights are masters that the layer rounds itself.
    """

    divide: bool
    online: bool


def bitnet_scheme(config: Mapping[str, Any], where: str) -> BitNetScheme | None:
    """The scheme of a config, or None if it has no quantization_config. Raises CheckpointError for other methods."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method != "bitnet":
        raise CheckpointError(f"{where}: quantization_config: quant_method is {method!r}, expected 'bitnet'")
    if quantization.get("use_rms_norm"):
        raise CheckpointError(
            f"{where}: quantization_config: use_rms_norm is true, which is not supported: it adds a norm before each linear"
        )
    kind = quantization.get("linear_class", "bitlinear")
    mode = quantization.get("quantization_mode", "offline")
    if kind not in ("bitlinear", "autobitlinear") or mode not in ("offline", "online"):
        raise CheckpointError(
            f"{where}: quantization_config: linear_class {kind!r} and quantization_mode {mode!r}, "
            "expected bitlinear or autobitlinear and offline or online"
        )
    return BitNetScheme(divide=kind == "bitlinear", online=kind == "autobitlinear" and mode == "online")


def read_ternary(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], scheme: BitNetScheme | None
) -> Ternary | None:
    """A linear as trits and scales without loss, or None if it is not ternary.

    shape: (rows, columns) that the model needs. Raises CheckpointError if the stored tensor does not fit.
    """
    if checkpoint.is_packed(name):
        return _read_packed(checkpoint, name, shape, scheme)
    _check_shape(checkpoint, name, shape)
    weight = checkpoint.rows(name)
    if scheme is not None and scheme.online:
        return from_master(weight)
    found = detect(weight)
    if found is None and scheme is not None:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name}: the config says packed BitNet weights, found floats that are not "
            "ternary; set quantization_mode to online if these are master weights"
        )
    return found


def _read_packed(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], scheme: BitNetScheme | None
) -> Ternary:
    if scheme is None or scheme.online:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} holds packed bytes, but the config describes none; "
            "quantization_config must say what they mean"
        )
    rows, columns = shape
    expected = (-(-rows // 4), columns)
    if checkpoint.shape(name) != expected:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} has shape {list(checkpoint.shape(name))}, expected {list(expected)} "
            f"(packed {rows} x {columns})"
        )
    scale_name = f"{name}_scale"
    stored = checkpoint.rows(scale_name).reshape(-1)
    if stored.size != 1 or not stored[0] > 0:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {scale_name} is {stored[:4].tolist()}, expected one positive number"
        )
    scale = np.float32(1) / stored if scheme.divide else stored
    try:
        trits = unpack_bitnet(checkpoint.rows(name), rows)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: tensor {name}: {error}") from None
    return Ternary(trits, scale.astype(np.float32), "parts")


def _check_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    if checkpoint.shape(name) != shape:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} has shape {list(checkpoint.shape(name))}, expected {list(shape)} from the config"
        )


def read_rows(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
    """Float rows of a tensor of the expected shape. Raises CheckpointError if it is packed or of another shape."""
    if checkpoint.is_packed(name):
        raise CheckpointError(f"{checkpoint.path}: tensor {name} holds packed bytes, expected floats")
    _check_shape(checkpoint, name, shape)
    return checkpoint.rows(name, start, stop)
