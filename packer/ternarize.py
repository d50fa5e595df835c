"""Ternary weights of checkpoints: BitNet's packed bytes, its master weights, and floats that are ternary already.

Matrices come in pieces of whole rows, so that only their trits (a byte each) are held at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from shaders.contract import quotient_up

from .errors import CheckpointError

#: Columns that share a scale, in the order in which they are tried.
GROUPS = (256, 128, 64)

Pieces = Iterable[np.ndarray]


@dataclass(frozen=True)
class Ternary:
    """trits int8 ``[N, K]``; scales f32 ``[1]`` (``parts``), f32 ``[N]`` (``row``) or f16 ``[N, G]`` (``group``).

    rounded: the model itself rounds the floats of its checkpoint to these, which are other numbers then.
    """

    trits: np.ndarray
    scales: np.ndarray
    scale_kind: str
    group: int = 0
    rounded: bool = False

    def values(self, start: int, stop: int) -> np.ndarray:
        """Rows as the numbers that they stand for, f32 ``[stop - start, K]``."""
        scales: np.ndarray = self.scales.astype(np.float32)
        if self.scale_kind == "row":
            scales = scales[start:stop, None]
        elif self.scale_kind == "group":
            scales = np.repeat(scales[start:stop], self.group, axis=1)[:, : self.trits.shape[1]]
        values: np.ndarray = self.trits[start:stop] * scales
        return values


def unpack_bitnet(packed: np.ndarray, rows: int) -> np.ndarray:
    """uint8 ``[ceil(rows/4), K]`` to trits int8 ``[rows, K]``.

    Byte [r, c] bits 2i..2i+1 hold W[r + i*R, c] + 1 with R = ceil(rows/4) (transformers ``integrations/bitnet.py``).
    Raises CheckpointError on a code of 3, which no packer writes.
    """
    codes = np.concatenate([(packed >> (2 * slot)) & 3 for slot in range(4)])[:rows]
    if codes.max(initial=0) == 3:
        raise CheckpointError("packed ternary bytes hold a code of 3; they are not BitNet weights")
    return codes.view(np.int8) - np.int8(1)


def from_master(pieces: Callable[[], Pieces]) -> Ternary:
    """BitNet's online formula: s = 1 / mean|W|, trit = clip(round(W s), -1, 1), value = trit / s. Reads W twice."""
    total, count = 0.0, 0
    for weight in pieces():
        total += float(np.abs(weight).sum(dtype=np.float64))
        count += weight.size
    mean = np.float32(max(total / count, 1e-5))
    inverse = np.float32(1) / mean
    trits = [np.clip(np.rint(weight * inverse), -1, 1).astype(np.int8) for weight in pieces()]
    return Ternary(np.concatenate(trits), np.array([mean], dtype=np.float32), "parts", rounded=True)


def detect(pieces: Pieces) -> Ternary | None:
    """A float matrix that is exactly ternary, as trits and scales without loss; None if it is not.

    Tries one scale a tensor, one a row, then groups of 256, 128 and 64 columns (f16 scales).
    """
    trits: list[np.ndarray] = []
    #: By columns that share a scale (0: all of a row) the scales found so far; a kind that fails is dropped.
    found: dict[int, list[np.ndarray]] = {group: [] for group in (0, *GROUPS)}
    for weight in pieces:
        magnitude = np.abs(weight)
        for group, scales in list(found.items()):
            fits = _row_scales(magnitude) if group == 0 else _group_scales(magnitude, group)
            if fits is None:
                del found[group]
            else:
                scales.append(fits)
        if not found:
            return None
        trits.append((weight > 0).view(np.int8) - (weight < 0).view(np.int8))
    group, scales = next(iter(found.items()))
    whole, codes = np.concatenate(scales), np.concatenate(trits)
    if group:
        return Ternary(codes, whole, "group", group)
    return _by_row(codes, whole)


def from_groups(trits: np.ndarray, scales: np.ndarray, group: int) -> Ternary | None:
    """Trits int8 ``[N, K]`` with finite scales ``[N, ceil(K/group)]`` in the form that ``detect`` gives their product.

    So whatever format a matrix comes in, its pack is the same: scales are positive, a group of zeros has 0, and scales
    that agree become one a tensor, one a row, or wider groups. None if what remains does not fit a pack: groups of
    fewer than 64 columns, or scales that f16 does not hold.
    """
    starts = np.arange(scales.shape[1]) * group
    scales = scales.astype(np.float32)
    signs = np.sign(scales).astype(np.int8)
    if (signs != 1).any():  # a scale of 0 makes zeros of its trits
        trits, scales = trits * np.repeat(signs, group, axis=1)[:, : trits.shape[1]], np.abs(scales)
    scales = np.where(np.logical_or.reduceat(trits, starts, axis=1), scales, np.float32(0))
    rows = scales.max(axis=1)
    if _is_two_valued(scales, rows[:, None]):
        return _by_row(trits, rows)
    for wider in (*GROUPS, group):
        if wider % group or wider % GROUPS[-1]:
            continue
        merged = np.maximum.reduceat(scales, np.arange(0, scales.shape[1], wider // group), axis=1)
        if _is_two_valued(scales, np.repeat(merged, wider // group, axis=1)[:, : scales.shape[1]]):
            halves = _as_halves(merged)
            return None if halves is None else Ternary(trits, halves, "group", wider)
    return None


def _by_row(trits: np.ndarray, scales: np.ndarray) -> Ternary:
    """One scale f32 a row, or one for all where they agree."""
    greatest = scales.max()
    if ((scales == 0) | (scales == greatest)).all():
        return Ternary(trits, np.array([greatest], dtype=np.float32), "parts")
    return Ternary(trits, scales, "row")


def _as_halves(scales: np.ndarray) -> np.ndarray | None:
    """As f16, or None if that changes one."""
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    return halves if np.array_equal(halves.astype(np.float32), scales) else None


def _row_scales(magnitude: np.ndarray) -> np.ndarray | None:
    """f32 ``[N]``, or None if a row holds two magnitudes other than 0."""
    scales: np.ndarray = magnitude.max(axis=1)
    return scales if _is_two_valued(magnitude, scales[:, None]) else None


def _group_scales(magnitude: np.ndarray, group: int) -> np.ndarray | None:
    """f16 ``[N, ceil(K/group)]``, or None if a group holds two magnitudes other than 0 or one that f16 does not."""
    columns = magnitude.shape[1]
    if columns <= group:
        return None
    starts = np.arange(quotient_up(columns, group)) * group
    scales = np.maximum.reduceat(magnitude, starts, axis=1)
    halves = _as_halves(scales)
    if halves is None:
        return None
    return halves if _is_two_valued(magnitude, np.repeat(scales, group, axis=1)[:, :columns]) else None


def _is_two_valued(magnitude: np.ndarray, scales: np.ndarray) -> bool:
    return bool(((magnitude == 0) | (magnitude == scales)).all())
