"""Token choice: which tokens survive, against transformers; with what weight, and which is drawn."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shaders.contract import constant
from shaders.sampling import Sampling, argmax, penalize, random_u32, sample, survivors
from tests.support import transformers_models  # noqa: F401  (sets up torch before transformers is imported)

from transformers.generation.logits_process import (  # isort: skip
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

V = 500


def random_logits(seed: int, size: int = V) -> np.ndarray:
    return (4 * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def warped(logits: np.ndarray, options: Sampling) -> np.ndarray:
    """Logits after transformers' warpers in its order, f64; -inf where a token was filtered out."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(options.temperature)])
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p > 0:
        warpers.append(MinPLogitsWarper(options.min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits.astype(np.float64))[None])[0].numpy()


OPTIONS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=5.0),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=0.8, top_k=40),
    Sampling(temperature=0.8, top_k=V),
    Sampling(temperature=0.8, top_k=V + 10),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=2.0, top_p=0.5),
    Sampling(temperature=1.0, top_p=0.001),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.5, top_k=50, top_p=0.9),
    Sampling(temperature=1.5, top_k=50, min_p=0.1),
    Sampling(temperature=3.0, top_p=0.95, min_p=0.02),
    Sampling(temperature=1.5, top_k=100, top_p=0.8, min_p=0.01),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_survivors_are_those_of_transformers(options: Sampling) -> None:
    """A token whose probability is below 2^-31 of the greatest has weight 0: it can never be drawn."""
    for seed in range(20):
        logits = random_logits(seed)
        found, expected = survivors(logits, options), warped(logits, options)
        drawable = np.exp(expected - expected.max()) > 2.0**-30
        assert set(np.flatnonzero(found)) - set(np.flatnonzero(np.isfinite(expected))) == set()
        np.testing.assert_array_equal(found > 0, (found > 0) | drawable)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_are_the_probabilities(options: Sampling) -> None:
    """As shares of the survivors. A weight is truncated to a whole number of 2^-31 of the greatest."""
    for seed in range(5):
        logits = random_logits(seed)
        found, expected = survivors(logits, options).astype(np.float64), warped(logits, options)
        probability = np.exp(expected - expected.max())
        # exp in float32 of scaled logits within 2^6: 2^-18 relative; the sum of weights as much.
        np.testing.assert_allclose(found / found.sum(), probability / probability.sum(), rtol=2e-5, atol=V * 2.0**-31)


def slow_survivors(logits: np.ndarray, options: Sampling) -> set[int]:
    """The same set by sorting and exact sums of fractions of float64 probabilities, ties kept."""
    scaled = [float(value) / options.temperature for value in logits]
    ranked = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    keep = set(ranked)
    if 0 < options.top_k < len(ranked):
        keep = {token for token in ranked if scaled[token] >= scaled[ranked[options.top_k - 1]]}
    if options.top_p < 1:
        weights = {token: Fraction(math.exp(scaled[token] - scaled[ranked[0]])) for token in keep}
        total, running, last = sum(weights.values()), Fraction(0), ranked[0]
        for token in ranked:
            last = token
            running += weights.get(token, Fraction(0))
            if running >= Fraction(options.top_p) * total:
                break
        keep = {token for token in keep if scaled[token] >= scaled[last]}
    if options.min_p > 0:
        keep = {token for token in keep if scaled[token] - scaled[ranked[0]] >= math.log(options.min_p)}
    return keep


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-5, 5), min_size=1, max_size=40),
    st.sampled_from([0.75, 1.0, 2.0]),
    st.integers(0, 8),
    st.sampled_from([1.0, 0.93, 0.71, 0.37, 0.011]),
    st.sampled_from([0.0, 0.013, 0.29]),
)
def test_survivors_by_sorting_with_ties_kept(values: list[int], temperature: float, k: int, p: float, m: float) -> None:
    """Whole logits make many ties; thresholds lie away from the sums that whole logits can give."""
    logits = np.float32(values)
    options = Sampling(temperature=temperature, top_k=k, top_p=p, min_p=m)
    assert set(np.flatnonzero(survivors(logits, options)).tolist()) == slow_survivors(logits, options)


def test_the_nucleus_ends_where_its_weight_is_reached() -> None:
    """Ties are kept, and what top-k has dropped does not count."""
    logits = np.float32([1, 0, 0, -40])
    for top_p, kept in ((1e-6, 1), (0.57, 1), (0.58, 3), (0.9999, 3)):  # e / (e + 2) is 0.5761
        assert np.count_nonzero(survivors(logits, Sampling(temperature=1.0, top_p=top_p))) == kept
    even = np.float32([4, 4, 3.9, 3.9])
    assert np.count_nonzero(survivors(even, Sampling(temperature=1.0, top_k=2, top_p=0.9))) == 2


def test_at_least_the_best_survives() -> None:
    for options in (Sampling(1.0, 1, 1e-6, 1.0), Sampling(100.0, 0, 1e-6), Sampling(1e-4, 0, 1.0)):
        weights = survivors(random_logits(3), options)
        assert weights[argmax(random_logits(3))] > 0


def test_equal_logits_share_equally() -> None:
    """A whole vocabulary of ties: 2^31 each, whose sum takes more than 32 bits."""
    size = 128256
    weights = survivors(np.zeros(size, dtype=np.float32), Sampling(temperature=1.0))
    assert set(weights.tolist()) == {2**31}
    drawn = [sample(np.zeros(size, dtype=np.float32), Sampling(temperature=1.0), position) for position in range(9)]
    assert drawn == [random_u32(0, position) * size >> 32 for position in range(9)]


@pytest.mark.parametrize("penalty", [1.0, 1.15, 0.5, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = random_logits(1)
    logits[3] = 0
    ids = [0, 3, 17, 17, 499]
    seen = np.zeros(V, dtype=bool)
    seen[ids] = True
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([ids]), torch.from_numpy(logits.copy())[None])[0].numpy()
    np.testing.assert_allclose(penalize(logits, seen, penalty), expected, rtol=2**-23)
    np.testing.assert_array_equal(penalize(logits, seen, penalty)[~seen], logits[~seen])


# --- greedy -----------------------------------------------------------------------------------------------------------


def test_argmax_takes_the_lowest_of_equals() -> None:
    assert argmax(np.float32([1, 5, 5, 2])) == 1
    assert argmax(np.float32([-0.0, 0.0])) == 0
    assert argmax(np.float32([-np.inf, -3])) == 1
    assert sample(np.float32([1, 5, 5, 2]), Sampling(), 7) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_give_the_invalid_id(bad: float) -> None:
    logits = random_logits(0)
    logits[100] = bad
    assert argmax(logits) == constant("invalid_id") == 2**32 - 1
    for options in (Sampling(), Sampling(temperature=1.0, top_k=5)):
        assert sample(logits, options, 0) == constant("invalid_id")
    assert argmax(np.full(4, -np.inf, dtype=np.float32)) == constant("invalid_id")


# --- drawing ----------------------------------------------------------------------------------------------------------


def pcg(value: int) -> int:
    """PCG-RXS-M-XS-32 as published (O'Neill 2014, pcg_output_rxs_m_xs_32_32 after one step of its LCG)."""
    state = np.uint32(value)
    with np.errstate(over="ignore"):
        state = state * np.uint32(747796405) + np.uint32(2891336453)
        word = ((state >> ((state >> np.uint32(28)) + np.uint32(4))) ^ state) * np.uint32(277803737)
    return int((word >> np.uint32(22)) ^ word)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_random_numbers_follow_the_formula(seed: int, position: int) -> None:
    low, high = seed & 0xFFFFFFFF, seed >> 32
    assert random_u32(seed, position) == pcg((pcg(pcg(low) ^ high) + position) & 0xFFFFFFFF)


def test_random_numbers_are_spread() -> None:
    """Over positions of one seed, and over seeds at one position: 64 classes, chi-square below its 0.9999 quantile."""
    for numbers in (
        [random_u32(12345, position) for position in range(20000)],
        [random_u32(seed, 7) for seed in range(20000)],
        [random_u32(seed << 32, 7) for seed in range(20000)],
    ):
        counts = np.bincount(np.array(numbers) >> 26, minlength=64)
        assert chi_square(counts, np.full(64, len(numbers) / 64)) < 111  # 63 degrees of freedom
        assert len(set(numbers)) > 19900  # as many as random numbers would, but for a few collisions


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float((np.square(counts - expected) / expected).sum())


@pytest.mark.parametrize("options", [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=8, top_p=0.9)], ids=str)
def test_draws_follow_the_probabilities(options: Sampling) -> None:
    logits = random_logits(5, 12) / 2
    expected = warped(logits, options)
    probability = np.exp(expected - expected.max())
    probability /= probability.sum()
    count = 6000
    draws = [sample(logits, Sampling(**{**vars(options), "seed": 99}), position) for position in range(count)]
    counts = np.bincount(draws, minlength=12)
    possible = probability > 0
    assert not counts[~possible].any()
    # At most 11 degrees of freedom: 0.9999 quantile 37.4. The seed is fixed, so this holds or does not.
    assert chi_square(counts[possible], count * probability[possible]) < 37.4


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.integers(0, 4000))
def test_the_first_whose_running_sum_exceeds_the_point_is_drawn(data_seed: int, seed: int, position: int) -> None:
    logits = random_logits(data_seed, 30)
    options = Sampling(temperature=1.2, top_k=9, seed=seed)
    weights = survivors(logits, options).astype(int).tolist()
    point = random_u32(seed, position) * sum(weights) // 2**32
    drawn = sample(logits, options, position)
    assert sum(weights[:drawn]) <= point < sum(weights[: drawn + 1])


@pytest.mark.parametrize(("random", "token"), [(0, 1), (2**30 - 1, 1), (2**30, 1), (2**31, 3), (2**32 - 1, 3)])
def test_points_on_the_border_belong_to_the_next(random: int, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal survivors, tokens 1 and 3; those that were filtered out are never drawn."""
    monkeypatch.setattr("shaders.sampling.random_u32", lambda seed, position: random)
    assert sample(np.float32([0, 9, 0, 9, 0]), Sampling(temperature=1.0, top_k=2), 0) == token


def test_seed_and_position_decide() -> None:
    logits = random_logits(2)
    draw = [sample(logits, Sampling(temperature=2.0, seed=s), p) for s in (1, 2, 1 << 40) for p in (0, 1, 2, 3)]
    again = [sample(logits, Sampling(temperature=2.0, seed=s), p) for s in (1, 2, 1 << 40) for p in (0, 1, 2, 3)]
    assert draw == again
    assert len(set(draw)) > 6


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", [-0.1, 101, math.nan, math.inf, 1e-30]),
        ("top_k", [-1, 2**31, 1.5]),
        ("top_p", [0, -1, 1.01, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0, -1, 1000, math.nan]),
        ("seed", [-1, 2**64, 0.5]),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, bad: list[float]) -> None:
    for value in bad:
        with pytest.raises(ValueError, match=field):
            Sampling(**{"temperature": 1.0, field: value})


def test_the_buffer_of_the_kernel() -> None:
    words = Sampling(0.5, 40, 0.9, 0.05, 1.25, seed=(7 << 32) | 9).words()
    assert words.dtype == np.uint32 and len(words) == 8
    floats = words.view(np.float32)
    assert floats[0] == 2.0 and words[1] == 40 and floats[2] == np.float32(0.9)
    assert floats[3] == np.float32(math.log(0.05))
    assert floats[4] == 1.25 and floats[5] == np.float32(0.8)
    assert words[6:].tolist() == [9, 7]
    assert Sampling().words().view(np.float32)[[0, 3]].tolist() == [1.0, np.float32(-3.0e38)]
