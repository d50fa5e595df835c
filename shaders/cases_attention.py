"""Cases of rope_append and attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from . import reference
from .case_kit import F32, SPARE_ROWS, Case, generator, make_case
from .cases_rows import DIVISION, EXP_BASE, EXP_SLOPE, normed
from .checks import AsFloats, Between, Check, Close, Exact, Halves, Rows, U, rounding_interval

KV_KINDS = ("f32", "f16", "q8")
#: Vectors of an operation that norms its heads.
GAINS = {"q_gain": "q gain", "k_gain": "k gain"}
#: f32 and f16 NaN, in rows that must not be looked at.
NAN_WORD = np.uint32(0x7FC07FC0)


def rope_append_cases() -> Iterator[Case]:
    """Every cache kind; head sizes around a workgroup's 64 threads; a position that is not zero; a zero head."""
    for kv in KV_KINDS:
        for heads, kv_heads, width, tokens, position in (
            (3, 1, 4, 1, 0),
            (9, 3, 64, 3, 5),
            (2, 2, 80, 2, 1),
            (4, 1, 128, 1, 7),
            (2, 1, 256, 2, 3),
        ):
            yield rope_case(
                f"rope_append {kv} {heads}/{kv_heads}x{width}", kv, heads, kv_heads, width, tokens, position
            )
        yield rope_case(f"rope_append {kv} dyadic", kv, 3, 1, 8, 2, 1, dyadic=True)
        yield rope_case(f"rope_append {kv} gains 3/1x4", kv, 3, 1, 4, 1, 3, magnitude=60.0, eps=900.0)
        for heads, kv_heads, width, tokens in ((4, 2, 80, 2), (2, 1, 256, 1)):
            title = f"rope_append {kv} gains {heads}/{kv_heads}x{width}"
            yield rope_case(title, kv, heads, kv_heads, width, tokens, 3, eps=1e-6)
    yield rope_case("rope_append f16 large", "f16", 1, 1, 64, 1, 0, magnitude=1e5)
    yield rope_case("rope_append q8 zero", "q8", 2, 2, 64, 2, 1, magnitude=0.0)
    yield rope_case("rope_append q8 gains zero", "q8", 2, 2, 64, 2, 1, magnitude=0.0, eps=1e-6)


def rope_case(
    name: str,
    kv: str,
    heads: int,
    kv_heads: int,
    width: int,
    tokens: int,
    position: int,
    magnitude: float = 1.0,
    dyadic: bool = False,
    eps: float | None = None,
) -> Case:
    """Heads rotated, keys and values appended between rows that must keep their content.

    dyadic: small integers and halves, so that every number is exact in f16 and every device gives the same bits.
    eps: of the norm of each head, where there is one.
    """
    rng = generator(name)
    capacity = position + tokens + SPARE_ROWS
    x = (rng.normal(size=(tokens, heads + 2 * kv_heads, width)) * magnitude).astype(F32)
    table = reference.rope_table(10000.0 ** (-np.arange(width // 2) / (width // 2)), 1.0, capacity)
    if dyadic:
        x = rng.choice([-8.0, -3.0, -1.0, 2.0, 5.0, 7.0], x.shape).astype(F32)
        table = rng.choice([-1.0, -0.5, 0.25, 0.5, 1.0], table.shape).astype(F32)
    span = slice(position, position + tokens)
    inputs: dict[str, np.ndarray] = {"x": x, "rope": table}
    fields: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": width}
    turned, relative = x[:, : heads + kv_heads].astype(np.float64), 0.0
    if eps is not None:
        turned, relative, inputs["gains"] = head_norms(rng, turned, heads, eps)
        fields |= GAINS | {"eps": eps}
    rotated = reference.rope(turned, table[span].astype(np.float64))
    # Two products and a sum, contracted or not: three roundings of at most the sum of magnitudes.
    error = ((0 if dyadic else 3 * U) + relative) * _rotation_magnitudes(turned, table[span])
    expected: dict[str, np.ndarray] = {"q": rotated[:, :heads].astype(F32)}
    checks: dict[str, Check] = {"q": Close(error[:, :heads])}
    appended = {
        "k": (rotated[:, heads:], error[:, heads:]),
        "v": (x[:, heads + kv_heads :].astype(np.float64), np.zeros((tokens, kv_heads, width))),
    }
    for cache, (values, bound) in appended.items():
        words, scales, word_check, scale_check = cached_words(values, bound, kv)
        old = rng.integers(0, 1 << 32, (capacity, *words.shape[1:]), dtype=np.uint32)
        inputs[f"{cache}_cache"], expected[f"{cache}_cache"] = old, old.copy()
        expected[f"{cache}_cache"][span] = words
        checks[f"{cache}_cache"] = Rows(word_check, position, tokens)
        if kv == "q8":
            old_scales = rng.normal(size=(capacity, kv_heads)).astype(F32)
            inputs[f"{cache}_scale"], expected[f"{cache}_scale"] = old_scales, old_scales.copy()
            expected[f"{cache}_scale"][span] = scales
            checks[f"{cache}_scale"] = Rows(scale_check, position, tokens)
    return make_case(
        name,
        {"op": "rope_append", "x": "x", "out": "q", **fields},
        {"x": {"dtype": "f32", "shape": ["T", x[0].size]}, "q": {"dtype": "f32", "shape": ["T", heads * width]}},
        inputs,
        expected,
        checks,
        step=(position, tokens, 1, 0),
        kv=kv,
        capacity=capacity,
    )


def head_norms(rng: np.random.Generator, x: np.ndarray, heads: int, eps: float) -> tuple[np.ndarray, float, np.ndarray]:
    """(normed in f64, relative error in f32, gains f32 ``[2, D]``) of ``[T, query and key heads, D]``.

    The kernels add at most 16 squares a thread, and no more partial sums than ``normed`` counts.
    """
    gains = (rng.normal(size=(2, x.shape[-1])) + 1).astype(F32)
    of_heads = np.repeat(gains, [heads, x.shape[1] - heads], axis=0)
    values, errors = normed(x, np.zeros_like(x), of_heads, eps)
    return values, float(errors.max()), gains


def _rotation_magnitudes(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """|a c| + |b s| for each sum of two products that the rotation makes."""
    low, high = np.split(np.abs(x.astype(np.float64)), 2, axis=-1)
    cos, sin = np.moveaxis(np.abs(table.astype(np.float64))[:, None], -1, 0)
    return np.concatenate([low * cos + high * sin, high * cos + low * sin], axis=-1)


def cached_words(values: np.ndarray, bound: np.ndarray, kv: str) -> tuple[np.ndarray, np.ndarray, Check, Check]:
    """(words, scales, check of the words, check of the scales) of ``[T, heads, D]`` in a cache."""
    scales = np.zeros(values.shape[:2], dtype=F32)
    if kv == "f32":
        words = values.astype(F32).view("<u4")
        return words, scales, AsFloats(Close(bound)) if bound.any() else Exact(), Exact()
    if kv == "f16":
        clipped = np.clip(values, -65504, 65504)
        halves = clipped.astype(np.float16)
        exact = not bound.any() and (halves == clipped).all()
        return halves.view("<u4"), scales, Exact() if exact else Halves(clipped, bound), Exact()
    scales, q = reference.quantize_cache(values.astype(F32))
    largest = np.abs(values).max(axis=-1, keepdims=True)
    safe = np.where(largest > 0, largest, 1)
    exact_q = values / safe * 127
    # The element and the largest may each be off by the bound; a quotient and a product follow.
    slack = (bound + bound.max(axis=-1, keepdims=True)) / safe * 127 + np.abs(exact_q) * (DIVISION + 2 * U)
    low, high = rounding_interval(exact_q, slack, -127, 127)
    words = q.astype(np.int8).view("<u4")
    scale_bound = scales * DIVISION + bound.max(axis=-1) / 127
    return words, scales, Between(low, high, "q8"), Close(scale_bound)


def attention_cases() -> Iterator[Case]:
    """Every cache kind; keys around a run of 64; head sizes; several query heads a kv head; tokens in the middle;
    windows of one key, over the end of a run, and wider than what there is."""
    # Each shape is compiled anew, which takes seconds on a CPU: f16 has them all, the other kinds some.
    some = [(2, 1, 4, 1, 0), (2, 1, 4, 1, 66), (2, 1, 8, 1, 66), (9, 3, 64, 1, 63), (2, 1, 16, 1, 3)]
    rest = [(3, 3, 64, 1, 62), (4, 2, 80, 1, 64), (4, 1, 128, 3, 126), (2, 1, 256, 2, 190), (5, 1, 32, 2, 127)]
    for kv, shapes in {"f16": some + rest, "f32": some + rest[2:4], "q8": some + rest[1:2]}.items():
        for heads, kv_heads, width, tokens, position in shapes:
            title = f"attention {kv} {heads}/{kv_heads}x{width} at {position}"
            yield attention_case(title, kv, heads, kv_heads, width, tokens, position)
    for kv in KV_KINDS:
        yield attention_case(f"attention {kv} sharp", kv, 2, 1, 64, 2, 99, magnitude=12.0)
        yield attention_case(f"attention {kv} software", kv, 9, 3, 64, 2, 63, software=True)
        yield attention_case(f"attention {kv} 6/1x16 at 300", kv, 6, 1, 16, 2, 300)
    for kv, heads, kv_heads, width, tokens, position, window in (
        ("f32", 3, 1, 16, 3, 130, 1), ("f16", 4, 2, 64, 2, 200, 140), ("q8", 2, 1, 16, 2, 5, 100),
        ("f32", 2, 1, 8, 2, 66, 65), ("f16", 3, 1, 12, 3, 130, 1), ("q8", 2, 1, 20, 2, 5, 100),
    ):  # fmt: skip
        title = f"attention {kv} {heads}/{kv_heads}x{width} at {position} window {window}"
        yield attention_case(title, kv, heads, kv_heads, width, tokens, position, window=window)
    yield attention_case("attention q8 software window", "q8", 4, 2, 32, 2, 90, software=True, window=20)
    yield attention_case("attention f16 prompt", "f16", 3, 1, 64, 17, 0)


def attention_case(
    name: str,
    kv: str,
    heads: int,
    kv_heads: int,
    width: int,
    tokens: int,
    position: int,
    magnitude: float = 1.0,
    software: bool = False,
    window: int = 0,
) -> Case:
    """Queries against a filled cache; rows that no token sees hold NaN and must not be looked at."""
    rng = generator(name)
    keys = position + tokens
    q = (rng.normal(size=(tokens, heads, width)) * magnitude).astype(F32)
    inputs: dict[str, np.ndarray] = {"q": q}
    caches: dict[str, np.ndarray] = {}
    for cache in ("k", "v"):
        values = rng.normal(size=(keys, kv_heads, width)).astype(F32)
        words, scales, _, _ = cached_words(values.astype(np.float64), np.zeros_like(values), kv)
        hidden = first_key(position, window)
        words[:hidden], scales[:hidden] = NAN_WORD, np.nan
        inputs[f"{cache}_cache"] = np.concatenate([words, np.full((SPARE_ROWS, *words.shape[1:]), NAN_WORD)])
        if kv == "q8":
            inputs[f"{cache}_scale"] = np.concatenate([scales, np.full((SPARE_ROWS, kv_heads), np.nan, dtype=F32)])
        caches[cache] = reference.cache_round_trip(values, kv).astype(np.float64)
    scale = width**-0.5
    expected, bound = _attention(q.astype(np.float64), caches["k"], caches["v"], position, float(F32(scale)), window)
    return make_case(
        name,
        {
            "op": "attention",
            "q": "q",
            "out": "y",
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": width,
            "scale": scale,
            "window": window,
        },
        {"q": {"dtype": "f32", "shape": ["T", heads * width]}, "y": {"dtype": "f32", "shape": ["T", heads * width]}},
        inputs,
        {"y": expected.astype(F32)},
        {"y": Close(bound)},
        symbols={"software": int(software)},
        step=(position, tokens, 1, 0),
        kv=kv,
        capacity=keys + SPARE_ROWS,
    )


def first_key(position: int, window: int) -> int:
    """The first key that a token at a position sees."""
    return max(0, position - window + 1) if window else 0


def _attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, scale: float, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """(attention in f64, bound of each element).

    A weight p = exp(s - m) errs, relative to itself, by: what s errs by (D products, their sums, two scales:
    (D + 4) U sum |q k| scale), the roundings of s - m, exp() itself, and one more exp() of the same kind for each
    later run that rescales it; an output, a mean of v weighted by p, by the mean of |p error| |v - y|; the sums
    over n keys add n U of the mean of p |v|, in two chains, and the last quotient a division.
    """
    tokens, heads, width = q.shape
    repeat = heads // k.shape[1]
    result, bound = np.zeros_like(q), np.zeros_like(q)
    for t in range(tokens):
        for head in range(heads):
            seen = slice(first_key(position + t, window), position + t + 1)
            keys, values = k[seen, head // repeat], v[seen, head // repeat]
            scores = keys @ q[t, head] * scale
            below = scores - scores.max()
            weights = np.exp(below) / np.exp(below).sum()
            score_error = (width + 4) * U * (np.abs(keys) @ np.abs(q[t, head])) * abs(scale)
            runs = -(-len(keys) // 64)
            spread = np.abs(below).max()
            error = 2 * score_error.max() + U * np.abs(scores) + (1 + runs) * (EXP_BASE + EXP_SLOPE * spread)
            y = weights @ values
            result[t, head] = y
            sums = 2 * (len(keys) + 4) * U * (weights @ np.abs(values)) + DIVISION * np.abs(y)
            bound[t, head] = (weights * error) @ np.abs(values - y) + sums
    return result, bound
