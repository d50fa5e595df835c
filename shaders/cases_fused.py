"""Cases of linear_fused.wgsl: norm, quantize, glu or a merge together with the ternary product that follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from . import reference
from .case_kit import F32, Case, generator, make_case, piece_symbols, random_weight, weight_inputs
from .cases_linear import integer_product, with_terms
from .cases_rows import DIVISION, EXP_BASE, EXP_SLOPE, integer_output, normed, row_case
from .cases_split import CHUNK, merge
from .checks import Close, U
from .contract import quotient_up
from .reference import Quantized
from .weights import WeightTensor

_FUSED = {"norm": "norm_linear", "quantize": "quantize_linear", "glu": "glu_linear"}


def fused_cases() -> Iterator[Case]:
    """Each operation before the product, columns around blocks and rounds of threads, scales, bias, sum."""
    for kind in ("a8", "a16"):
        for rows, columns in ((1, 4), (5, 64), (19, 68), (33, 576), (5, 1536), (4, 2560)):
            yield fused_case(f"norm_linear {kind} {rows}x{columns}", "norm", kind, rows, columns)
        yield fused_case(f"quantize_linear {kind}", "quantize", kind, 18, 576, accumulate=True)
        for act in ("silu", "relu2", "gelu_tanh"):
            yield fused_case(f"glu_linear {act} {kind}", "glu", kind, 9, 132, act=act)
        yield fused_case(f"glu_linear relu2 norm {kind}", "glu", kind, 9, 576, act="relu2", gain=True)
        yield fused_case(f"glu_linear {kind} accumulate", "glu", kind, 9, 132, act="silu", accumulate=True)
        yield fused_case(f"norm_linear {kind} group", "norm", kind, 7, 320, group=64)
        yield fused_case(f"norm_linear {kind} huge", "norm", kind, 9, 200, magnitude=1e15)
        yield fused_case(f"quantize_linear {kind} below the floor", "quantize", kind, 9, 200, magnitude=1e-8)
    yield fused_case("glu_linear relu2 norm 6912", "glu", "a8", 5, 6912, act="relu2", gain=True, accumulate=True)
    yield fused_case("norm_linear parts", "norm", "a8", 9, 576, parts=True)
    yield fused_case("norm_linear piece", "norm", "a8", 5, 132, first_row=64, all_rows=80, bias=True)
    yield fused_case("quantize_linear bias accumulate", "quantize", "a8", 5, 132, bias=True, accumulate=True)
    yield fused_case("quantize_linear nan", "quantize", "a8", 5, 132, broken=np.nan)
    yield fused_case("norm_linear group 128", "norm", "a16", 7, 320, group=128, accumulate=True)
    yield fused_case("norm_linear large eps", "norm", "a8", 7, 68, eps=0.25)
    yield fused_case("quantize_linear small", "quantize", "a16", 3, 36)
    yield fused_case("glu_linear small", "glu", "a8", 3, 36, act="silu")
    several: dict[str, dict[str, Any]] = {"norm": {}, "quantize": {}, "glu": {"act": "relu2", "gain": True}}
    for first, options in several.items():
        title = f"{first}_linear small"
        yield fused_case(f"{title} bias", first, "a8", 3, 36, bias=True, **options)
        yield fused_case(f"{title} group", first, "a16", 3, 36, group=64, accumulate=True, **options)
        for workgroup, rows in _TUNED:
            tuned = {"WORKGROUP": workgroup, "ROWS": rows}
            yield fused_case(
                f"{first}_linear {workgroup} threads {rows} rows", first, "a8", 70, 580, tuned=tuned, **options
            )


#: Threads and rows other than the first candidates, each in one case.
_TUNED = ((64, 16), (128, 8), (64, 24), (256, 32), (64, 64), (256, 48))


def merge_cases() -> Iterator[Case]:
    """The merge of attention before the product: one to four parts, with and without a norm."""
    for kind in ("a8", "a16"):
        for position in (0, 63, 64, 150, 255):
            yield merge_case(f"merge_linear {kind} at {position}", kind, 3, 64, position)
        yield merge_case(f"merge_linear norm {kind}", kind, 2, 128, 200, gain=True)
        yield merge_case(f"merge_linear {kind} empty parts", kind, 3, 64, 200, empty=2)
    yield merge_case("merge_linear small bias", "a8", 2, 16, 126, bias=True)
    yield merge_case("merge_linear small group", "a16", 2, 16, 3, gain=True, group=64, accumulate=False)
    for workgroup, rows in _TUNED:
        tuned = {"WORKGROUP": workgroup, "ROWS": rows}
        yield merge_case(f"merge_linear {workgroup} threads {rows} rows", "a8", 3, 64, 200, gain=True, tuned=tuned)


def merge_case(
    name: str,
    kind: str,
    heads: int,
    width: int,
    position: int,
    *,
    gain: bool = False,
    group: int = 0,
    bias: bool = False,
    accumulate: bool = True,
    tuned: Mapping[str, int] | None = None,
    empty: int = 0,
) -> Case:
    """Parts that do not cancel, so that the relative error of what is quantized stays small.

    empty: so many chunks, the first ones, whose keys a window hides.
    """
    rng = generator(name)
    columns, rows, capacity = heads * width, 21, position + 1
    parts = rng.uniform(0.5, 1.5, (1, heads, quotient_up(capacity, CHUNK), width // 4 + 1, 4)).astype(F32)
    parts[:, :, :, :-1] *= rng.choice([-1.0, 1.0], (1, heads, 1, width // 4, 4)).astype(F32)
    parts[:, :, :empty] = 0
    parts[:, :, :empty, -1, 0] = -3e38
    used = position // CHUNK + 1
    parts[:, :, used:] = np.nan
    value = merge(parts[0, :, :used]).reshape(1, -1)
    # exp() of differences below one, four fused additions in both sums, and the quotient.
    error = np.full(value.shape, 2 * (EXP_BASE + EXP_SLOPE + 6 * U) + DIVISION)
    gains = (rng.normal(size=columns) + 1).astype(F32) if gain else None
    result, result_error = normed(value, error, gains, 1e-5)
    expected, checks = integer_output(result, result_error, error, kind)
    weight = random_weight(rng, "ternary", rows, columns, group=group)
    product, bound = _product(expected["q_scale"], checks, kind, weight)
    more, y, bounds = with_terms(rng, product, bound, rows, 0, bias=bias, accumulate=accumulate)
    inputs = {"x": parts, **weight_inputs(weight), **more} | ({"gain": gains} if gains is not None else {})
    op: dict[str, Any] = {"op": "merge_linear", "via": "a", "w": "w", "out": "y", "accumulate": accumulate}
    op |= {"bias": "bias"} if bias else {}
    op |= {"heads": heads, "kv_heads": heads, "head_dim": width} | ({"gain": "gain", "eps": 1e-5} if gain else {})
    values = {"a": {"dtype": kind, "shape": ["T", columns]}, "y": {"dtype": "f32", "shape": ["T", rows]}}
    return make_case(
        name,
        op,
        values,
        inputs,
        {"y": y},
        {"y": Close(bounds)},
        symbols=piece_symbols(weight) | dict(tuned or {}),
        step=(position, 1, 1, 0),
        capacity=capacity,
    )


def fused_case(
    name: str,
    first: str,
    kind: str,
    rows: int,
    columns: int,
    *,
    group: int = 0,
    parts: bool = False,
    bias: bool = False,
    accumulate: bool = False,
    first_row: int = 0,
    all_rows: int = 0,
    tuned: Mapping[str, int] | None = None,
    **options: Any,
) -> Case:
    """One case; ``options`` are those of ``row_case``, which makes the input and knows the integers."""
    rng = generator(name)
    all_rows = all_rows or rows
    before = row_case(name, first, kind, 1, columns, **options)
    weight = random_weight(rng, "ternary", rows, columns, group=group, parts=parts)
    product, bound = _product(before.expected["q_scale"], before.checks, kind, weight)
    more, expected, bounds = with_terms(rng, product, bound, all_rows, first_row, bias=bias, accumulate=accumulate)
    inputs = {**before.inputs, **weight_inputs(weight), **more}
    op = {"op": _FUSED[first], "x": "x", "via": "a", "w": "w", "out": "y", "accumulate": accumulate}
    op |= {"bias": "bias"} if bias else {}
    op |= {"gain": "gain"} if "gain" in before.inputs else {}
    op |= {"eps": options.get("eps", 1e-5)} if first != "quantize" else {}
    op |= {"act": options["act"]} if first == "glu" else {}
    values = {
        "x": {"dtype": "f32", "shape": ["T", before.inputs["x"][0].size]},
        "a": {"dtype": kind, "shape": ["T", columns]},
        "y": {"dtype": "f32", "shape": ["T", all_rows]},
    }
    return make_case(
        name,
        op,
        values,
        inputs,
        {"y": expected},
        {"y": Close(bounds)},
        symbols=piece_symbols(weight, first_row, all_rows) | dict(tuned or {}),
        step=(4, 1, 1, 0),
    )


def _product(
    token_scale: np.ndarray, checks: Mapping[str, Any], kind: str, weight: WeightTensor
) -> tuple[np.ndarray, np.ndarray]:
    """(product in f64, bound of each element).

    checks: of the integers ``q`` and their ``q_scale``. The product of the integers is exact. What may differ: an
    integer whose value is near a tie, by one; the scale of a token, by what the norm allows it; and two products, or a
    chain of them by group, as in ``integer_product``.
    """
    q, scale = checks["q"], checks["q_scale"]
    middle = np.clip((q.low.astype(np.int64) + q.high) // 2, -32768, 32767).astype(np.int32)
    product, chain, _ = integer_product(Quantized(middle, token_scale, kind), weight)
    dense = np.abs(reference.dequantize(weight)).astype(np.float64)
    ties = np.abs(token_scale[:, None].astype(np.float64)) * ((q.high - q.low) @ dense.T)
    sound = np.isfinite(token_scale)
    relative = np.where(sound, scale.bound / np.where(sound, np.abs(token_scale), 1), 0)
    rounded = chain if weight.group else 4 * U * np.abs(product)
    return product, np.nan_to_num(ties + relative[:, None] * np.abs(product) + rounded)
