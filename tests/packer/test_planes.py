"""Ternary planes and error-compensated rounding, held against brute force and published numbers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from packer import planes as module
from packer.compensate import compensate, compensated_planes, inverse_factor
from packer.errors import CheckpointError
from packer.planes import Planes, fit_alphas, fit_planes, nearest


def gaussian(rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((rows, columns))).astype(np.float32)


def error(values: np.ndarray, found: np.ndarray) -> float:
    """Relative RMS."""
    return float(np.sqrt(np.square(values - found, dtype=np.float64).sum() / np.square(values, dtype=np.float64).sum()))


# --- planes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("planes", "published"), [(1, 0.433), (2, 0.170), (3, 0.067)])
def test_gaussian_weights_lose_what_is_published(planes: int, published: float) -> None:
    """Groups of 128. Several starting points make two and three planes a little better than that."""
    values = gaussian(256, 512)
    assert 0.88 * published < error(values, fit_planes(values, planes, 128).values()) < 1.005 * published


@pytest.mark.parametrize("planes", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_code_words_are_those_of_brute_force(planes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    groups = random.standard_normal((20, 64)).astype(np.float32)
    groups[:, ::9] = 0
    alphas = np.abs(random.standard_normal((20, planes))).astype(np.float16).astype(np.float32)
    alphas[3] = 0  # then every word stands for nothing
    alphas[4, -1] = alphas[4, 0]  # words of the same size
    words = np.array(list(product((-1, 0, 1), repeat=planes)))
    best = np.abs(groups[:, :, None] - (alphas.astype(np.float64) @ words.T)[:, None, :]).min(axis=2)
    trits = nearest(groups, alphas)
    assert trits.shape == (planes, 20, 64) and set(np.unique(trits)) <= {-1, 0, 1}
    found = np.abs(groups - np.einsum("pml,mp->ml", trits.astype(np.float64), alphas))
    np.testing.assert_allclose(found, best, atol=1e-6)


@pytest.mark.parametrize("planes", [1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_round_makes_the_error_greater(planes: int, weighted: bool) -> None:
    groups = gaussian(200, 64, seed=4)
    importance = np.random.default_rng(5).uniform(0.1, 3, 64) if weighted else None
    some = module._Sorted(groups, importance)
    alphas = next(iter(module._starts(some, planes)))
    before = None
    for _ in range(12):
        errors, better = module._step(some, alphas)
        words = nearest(groups, alphas.astype(np.float32)).astype(np.float64)
        counted = np.square(groups - np.einsum("pml,mp->ml", words, alphas)) * (1 if importance is None else importance)
        np.testing.assert_allclose(errors, counted.sum(axis=1), rtol=1e-4)  # the sums stand for each single weight
        if before is not None:
            assert (errors <= before * (1 + 1e-6)).all()
        before, alphas = errors, better
    assert before is not None and (module._alternate(some, alphas, 50)[1] <= before * (1 + 1e-9)).all()


def test_alphas_are_the_least_squares_of_their_words() -> None:
    groups = gaussian(50, 64, seed=6)
    alphas = fit_alphas(groups, 2)
    words = nearest(groups, alphas).astype(np.float64)
    for row, group in enumerate(groups):
        expected = np.linalg.lstsq(words[:, row].T, group, rcond=None)[0]
        np.testing.assert_allclose(alphas[row], np.abs(expected), rtol=2e-2)


def test_what_is_ternary_comes_back_as_it_was() -> None:
    trits = np.random.default_rng(7).integers(-1, 2, (30, 100))
    scales = np.float16(0.25) * np.arange(1, 31, dtype=np.float16)
    values = trits * scales.astype(np.float32)[:, None]
    for planes in (1, 2, 3):
        np.testing.assert_array_equal(fit_planes(values, planes, 64).values(), values)


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 130])
def test_any_number_of_columns(columns: int) -> None:
    found = fit_planes(gaussian(5, columns), 2, 64)
    assert found.trits.shape == (2, 5, columns) and found.scales.shape == (2, 5, -(-columns // 64))
    assert found.scales.dtype == np.float16 and (found.scales >= 0).all()
    # What lies beyond the last column has no say.
    alone = fit_planes(gaussian(5, columns)[:, -(columns % 64 or 64) :], 2, 64)
    np.testing.assert_array_equal(found.scales[:, :, -1], alone.scales[:, :, 0])


def test_rows_do_not_depend_on_each_other() -> None:
    """So that pieces, and one day workers, give the bytes of the whole."""
    values = gaussian(40, 192, seed=8)
    factor = inverse_factor(np.cov(gaussian(192, 300, seed=9)))
    for whole, one in (
        (fit_planes(values, 3), lambda rows: fit_planes(rows, 3)),
        (compensated_planes(values, factor, 3, 64), lambda rows: compensated_planes(rows, factor, 3, 64)),
    ):
        pieces: list[Planes] = [one(values[:13]), one(values[13:])]
        np.testing.assert_array_equal(whole.trits, np.concatenate([piece.trits for piece in pieces], axis=1))
        np.testing.assert_array_equal(whole.scales, np.concatenate([piece.scales for piece in pieces], axis=1))


def test_zeros_and_extremes() -> None:
    assert not fit_planes(np.zeros((3, 70), dtype=np.float32), 3).values().any()
    assert np.isfinite(fit_planes(gaussian(3, 70, scale=1e-7), 3).values()).all()
    with pytest.raises(CheckpointError, match="does not fit f16"):
        fit_planes(gaussian(3, 70, scale=1e6), 1)


# --- compensation -----------------------------------------------------------------------------------------------------


def correlated(columns: int, seed: int = 1) -> np.ndarray:
    """Activations of which a few directions hold the most, f32 ``[400, K]``."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((400, 12)) @ random.standard_normal((12, columns))
    return (x + 0.3 * random.standard_normal(x.shape)).astype(np.float32)


def test_the_factor_is_that_of_the_inverse() -> None:
    x = correlated(40).astype(np.float64)
    factor = inverse_factor(x.T @ x, damping=0.0).astype(np.float64)
    assert not np.tril(factor, -1).any()
    np.testing.assert_allclose(factor.T @ factor @ (2 * x.T @ x), np.eye(40), atol=2e-2)


def test_columns_that_the_text_never_used_are_rounded_all_the_same() -> None:
    gram = np.zeros((70, 70))
    gram[:9, :9] = np.eye(9)
    for each in (gram, np.zeros((70, 70))):
        assert np.isfinite(compensated_planes(gaussian(4, 70), inverse_factor(each), 2, 64).values()).all()


@pytest.mark.parametrize("planes", [1, 2, 3])
def test_products_are_nearer_than_without(planes: int) -> None:
    """On activations like those that it was told, and on others from the same source."""
    values, x = gaussian(30, 200, seed=2), correlated(200)
    plain = fit_planes(values, planes).values()
    found = compensated_planes(values, inverse_factor(x[:300].T @ x[:300]), planes, 64).values()
    for some in (x[:300], x[300:]):
        assert error(some @ values.T, some @ found.T) < 0.5 * error(some @ values.T, some @ plain.T)
    assert error(values, found) > error(values, plain)


def test_without_correlation_nothing_is_pushed_on() -> None:
    values = gaussian(20, 128)
    found, plain = compensated_planes(values, inverse_factor(np.eye(128)), 2, 64), fit_planes(values, 2, 64)
    np.testing.assert_array_equal(found.trits, plain.trits)
    np.testing.assert_array_equal(found.scales, plain.scales)


def test_errors_are_pushed_as_optimal_brain_surgery_does() -> None:
    """After each column the others are what minimises the output error with the rounded ones held fixed."""
    values, x = gaussian(3, 6, scale=1.0), correlated(6).astype(np.float64)
    hessian = 2 * x.T @ x
    seen: list[np.ndarray] = []

    def fit(block: np.ndarray, start: int):
        def rounder(index: int, weights: np.ndarray) -> np.ndarray:
            seen.append(weights.copy())
            return np.rint(weights)

        return rounder

    stored = compensate(values, inverse_factor(x.T @ x, damping=0.0), 2, fit)
    for column in range(1, 6):
        fixed, free = slice(0, column), slice(column, 6)
        change = -np.linalg.solve(hessian[free, free], hessian[free, fixed] @ (stored - values)[:, fixed].T).T
        np.testing.assert_allclose(seen[column], values[:, column] + change[:, 0], rtol=1e-3, atol=1e-3)


def test_columns_that_matter_more_are_fitted_more_closely() -> None:
    values, sizes = gaussian(40, 128, seed=3), np.geomspace(0.1, 10, 128)
    gram = np.diag(sizes**2)  # without correlation nothing is pushed on, and only the alphas can differ
    found, plain = compensated_planes(values, inverse_factor(gram), 3, 128), fit_planes(values, 3, 128)
    assert error(values * sizes, found.values() * sizes) < 0.9 * error(values * sizes, plain.values() * sizes)
