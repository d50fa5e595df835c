"""Measures that several tests share."""

from __future__ import annotations

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithm of the probabilities along the last axis, f64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def kl_divergence(truth: np.ndarray, found: np.ndarray) -> np.ndarray:
    """KL(truth || found) of logits along the last axis, in nats."""
    p, q = log_softmax(truth), log_softmax(found)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def relative_to_range(found: np.ndarray, expected: np.ndarray) -> float:
    """Greatest difference as a share of the expected values' range."""
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    wide = expected.astype(np.float64)
    return float(np.abs(found - wide).max() / (wide.max() - wide.min()))
