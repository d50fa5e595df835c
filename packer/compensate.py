"""Error-compensated rounding (GPTQ, arXiv 2210.17323): the error of each column is made good by the columns after it.

With H = 2 X^T X of the inputs X of a linear, and H^-1 = U^T U (U upper triangular), rounding column j by e_j changes
the output least if the columns after it change by -e_j / U[j, j] * U[j, after j].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .encodings import pad_columns
from .planes import Book, Planes, fit_alphas

#: Added to the diagonal of H, relative to its mean, so that columns that the text hardly used keep their numbers.
DAMPING = 0.01
#: Rows that should be compensated together: columns come one after another, each for all of them.
ROWS_TOGETHER = 512
_STRIP = 512

#: Takes f32 ``[N, g]``, the columns of a group as earlier errors have left them, and the index of its first column;
#: gives what rounds one of these columns, by its place in the group and f32 ``[N]``, to the values that are stored.
FitGroup = Callable[[np.ndarray, int], Callable[[int, np.ndarray], np.ndarray]]


def inverse_factor(gram: np.ndarray, damping: float = DAMPING, *, overwrite: bool = False) -> np.ndarray:
    """U f32 ``[K, K]``, upper triangular, of X^T X ``[K, K]``, of which the upper triangle is read.

    Its scale changes no rounding. overwrite: take the memory of ``gram`` (f64), which is lost then. Beside that and
    the result only strips of ``_STRIP`` rows are needed.
    """
    hessian = gram if overwrite else gram.astype(np.float64)
    hessian *= 2
    mean = float(hessian.diagonal().mean())
    hessian[np.diag_indices_from(hessian)] += damping * mean if mean > 0 else 1.0
    strips = [slice(start, min(start + _STRIP, len(hessian))) for start in range(0, len(hessian), _STRIP)]
    _factorize(hessian, strips)
    _invert(hessian, strips)
    return hessian.astype(np.float32)


def _factorize(matrix: np.ndarray, strips: list[slice]) -> None:
    """H to R, upper triangular, with H = R R^T: Cholesky's method from the last rows and columns to the first."""
    for strip in reversed(strips):
        corner = np.linalg.cholesky(matrix[strip, strip][::-1, ::-1])[::-1, ::-1]
        matrix[strip, strip] = corner
        above = matrix[: strip.start, strip]
        above[...] = np.linalg.solve(corner, above.T).T
        for other in strips[: strips.index(strip)]:
            rest = slice(other.start, strip.start)
            matrix[other, rest] -= above[other] @ above[rest].T


def _invert(matrix: np.ndarray, strips: list[slice]) -> None:
    """R, upper triangular, to its inverse; what is below the diagonal becomes 0."""
    for strip in strips:
        matrix[strip, : strip.start] = 0
        corner = np.triu(np.linalg.inv(matrix[strip, strip]))
        matrix[strip, strip] = corner
        above = matrix[: strip.start, strip]
        above[...] = -(matrix[: strip.start, : strip.start] @ (above @ corner))


def compensate(values: np.ndarray, factor: np.ndarray, group: int, fit: FitGroup) -> np.ndarray:
    """Round f32 ``[N, K]`` column by column and return what is stored, f32 ``[N, K]``. Each row for itself."""
    left, stored = values.astype(np.float32), np.empty(values.shape, dtype=np.float32)
    columns = values.shape[1]
    for start in range(0, columns, group):
        stop = min(start + group, columns)
        block = left[:, start:stop].copy()
        errors = np.empty_like(block)
        rounder = fit(block, start)
        for index in range(stop - start):
            column = start + index
            stored[:, column] = rounder(index, block[:, index])
            errors[:, index] = (block[:, index] - stored[:, column]) / factor[column, column]
            block[:, index + 1 :] -= np.outer(errors[:, index], factor[column, column + 1 : stop])
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    return stored


def compensated_planes(values: np.ndarray, factor: np.ndarray, planes: int, group: int) -> Planes:
    """Planes of f32 ``[N, K]`` whose product is near the original's. Raises CheckpointError as ``fit_planes`` does.

    The alphas of a group are fitted when it is reached, to what earlier errors have made of it; a column's error counts
    as much as it costs: 1 / U[j, j]^2.
    """
    rows, columns = values.shape
    trits = np.empty((planes, rows, columns), dtype=np.int8)
    scales: list[np.ndarray] = []
    cost = 1 / factor.diagonal().astype(np.float64) ** 2

    def fit(block: np.ndarray, start: int) -> Callable[[int, np.ndarray], np.ndarray]:
        importance = np.zeros(group)
        importance[: block.shape[1]] = cost[start : start + block.shape[1]]
        alphas = fit_alphas(pad_columns(block, group), planes, importance / importance.max())
        scales.append(alphas.T.astype(np.float16))
        book, every = Book(alphas), np.arange(rows)

        def rounder(index: int, weights: np.ndarray) -> np.ndarray:
            chosen = book.choose(weights[:, None])[:, 0]
            negative = weights < 0
            words = book.words[every, chosen]
            trits[:, :, start + index] = np.where(negative[:, None], -words, words).T
            sizes = book.sizes[every, chosen]
            found: np.ndarray = np.where(negative, -sizes, sizes)
            return found

        return rounder

    compensate(values, factor, group, fit)
    return Planes(trits, np.stack(scales, axis=2), group)
