"""Cases of expand, dequantize, embed and the linear kernels that take activations as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from . import reference
from .case_kit import (
    F32,
    Case,
    generator,
    integer_inputs,
    make_case,
    piece_symbols,
    random_integers,
    random_weight,
    weight_inputs,
)
from .checks import Check, Close, Exact, U
from .resident import disk_words
from .weights import WeightTensor

ENCODINGS = ("ternary", "q8", "q4", "f16", "f32")


def expand_cases() -> Iterator[Case]:
    """Sizes around the blocks of 5, 16, 20 and 64 columns, and every byte that encodes five trits."""
    for rows, columns in (
        (1, 1), (3, 4), (2, 5), (2, 16), (3, 19), (2, 21), (2, 63), (2, 64), (2, 65), (5, 576), (1, 1215), (2, 1536),
        (2, 2560), (1, 3200), (1, 6912), (1, 8640),
    ):  # fmt: skip
        name = f"expand {rows}x{columns}"
        weight = random_weight(generator(name), "ternary", rows, columns)
        if columns == 1215:
            weight.data[0, :243] = -(-np.arange(243) * 256 // 243)
        yield make_case(
            name,
            {"op": "expand"},
            {},
            {"packed": disk_words(weight)},
            {"codes": reference.expand(weight)},
            symbols=piece_symbols(weight),
        )


def dequantize_cases() -> Iterator[Case]:
    """Every encoding at odd sizes, every code word, every finite half."""
    for encoding in ENCODINGS:
        for columns in (1, 61, 576):
            weight = partial(random_weight, encoding=encoding, rows=3, columns=columns)
            yield dequantize_case(f"dequantize {encoding} 3x{columns}", weight)
    yield dequantize_case("dequantize ternary parts", lambda rng: random_weight(rng, "ternary", 6, 65, parts=True))
    yield dequantize_case("dequantize ternary group 64", lambda rng: random_weight(rng, "ternary", 3, 130, group=64))
    yield dequantize_case("dequantize ternary group 128", lambda rng: random_weight(rng, "ternary", 3, 577, group=128))
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = every[np.isfinite(every)].reshape(62, 1024)
    yield dequantize_case("dequantize every half", lambda rng: WeightTensor("w", "f16", halves.shape, halves))
    codes = np.tile(np.arange(-128, 128).astype(np.int8), (2, 1))
    scales = np.full((2, 8), 0.75, dtype=np.float16)
    every_q8 = WeightTensor("w", "q8", codes.shape, codes, scales, group=32)
    yield dequantize_case("dequantize every q8", lambda rng: every_q8)


def dequantize_case(
    name: str, weight_of: Callable[[np.random.Generator], WeightTensor], check: Check | None = None
) -> Case:
    """A whole matrix to floats, the same bits unless ``check`` says more."""
    weight = weight_of(generator(name))
    symbols = piece_symbols(weight) | {"T": 1, "multiplier": 1.0}
    # One product of a small integer and a scale: every device rounds it alike. A device may flush subnormal f32.
    return make_case(
        name,
        {"op": "dequantize"},
        {},
        weight_inputs(weight),
        {"y": reference.dequantize(weight)},
        {"y": check} if check else None,
        symbols=symbols,
    )


def embed_cases() -> Iterator[Case]:
    """Gathering from a whole tensor and from a piece of one; rows of other pieces stay as they are."""
    for encoding in ENCODINGS:
        yield embed_case(f"embed {encoding}", encoding, 70, 61, [69, 0, 3, 3, 33])
    yield embed_case("embed q8 576", "q8", 64, 576, [63])
    yield embed_case("embed times 12", "q8", 9, 64, [8, 0], multiplier=12.0)
    yield embed_case("embed small piece", "q4", 16, 36, [63, 64, 79, 80], first_row=64)
    yield embed_case("embed piece", "q4", 64, 36, [0, 63, 64, 65, 127, 128, 0xFFFFFFFF], first_row=64)


def embed_case(
    name: str, encoding: str, rows: int, columns: int, ids: list[int], multiplier: float = 1.0, first_row: int = 0
) -> Case:
    """Rows of a matrix that begins at ``first_row`` of a taller one; ids of other rows leave what is there."""
    rng = generator(name)
    weight = random_weight(rng, encoding, rows, columns)
    old = rng.normal(size=(len(ids), columns)).astype(F32)
    expected = old.copy()
    for token, row in enumerate(ids):
        if first_row <= row < first_row + rows:
            expected[token] = reference.embed(weight, np.array([row - first_row]), multiplier)[0]
    inputs = {**weight_inputs(weight), "ids": np.array(ids, dtype=np.uint32), "y": old}
    return make_case(
        name,
        {"op": "embed", "multiplier": multiplier, "out": "y"},
        {"y": {"dtype": "f32", "shape": ["T", columns]}},
        inputs,
        {"y": expected},
        symbols=piece_symbols(weight, first_row, max(first_row + rows, max(ids[:1]) + 1)),
        step=(0, len(ids), 1, 0),
    )


def position_cases() -> Iterator[Case]:
    """From the beginning and from further on; pieces of a table; columns around the padding and the threads."""
    for columns in (1, 63, 64, 65, 301):
        yield position_case(f"position {columns}", 9, columns, 3, 5)
    yield position_case("position first", 4, 20, 0, 4)
    yield position_case("position one", 130, 36, 129, 1)
    yield position_case("position piece", 64, 36, 60, 9, first_row=64)
    yield position_case("position small piece", 8, 20, 62, 4, first_row=64)
    yield position_case("position before a piece", 64, 36, 62, 1, first_row=64)
    yield position_case("position behind a piece", 64, 36, 126, 5, first_row=64)


def position_case(name: str, rows: int, columns: int, position: int, tokens: int, first_row: int = 0) -> Case:
    """Rows of a table that begins at ``first_row`` of a taller one; positions in other pieces leave what is there."""
    rng = generator(name)
    weight = random_weight(rng, "f32", rows, columns)
    old = rng.normal(size=(tokens, columns)).astype(F32)
    expected = old.copy()
    for token, row in enumerate(range(position - first_row, position - first_row + tokens)):
        if 0 <= row < rows:
            expected[token] += reference.position(weight, row, 1)[0]
    return make_case(
        name,
        {"op": "position", "accumulate": True, "out": "y"},
        {"y": {"dtype": "f32", "shape": ["T", columns]}},
        {**weight_inputs(weight), "y": old},
        {"y": expected},
        symbols=piece_symbols(weight, first_row, first_row + rows),
        step=(position, tokens, 1, 0),
    )


def linear_case(
    name: str,
    activation: str,
    encoding: str,
    rows: int,
    columns: int,
    tokens: int,
    *,
    group: int = 0,
    parts: bool = False,
    powers: bool = False,
    bias: bool = False,
    accumulate: bool = False,
    first_row: int = 0,
    all_rows: int = 0,
    last_rows: bool = False,
    few: bool = False,
    software: bool = False,
    tuned: Mapping[str, int] | None = None,
) -> Case:
    """y = x W^T (+ bias) (+ old y). ``first_row`` and ``all_rows`` make the matrix a piece of a taller one.

    few: the tokens are drafts to be verified. software: what a CPU renderer runs. tuned: constants, not defaults.
    """
    rng = generator(name)
    all_rows = all_rows or rows
    weight = random_weight(rng, encoding, rows, columns, group=group, parts=parts, powers=powers)
    inputs = weight_inputs(weight)
    if activation == "f32":
        x = rng.normal(size=(tokens, columns)).astype(F32)
        inputs["x"] = x
        product, bound, nmse = float_product(x, weight)
    else:
        limit = 2000 if powers and activation == "a16" else 0
        integers = random_integers(rng, activation, tokens, columns, limit=limit)
        inputs |= integer_inputs(integers)
        product, bound, nmse = integer_product(integers, weight)
    more, expected, bounds = with_terms(rng, product, bound, all_rows, first_row, bias=bias, accumulate=accumulate)
    exact = activation != "f32" and (not group or powers) and not bias and not accumulate
    if exact:
        expected[:, first_row : first_row + rows] = reference.linear(integers, weight)
    check = Exact() if exact else Close(bounds, nmse)
    lead = "R" if last_rows else "T"
    op = {"op": "linear", "x": "x", "w": "w", "out": "y", "accumulate": accumulate, "bias": "bias" if bias else None}
    values = {"x": {"dtype": activation, "shape": [lead, columns]}, "y": {"dtype": "f32", "shape": [lead, all_rows]}}
    return make_case(
        name,
        op,
        values,
        {**inputs, **more},
        {"y": expected},
        {"y": check},
        symbols=piece_symbols(weight, first_row, all_rows)
        | {"few": int(few), "software": int(software)}
        | dict(tuned or {}),
        step=(3, 5 if last_rows else tokens, tokens, 0),
    )


def with_terms(
    rng: np.random.Generator,
    product: np.ndarray,
    bound: np.ndarray,
    all_rows: int,
    first_row: int,
    *,
    bias: bool,
    accumulate: bool,
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """(inputs ``y`` and ``bias``, expected y f32 ``[T, OUT_N]``, its bounds) of a product f64 ``[T, N]`` with a bound.

    The product may be a piece of a taller one: columns of other pieces must keep what they have, so the old values are
    always given.
    """
    old = rng.normal(size=(len(product), all_rows)).astype(F32)
    inside = slice(first_row, first_row + product.shape[1])
    inputs, terms = {"y": old}, [product]
    if bias:
        inputs["bias"] = rng.normal(size=all_rows).astype(F32)
        terms.append(inputs["bias"][None, inside].astype(np.float64))
    if accumulate:
        terms.append(old[:, inside].astype(np.float64))
    expected, bounds = old.copy(), np.zeros(old.shape)
    expected[:, inside] = sum(terms)
    # Each addition rounds once; a compiler may contract it with the product before, or not.
    magnitude = sum(np.abs(np.nan_to_num(term)) for term in terms)
    bounds[:, inside] = bound + 2 * len(terms) * U * magnitude
    return inputs, expected, bounds


def float_product(x: np.ndarray, weight: WeightTensor) -> tuple[np.ndarray, np.ndarray, float]:
    """(product in f64, bound of each element, bound of the normalised mean squared error).

    A chain of n roundings of sums that never exceed A = sum |w x| errs by n U A at most, and as a random walk by
    sqrt(n) U A. The longest chain: products and the four terms of a dot (5), the scale (1), then one addition a
    quad in the tiled kernel; for one token, and for drafts, a thread adds every 16th vec4 of words, which has at most
    sixteen quads, and 16 partial sums of threads follow.
    """
    dense = reference.dequantize(weight).astype(np.float64)
    product = x.astype(np.float64) @ dense.T
    magnitude = np.abs(x).astype(np.float64) @ np.abs(dense).T
    quads = -(-weight.columns // 4)
    chain = 8 + (quads if len(x) > 1 else min(quads, -(-quads // 16) + 16) + 20)
    return product, chain * U * magnitude, _walk(chain, magnitude, product)


def integer_product(x: reference.Quantized, weight: WeightTensor) -> tuple[np.ndarray, np.ndarray, float]:
    """As ``float_product``; the sums within a block are exact, so the chain is one addition a block."""
    trits = reference.unpack_trits(weight.data, weight.columns).astype(np.int64)
    scales = weight.row_scales().astype(np.float64)
    product = np.zeros((len(x.q), weight.rows))
    magnitude = product.copy()
    for first in range(0, weight.columns, 64):
        columns = slice(first, first + 64)
        sums = x.q[:, columns].astype(np.int64) @ trits[:, columns].T
        scaled = sums * (scales[:, first // weight.group] if weight.group else scales)
        product += scaled
        magnitude += np.abs(scaled)
    product, magnitude = product * x.scale[:, None], magnitude * x.scale[:, None]
    chain = -(-weight.columns // 64) + 24
    return product, chain * U * magnitude, _walk(chain, magnitude, product)


def _walk(chain: int, magnitude: np.ndarray, product: np.ndarray) -> float:
    return float(chain * U**2 * np.square(magnitude).mean() / max(np.square(product).mean(), 1e-300))


def linear_ternary_cases() -> Iterator[Case]:
    """One token, and up to eight drafts: rows around a workgroup's, columns around blocks and lanes, scales, sums."""
    for kind in ("a8", "a16"):
        for rows, columns in (
            (1, 1), (3, 20), (4, 63), (5, 64), (7, 65), (17, 130), (33, 576), (6, 1536), (5, 3200), (3, 16449),
        ):  # fmt: skip
            yield linear_case(f"linear_ternary {kind} {rows}x{columns}", kind, "ternary", rows, columns, 1)
        for rows, columns in ((5, 2560), (4, 6912), (2, 8640)):
            yield linear_case(
                f"linear_ternary {kind} parts {rows}x{columns}", kind, "ternary", rows, columns, 1, parts=True
            )
        for group, columns in ((64, 130), (128, 576), (128, 2560), (256, 3200)):
            title = f"linear_ternary {kind} group {group}"
            yield linear_case(f"{title} {columns} powers", kind, "ternary", 6, columns, 1, group=group, powers=True)
            yield linear_case(f"{title} {columns}", kind, "ternary", 7, columns, 1, group=group)
        for tokens in (2, 3, 4, 5, 8):
            title = f"linear_ternary {kind} few {tokens}"
            yield linear_case(title, kind, "ternary", 19, 576, tokens, few=True)
        yield linear_case(
            f"linear_ternary {kind} few group", kind, "ternary", 7, 320, 3, group=64, powers=True, few=True
        )
    yield linear_case("linear_ternary bias", "a8", "ternary", 9, 200, 1, bias=True)
    yield linear_case("linear_ternary accumulate", "a8", "ternary", 9, 200, 1, accumulate=True)
    yield linear_case(
        "linear_ternary bias accumulate group", "a16", "ternary", 9, 200, 1, bias=True, accumulate=True, group=64
    )
    yield linear_case(
        "linear_ternary few last rows", "a8", "ternary", 9, 200, 3, bias=True, accumulate=True, few=True, last_rows=True
    )
    yield linear_case("linear_ternary piece", "a8", "ternary", 5, 77, 1, first_row=64, all_rows=80, bias=True)
    yield linear_case("linear_ternary last rows", "a8", "ternary", 3, 68, 1, last_rows=True)
    yield linear_case("linear_ternary small few 8", "a16", "ternary", 3, 68, 8, few=True)
    for workgroup, rows in ((64, 4), (128, 8), (16, 4), (16, 24), (64, 64), (256, 32)):
        tuned = {"WORKGROUP": workgroup, "ROWS": rows}
        yield linear_case(f"linear_ternary {workgroup} threads {rows} rows", "a16", "ternary", 70, 2560, 1, tuned=tuned)


def linear_ternary_tiled_cases() -> Iterator[Case]:
    """Several tokens: rows and tokens around a workgroup's 64, blocks around a round's two."""
    for kind in ("a8", "a16"):
        for rows, columns, tokens in (
            (1, 1, 2), (63, 64, 7), (64, 65, 63), (65, 255, 65), (3, 257, 17), (66, 576, 2), (5, 1536, 9),
            (65, 2560, 3), (4, 6912, 2),
        ):  # fmt: skip
            yield linear_case(f"tiled {kind} {rows}x{columns} T{tokens}", kind, "ternary", rows, columns, tokens)
        for group, columns in ((64, 130), (128, 576), (256, 3200)):
            title = f"tiled {kind} group {group}"
            yield linear_case(f"{title} powers", kind, "ternary", 65, columns, 9, group=group, powers=True)
            yield linear_case(title, kind, "ternary", 7, columns, 3, group=group)
        yield linear_case(f"tiled {kind} 3x68 T5", kind, "ternary", 3, 68, 5)
    yield linear_case("tiled parts", "a8", "ternary", 66, 200, 3, parts=True)
    # One pipeline for three switches: a CPU driver takes seconds for each.
    yield linear_case(
        "tiled bias accumulate last rows", "a8", "ternary", 9, 200, 3, bias=True, accumulate=True, last_rows=True
    )
    yield linear_case("tiled piece", "a8", "ternary", 66, 77, 9, first_row=64, all_rows=140)
    yield from _narrow_cases()


def _narrow_cases() -> Iterator[Case]:
    """What CPU renderers run instead: rows around 64, tokens around 8, blocks around four."""
    for kind in ("a8", "a16"):
        for rows, columns, tokens in ((1, 1, 2), (64, 65, 8), (65, 257, 9), (3, 576, 17)):
            title = f"narrow {kind} {rows}x{columns} T{tokens}"
            yield linear_case(title, kind, "ternary", rows, columns, tokens, software=True)
        title = f"narrow {kind} group 64"
        yield linear_case(title, kind, "ternary", 65, 130, 9, group=64, powers=True, software=True)
    yield linear_case(
        "narrow bias accumulate last rows",
        "a8", "ternary", 9, 200, 3, bias=True, accumulate=True, last_rows=True, software=True,
    )  # fmt: skip
    yield linear_case("narrow piece", "a8", "ternary", 66, 77, 9, first_row=64, all_rows=140, software=True)
    tuned = {"WORKGROUP": 128}
    yield linear_case("narrow 128 threads", "a16", "ternary", 130, 320, 9, software=True, tuned=tuned)
    yield linear_case("narrow 3x68 T2", "a16", "ternary", 3, 68, 2, software=True)


def linear_float_cases() -> Iterator[Case]:
    """Every encoding by f32 activations, one token, drafts, many tokens; columns that are no multiple of four too."""
    for encoding in ENCODINGS:
        for rows, columns in ((1, 1), (3, 36), (5, 61), (35, 576), (9, 515)):
            yield linear_case(f"linear_float {encoding} {rows}x{columns}", "f32", encoding, rows, columns, 1)
        for rows, columns, tokens in ((1, 3, 2), (63, 127, 7), (65, 129, 9), (5, 576, 17)):
            yield linear_case(
                f"float tiled {encoding} {rows}x{columns} T{tokens}", "f32", encoding, rows, columns, tokens
            )
    for encoding in ("ternary", "q8", "q4", "f32"):
        yield linear_case(f"linear_float {encoding} few 3", "f32", encoding, 33, 132, 3, few=True)
    for tokens in (2, 4, 5, 8):
        yield linear_case(f"linear_float few {tokens}", "f32", "q8", 37, 580, tokens, few=True)
    yield linear_case("linear_float few last rows", "f32", "q8", 9, 72, 3, bias=True, few=True, last_rows=True)
    for columns in (2560, 6912):
        yield linear_case(f"linear_float q8 {columns}", "f32", "q8", 5, columns, 1)
    for tokens in (1, 3):
        title = f"linear_float T{tokens}"
        yield linear_case(f"{title} group 64", "f32", "ternary", 7, 130, tokens, group=64)
        yield linear_case(f"{title} group 64 wide", "f32", "ternary", 7, 132, tokens, group=64)
        yield linear_case(f"{title} parts", "f32", "ternary", 9, 100, tokens, parts=True)
        yield linear_case(f"{title} bias accumulate", "f32", "q4", 9, 100, tokens, bias=True, accumulate=True)
        yield linear_case(f"{title} f16 accumulate", "f32", "f16", 9, 100, tokens, accumulate=True)
        yield linear_case(f"{title} piece", "f32", "f16", 7, 36, tokens, first_row=64, all_rows=80, bias=True)
        yield linear_case(f"{title} wide piece", "f32", "q8", 7, 36, tokens, first_row=64, all_rows=80, bias=True)
    for workgroup in (16, 32, 128):
        tuned = {"WORKGROUP": workgroup}
        yield linear_case(f"linear_float {workgroup} threads", "f32", "f16", 6, 2561, 1, tuned=tuned)
    for workgroup in (64, 256):
        tuned = {"WORKGROUP": workgroup}
        yield linear_case(f"linear_float wide {workgroup} threads", "f32", "q8", 70, 576, 1, tuned=tuned)
    yield linear_case("linear_float wide last rows", "f32", "q8", 3, 36, 1, last_rows=True)
    for tokens in (2, 5, 8):
        yield linear_case(f"linear_float small few {tokens}", "f32", "q8", 3, 36, tokens, few=True)
    yield linear_case("float tiled last rows", "f32", "q8", 9, 70, 3, last_rows=True)
    yield linear_case("float tiled 128 threads", "f32", "q4", 129, 300, 9, tuned={"WORKGROUP": 128})
