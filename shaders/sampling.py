"""NumPy reference of token choice: greedy and random, as the kernels ``argmax``, ``weigh`` and ``draw`` do it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .contract import constant

F32 = np.float32
_MASK = 0xFFFFFFFF
_MIN_P_OFF = -3.0e38


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    Raises ValueError naming an option that is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0:  # below 1e-4 a logit over the temperature could leave float32
            self._require("temperature", 1e-4, 100, "0, or ")
        self._require("top_p", 1e-6, 1)
        self._require("min_p", 0, 1)
        self._require("repetition_penalty", 0.01, 100)
        self._require("top_k", 0, 2**31 - 1)
        self._require("seed", 0, 2**64 - 1)
        for name in ("top_k", "seed"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name} is {getattr(self, name)}, expected an integer")

    def _require(self, name: str, low: float, high: float, other: str = "") -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, expected {other}{low} to {high}")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    def words(self) -> np.ndarray:
        """The ``@sampling`` buffer, u32 ``[8]``."""
        floats = np.array(
            [
                1.0 if self.greedy else 1.0 / self.temperature,
                self.top_p,
                np.log(self.min_p) if self.min_p > 0 else _MIN_P_OFF,
                self.repetition_penalty,
                1.0 / self.repetition_penalty,
            ],
            dtype=F32,
        ).view(np.uint32)
        head = [floats[0], self.top_k, floats[1], floats[2], floats[3], floats[4]]
        return np.array([*head, self.seed & _MASK, self.seed >> 32], dtype=np.uint32)


def penalize(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    """Repetition penalty (transformers' formula) on tokens where ``seen`` is true; f32 ``[V]``."""
    inverse = F32(1.0 / penalty)
    changed = np.where(logits > 0, logits * inverse, logits * F32(penalty))
    return np.where(seen, changed, logits).astype(F32)


def argmax(logits: np.ndarray) -> int:
    """Greatest logit, ties to the lowest id; ``invalid_id`` if the greatest is NaN or infinite."""
    best = int(np.argmax(logits))
    return best if np.isfinite(logits[best]) else constant("invalid_id")


def random_u32(seed: int, position: int) -> int:
    """Counter-based random number: three rounds of PCG-RXS-M-XS-32 (O'Neill 2014) over seed and position."""
    mixed = _pcg(seed & _MASK) ^ (seed >> 32)
    return _pcg((_pcg(mixed) + position) & _MASK)


def _pcg(value: int) -> int:
    state = (value * 747796405 + 2891336453) & _MASK
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & _MASK
    return (word >> 22) ^ word


def temper(logits: np.ndarray, options: Sampling) -> np.ndarray:
    """Penalized logits over the temperature, f32 ``[V]``."""
    return (logits * F32(1.0 / options.temperature)).astype(F32)


def weigh(scaled: np.ndarray, highest: np.float32) -> np.ndarray:
    """Weights exp(scaled - highest) as whole numbers of 2^-31, truncated; u32 ``[V]``."""
    return (np.exp((scaled - highest).astype(F32)) * F32(constant("weight_one"))).astype(np.uint32)


def survivors(logits: np.ndarray, options: Sampling) -> np.ndarray:
    """Integer weights of the tokens that may be drawn (0: filtered out), u32 ``[V]``; logits already penalized."""
    scaled = temper(logits, options)
    highest = scaled.max()
    keep = np.ones(len(scaled), dtype=bool)
    if 0 < options.top_k < len(scaled):
        keep = scaled >= np.sort(scaled)[-options.top_k]
    weights = np.where(keep, weigh(scaled, highest), 0)
    if options.top_p < 1:
        keep &= scaled >= _nucleus_threshold(scaled, weights, options.top_p)
    if options.min_p > 0:
        keep &= scaled >= highest + F32(np.log(options.min_p))
    return np.where(keep, weights, 0).astype(np.uint32)


def _nucleus_threshold(scaled: np.ndarray, weights: np.ndarray, top_p: float) -> np.float32:
    order = np.argsort(-scaled, kind="stable")
    running = np.cumsum(weights[order].astype(np.uint64))
    # One of the likeliest stays whatever top_p is. The product has more than 64 bits.
    target = max(1, int(running[-1]) * int(F32(top_p) * F32(2**32)) >> 32)
    last = min(int(np.searchsorted(running, target)), len(order) - 1)
    return np.float32(scaled[order[last]])


def sample(logits: np.ndarray, options: Sampling, position: int) -> int:
    """Draw the token for ``position`` from penalized logits f32 ``[V]``; ``invalid_id`` if they are broken."""
    if options.greedy or argmax(logits) == constant("invalid_id"):
        return argmax(logits)
    running = np.cumsum(survivors(logits, options).astype(np.uint64))
    point = (random_u32(options.seed, position) * int(running[-1])) >> 32
    return int(np.searchsorted(running, point, side="right"))
