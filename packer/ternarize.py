"""Ternary weights of checkpoints: BitNet's packed bytes, its master weights, and floats that are ternary already.

Matrices come in pieces of whole rows, so that only their trits (a byte each) are held at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shaders.contract import quotient_up

from .errors import CheckpointError
from .workers import SERIAL, Workers

#: Columns that share a scale, in the order in which they are tried.
GROUPS = (256, 128, 64)

#: Gives the rows of a piece of a matrix, f32 ``[N, K]``.
Read = Callable[[Any], np.ndarray]


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
    codes = np.empty((4, *packed.shape), dtype=np.uint8)
    for slot, part in enumerate(codes):
        np.right_shift(packed, 2 * slot, out=part)
    codes &= 3
    trits = codes.reshape(-1, *packed.shape[1:])[:rows]
    if trits.max(initial=0) == 3:
        raise CheckpointError("packed ternary bytes hold a code of 3; they are not BitNet weights")
    trits -= np.uint8(1)  # 0 becomes 255, which is -1 as int8
    return trits.view(np.int8)


def from_master(
    pieces: Callable[[], Iterable[Any]], read: Read = lambda piece: piece, workers: Workers = SERIAL
) -> Ternary:
    """BitNet's online formula: s = 1 / mean|W|, trit = clip(round(W s), -1, 1), value = trit / s.

    pieces: of W, in order, asked for twice. read: gives the rows of one, f32 ``[N, K]``; each itself if left out.
    """

    def total(piece: Any) -> tuple[float, int]:
        weight = read(piece)
        return float(np.abs(weight).sum(dtype=np.float64)), weight.size

    totals, counts = zip(*workers.map(total, pieces()), strict=True)
    mean = np.float32(max(sum(totals) / sum(counts), 1e-5))
    inverse = np.float32(1) / mean

    def rounded(piece: Any) -> np.ndarray:
        trits: np.ndarray = np.clip(np.rint(read(piece) * inverse), -1, 1).astype(np.int8)
        return trits

    trits = np.concatenate([*workers.map(rounded, pieces())])
    return Ternary(trits, np.array([mean], dtype=np.float32), "parts", rounded=True)


@dataclass(frozen=True)
class _Found:
    """A piece that is ternary: trits int8 ``[N, K]``, scales f32 ``[N, ceil(K/group)]``; group 0: one a row."""

    trits: np.ndarray
    scales: np.ndarray
    group: int


def detect(
    pieces: Iterable[Any], read: Read = lambda piece: piece, workers: Workers = SERIAL, rows: int | None = None
) -> Ternary | None:
    """A float matrix that is exactly ternary, as trits and scales without loss; None if it is not.

    Takes one scale a tensor, else one a row, else (f16) one a group of 256, 128 or 64 columns, as all pieces allow.
    pieces, read: as in ``from_master``. rows: of all pieces; if it is known, their trits are held only once.
    """
    trits: list[np.ndarray] = []
    parts: list[_Found] = []
    whole, stop = None, 0
    with closing(workers.map(lambda piece: _find(read(piece)), pieces)) as found:
        for part in found:
            if part is None:
                return None
            if rows is not None and whole is None:
                whole = np.empty((rows, part.trits.shape[1]), dtype=np.int8)
            if whole is not None:
                start, stop = stop, stop + len(part.trits)
                whole[start:stop] = part.trits
                part = replace(part, trits=whole[start:stop])
            trits.append(part.trits)
            parts.append(part)
    codes = np.concatenate(trits) if whole is None else whole
    groups = {part.group for part in parts} - {0}
    if not groups:
        return _by_row(codes, np.concatenate([part.scales[:, 0] for part in parts]))
    halves = [_regrouped(part, min(groups)) for part in parts]
    fitting = [scales for scales in halves if scales is not None]
    if len(fitting) < len(halves):
        return None
    return Ternary(codes, np.concatenate(fitting), "group", min(groups))


def _find(weight: np.ndarray) -> _Found | None:
    """Trits of f32 ``[N, K]`` with one scale a row, else with the widest groups of columns that have one in f16."""
    magnitude = np.abs(weight)
    for group in (0, *GROUPS):
        scales = _scales(magnitude, group)
        if scales is not None:
            return _Found((weight > 0).view(np.int8) - (weight < 0).view(np.int8), scales, group)
    return None


def _regrouped(found: _Found, group: int) -> np.ndarray | None:
    """Scales f16 of narrower groups; a group of zeros has 0. None if f16 does not hold one."""
    if found.group == group:
        return found.scales.astype(np.float16)
    count = quotient_up(found.trits.shape[1], group)
    wide = np.repeat(found.scales, found.group // group, axis=1)[:, :count] if found.group else found.scales
    used = np.logical_or.reduceat(found.trits, np.arange(count) * group, axis=1)
    return _as_halves(np.where(used, wide, np.float32(0)))


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


def _scales(magnitude: np.ndarray, group: int) -> np.ndarray | None:
    """f32 ``[N, ceil(K/group)]`` (group 0: ``[N, 1]``), or None if a group holds two magnitudes other than 0.

    So too if f16 does not hold the scale of a group of fewer columns than all.
    """
    columns = magnitude.shape[1]
    if group == 0:
        rows: np.ndarray = magnitude.max(axis=1, keepdims=True)
        return rows if _is_two_valued(magnitude, rows) else None
    if columns <= group:
        return None
    starts = np.arange(quotient_up(columns, group)) * group
    scales: np.ndarray = np.maximum.reduceat(magnitude, starts, axis=1)
    if _as_halves(scales) is None:
        return None
    return scales if _is_two_valued(magnitude, np.repeat(scales, group, axis=1)[:, :columns]) else None


def _is_two_valued(magnitude: np.ndarray, scales: np.ndarray) -> bool:
    return bool(((magnitude == 0) | (magnitude == scales)).all())
