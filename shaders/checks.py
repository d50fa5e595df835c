"""How a kernel's output is compared with the reference: one class a tolerance. Derivations: ``README.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

#: Unit roundoff of f32: a correctly rounded operation errs by at most this share of its result.
U = 2.0**-24


class Check(Protocol):
    """Compares one output; returns what is wrong in words, empty if nothing is."""

    def problem(self, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, np.ndarray]) -> str: ...

    def close(self) -> float | None:
        """The check as one number, the largest difference of an element (0: the same bits); None if it is none."""


def _worst(bad: np.ndarray, actual: np.ndarray, expected: np.ndarray, why: str) -> str:
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{int(bad.sum())} of {bad.size} elements {why}; first at {at}: {actual[at]!r}, expected {expected[at]!r}"


@dataclass(frozen=True)
class Exact:
    """The same bits."""

    def problem(self, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, np.ndarray]) -> str:
        """See Check."""
        bad = actual.view("<u4") != np.ascontiguousarray(expected).view("<u4")
        return _worst(bad, actual, expected, "differ") if bad.any() else ""

    def close(self) -> float | None:
        """See Check."""
        return 0.0


@dataclass(frozen=True)
class Close:
    """Finite where the reference is, each element within ``bound`` (an array or a number), and the normalised
    mean squared error within ``nmse``: an error that is small everywhere but has one sign everywhere shows there.
    """

    bound: np.ndarray | float
    nmse: float = np.inf

    def problem(self, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, np.ndarray]) -> str:
        """See Check."""
        finite = np.isfinite(expected)
        if (np.isfinite(actual) != finite).any():
            return _worst(np.isfinite(actual) != finite, actual, expected, "are finite in one and not in the other")
        error = np.where(finite, actual.astype(np.float64) - np.where(finite, expected, 0), 0)
        bad = finite & (np.abs(error) > self.bound)
        if bad.any():
            return _worst(bad, actual, expected, f"are off by up to {np.abs(error).max():.3g}")
        found = float(np.square(error).sum() / max(np.square(expected[finite].astype(np.float64)).sum(), 1e-300))
        return f"normalised mean squared error {found:.3g}, bound {self.nmse:.3g}" if found > self.nmse else ""

    def close(self) -> float | None:
        """See Check."""
        return float(np.max(self.bound))


@dataclass(frozen=True)
class Between:
    """Packed integers, each between ``low`` and ``high`` (the same but where the reference is near a tie).

    layout: ``a8`` or ``a16`` (words ``[T, ceil(K/64), P, 16]``; bounds i32 ``[T, K]``) or ``q8`` (bounds of the
    bytes' own shape).
    """

    low: np.ndarray
    high: np.ndarray
    layout: str

    def problem(self, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, np.ndarray]) -> str:
        """See Check."""
        q, padding = unpack_integers(actual, self.layout, self.low.shape[-1])
        if padding.any():
            return "the padding beyond K is not zero"
        bad = (q < self.low) | (q > self.high)
        return _worst(bad, q, self.low, "are outside of what rounding explains") if bad.any() else ""

    def close(self) -> float | None:
        """See Check."""
        return 0.0 if (self.low == self.high).all() else None


@dataclass(frozen=True)
class BlockSums:
    """The sums of the integers that the same run wrote to ``source``."""

    source: str
    layout: str

    def problem(self, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, np.ndarray]) -> str:
        """See Check."""
        q, _ = unpack_integers(outputs[self.source], self.layout, actual.shape[-1] * 64)
        sums = q.reshape(*actual.shape, 64).sum(axis=-1, dtype=np.int32)
        return _worst(actual != sums, actual, sums, "are not the sums of q") if (actual != sums).any() else ""

    def close(self) -> float | None:
        """See Check."""
        return 0.0


@dataclass(frozen=True)
class AsFloats:
    """Words that are the bits of f32 numbers."""

    inner: Check

    def problem(self, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, np.ndarray]) -> str:
        """See Check."""
        return self.inner.problem(actual.view("<f4"), expected.view("<f4"), outputs)

    def close(self) -> float | None:
        """See Check."""
        return None


@dataclass(frozen=True)
class Halves:
    """Pairs of f16: within ``bound`` plus one unit in the last place, for a device may round up or down."""

    expected: np.ndarray
    bound: np.ndarray

    def problem(self, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, np.ndarray]) -> str:
        """See Check."""
        values = actual.view("<f2").astype(np.float64).reshape(self.expected.shape)
        return Close(self.bound + np.maximum(np.abs(self.expected) * 2.0**-10, 2.0**-24)).problem(
            values, self.expected, outputs
        )

    def close(self) -> float | None:
        """See Check."""
        return None


@dataclass(frozen=True)
class Rows:
    """``inner`` on the rows from ``first`` on, as many as ``rows``; the same bits in all others."""

    inner: Check
    first: int
    rows: int

    def problem(self, actual: np.ndarray, expected: np.ndarray, outputs: dict[str, np.ndarray]) -> str:
        """See Check."""
        inside = slice(self.first, self.first + self.rows)
        outside = np.ones(len(actual), dtype=bool)
        outside[inside] = False
        return Exact().problem(actual[outside], expected[outside], outputs) or self.inner.problem(
            actual[inside], expected[inside], outputs
        )

    def close(self) -> float | None:
        """See Check."""
        return self.inner.close()


def unpack_integers(words: np.ndarray, layout: str, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(i32 ``[..., columns]``, what lies beyond them) of packed int8 or of two planes of them."""
    data = np.ascontiguousarray(words).view(np.int8).astype(np.int32)
    if layout == "a8":
        data = data.reshape(len(words), -1)
    elif layout == "a16":
        planes = data.reshape(*words.shape[:2], 2, 64)
        data = (planes[:, :, 0] * 256 + planes[:, :, 1]).reshape(len(words), -1)
    return data[..., :columns], data[..., columns:]


def rounding_interval(exact: np.ndarray, slack: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers that rounding may give for a number known to within ``slack``, clamped to ``low`` .. ``high``."""
    lowest, highest = (np.clip(np.rint(exact + s), low, high).astype(np.int32) for s in (-slack, slack))
    return lowest, highest
