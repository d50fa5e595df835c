"""Fits lines through groups of weights, for q4a: value = n * scale + minimum with n = 0 .. 15.

The idea of ggml's ``make_qkx2_quants``: several first scales, each with the nearest codes, then the line of least
squares through those codes, then the nearest codes again. Errors count after rounding to f16. Codes follow from
scale and minimum, so a fit is those two.
"""

from __future__ import annotations

import numpy as np

from .errors import CheckpointError

LEVELS = 15
F16_MAX = 65504.0
#: Steps that the range of a group is taken to have. ggml tries 14 to 16 for a number of 15. Beside 14.5, not on it, so
#: that rounding errors do not choose between two codes for the greatest weight: both are tried.
_STEPS = (15.0, 14.75, 14.49, 14.51, 14.25, 14.0, 15.25, 15.5, 16.0)
#: Farthest from a grid point, in steps, that a weight of a group on a grid may be: f16 sums in f32 err by less.
_ON_GRID = 1e-3

#: Groups that are fitted together: few enough for a cache, and enough that threads seldom wait for each other.
_AT_ONCE = 1 << 14
#: Weights of a group that are looked at before all are, to see that it stands on no grid.
_FIRST = 4
#: Ranges below this are none to f16, and their inverse may be none to f32.
_TINY = np.float32(1e-30)

#: Scales f16 ``[M]``, minima f16 ``[M]``, sums of squared errors f32 ``[M]`` with the nearest codes.
_Fit = tuple[np.ndarray, np.ndarray, np.ndarray]


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
    """Codes u8 ``[M, L]``, scales and minima f16 ``[M]``: the best fit of each f32 group ``[M, L]``."""
    codes = np.empty(groups.shape, dtype=np.uint8)
    scales, minima = (np.empty(len(groups), dtype=np.float16) for _ in range(2))
    for start in range(0, len(groups), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        weights = np.ascontiguousarray(groups[some].T)
        scales[some], minima[some], _ = best = _best(weights)
        codes[some] = _nearest(weights, *_wide(best)).T
    return codes, scales, minima


def _best(weights: np.ndarray) -> _Fit:
    """The best fit of groups f32 ``[L, M]``, in which a group is a column: so NumPy works on many of them at once."""
    low, high = weights.min(axis=0), weights.max(axis=0)
    above, spread = weights - low, high - low
    total = above.sum(axis=0)
    best = _tried(weights, spread / LEVELS, low)
    for steps in _STEPS:
        codes = above * np.divide(steps, spread, out=np.zeros_like(spread), where=spread > _TINY)
        np.minimum(np.rint(codes, out=codes), LEVELS, out=codes)
        scales, offsets = _line(above, total, codes)
        best = _better(best, _tried(weights, scales, low + offsets))
    # What is left of a constant that f16 does not hold goes into the scale, with code 0 or 15.
    minima = _halves(low)
    best = _better(best, _tried(weights, (low - minima.astype(np.float32)) / LEVELS, minima))
    return _better(best, _on_grid(weights, low, spread, best[2]))


def _halves(values: np.ndarray) -> np.ndarray:
    halves: np.ndarray = np.clip(values, -F16_MAX, F16_MAX).astype(np.float16)
    return halves


def _wide(fit: _Fit) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima as f32."""
    return fit[0].astype(np.float32), fit[1].astype(np.float32)


def _nearest(weights: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Nearest codes f32 ``[L, M]`` for scales and minima that f16 holds, as f32; a scale of 0 gives code 0."""
    codes: np.ndarray = weights - minima
    codes *= np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    np.rint(codes, out=codes)
    np.clip(codes, 0, LEVELS, out=codes)
    return codes


def _tried(weights: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> _Fit:
    """The fit with these scales and minima, as f16 holds them."""
    halves = _halves(scales), _halves(minima)
    wide, base = (array.astype(np.float32) for array in halves)
    error = _nearest(weights, wide, base)
    error *= wide
    error += base
    error -= weights
    return *halves, np.einsum("lm,lm->m", error, error)


def _better(one: _Fit, other: _Fit) -> _Fit:
    """Group by group the fit with the smaller error; the first one on a tie."""
    take = other[2] < one[2]
    return np.where(take, other[0], one[0]), np.where(take, other[1], one[1]), np.where(take, other[2], one[2])


def _line(above: np.ndarray, total: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset of least squares for given codes f32; where those are all alike a scale of 0 and the mean.

    above: the weights less the least of their group. total: their sum. Sums of codes are whole, so f32 holds them.
    """
    length = len(above)
    middle = codes.sum(axis=0).astype(np.float64) / length
    spread = np.einsum("lm,lm->m", codes, codes) - length * middle**2
    product = np.einsum("lm,lm->m", codes, above) - middle * total
    scales = np.divide(product, spread, out=np.zeros_like(middle), where=spread > 1e-6)
    return scales.astype(np.float32), (total / np.float64(length) - scales * middle).astype(np.float32)


def _on_grid(weights: np.ndarray, low: np.ndarray, spread: np.ndarray, errors: np.ndarray) -> _Fit:
    """Groups whose weights stand on a grid of fewer steps than 15: the one first code whose minimum f16 holds.

    A group that uses the codes a .. b alone says b - a, not a. errors: so far. All others keep an infinite one.
    """
    count = weights.shape[1]
    best: _Fit = (
        np.zeros(count, dtype=np.float16), np.zeros(count, dtype=np.float16), np.full(count, np.inf, dtype=np.float32)
    )  # fmt: skip
    inverse = np.divide(np.float32(1), spread, out=np.full_like(spread, np.nan), where=(spread > _TINY) & (errors > 0))
    first = (weights[:_FIRST] - low) * inverse  # NaN is near nothing
    for steps in range(1, LEVELS):
        ratio = first * np.float32(steps)
        chosen = np.flatnonzero(np.abs(ratio - np.rint(ratio)).max(axis=0) < _ON_GRID)
        if len(chosen):  # few, so all weights of a group are looked at now
            ratio = (weights[:, chosen] - low[chosen]) * (np.float32(steps) * inverse[chosen])
            chosen = chosen[np.abs(ratio - np.rint(ratio)).max(axis=0) < _ON_GRID]
        if not len(chosen):
            continue
        some, half = weights[:, chosen], _halves(spread[chosen] / np.float32(steps))
        fitted: _Fit = tuple(array[chosen] for array in best)  # type: ignore[assignment]
        for code in range(LEVELS - steps + 1):
            fitted = _better(fitted, _tried(some, half, low[chosen] - code * half.astype(np.float32)))
        for array, part in zip(best, fitted, strict=True):
            array[chosen] = part
    return best
