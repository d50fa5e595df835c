"""Numbers of a few bits: E2M1 weights of four bits, and the E4M3 and E8M0 scales of their blocks.

Sources: OCP Microscaling Formats (MX) v1.0 (E2M1: sign, two bits of exponent with bias 1, one of mantissa, neither
infinity nor NaN; E8M0: a power of two with bias 127, 255 is NaN) and OCP 8-bit Floating Point v1.0 (E4M3: bias 7, the
greatest 448, 127 is NaN). MXFP4 is blocks of 32 E2M1 with an E8M0 scale; NVFP4, as NVIDIA describes it for Blackwell
GPUs, is blocks of 16 E2M1 with an E4M3 scale, and one f32 scale a tensor.
"""

from __future__ import annotations

import numpy as np

F32 = np.float32
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=F32)
#: The value of each nibble.
E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
E2M1_MAX, E4M3_MAX = 6.0, 448.0
#: Greatest codes of a scale in a pack. E4M3 scales have no sign; six times a greater E8M0 scale is no f32.
E4M3_MAX_CODE, E8M0_MAX_CODE = 0x7E, 252
E8M0_BIAS = 127


def e4m3(codes: np.ndarray) -> np.ndarray:
    """E4M3 without its sign: u8 codes of any shape to f32. 127 is NaN."""
    exponent, mantissa = (codes >> 3).astype(np.int32) & 15, (codes & 7).astype(F32)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10)).astype(F32)
    return np.where(codes & 127 == 127, F32(np.nan), values)


def e8m0(codes: np.ndarray) -> np.ndarray:
    """Powers of two: u8 codes of any shape to f32. 255 is NaN."""
    values = np.ldexp(F32(1), np.minimum(codes, 254).astype(np.int32) - E8M0_BIAS).astype(F32)
    return np.where(codes == 255, F32(np.nan), values)


def nibbles(data: np.ndarray) -> np.ndarray:
    """u8 ``[N, n]`` to u8 ``[N, 2n]``, the low nibble of a byte first."""
    return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)
