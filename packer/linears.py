"""Reads a checkpoint's linear weights: ternary in whatever form they are stored, or float."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shaders.contract import quotient_up

from .checkpoints import Checkpoint
from .errors import CheckpointError
from .ternarize import Ternary, detect, from_master, unpack_bitnet
from .workers import SERIAL, Workers

#: Rows are read in pieces of about this many bytes of float32: large tensors need little memory, a piece fits into
#: processors' caches, and matrices of small models are several pieces too, which workers share.
PIECE_BYTES = 2 << 20


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
        return _scheme_1bitllm(config, where)
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if not isinstance(quantization, Mapping) or method != "bitnet":
        raise CheckpointError(f"{where}: quantization_config: quant_method is {method!r}, expected 'bitnet'")
    if quantization.get("use_rms_norm"):
        raise CheckpointError(
            f"{where}: quantization_config: use_rms_norm is true, which is not supported: "
            "it adds a norm before each linear"
        )
    kept = quantization.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not set(map(str, kept)) <= {"lm_head", "embed_tokens", "model.embed_tokens"}:
        raise CheckpointError(
            f"{where}: quantization_config: modules_to_not_convert is {kept!r}, "
            "but only the output head and the embedding may stay unconverted here"
        )
    kind = quantization.get("linear_class", "bitlinear")
    mode = quantization.get("quantization_mode", "offline")
    if kind not in ("bitlinear", "autobitlinear") or mode not in ("offline", "online"):
        raise CheckpointError(
            f"{where}: quantization_config: linear_class {kind!r} and quantization_mode {mode!r}, "
            "expected bitlinear or autobitlinear and offline or online"
        )
    return BitNetScheme(divide=kind == "bitlinear", online=kind == "autobitlinear" and mode == "online")


def _scheme_1bitllm(config: Mapping[str, Any], where: str) -> BitNetScheme | None:
    """1bitLLM's models say ``weight_bits`` 1 and ``input_bits`` 8: masters, which their own code rounds as BitNet's."""
    bits = tuple(config.get(field) for field in ("weight_bits", "input_bits"))
    if bits == (None, None):
        return None
    if bits != (1, 8):
        raise CheckpointError(f"{where}: weight_bits and input_bits are {bits[0]!r} and {bits[1]!r}, expected 1 and 8")
    return BitNetScheme(divide=False, online=True)


def read_ternary(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, int],
    scheme: BitNetScheme | None,
    workers: Workers = SERIAL,
) -> Ternary | None:
    """A linear as trits and scales without loss, or None if it is not ternary.

    shape: (rows, columns) that the model needs. Raises CheckpointError if the stored tensor does not fit.
    """
    if checkpoint.is_packed(name):
        return _read_packed(checkpoint, name, shape, scheme)

    def read(span: tuple[int, int]) -> np.ndarray:
        return read_rows(checkpoint, name, shape, *span)

    if scheme is not None and scheme.online:
        return from_master(lambda: piece_spans(0, *shape), read, workers)
    if checkpoint.shape(name) == shape:  # else reading its numbers says what is wrong
        stored = checkpoint.ternary(name)
        if stored is not None:
            return stored
    found = detect(piece_spans(0, *shape), read, workers, shape[0])
    if found is None and scheme is not None:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name}: the config says packed BitNet weights, found floats that are not "
            "ternary; set quantization_mode to online if these are master weights"
        )
    return found


def _read_packed(checkpoint: Checkpoint, name: str, shape: tuple[int, int], scheme: BitNetScheme | None) -> Ternary:
    if scheme is None or scheme.online:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} holds packed bytes, but the config describes none; "
            "quantization_config must say what they mean"
        )
    rows, columns = shape
    expected = (quotient_up(rows, 4), columns)
    if checkpoint.shape(name) != expected:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} has shape {list(checkpoint.shape(name))}, expected {list(expected)} "
            f"(packed {rows} x {columns})"
        )
    scale_name = f"{name}_scale"
    stored = checkpoint.rows(scale_name)
    with np.errstate(all="ignore"):
        scale = np.float32(1) / stored if scheme.divide else stored
    scale = scale.reshape(-1)
    if stored.dtype != np.float32 or stored.size != 1 or not 0 < scale[0] < np.inf:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {scale_name} is {stored.reshape(-1)[:4].tolist()} of shape "
            f"{list(stored.shape)}, expected one positive number"
        )
    try:
        trits = unpack_bitnet(checkpoint.rows(name), rows)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: tensor {name}: {error}") from None
    return Ternary(trits, scale, "parts")


def read_rows(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
    """Float rows of a tensor of the expected shape. Raises CheckpointError if it is packed or of another shape."""
    if checkpoint.is_packed(name):
        raise CheckpointError(f"{checkpoint.path}: tensor {name} holds packed bytes, expected floats")
    if checkpoint.shape(name) != shape:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} has shape {list(checkpoint.shape(name))}, expected {list(shape)} "
            "from the config"
        )
    return checkpoint.rows(name, start, stop)


def piece_spans(start: int, stop: int, columns: int, least: int = 1) -> Iterator[tuple[int, int]]:
    """Rows ``start:stop`` cut into pieces of at most ``PIECE_BYTES``, but of ``least`` rows at least."""
    step = max(least, PIECE_BYTES // (4 * columns))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)
