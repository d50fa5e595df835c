"""Ternary types of GGUF files: blocks to integer codes and their scales, without a float in between.

Layouts: TQ1_0, TQ2_0, Q1_0 and Q2_0 ggml ``ggml-quants.c``; PQ2_0 and PTQ1_0 PrismML's fork of it; I2_S
bitnet.cpp ``ggml-quants.c``. I2_S files of other builds (64 codes in 16 bytes on ARM, rows in fours) cannot be told
from the bytes; what every reader of bitnet.cpp's own file takes, 128 codes in 32 bytes, is what is read here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

#: Bytes after the blocks of an I2_S tensor, of which the first four are its one scale, f32.
I2_S_TAIL = 32
I2_S, Q2_0 = 36, 42


@dataclass(frozen=True)
class TernaryType:
    """A type. elements: weights in a block. n_bytes: its size. scale_at: where its f16 scale lies, None for none.

    unpack: bytes uint8 ``[blocks, n_bytes]`` without the scale to codes int8 ``[blocks, elements]``: weight / scale.
    A code of 2, which 2-bit types can hold, makes a tensor that is not ternary.
    """

    elements: int
    n_bytes: int
    scale_at: int | None
    unpack: Callable[[np.ndarray], np.ndarray]

    def decode(self, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows uint8 ``[N, row bytes]`` to codes int8 ``[N, K]`` and scales f16 ``[N, K / elements]`` (none: ones)."""
        blocks = data.reshape(-1, self.n_bytes)
        if self.scale_at is None:
            scales = np.ones(len(blocks), dtype=np.float16)
        else:
            scales = np.ascontiguousarray(blocks[:, self.scale_at : self.scale_at + 2]).view("<f2")
            blocks = np.delete(blocks, [self.scale_at, self.scale_at + 1], axis=1)
        return self.unpack(blocks).reshape(len(data), -1), scales.astype(np.float16).reshape(len(data), -1)


def ternary_type(type_id: int, elements: int = 128) -> TernaryType | None:
    """The type of this number, None for others. elements: in a block of Q2_0, 64 or 128."""
    if type_id == Q2_0:
        return Q2_0_SIZES.get(elements)
    return TYPES.get(type_id)


def _base3(stages: tuple[tuple[int, int], ...]) -> Callable[[np.ndarray], np.ndarray]:
    """stages: runs of (bytes, digits each). Byte b of a run has as digit n the run's element ``n * bytes + b``."""

    def unpack(blocks: np.ndarray) -> np.ndarray:
        codes, begin = [], 0
        for n_bytes, digits in stages:
            powers = (3 ** np.arange(digits)).astype(np.uint16)[:, None]
            shifted = (blocks[:, None, begin : begin + n_bytes] * powers) & 255  # [blocks, digit, byte]
            codes.append(((shifted * 3) >> 8).reshape(len(blocks), -1))
            begin += n_bytes
        return np.concatenate(codes, axis=1).astype(np.int8) - np.int8(1)

    return unpack


def _bits(width: int, *, run: int, high_first: bool = False) -> Callable[[np.ndarray], np.ndarray]:
    """Codes of ``width`` bits. Of a run of bytes all first slots come, then all second ones; run 1: byte by byte."""
    slots = np.arange(0, 8, width, dtype=np.uint8)
    shifts = slots[::-1] if high_first else slots

    def unpack(blocks: np.ndarray) -> np.ndarray:
        runs = blocks.reshape(len(blocks), -1, 1, run) >> shifts[:, None]  # [blocks, run, slot, byte]
        codes: np.ndarray = (runs & (2**width - 1)).reshape(len(blocks), -1).astype(np.int8)
        return codes

    return unpack


def _minus_one(unpack: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: unpack(blocks) - np.int8(1)


def _signs(blocks: np.ndarray) -> np.ndarray:
    """Bits: 1 is +1, 0 is -1."""
    signs: np.ndarray = 2 * _bits(1, run=1)(blocks) - 1
    return signs


_CODES = _minus_one(_bits(2, run=1))
Q2_0_SIZES = {64: TernaryType(64, 18, 0, _CODES), 128: TernaryType(128, 34, 0, _CODES)}
TYPES = {
    34: TernaryType(256, 54, 52, _base3(((32, 5), (16, 5), (4, 4)))),  # TQ1_0
    35: TernaryType(256, 66, 64, _minus_one(_bits(2, run=32))),  # TQ2_0
    I2_S: TernaryType(128, 32, None, _minus_one(_bits(2, run=32, high_first=True))),
    41: TernaryType(128, 18, 0, _signs),  # Q1_0
    142: TernaryType(128, 34, 0, _CODES),  # PQ2_0
    143: TernaryType(128, 28, 26, _base3(((16, 5), (8, 5), (2, 4)))),  # PTQ1_0
}
