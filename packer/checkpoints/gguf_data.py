"""Tensor data of GGUF files, a few rows at a time: as numbers, and as codes and scales where a type is ternary."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from ..errors import CheckpointError
from .gguf_header import GgufTensor
from .gguf_ternary import I2_S, TernaryType

#: Elements decoded at a time: the decoders' own buffers take about three times as much as their result.
PIECE_ELEMENTS = 1 << 20


def decode_rows(path: Path, tensor: GgufTensor, rows: np.ndarray) -> np.ndarray:
    """Rows by their numbers in the file as float32 ``[len(rows), K]``; a vector is one row.

    Reads a piece of rows at a time, from its lowest to its highest, so neighbours should lie close together.
    """
    values = np.empty((len(rows), tensor.shape[-1]), dtype=np.float32)
    for start, stop, data in stored_pieces(path, tensor, rows):
        with np.errstate(all="ignore"):  # damaged scales overflow; the caller looks for what is not finite
            values[start:stop] = _dequantized(path, tensor, data)
    return values


def stored_pieces(path: Path, tensor: GgufTensor, rows: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Bytes uint8 ``[stop - start, row bytes]`` of ``rows[start:stop]``, a piece after another."""
    elements, block_bytes = tensor.block or (1, 0)
    row_bytes = tensor.shape[-1] // elements * block_bytes
    step = max(1, PIECE_ELEMENTS // tensor.shape[-1])
    for first in range(0, len(rows), step):
        piece = rows[first : first + step]
        low, high = int(piece.min()), int(piece.max()) + 1
        data = _read(path, tensor, low * row_bytes, (high - low) * row_bytes).reshape(-1, row_bytes)
        yield first, first + len(piece), data[piece - low]


def _dequantized(path: Path, tensor: GgufTensor, data: np.ndarray) -> np.ndarray:
    """Rows as float32. Where the gguf package knows a ternary type, its decoder checks ours during an export."""
    if tensor.ternary is None or tensor.type_id in (GGMLQuantizationType.TQ1_0, GGMLQuantizationType.TQ2_0):
        values: np.ndarray = dequantize(data, GGMLQuantizationType(tensor.type_id))
        return values
    codes, scales = decoded(path, tensor, tensor.ternary, data)
    values = codes * np.repeat(scales.astype(np.float32) * factor(path, tensor), tensor.ternary.elements, axis=1)
    return values


def decoded(path: Path, tensor: GgufTensor, kind: TernaryType, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of rows; see ``TernaryType.decode``."""
    codes, scales = kind.decode(data)
    if tensor.type_id == I2_S and codes.max(initial=0) > 1:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} of type {tensor.type_name} holds a code of 3, which nothing writes; the "
            "file is damaged, or of a build of bitnet.cpp with another layout"
        )
    return codes, scales


def factor(path: Path, tensor: GgufTensor) -> np.float32:
    """What all of a tensor is multiplied by: the one scale of I2_S, else 1."""
    if tensor.type_id != I2_S or tensor.block is None:
        return np.float32(1)
    elements, block_bytes = tensor.block
    scale = _read(path, tensor, math.prod(tensor.shape) // elements * block_bytes, 4).view("<f4")[0]
    if not 0 < scale < np.inf:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} of type {tensor.type_name} has the scale {scale}, expected a positive "
            "number; the file is damaged, or of a build of bitnet.cpp with another layout"
        )
    return np.float32(scale)


def _read(path: Path, tensor: GgufTensor, begin: int, n_bytes: int) -> np.ndarray:
    try:
        with path.open("rb") as stream:
            stream.seek(tensor.offset + begin)
            data = np.fromfile(stream, dtype=np.uint8, count=n_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: tensor {tensor.name} cannot be read: {error.strerror}") from None
    if data.size != n_bytes:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} ends after {begin + data.size:,} bytes; the file was cut short"
        )
    return data
