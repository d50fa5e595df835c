"""Cases of rope_attention and attention_merge, which split a long context over workgroups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from . import reference
from .case_kit import F32, SPARE_ROWS, Case, generator, make_case
from .cases_attention import KV_KINDS, cached_words
from .cases_rows import DIVISION, EXP_BASE, EXP_SLOPE
from .checks import Between, Check, Close, Rows, U
from .contract import constant, quotient_up

CHUNK = constant("key_chunk")
#: (cos, sin) that move numbers and change their signs, and round nothing.
_QUADRANTS = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])


def merge(parts: np.ndarray) -> np.ndarray:
    """Parts of a token ``[heads, chunks, D/4 + 1, 4]`` joined in f64: ``[heads, D]``."""
    wide = parts.astype(np.float64)
    largest, sums = wide[:, :, -1, 0], wide[:, :, -1, 1]
    factor = np.exp(largest - largest.max(axis=1, keepdims=True))
    mixed = (wide[:, :, :-1].reshape(*parts.shape[:2], -1) * factor[..., None]).sum(axis=1)
    joined: np.ndarray = mixed / (sums * factor).sum(axis=1)[:, None]
    return joined


def rope_attention_cases() -> Iterator[Case]:
    """Every cache kind; positions around a chunk of 64 keys; drafts across its end; several query heads a kv head."""
    for kv in KV_KINDS:
        for heads, kv_heads, width, tokens, position in (
            (2, 1, 16, 1, 0), (3, 3, 64, 1, 62), (9, 3, 64, 1, 63), (4, 2, 80, 1, 64), (8, 1, 128, 1, 300),
            (9, 3, 64, 4, 62), (4, 1, 256, 8, 120), (5, 1, 32, 3, 5), (2, 1, 16, 2, 3),
        ):  # fmt: skip
            title = f"rope_attention {kv} {heads}/{kv_heads}x{width} T{tokens} at {position}"
            yield rope_attention_case(title, kv, heads, kv_heads, width, tokens, position)


def rope_attention_case(name: str, kv: str, heads: int, kv_heads: int, width: int, tokens: int, position: int) -> Case:
    """New rows are small dyadic numbers, so that every device caches the same bits; older rows are random.

    Rows beyond the last token hold NaN and must not be looked at.
    """
    for attempt in range(100):
        rng = generator(f"{name} {attempt}")
        capacity = position + tokens + SPARE_ROWS
        x = rng.choice([-1.0, -0.75, 0.25, 0.625, 1.0], (tokens, heads + 2 * kv_heads, width)).astype(F32)
        table = rng.choice(_QUADRANTS, (capacity, width // 2)).astype(F32)
        span = slice(position, position + tokens)
        rotated = reference.rope(x[:, : heads + kv_heads].astype(np.float64), table[span].astype(np.float64))
        inputs: dict[str, np.ndarray] = {"x": x, "rope": table}
        expected: dict[str, np.ndarray] = {}
        checks: dict[str, Check] = {}
        seen: dict[str, np.ndarray] = {}
        exact = True
        for cache, new in (("k", rotated[:, heads:]), ("v", x[:, heads + kv_heads :].astype(np.float64))):
            old = rng.normal(size=(position, kv_heads, width)).astype(F32)
            words, scales, _, _ = cached_words(old.astype(np.float64), np.zeros_like(old), kv)
            new_words, new_scales, word_check, scale_check = cached_words(new, np.zeros_like(new), kv)
            exact &= not isinstance(word_check, Between) or word_check.close() == 0
            rest = np.full((capacity - position, *words.shape[1:]), 0x7FC07FC0, dtype=np.uint32)
            inputs[f"{cache}_cache"] = np.concatenate([words, rest])
            expected[f"{cache}_cache"] = inputs[f"{cache}_cache"].copy()
            expected[f"{cache}_cache"][span] = new_words
            checks[f"{cache}_cache"] = Rows(word_check, position, tokens)
            if kv == "q8":
                beyond = np.full((capacity - position, kv_heads), np.nan, F32)
                inputs[f"{cache}_scale"] = np.concatenate([scales, beyond])
                expected[f"{cache}_scale"] = inputs[f"{cache}_scale"].copy()
                expected[f"{cache}_scale"][span] = new_scales
                checks[f"{cache}_scale"] = Rows(scale_check, position, tokens)
            seen[cache] = reference.cache_round_trip(np.concatenate([old, new.astype(F32)]), kv).astype(np.float64)
        if exact:
            break
    else:
        raise ValueError(f"case {name}: every attempt has a number near a tie")
    scale = width**-0.5
    # Chunks beyond a token's last key must keep what they had.
    old_parts = rng.normal(size=(tokens, heads, quotient_up(capacity, CHUNK), width // 4 + 1, 4)).astype(F32)
    parts, bound = old_parts.copy(), np.zeros(old_parts.shape)
    for t in range(tokens):
        for first in range(0, position + t + 1, CHUNK):
            keys = slice(first, min(first + CHUNK, position + t + 1))
            for head in range(heads):
                group = head // (heads // kv_heads)
                place = t, head, first // CHUNK
                parts[place], bound[place] = _part(
                    rotated[t, head], seen["k"][keys, group], seen["v"][keys, group], float(F32(scale))
                )
    op = {"op": "rope_attention", "x": "x", "heads": heads, "kv_heads": kv_heads, "head_dim": width, "scale": scale}
    return make_case(
        name,
        op,
        {"x": {"dtype": "f32", "shape": ["T", x[0].size]}},
        {**inputs, "parts": old_parts},
        {**expected, "parts": parts},
        {**checks, "parts": Close(bound)},
        step=(position, tokens, 1, 0),
        kv=kv,
        capacity=capacity,
    )


def _part(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(part, bound of each element), both ``[D/4 + 1, 4]``, of one query and the keys and values of a chunk.

    A score errs as in ``cases_attention``; a weight by its score, the largest score and exp(); then come the sums.
    """
    scores = k @ q * scale
    error = (len(q) + 4) * U * (np.abs(k) @ np.abs(q)) * abs(scale) + U * np.abs(scores)
    below = scores - scores.max()
    weights = np.exp(below)
    relative = error + error.max() + EXP_BASE + (EXP_SLOPE + U) * np.abs(below)
    chain = (len(k) + 5) * U
    last = np.array([scores.max(), weights.sum(), 0.0, 0.0])
    last_bound = np.array([error.max(), weights @ relative + chain * weights.sum(), 0.0, 0.0])
    mixed_bound = (weights * relative) @ np.abs(v) + chain * (weights @ np.abs(v))
    part = np.concatenate([weights @ v, last]).astype(F32).reshape(-1, 4)
    return part, np.concatenate([mixed_bound, last_bound]).reshape(-1, 4)


def attention_merge_cases() -> Iterator[Case]:
    """One chunk and several; tokens on both sides of a chunk's end; chunks beyond the last key hold NaN."""
    for heads, width, tokens, position in (
        (2, 16, 1, 0), (3, 64, 1, 63), (2, 128, 1, 64), (3, 256, 2, 255), (9, 64, 3, 700),
    ):  # fmt: skip
        yield merge_case(f"attention_merge {heads}x{width} T{tokens} at {position}", heads, width, tokens, position)
    for threads in (64, 128):
        yield merge_case(f"attention_merge {threads} threads", 2, 16, 2, 700, tuned={"WORKGROUP": threads})
    yield merge_case("attention_merge 2x16 T2 at 127", 2, 16, 2, 127)


def merge_case(
    name: str, heads: int, width: int, tokens: int, position: int, tuned: Mapping[str, int] | None = None
) -> Case:
    """Random parts with maxima far apart and close together."""
    rng = generator(name)
    capacity = position + tokens + CHUNK
    parts = rng.normal(size=(tokens, heads, quotient_up(capacity, CHUNK), width // 4 + 1, 4)).astype(F32)
    parts[..., -1, 0] *= 5
    parts[..., -1, 1] = 1 + 100 * rng.random(parts.shape[:3])
    y, bound = np.zeros((tokens, heads, width)), np.zeros((tokens, heads, width))
    for t in range(tokens):
        used = (position + t) // CHUNK + 1
        parts[t, :, used:] = np.nan
        y[t] = merge(parts[t, :, :used])
        wide = parts[t, :, :used].astype(np.float64)
        below = wide[:, :, -1, 0] - wide[:, :, -1, 0].max(axis=1, keepdims=True)
        factor = np.exp(below)
        magnitude = (np.abs(wide[:, :, :-1]).reshape(heads, used, -1) * factor[..., None]).sum(axis=1)
        magnitude /= (wide[:, :, -1, 1] * factor).sum(axis=1)[:, None]
        # exp(), its argument's rounding, a chain of one addition a chunk in both sums, and the quotient.
        error = EXP_BASE + EXP_SLOPE * np.abs(below).max() + 2 * U * np.abs(wide[:, :, -1, 0]).max() + (used + 2) * U
        bound[t] = 2 * error * magnitude + DIVISION * np.abs(y[t])
    op = {"op": "attention_merge", "out": "y", "heads": heads, "kv_heads": heads, "head_dim": width}
    return make_case(
        name,
        op,
        {"y": {"dtype": "f32", "shape": ["T", heads * width]}},
        {"parts": parts},
        {"y": y.astype(F32)},
        {"y": Close(bound)},
        symbols=tuned,
        step=(position, tokens, 1, 0),
        capacity=capacity,
    )
