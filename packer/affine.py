"""Fits lines through groups of weights, for q4a: value = n * scale + minimum with n = 0 .. 15.

The idea of ggml's ``make_qkx2_quants``: several first scales, each with the nearest codes, then the line of least
squares through those codes, then the nearest codes again. Errors count after rounding to f16.
"""

from __future__ import annotations

import numpy as np

from .errors import CheckpointError

LEVELS = 15
F16_MAX = 65504.0
#: Steps that the range of a group is taken to have. ggml tries 14 to 16 for a number of 15.
_STEPS = (15.0, 14.75, 14.5, 14.25, 14.0, 15.25, 15.5, 16.0)
#: Farthest from a grid point, in steps, that a weight of a group on a grid may be: f16 sums in f32 err by less.
_ON_GRID = 1e-3

#: Codes u8 ``[M, L]``, scales f16 ``[M]``, minima f16 ``[M]``, sums of squared errors f32 ``[M]``.
_Fit = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def fit(groups: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes u8 ``[N, G, L]``, scales and minima f16 ``[N, G]`` of f32 groups ``[N, G, L]``.

    columns: K; those beyond are no weights and get code 0. Raises CheckpointError if f16 does not hold a weight.
    """
    rows, count, length = groups.shape
    greatest = float(np.abs(groups).max(initial=0))
    if greatest > F16_MAX:
        raise CheckpointError(f"a weight of {greatest:.6g} does not fit a minimum in f16 (at most {F16_MAX:.0f})")
    rest = columns % length
    full = count - 1 if rest else count
    pieces = [_fit(groups[:, :full].reshape(-1, length))] if full else []
    shapes = [(rows, full)]
    if rest:
        codes, scales, minima = _fit(groups[:, -1, :rest])
        pieces.append((np.pad(codes, ((0, 0), (0, length - rest))), scales, minima))
        shapes = ([(rows, full)] if full else []) + [(rows, 1)]
    parts = [
        tuple(array.reshape(*shape, *array.shape[1:]) for array in piece)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]
    codes, scales, minima = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    return codes, scales, minima


def _fit(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best fit of each f32 group ``[M, L]``."""
    low, high = groups.min(axis=1), groups.max(axis=1)
    best = _coded(groups, (high - low) / LEVELS, low)
    for steps in _STEPS:
        codes = _nearest(groups, (high - low) / np.float32(steps), low)
        best = _better(best, _coded(groups, *_line(groups, codes)))
    # What is left of a constant that f16 does not hold goes into the scale, with code 0 or 15.
    best = _better(best, _constant(groups, low))
    found = np.flatnonzero(best[3])
    if len(found):
        better = _better(tuple(array[found] for array in best), _on_grid(groups[found], low[found], high[found]))  # type: ignore[arg-type]
        for array, part in zip(best, better, strict=True):
            array[found] = part
    return best[:3]


def _halves(values: np.ndarray) -> np.ndarray:
    halves: np.ndarray = np.clip(values, -F16_MAX, F16_MAX).astype(np.float16)
    return halves


def _nearest(groups: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Nearest codes u8; a scale of 0 gives code 0."""
    wide = scales.astype(np.float32)[:, None]
    above = groups - minima.astype(np.float32)[:, None]
    ratio = np.divide(above, wide, out=np.zeros_like(above), where=wide != 0)
    codes: np.ndarray = np.clip(np.rint(ratio), 0, LEVELS).astype(np.uint8)
    return codes


def _coded(groups: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> _Fit:
    """The fit with these scales and minima, as f16 holds them, and the nearest codes."""
    scales, minima = _halves(scales), _halves(minima)
    codes = _nearest(groups, scales, minima)
    decoded = codes * scales.astype(np.float32)[:, None] + minima.astype(np.float32)[:, None]
    return codes, scales, minima, np.square(groups - decoded).sum(axis=1)


def _better(one: _Fit, other: _Fit) -> _Fit:
    """Group by group the fit with the smaller error; the first one on a tie."""
    take = other[3] < one[3]
    return (
        np.where(take[:, None], other[0], one[0]),
        np.where(take, other[1], one[1]),
        np.where(take, other[2], one[2]),
        np.where(take, other[3], one[3]),
    )


def _line(groups: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of least squares for given codes; where those are all alike a scale of 0 and the mean."""
    n = codes.astype(np.float64)
    mean, middle = groups.mean(axis=1, dtype=np.float64), n.mean(axis=1)
    spread = np.square(n - middle[:, None]).sum(axis=1)
    product = ((n - middle[:, None]) * groups).sum(axis=1)
    scales = np.divide(product, spread, out=np.zeros_like(mean), where=spread > 0)
    return scales.astype(np.float32), (mean - scales * middle).astype(np.float32)


def _constant(groups: np.ndarray, low: np.ndarray) -> _Fit:
    minima = _halves(low)
    return _coded(groups, (low - minima.astype(np.float32)) / LEVELS, minima)


def _on_grid(groups: np.ndarray, low: np.ndarray, high: np.ndarray) -> _Fit:
    """Groups whose weights stand on a grid of fewer steps than 15: the one first code whose minimum f16 holds.

    A group that uses the codes a .. b alone says b - a, not a. All others keep an infinite error.
    """
    best: _Fit = (
        np.zeros(groups.shape, dtype=np.uint8),
        np.zeros(len(groups), dtype=np.float16),
        np.zeros(len(groups), dtype=np.float16),
        np.full(len(groups), np.inf, dtype=np.float32),
    )
    for steps in range(1, LEVELS):
        scales = (high - low) / np.float32(steps)
        ratio = np.divide(groups - low[:, None], scales[:, None], out=np.zeros_like(groups), where=scales[:, None] > 0)
        chosen = np.flatnonzero((np.abs(ratio - np.rint(ratio)).max(axis=1) < _ON_GRID) & (scales > 0))
        if not len(chosen):
            continue
        some, half = groups[chosen], _halves(scales[chosen])
        fitted: _Fit = tuple(array[chosen] for array in best)  # type: ignore[assignment]
        for first in range(LEVELS - steps + 1):
            minima = low[chosen] - first * half.astype(np.float32)
            fitted = _better(fitted, _coded(some, half, minima))
        for array, part in zip(best, fitted, strict=True):
            array[chosen] = part
    return best
