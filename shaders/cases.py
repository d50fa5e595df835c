"""The one list of kernel cases, for wgpu-py, for Chromium and for the engines' check at load."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from .case_kit import Case
from .cases_attention import attention_cases, rope_append_cases
from .cases_fused import fused_cases, merge_cases
from .cases_linear import (
    dequantize_cases,
    embed_cases,
    expand_cases,
    linear_float_cases,
    linear_ternary_cases,
    linear_ternary_tiled_cases,
    position_cases,
)
from .cases_low_bits import low_bit_cases
from .cases_rows import activate_cases, glu_cases, norm_cases, quantize_cases
from .cases_sampling import accept_cases, argmax_cases, sample_cases
from .cases_split import attention_merge_cases, rope_attention_cases
from .cases_subgroups import subgroup_cases
from .cases_utility import read_bandwidth_cases
from .cases_wide import wide_cases

_GROUPS = (
    expand_cases,
    dequantize_cases,
    embed_cases,
    position_cases,
    norm_cases,
    quantize_cases,
    glu_cases,
    activate_cases,
    wide_cases,
    linear_ternary_cases,
    linear_ternary_tiled_cases,
    linear_float_cases,
    low_bit_cases,
    fused_cases,
    merge_cases,
    subgroup_cases,
    rope_append_cases,
    attention_cases,
    rope_attention_cases,
    attention_merge_cases,
    argmax_cases,
    sample_cases,
    accept_cases,
    read_bandwidth_cases,
)


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case. Names are unique; the numbers are the same at each call and in each process."""
    return tuple(_generate())


def _generate() -> Iterator[Case]:
    for group in _GROUPS:
        yield from group()
