"""Cases of argmax and sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from . import sampling
from .case_kit import F32, Case, generator, make_case
from .contract import constant
from .sampling import Sampling

#: Relative error of a weight: exp() of a difference down to -20, where the integer weight becomes zero, errs by at
#: most (3 + 2 * 20) units in the last place; the quotient, the product and the sum of exponentials by a few more.
WEIGHT_ERROR = 1e-5
#: Seeds that are tried for each case.
SEEDS = 300


def argmax_cases() -> Iterator[Case]:
    """Sizes around the 256 threads; ties; both zeros; a penalty that changes the winner; numbers that are broken."""
    for vocabulary in (1, 2, 255, 257, 1000, 49152):
        yield _choice(f"argmax {vocabulary}", _logits(f"argmax {vocabulary}", vocabulary), Sampling())
    tied = _logits("tied", 700)
    tied[[5, 260, 261, 699]] = 99.0
    yield _choice("argmax tie", tied, Sampling())
    zeros = np.full(600, -1.0, dtype=F32)
    zeros[[300, 301]] = -0.0, 0.0
    yield _choice("argmax zeros tie", zeros, Sampling())
    yield _choice("argmax negative", np.linspace(-900, -1, 300).astype(F32), Sampling())
    penalized = _logits("penalized", 400)
    penalized[7], penalized[300] = 10.0, 9.5
    yield _choice("argmax penalty", penalized, Sampling(repetition_penalty=1.3), seen=[7, 12, 399])
    below_zero = np.array([-1.0, -1.1, -5.0], dtype=F32)
    yield _choice("argmax penalty below zero", below_zero, Sampling(repetition_penalty=2.0), seen=[0])
    yield _choice("argmax rows", np.stack([_logits("a", 300), _logits("b", 300), _logits("c", 300)]), Sampling())
    yield _choice("argmax ring", _logits("ring", 300), Sampling(), step=(17, 6, 1, 3 * constant("ring") + 5))
    yield from _broken("argmax", Sampling())


def sample_cases() -> Iterator[Case]:
    """Each filter alone and together, ties at a threshold, small and full vocabularies, several seeds."""
    options = {
        "plain": Sampling(temperature=1.0),
        "cold": Sampling(temperature=0.05),
        "hot": Sampling(temperature=5.0),
        "top-k 1": Sampling(temperature=1.0, top_k=1),
        "top-k 40": Sampling(temperature=1.5, top_k=40),
        "top-k beyond": Sampling(temperature=1.0, top_k=10**6),
        "top-p": Sampling(temperature=1.0, top_p=0.9),
        "top-p least": Sampling(temperature=1.0, top_p=1e-6),
        "min-p": Sampling(temperature=1.0, min_p=0.1),
        "min-p 1": Sampling(temperature=1.0, min_p=1.0),
        "all": Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
    }
    for title, choice in options.items():
        for vocabulary in (300, 1000):
            name = f"sample {title} {vocabulary}"
            yield _choice(name, _logits(name, vocabulary), choice, seen=[3, 200, 299])
    big = _logits("sample 49152", 49152)
    for title in ("plain", "all"):
        yield _choice(f"sample {title} 49152", big, options[title], seen=[int(big.argmax())])
    small = _logits("sample small", 5)
    yield _choice("sample 5", small, Sampling(temperature=1.0, top_k=3, top_p=0.7))
    yield _choice("sample 1", small[:1], Sampling(temperature=1.0, top_k=3, top_p=0.7))
    # Steps of a quarter: many logits equal the k-th largest and the one at which the nucleus ends.
    coarse = np.round(_logits("coarse", 600) * 4).astype(F32) / 4
    yield _choice("sample tie top-k", coarse, Sampling(temperature=1.0, top_k=20))
    yield _choice("sample tie top-p", coarse, Sampling(temperature=1.0, top_p=0.5))
    same = np.zeros(1000, dtype=F32)
    for seed in (0, 2**32, 2**64 - 1):
        yield _choice(f"sample flat seed {seed}", same, Sampling(temperature=1.0, seed=seed), step=(40, 1, 1, 7))
    yield _choice("sample flat top-k keeps ties", same, Sampling(temperature=1.0, top_k=2), step=(0, 9, 1, 0))
    rows = np.stack([_logits("x", 300), _logits("y", 300)])
    yield _choice("sample rows", rows, Sampling(temperature=1.0), step=(3, 4, 2, constant("ring")))
    yield from _broken("sample", Sampling(temperature=1.0, top_k=10, top_p=0.9))


def _broken(kernel: str, options: Sampling) -> Iterator[Case]:
    for title, value in (("nan", np.nan), ("inf", np.inf)):
        logits = _logits(title, 520)
        logits[300] = value
        yield _choice(f"{kernel} {title}", logits, options, seen=[2])
    yield _choice(f"{kernel} all -inf", np.full(300, -np.inf, dtype=F32), options)


def _logits(name: str, vocabulary: int) -> np.ndarray:
    rng = generator(name)
    return (rng.normal(size=vocabulary) * 3 + (rng.random(vocabulary) < 0.01) * 6).astype(F32)


def _choice(
    name: str,
    logits: np.ndarray,
    options: Sampling,
    *,
    seen: list[int] | None = None,
    step: tuple[int, int, int, int] | None = None,
) -> Case:
    """Logits ``[rows, V]``: the last row decides, and the id goes to ids, ring, seen and step."""
    rows = np.atleast_2d(logits)
    step = step or (11, 2, len(rows), 5)
    vocabulary, ring_size = rows.shape[1], constant("ring")
    mask = np.zeros(vocabulary, dtype=bool)
    mask[seen or []] = True
    position = step[0] + step[1]
    with np.errstate(invalid="ignore"):
        penalized = sampling.penalize(rows[-1], mask, options.repetition_penalty)
    if not options.greedy and np.isfinite(penalized.max()):
        options = _decided(penalized, options, position)
    token = sampling.sample(penalized, options, position)
    ring = generator(name).integers(0, 1 << 32, ring_size, dtype=np.uint32)
    inputs = {
        "logits": rows,
        "sampling": options.words(),
        "step": np.array(step, dtype=np.uint32),
        "ids": np.array([77], dtype=np.uint32),
        "ring": ring,
        "seen": _bits(mask),
    }
    after = ring.copy()
    after[step[3] % ring_size] = token
    if token != constant("invalid_id"):
        mask[token] = True
    expected = {
        "step": np.array([position, 1, 1, step[3] + 1], dtype=np.uint32),
        "ids": np.array([token], dtype=np.uint32),
        "ring": after,
        "seen": _bits(mask),
    }
    op = {"op": "argmax" if options.greedy else "sample", "logits": "logits"}
    return make_case(name, op, {"logits": {"dtype": "f32", "shape": ["R", vocabulary]}}, inputs, expected, step=step)


def _bits(mask: np.ndarray) -> np.ndarray:
    return np.packbits(
        np.resize(np.append(mask, np.zeros(-len(mask) % 32, dtype=bool)), -(-len(mask) // 32) * 32), bitorder="little"
    ).view("<u4")


def _decided(penalized: np.ndarray, options: Sampling, position: int) -> Sampling:
    """The options with a seed whose draw depends on the filters, as many as one can, and on no error of a weight.

    exp() differs by a few units in the last place from device to device, so a draw on the border between two ids
    may fall on either. The end of the nucleus must be as clear, which a case's logits have to see to.
    """
    running = np.cumsum(sampling.survivors(penalized, options).astype(np.float64))
    for share in (1 - WEIGHT_ERROR, 1 + WEIGHT_ERROR) if options.top_p < 1 else ():
        other = sampling.survivors(penalized, replace(options, top_p=float(np.clip(options.top_p * share, 1e-6, 1))))
        if ((other > 0) != (np.diff(running, prepend=0) > 0)).any():
            raise ValueError(f"the nucleus of {options} ends too close to a border")
    others = [np.cumsum(sampling.survivors(penalized, one).astype(np.float64)) for one in _neighbours(options)]
    slack = WEIGHT_ERROR * running[-1] + len(running)
    best, most = None, -1
    for seed in range(options.seed, options.seed + SEEDS):
        share = sampling.random_u32(seed & (2**64 - 1), position) / 2**32
        before, after = np.searchsorted(running, share * running[-1] + np.array([-slack, slack]), side="right")
        if before == after:
            different = sum(np.searchsorted(other, share * other[-1], side="right") != after for other in others)
            if different > most:
                best, most = seed & (2**64 - 1), different
    if best is None:
        raise ValueError(f"no seed gives {options} a draw far from a border")
    return replace(options, seed=best)


def _neighbours(options: Sampling) -> Iterator[Sampling]:
    """The options with one filter off, a little narrower, or a little wider."""
    if options.top_k:
        for top_k in (0, options.top_k - 1, options.top_k + 1):
            yield replace(options, top_k=top_k)
    if options.top_p < 1:
        for top_p in (1.0, options.top_p * 0.95, options.top_p * 1.02):
            yield replace(options, top_p=min(max(top_p, 1e-6), 1.0))
    if options.min_p > 0:
        for min_p in (0.0, options.min_p * 0.8, options.min_p * 1.2):
            yield replace(options, min_p=min(min_p, 1.0))
    if options.temperature != 1:
        yield replace(options, temperature=1.0)
