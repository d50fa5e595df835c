"""Ternary weights out of checkpoints: BitNet's packed bytes, its master weights, and floats that are ternary already."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import CheckpointError


@dataclass(frozen=True)
class Ternary:
    """trits int8 ``[N, K]`` and scales: f32 ``[1]`` (``parts``), f32 ``[N]`` (``row``) or f16 ``[N, G]`` (``group``)."""

    trits: np.ndarray
    scales: np.ndarray
    scale_kind: str
    group: int = 0


def unpack_bitnet(packed: np.ndarray, rows: int) -> np.ndarray:
    """uint8 ``[ceil(rows/4), K]`` to trits int8 ``[rows, K]``.

    Byte [r, c] bits 2i..2i+1 hold W[r + i*R, c] + 1 with R = ceil(rows/4) (transformers ``integrations/bitnet.py``).
    Raises CheckpointError on a code of 3, which no packer writes.
    """
    codes = np.concatenate([(packed >> (2 * slot)) & 3 for slot in range(4)])[:rows]
    if (codes == 3).any():
        raise CheckpointError("packed ternary bytes hold a code of 3; they are not BitNet weights")
    return codes.astype(np.int8) - np.int8(1)


def from_master(weight: np.ndarray) -> Ternary:
    """BitNet's online formula: s = 1 / mean|W|, trit = clip(round(W s), -1, 1), value = trit / s."""
    mean = np.maximum(np.abs(weight).mean(dtype=np.float64), 1e-5).astype(np.float32)
    trits = np.clip(np.rint(weight * (np.float32(1) / mean)), -1, 1).astype(np.int8)
    return Ternary(trits, np.array([mean], dtype=np.float32), "parts")


def detect(weight: np.ndarray) -> Ternary | None:
    """A float matrix that is exactly ternary, as trits and scales without loss; None if it is not.

    Tries one scale a tensor, one a row, then groups of 256, 128 and 64 columns (f16 scales).
    """
    magnitude = np.abs(weight)
    trits = np.sign(weight).astype(np.int8)
    whole = magnitude.max(initial=0)
    if _is_two_valued(magnitude, whole):
        return Ternary(trits, np.array([whole], dtype=np.float32), "parts")
    by_row = magnitude.max(axis=1)
    if _is_two_valued(magnitude, by_row[:, None]):
        return Ternary(trits, by_row.astype(np.float32), "row")
    for group in (256, 128, 64):
        scales = _group_maxima(magnitude, group)
        halves = scales.astype(np.float16)
        exact = np.array_equal(halves.astype(np.float32), scales)
        spread = np.repeat(scales, group, axis=1)[:, : weight.shape[1]]
        if exact and weight.shape[1] > group and _is_two_valued(magnitude, spread):
            return Ternary(trits, halves, "group", group)
    return None


def _is_two_valued(magnitude: np.ndarray, scale: np.ndarray | np.floating) -> bool:
    return bool(((magnitude == 0) | (magnitude == scale)).all())


def _group_maxima(magnitude: np.ndarray, group: int) -> np.ndarray:
    missing = -magnitude.shape[1] % group
    padded = np.pad(magnitude, ((0, 0), (0, missing)))
    return padded.reshape(len(padded), -1, group).max(axis=-1)
