"""Weight encodings of FORMAT.md: float or trit rows to the disk layout. Decoding: ``shaders/reference.py``.

Every function is pure and works on any number of whole rows, so large tensors go through in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from shaders.contract import quotient_up
from shaders.float4 import E2M1, E2M1_MAX, E4M3_MAX, E4M3_MAX_CODE, E8M0_BIAS, E8M0_MAX_CODE, e4m3, e8m0

from . import affine
from .affine import F16_MAX
from .errors import CheckpointError

#: Columns that share a scale in q8, q4, q4a and mxfp4.
GROUP = 32
#: Byte of each number of five base-3 digits: ceil(v * 256 / 243).
_PACKED = ((np.arange(243) * 256 + 242) // 243).astype(np.uint8)


def pad_columns(values: np.ndarray, multiple: int, fill: int = 0) -> np.ndarray:
    """``[N, K]`` with columns up to the next multiple filled."""
    missing = -values.shape[1] % multiple
    return np.pad(values, ((0, 0), (0, missing)), constant_values=fill) if missing else values


def encode_trits(trits: np.ndarray) -> np.ndarray:
    """Trits int8 ``[N, K]`` to base-3 bytes ``[N, 4*ceil(K/20)]``: byte = ceil(v * 256 / 243)."""
    codes = pad_columns(trits + np.int8(1), 20, fill=1).astype(np.uint8, copy=False).reshape(len(trits), -1, 5)
    numbers = codes[..., 0].copy()  # at most 242, so a byte is wide enough
    for digit in range(1, 5):
        numbers *= np.uint8(3)
        numbers += codes[..., digit]
    packed: np.ndarray = _PACKED[numbers]
    return packed


def encode_q8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 ``[N, K]`` to int8 ``[N, 32*ceil(K/32)]`` and f16 scales ``[N, ceil(K/32)]``."""
    q, scales = _fit(_groups(values), levels=127)
    return q.reshape(len(values), -1), scales


def encode_q4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 ``[N, K]`` to nibbles u8 ``[N, 16*ceil(K/32)]`` and f16 scales ``[N, ceil(K/32)]``."""
    q, scales = _fit_q4(_groups(values))
    return _pack_nibbles((q + 8).astype(np.uint8)), scales


def encode_q4a(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 ``[N, K]`` to nibbles u8 ``[N, 16*ceil(K/32)]`` and f16 (scale, minimum) ``[N, 2*ceil(K/32)]``.

    Groups that stand on a grid of sixteen steps come back as they are, if f16 holds their scale and minimum.
    """
    groups = _groups(values)
    codes, scales, minima = affine.fit(groups, values.shape[1])
    return _pack_nibbles(codes), np.stack([scales, minima], axis=-1).reshape(len(values), -1)


def nvfp4_tensor_scale(greatest: float) -> np.float32:
    """The f32 scale of an nvfp4 tensor whose greatest magnitude this is: block scales then reach up to 448.

    Never so small that a device would take it, or a block's product with it, for zero.
    """
    return max(np.float32(greatest / (E2M1_MAX * E4M3_MAX)), np.float32(2.0**-100))


def encode_nvfp4(values: np.ndarray, tensor_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """f32 ``[N, K]`` to E2M1 u8 ``[N, 16*ceil(K/32)]`` and E4M3 scales u8 ``[N, ceil(K/16)]``.

    tensor_scale: of the whole tensor, ``nvfp4_tensor_scale``. A block takes the scale nearest to its greatest magnitude
    / 6, or one beside it where the sum of squared errors is smaller.
    """
    groups = _groups(values, 16)
    wanted = np.abs(groups).max(axis=-1) / (np.float32(E2M1_MAX) * tensor_scale)
    nearest = np.minimum(wanted, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.int32)
    scales = [np.clip(nearest + step, 0, E4M3_MAX_CODE).astype(np.uint8) for step in (0, -1, 1)]
    return _encode_e2m1(groups, scales, lambda codes: e4m3(codes) * tensor_scale)


def encode_mxfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 ``[N, K]`` to E2M1 u8 ``[N, 16*ceil(K/32)]`` and E8M0 scales u8 ``[N, ceil(K/32)]``.

    A block takes the power of two of OCP MX v1.0 (the greatest magnitude's, over that of 6), or the next
    one where the sum of squared errors is smaller.
    """
    groups = _groups(values)
    _, exponents = np.frexp(np.abs(groups).max(axis=-1))
    lowest = exponents.astype(np.int32) - 3 + E8M0_BIAS
    scales = [np.clip(lowest + step, 0, E8M0_MAX_CODE).astype(np.uint8) for step in (0, 1)]
    return _encode_e2m1(groups, scales, e8m0)


def encode_f16(values: np.ndarray) -> np.ndarray:
    """f32 ``[N, K]`` to f16 ``[N, 4*ceil(K/4)]``. Raises CheckpointError beyond the f16 range."""
    greatest = float(np.abs(values).max(initial=0))
    if greatest > F16_MAX:
        raise CheckpointError(f"a weight of {greatest:.6g} does not fit f16 (at most {F16_MAX:.0f}); use q8 or q4")
    return pad_columns(values, 4).astype(np.float16)


def encode_f32(values: np.ndarray) -> np.ndarray:
    """f32 ``[N, K]`` to f32 ``[N, 4*ceil(K/4)]``."""
    return pad_columns(values, 4).astype(np.float32)


def encode(values: np.ndarray, encoding: str) -> tuple[np.ndarray, np.ndarray | None]:
    """(data, scales or None) of f32 ``[N, K]`` in an encoding whose rows stand for themselves: no ternary, no nvfp4."""
    scaled = {"q8": encode_q8, "q4": encode_q4, "q4a": encode_q4a, "mxfp4": encode_mxfp4}.get(encoding)
    if scaled:
        return scaled(values)
    return {"f16": encode_f16, "f32": encode_f32}[encoding](values), None


def _groups(values: np.ndarray, group: int = GROUP) -> np.ndarray:
    padded = pad_columns(values.astype(np.float32), group)
    return padded.reshape(len(values), quotient_up(values.shape[1], group), group)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes u8 ``[N, G, group]`` to bytes ``[N, 16*ceil(G*group/32)]``, the first of two in the low nibble."""
    flat = pad_columns(codes.reshape(len(codes), -1), GROUP)
    packed: np.ndarray = flat[:, 0::2] | (flat[:, 1::2] << 4)
    return packed


def _encode_e2m1(
    groups: np.ndarray,
    candidates: Sequence[np.ndarray],
    scale_of: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Nibbles and scale codes: group by group the candidate with the smaller squared error, the first on a tie."""
    best: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    for scales in candidates:
        wide = scale_of(scales)[..., None]
        ratio = np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0)
        codes = np.clip(ratio, -E2M1_MAX, E2M1_MAX).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        codes[codes == 8] = 0  # no negative zeros
        error = np.square(groups - E2M1[codes] * wide).sum(axis=-1)
        if best is not None:
            take = error < best[2]
            codes = np.where(take[..., None], codes, best[0])
            scales, error = np.where(take, scales, best[1]), np.where(take, error, best[2])
        best = codes, scales, error
    assert best is not None
    return _pack_nibbles(best[0]), best[1]


def half_scales(scales: np.ndarray) -> np.ndarray:
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
    first = half_scales(np.abs(groups).max(axis=-1) / levels)
    q = _quantize(groups, first, -levels, levels)
    refined = half_scales(_least_squares(groups, q, first))
    return _better(groups, (q, first), (_quantize(groups, refined, -levels, levels), refined))


def _fit_q4(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes -8..7 and f16 scales: the best of several starting scales of both signs, each refined by least squares."""
    index = np.abs(groups).argmax(axis=-1)[..., None]
    extreme = np.take_along_axis(groups, index, axis=-1)[..., 0]
    best = None
    for divisor in (-8.5, -8.0, -7.5, -7.0, -6.5, 7.0, 7.5):
        scales = half_scales(extreme / np.float32(divisor))
        q = _quantize(groups, scales, -8, 7)
        refined = half_scales(_least_squares(groups, q, scales))
        candidate = (_quantize(groups, refined, -8, 7), refined)
        best = candidate if best is None else _better(groups, best, candidate)
    assert best is not None
    return best


def _better(groups: np.ndarray, one: tuple, other: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Group by group the fit with the smaller squared error; the first one on a tie."""
    errors = [np.square(groups - q * scales.astype(np.float32)[..., None]).sum(axis=-1) for q, scales in (one, other)]
    take = errors[1] < errors[0]
    return np.where(take[..., None], other[0], one[0]), np.where(take, other[1], one[1])
