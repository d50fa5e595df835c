"""Weight encodings of FORMAT.md: float or trit rows to the disk layout. Decoding: ``shaders/reference.py``.

Every function is pure and works on any number of whole rows, so large tensors go through in slices.
"""

from __future__ import annotations

import numpy as np

from shaders.contract import quotient_up

from .errors import CheckpointError

#: Columns that share a scale in q8 and q4.
GROUP = 32
F16_MAX = 65504.0
_POWERS = np.array([81, 27, 9, 3, 1], dtype=np.uint16)


def pad_columns(values: np.ndarray, multiple: int, fill: int = 0) -> np.ndarray:
    """``[N, K]`` with columns up to the next multiple filled."""
    missing = -values.shape[1] % multiple
    return np.pad(values, ((0, 0), (0, missing)), constant_values=fill) if missing else values


def encode_trits(trits: np.ndarray) -> np.ndarray:
    """Trits int8 ``[N, K]`` to base-3 bytes ``[N, 4*ceil(K/20)]``: byte = ceil(v * 256 / 243)."""
    codes = pad_columns(trits + np.int8(1), 20, fill=1).astype(np.uint16)
    numbers = (codes.reshape(len(trits), -1, 5) * _POWERS).sum(axis=-1, dtype=np.uint16)
    packed: np.ndarray = ((numbers.astype(np.uint32) * 256 + 242) // 243).astype(np.uint8)
    return packed


def encode_q8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 ``[N, K]`` to int8 ``[N, 32*ceil(K/32)]`` and f16 scales ``[N, ceil(K/32)]``."""
    q, scales = _fit(_groups(values), levels=127)
    return q.reshape(len(values), -1), scales


def encode_q4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 ``[N, K]`` to nibbles u8 ``[N, 16*ceil(K/32)]`` and f16 scales ``[N, ceil(K/32)]``."""
    q, scales = _fit_q4(_groups(values))
    codes = (q.reshape(len(values), -1) + 8).astype(np.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def encode_f16(values: np.ndarray) -> np.ndarray:
    """f32 ``[N, K]`` to f16 ``[N, 4*ceil(K/4)]``. Raises CheckpointError beyond the f16 range."""
    greatest = float(np.abs(values).max(initial=0))
    if greatest > F16_MAX:
        raise CheckpointError(f"a weight of {greatest:.6g} does not fit f16 (at most {F16_MAX:.0f}); use q8 or q4")
    return pad_columns(values, 4).astype(np.float16)


def encode_f32(values: np.ndarray) -> np.ndarray:
    """f32 ``[N, K]`` to f32 ``[N, 4*ceil(K/4)]``."""
    return pad_columns(values, 4).astype(np.float32)


def _groups(values: np.ndarray) -> np.ndarray:
    padded = pad_columns(values.astype(np.float32), GROUP)
    return padded.reshape(len(values), quotient_up(values.shape[1], GROUP), GROUP)


def _half_scales(scales: np.ndarray) -> np.ndarray:
    """Scales rounded to f16. Raises CheckpointError beyond its range."""
    greatest = float(np.abs(scales).max(initial=0))
    if greatest > F16_MAX:
        raise CheckpointError(f"a scale of {greatest:.6g} does not fit f16 (at most {F16_MAX:.0f})")
    return scales.astype(np.float16)


def _quantize(groups: np.ndarray, scales: np.ndarray, low: int, high: int) -> np.ndarray:
    """Nearest codes for f16 scales ``[N, G]``; a scale of 0 gives code 0."""
    wide = scales.astype(np.float32)[..., None]
    ratio = np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0)
    codes: np.ndarray = np.clip(np.rint(ratio), low, high).astype(np.int8)
    return codes


def _least_squares(groups: np.ndarray, q: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    """Scales f32 ``[N, G]`` that minimise the squared error for given codes: sum(w q) / sum(q q)."""
    codes = q.astype(np.float32)
    square = (codes * codes).sum(axis=-1)
    best: np.ndarray = fallback.astype(np.float32)
    np.divide((groups * codes).sum(axis=-1), square, out=best, where=square > 0)
    return best


def _fit(groups: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and f16 scales from the greatest magnitude, then refined once by least squares if that is better."""
    first = _half_scales(np.abs(groups).max(axis=-1) / levels)
    q = _quantize(groups, first, -levels, levels)
    refined = _half_scales(_least_squares(groups, q, first))
    return _better(groups, (q, first), (_quantize(groups, refined, -levels, levels), refined))


def _fit_q4(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes -8..7 and f16 scales: the best of several starting scales of both signs, each refined by least squares."""
    index = np.abs(groups).argmax(axis=-1)[..., None]
    extreme = np.take_along_axis(groups, index, axis=-1)[..., 0]
    best = None
    for divisor in (-8.5, -8.0, -7.5, -7.0, -6.5, 7.0, 7.5):
        scales = _half_scales(extreme / np.float32(divisor))
        q = _quantize(groups, scales, -8, 7)
        refined = _half_scales(_least_squares(groups, q, scales))
        candidate = (_quantize(groups, refined, -8, 7), refined)
        best = candidate if best is None else _better(groups, best, candidate)
    assert best is not None
    return best


def _better(groups: np.ndarray, one: tuple, other: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Group by group the fit with the smaller squared error; the first one on a tie."""
    errors = [np.square(groups - q * scales.astype(np.float32)[..., None]).sum(axis=-1) for q, scales in (one, other)]
    take = errors[1] < errors[0]
    return np.where(take[..., None], other[0], one[0]), np.where(take, other[1], one[1])
