"""The formulas of the quality report: perplexity, KL divergence, agreement. Plain NumPy, float64, nats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: Borders of the KL histogram in nats; the first bin takes all below, the last all above.
KL_EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities along the last axis, f64 ``[R, V]``."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def kl_divergence(source: np.ndarray, pack: np.ndarray) -> np.ndarray:
    """KL(source || pack) of log-probabilities ``[R, V]``, nats ``[R]``; rounding below 0 counts as 0."""
    total: np.ndarray = np.maximum((np.exp(source) * (source - pack)).sum(axis=-1), 0.0)
    return total


@dataclass
class Positions:
    """What is kept of each scored position: nats, probabilities of the true token, whether the top tokens agree."""

    kl: list[np.ndarray] = field(default_factory=list)
    source_loss: list[np.ndarray] = field(default_factory=list)
    pack_loss: list[np.ndarray] = field(default_factory=list)
    same_top: list[np.ndarray] = field(default_factory=list)

    def add(self, source: np.ndarray, pack: np.ndarray, targets: np.ndarray) -> None:
        """Rows of log-probabilities ``[R, V]`` of both models and the tokens that came, int ``[R]``."""
        rows = np.arange(len(targets))
        self.kl.append(kl_divergence(source, pack))
        self.source_loss.append(-source[rows, targets])
        self.pack_loss.append(-pack[rows, targets])
        self.same_top.append(source.argmax(axis=-1) == pack.argmax(axis=-1))

    def first(self, count: int) -> Positions:
        """The first ``count`` positions."""
        names = ("kl", "source_loss", "pack_loss", "same_top")
        return Positions(**{name: [np.concatenate(getattr(self, name))[:count]] for name in names})

    def summary(self) -> dict[str, Any]:
        """Perplexities, KL, agreement and change of probability, as ``report.json`` holds them."""
        kl, source, pack, same = (
            np.concatenate(parts) for parts in (self.kl, self.source_loss, self.pack_loss, self.same_top)
        )
        change = np.exp(-pack) - np.exp(-source)
        return {
            "scored_tokens": len(kl),
            "perplexity": {
                "source": perplexity(source),
                "pack": perplexity(pack),
                "ratio": perplexity(pack - source),
            },
            "kl": {
                **mean_with_error(kl),
                "p99": rounded(np.quantile(kl, 0.99)),
                "p999": rounded(np.quantile(kl, 0.999)),
                "max": rounded(kl.max()),
                "histogram": {"edges": list(KL_EDGES), "counts": histogram(kl)},
            },
            "same_top": mean_with_error(same.astype(np.float64)),
            "rms_probability_change": rounded(np.sqrt(np.square(change).mean())),
        }

    def brief(self) -> dict[str, Any]:
        """KL and agreement alone."""
        kl, same = np.concatenate(self.kl), np.concatenate(self.same_top)
        return {"scored_tokens": len(kl), "kl": mean_with_error(kl), "same_top": rounded(same.mean())}


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean; 0 for a single value."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def mean_with_error(values: np.ndarray) -> dict[str, float]:
    """Mean and its standard error; neighbouring tokens are taken as independent, as llama.cpp does."""
    return {"mean": rounded(values.mean()), "error": rounded(standard_error(values))}


def perplexity(losses: np.ndarray) -> dict[str, float]:
    """exp(mean loss) and its standard error (that of the mean times the value)."""
    with np.errstate(over="ignore"):
        value = min(float(np.exp(losses.mean())), 1e300)  # JSON has no infinity
    return {"value": rounded(value), "error": rounded(min(value * standard_error(losses), 1e300))}


def histogram(kl: np.ndarray) -> list[int]:
    """Positions in each bin between ``KL_EDGES``, one bin more than edges."""
    bins = np.searchsorted(np.asarray(KL_EDGES), kl, side="right")
    return [int(count) for count in np.bincount(bins, minlength=len(KL_EDGES) + 1)]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None."""
    length = min(len(one), len(other))
    found = next((index for index in range(length) if one[index] != other[index]), None)
    return length if found is None and len(one) != len(other) else found


def rounded(value: Any) -> float:
    """Five significant digits: what lies beyond depends on the device."""
    return float(f"{float(value):.5g}")
