"""Cases of q4a, nvfp4 and mxfp4: four bits a weight with a minimum, and floats of four bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from . import reference
from .case_kit import Case, random_weight
from .cases_linear import dequantize_case, embed_case, linear_case
from .checks import Close
from .float4 import E4M3_MAX_CODE, E8M0_MAX_CODE
from .weights import WeightTensor

ENCODINGS = ("q4a", "nvfp4", "mxfp4")
#: Every nibble once: element 2j in the low half of byte j.
_EVERY_NIBBLE = (np.arange(0, 16, 2) | np.arange(1, 16, 2) << 4).astype(np.uint8)


def low_bit_cases() -> Iterator[Case]:
    """Sizes around blocks of 16 and 32 columns, odd counts of groups, pieces, every scale, in each kernel."""
    for encoding in ENCODINGS:
        for columns in (1, 61, 80):
            weight = partial(random_weight, encoding=encoding, rows=3, columns=columns)
            yield dequantize_case(f"dequantize {encoding} 3x{columns}", weight)
        yield embed_case(f"embed {encoding}", encoding, 70, 61, [69, 0, 3, 3, 33])
        yield embed_case(f"embed {encoding} piece", encoding, 64, 36, [0, 63, 64, 127, 128], first_row=64)
        for rows, columns in ((1, 1), (5, 61), (9, 515)):
            yield linear_case(f"linear_float {encoding} {rows}x{columns}", "f32", encoding, rows, columns, 1)
        for rows, columns in ((3, 36), (35, 592)):
            yield linear_case(f"linear_float {encoding} {rows}x{columns}", "f32", encoding, rows, columns, 1)
        yield linear_case(f"linear_float {encoding} few 3", "f32", encoding, 33, 132, 3, few=True)
        yield linear_case(f"float tiled {encoding} 65x129 T9", "f32", encoding, 65, 129, 9)
        yield linear_case(f"float tiled {encoding} 5x48 T2", "f32", encoding, 5, 48, 2)
    yield linear_case("linear_float nvfp4 few 8", "f32", "nvfp4", 7, 48, 8, few=True)
    yield linear_case("linear_float nvfp4 piece", "f32", "nvfp4", 7, 48, 1, first_row=64, all_rows=80)
    yield dequantize_case("dequantize every nvfp4", lambda rng: _every_e4m3())
    mxfp4 = _every_e8m0()
    # Those that are no normal f32 may be flushed.
    small = np.abs(reference.dequantize(mxfp4)) < 2.0**-126
    yield dequantize_case("dequantize every mxfp4", lambda rng: mxfp4, Close(np.where(small, 2.0**-126, 0)))


def _every_e4m3() -> WeightTensor:
    codes = np.arange(E4M3_MAX_CODE + 1, dtype=np.uint8)[None]
    data = np.resize(_EVERY_NIBBLE, (1, 16 * -(-codes.size // 2)))
    data[:, 8 * codes.size :] = 0
    return WeightTensor("w", "nvfp4", (1, 16 * codes.size), data, codes, group=16, tensor_scale=0.75)


def _every_e8m0() -> WeightTensor:
    codes = np.arange(E8M0_MAX_CODE + 1, dtype=np.uint8)[None]
    data = np.resize(_EVERY_NIBBLE, (1, 16 * codes.size))
    return WeightTensor("w", "mxfp4", (1, 32 * codes.size), data, codes, group=32)
