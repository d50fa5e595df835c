"""Slices: so many rows of a matrix that a shard holds them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shaders.contract import quotient_up

from . import encodings
from .manifest import DTYPE_BYTES, data_layout
from .models import Matrix


def cut(matrix: Matrix, encoding: str, shard_bytes: int) -> tuple[int, ...]:
    """Rows of each slice: as many as a shard holds, in multiples of 64."""
    most = max(64, shard_bytes // row_bytes(encoding, matrix.columns) // 64 * 64)
    full, rest = divmod(matrix.rows, most)
    return (most,) * full + ((rest,) if rest else ())


def row_bytes(encoding: str, columns: int) -> int:
    """Most bytes that a row takes in a pack, its scales included."""
    dtype, width = data_layout(encoding, columns)
    scales = (4 if encoding == "q4a" else 2) * quotient_up(columns, encodings.GROUP) + 4
    return width * DTYPE_BYTES[dtype] + scales


def spans(slices: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First row of each slice, and the row after its last."""
    start = 0
    for rows in slices:
        yield start, start + rows
        start += rows


class Rows:
    """An array of so many rows that comes in pieces; it is held once only."""

    def __init__(self, rows: int):
        self.rows, self.done = rows, 0
        self.array = np.empty(0)

    def add(self, piece: np.ndarray) -> None:
        """The next rows."""
        if not self.done:
            self.array = np.empty((self.rows, *piece.shape[1:]), dtype=piece.dtype)
        self.array[self.done : self.done + len(piece)] = piece
        self.done += len(piece)
