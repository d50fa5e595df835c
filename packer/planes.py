"""Floats as sums of ternary planes: W = sum over k of alpha_k T_k, with one alpha a plane, row and group of columns.

PTQTP (arXiv 2509.16989): the choice of trits for given alphas and least squares for given trits alternate. A row's
weights in a group are numbers on a line, and the 3^K code words are points on it: so the best code word is the nearest
point, and sums over sorted weights give the error of any alphas without looking at each weight again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from shaders.contract import quotient_up

from .encodings import half_scales, pad_columns

MOST_PLANES = 3
#: Columns that share an alpha.
GROUP = 64
ITERATIONS = 50
#: Rounds that each starting point gets before the best of them goes on alone.
_TRIAL_ROUNDS = 4
#: A group whose error shrinks by a smaller share than this is done.
_LEAST_GAIN = 1e-5
#: lambda of the ridge in (S^T S + lambda I)^-1 S^T w, relative to the number of weights.
_RIDGE = 1e-6
#: What the sums of squares may be wrong by, relative to those of the weights.
_NOISE = 1e-12
_GROUPS_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class Planes:
    """trits int8 ``[P, N, K]``; scales f16 ``[P, N, ceil(K/group)]``, none negative, the largest plane first."""

    trits: np.ndarray
    scales: np.ndarray
    group: int

    def values(self) -> np.ndarray:
        """What the planes add up to, f32 ``[N, K]``, in the order in which a program adds them."""
        wide = np.repeat(self.scales.astype(np.float32), self.group, axis=2)[:, :, : self.trits.shape[2]]
        total: np.ndarray = self.trits[0] * wide[0]
        for trits, scales in zip(self.trits[1:], wide[1:], strict=True):
            total = total + trits * scales
        return total


def fit_planes(values: np.ndarray, planes: int, group: int = GROUP) -> Planes:
    """The planes nearest to f32 ``[N, K]`` by least squares. Raises CheckpointError if f16 does not hold an alpha.

    Every row and group is a problem of its own, so the result does not depend on how rows are cut into pieces.
    """
    rows, columns = values.shape
    parts = quotient_up(columns, group)
    groups = pad_columns(values.astype(np.float32), group).reshape(rows * parts, group)
    alphas = fit_alphas(groups, planes)
    trits = nearest(groups, alphas).reshape(planes, rows, parts * group)[:, :, :columns]
    scales = alphas.astype(np.float16).reshape(rows, parts, planes)
    return Planes(np.ascontiguousarray(trits), np.ascontiguousarray(np.moveaxis(scales, 2, 0)), group)


def fit_alphas(groups: np.ndarray, planes: int, importance: np.ndarray | None = None) -> np.ndarray:
    """Alphas f32 ``[M, P]`` of f32 groups ``[M, L]``, as f16 holds them; the greatest of a group first.

    importance: f64 ``[L]``, what the square of a column's error counts; all alike if None.
    """
    alphas = np.concatenate([_fit(_Sorted(piece, importance), planes) for piece in _pieces(groups)])
    return half_scales(alphas).astype(np.float32)


def nearest(groups: np.ndarray, alphas: np.ndarray) -> np.ndarray:
    """The trits int8 ``[P, M, L]`` whose sum is nearest to each weight of f32 ``[M, L]``; a tie takes the smaller."""
    found = np.empty((alphas.shape[1], *groups.shape), dtype=np.int8)
    start = 0
    for piece in _pieces(groups):
        rows = slice(start, start + len(piece))
        book = Book(alphas[rows])
        words = book.words[np.arange(len(piece))[:, None], book.choose(piece)]
        found[:, rows] = np.moveaxis(np.where(piece[..., None] < 0, -words, words), 2, 0)
        start += len(piece)
    return found


class Book:
    """The code words of some groups, by the size of what they stand for.

    alphas: f32 ``[M, P]``. words: int8 ``[M, C + 1, P]``, the zero word first; only those that stand for a positive
    number, since their negatives serve negative weights. sizes: f32 ``[M, C + 1]``, ascending. edges: f32 ``[M, C]``,
    halfway from one to the next.
    """

    def __init__(self, alphas: np.ndarray):
        half = _half_of_the_words(alphas.shape[1])
        sizes = alphas.astype(np.float64) @ half.T.astype(np.float64)
        words = np.where(sizes[..., None] < 0, -half, half)
        order = np.argsort(np.abs(sizes), axis=1, kind="stable")
        self.words = np.take_along_axis(words, order[..., None], axis=1)
        self.sizes = np.take_along_axis(np.abs(sizes), order, axis=1).astype(np.float32)
        self.edges = (self.sizes[:, 1:] + self.sizes[:, :-1]) / np.float32(2)

    def choose(self, groups: np.ndarray) -> np.ndarray:
        """Index of the word nearest to the magnitude of each weight, u8 ``[M, L]``."""
        magnitude = np.abs(groups)
        chosen = np.zeros(groups.shape, dtype=np.uint8)
        for edge in self.edges.T:
            chosen += magnitude > edge[:, None]
        return chosen


@cache
def _half_of_the_words(planes: int) -> np.ndarray:
    """int8 ``[C + 1, P]``: the zero word, then those whose first trit other than 0 is 1; C = (3^P - 1) / 2."""
    words = [word for word in product((1, 0, -1), repeat=planes) if word > (0,) * planes]
    return np.array([(0,) * planes, *words], dtype=np.int8)


def _pieces(groups: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(groups), _GROUPS_AT_ONCE):
        yield groups[start : start + _GROUPS_AT_ONCE]


class _Sorted:
    """Magnitudes of each group in ascending order, with sums from the first to each of them."""

    def __init__(self, groups: np.ndarray, importance: np.ndarray | None):
        magnitude = np.abs(groups).astype(np.float64)
        if importance is None:
            self.magnitude = np.sort(magnitude, axis=1)
            counts = np.ones_like(self.magnitude)
        else:
            order = np.argsort(magnitude, axis=1, kind="stable")
            self.magnitude = np.take_along_axis(magnitude, order, axis=1)
            counts = importance[order]
        self.counts = _running(counts)
        self.sums = _running(counts * self.magnitude)
        self.squares = (counts * self.magnitude**2).sum(axis=1)

    def __len__(self) -> int:
        return len(self.magnitude)

    def only(self, kept: np.ndarray) -> _Sorted:
        """Those groups alone."""
        fewer: _Sorted = object.__new__(_Sorted)
        for name, array in vars(self).items():
            setattr(fewer, name, array[kept])
        return fewer

    def below(self, edges: np.ndarray) -> np.ndarray:
        """How many magnitudes of a group are at most each of its edges ``[M, C]``: a binary search in all at once."""
        length = self.magnitude.shape[1]
        flat, base = self.magnitude.reshape(-1), np.arange(len(self))[:, None] * length
        count = np.zeros(edges.shape, dtype=np.int64)
        step = 1 << (length.bit_length() - 1)
        while step:
            further = count + step
            inside = further <= length
            probe = flat[base + np.minimum(further, length) - 1]
            count = np.where(inside & (probe <= edges), further, count)
            step >>= 1
        return count


def _running(values: np.ndarray) -> np.ndarray:
    sums = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


def _fit(groups: _Sorted, planes: int) -> np.ndarray:
    """Alphas f64 ``[M, P]``: several starting points, the best of which is followed to its end."""
    best, error = None, None
    for start in _starts(groups, planes):
        alphas, found = _alternate(groups, start, _TRIAL_ROUNDS)
        if best is None or error is None:
            best, error = alphas, found
        else:
            take = found < error - _NOISE * groups.squares
            best, error = np.where(take[:, None], alphas, best), np.where(take, found, error)
    assert best is not None
    return _alternate(groups, best, ITERATIONS - _TRIAL_ROUNDS)[0]


def _starts(groups: _Sorted, planes: int) -> Iterator[np.ndarray]:
    """The greatest weight alone, which is exact for a group that is ternary and helps one with an outlier; levels at
    equal distances (alphas 9 : 3 : 1) up to shares of it; planes that shrink from the mean on.
    """
    yield groups.magnitude[:, -1:] * (np.arange(planes) == 0)
    powers = 3.0 ** np.arange(planes - 1, -1, -1)
    for share in (1.0, 0.8, 0.6):
        yield groups.magnitude[:, -1:] * (share * powers / powers.sum())
    mean = groups.sums[:, -1:] / np.maximum(groups.counts[:, -1:], 1e-300)
    yield mean * 1.5 * 0.45 ** np.arange(planes)


def _alternate(groups: _Sorted, alphas: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """(alphas, squared errors) after so many rounds at most; no round makes a group's error greater."""
    best = alphas.copy()
    error, better = _step(groups, alphas)
    active, new = np.arange(len(groups)), better
    some = groups
    for _ in range(rounds):
        found, better = _step(some, new)
        gained = found < error[active] * (1 - _LEAST_GAIN) - _NOISE * some.squares
        keep = active[gained]
        best[keep], error[keep] = new[gained], found[gained]
        if not len(keep):
            break
        active, new, some = keep, better[gained], some.only(gained)
    return best, error


def _step(groups: _Sorted, alphas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(squared error ``[M]`` with the best code words for these alphas, the best alphas ``[M, P]`` for those words)."""
    book = Book(alphas)
    ends = np.concatenate([groups.below(book.edges), np.full((len(groups), 1), groups.magnitude.shape[1])], axis=1)
    counts = np.diff(np.take_along_axis(groups.counts, ends, axis=1), axis=1)
    sums = np.diff(np.take_along_axis(groups.sums, ends, axis=1), axis=1)
    words = book.words[:, 1:].astype(np.float64)
    weighted = words * counts[..., None]
    gram = np.matmul(np.swapaxes(words, 1, 2), weighted)
    right = np.matmul(sums[:, None, :], words)[:, 0]
    fitted = np.matmul(gram, alphas[..., None])[..., 0]
    error = groups.squares + ((fitted - 2 * right) * alphas).sum(axis=1)
    ridge = _RIDGE * groups.counts[:, -1] + 1e-300
    gram += ridge[:, None, None] * np.eye(alphas.shape[1])
    solved = np.linalg.solve(gram, right[..., None])[..., 0]
    return error, -np.sort(-np.abs(solved), axis=1)
