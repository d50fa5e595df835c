"""What ``weigh`` leaves for ``draw``, as the reference has it, how it is compared; and seeds that decide a case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from . import sampling
from .sampling import Sampling

F32 = np.float32
BINS = 256
#: Relative error of a weight: exp() of a difference down to -22, where the integer weight becomes zero, errs by at
#: most (3 + 2 * 22) units in the last place.
WEIGHT_ERROR = 1e-5
#: Seeds that are tried for each case.
SEEDS = 300


def keys_of(values: np.ndarray) -> np.ndarray:
    """Unsigned integers in the order of floats; both zeros alike, NaN above all. u32 ``[V]``."""
    bits = (values + F32(0)).view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))
    return np.where(np.isnan(values), np.uint32(0xFFFFFFFF), keys).astype(np.uint32)


def bins_of(scaled: np.ndarray) -> np.ndarray:
    """The bin of each logit over the temperature, int ``[V]``: 11.5 a nat below the greatest; the last is the rest."""
    return np.asarray(np.minimum((scaled.max() - scaled).astype(F32) * F32(11.5), F32(BINS - 1)), dtype=np.int64)


def weighed(scaled: np.ndarray, options: Sampling, part: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums u32 ``[PARTS, 256, 2]`` and keys u32 ``[PARTS, part]``; zero where ``weigh`` does not write."""
    parts = -(-len(scaled) // part)
    sums, keys = np.zeros((parts, BINS, 2), dtype=np.uint32), np.zeros((parts, part), dtype=np.uint32)
    if not np.isfinite(scaled.max()):
        return sums, keys
    weights, bins = sampling.weigh(scaled, scaled.max()), bins_of(scaled)
    narrows = 0 < options.top_k < len(scaled) or options.top_p < 1
    lowest = scaled.max() + options.words()[3:4].view(F32)[0]
    for index in range(parts):
        own = slice(index * part, (index + 1) * part)
        if narrows:
            inside = bins[own] < BINS - 1
            numbers = np.cumsum(np.bincount(bins[own][inside], minlength=BINS))
            amounts = [weights[own][inside & (bins[own] == one)].sum(dtype=np.uint64) for one in range(BINS)]
            sums[index] = _words(np.cumsum(np.array(amounts)), numbers)
            order = np.argsort(bins[own][inside], kind="stable")
            keys[index, : len(order)] = keys_of(scaled[own])[inside][order]
        else:
            total = np.where(scaled[own] >= lowest, weights[own], 0).sum(dtype=np.uint64)
            sums[index, -1:] = _words(np.array([total]), np.zeros(1, dtype=int))
    return sums, keys


def _words(weights: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    high = (numbers.astype(np.uint64) << np.uint64(16)) | (weights >> np.uint64(32))
    return np.stack([weights & np.uint64(0xFFFFFFFF), high], axis=-1).astype(np.uint32)


@dataclass(frozen=True)
class Sums:
    """Numbers exactly, weights to within what exp() may err and truncation adds."""

    def problem(self, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, np.ndarray]) -> str:
        """See Check."""
        (weight, number), (wanted, numbers) = _split(actual), _split(expected)
        if (number != numbers).any():
            return f"{int((number != numbers).sum())} numbers of keys differ"
        bad = np.abs(weight - wanted) > WEIGHT_ERROR * wanted + 1024
        return f"{int(bad.sum())} weights differ, by up to {np.abs(weight - wanted).max():.3g}" if bad.any() else ""

    def close(self) -> float | None:
        """See Check."""
        return None


def _split(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = words[..., 0].astype(np.float64), words[..., 1]
    return low + (high & 0xFFFF) * 2.0**32, high >> 16


@dataclass(frozen=True)
class Binned:
    """The same keys in each bin, in any order. sums: u32 ``[R, PARTS, 256, 2]``, as expected."""

    sums: np.ndarray

    def problem(self, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, np.ndarray]) -> str:
        """See Check."""
        numbers = _split(self.sums)[1]
        for at in np.ndindex(numbers.shape[:2]):
            # Each key with the bin of its place, so that sorting moves none out of it.
            place = np.searchsorted(numbers[at], np.arange(actual.shape[-1]), side="right").astype(np.uint64)
            found, wanted = (np.sort((place << np.uint64(32)) | keys[at]) for keys in (actual, expected))
            if (found != wanted).any():
                return f"{int((found != wanted).sum())} keys of row and part {at} are in other bins"
        return ""

    def close(self) -> float | None:
        """See Check."""
        return None


def decided(penalized: np.ndarray, options: Sampling, position: int) -> Sampling:
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
