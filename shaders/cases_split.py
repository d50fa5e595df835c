"""Cases of rope_attention and attention_merge, which split a long context over workgroups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from . import reference
from .case_kit import F32, SPARE_ROWS, Case, generator, make_case
from .cases_attention import GAINS, NAN_WORD, cached_words, first_key, head_norms
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
    # Each shape is compiled anew, which takes seconds on a CPU: f16 has them all, the other kinds some.
    some = [(2, 1, 16, 1, 0), (2, 1, 16, 2, 3), (9, 3, 64, 1, 63), (9, 3, 64, 4, 62)]
    odd, long, wide = (4, 2, 80, 1, 64), (8, 1, 128, 1, 300), (4, 1, 256, 8, 120)
    shapes = {
        "f16": [*some, odd, long, wide, (3, 3, 64, 1, 62), (5, 1, 32, 3, 5)],
        "f32": [*some, wide],
        "q8": [*some, odd],
    }
    for kv, all_shapes in shapes.items():
        for heads, kv_heads, width, tokens, position in all_shapes:
            title = f"rope_attention {kv} {heads}/{kv_heads}x{width} T{tokens} at {position}"
            yield rope_attention_case(title, kv, heads, kv_heads, width, tokens, position)
    for kv, heads, kv_heads, width, tokens, position, window in (
        ("f32", 2, 1, 16, 1, 300, 70), ("f32", 2, 1, 16, 2, 254, 64), ("f16", 2, 1, 16, 2, 3, 2),
        ("f16", 3, 3, 64, 4, 126, 3), ("q8", 4, 1, 32, 8, 62, 2),
    ):  # fmt: skip
        title = f"rope_attention {kv} {heads}/{kv_heads}x{width} T{tokens} at {position} window {window}"
        yield rope_attention_case(title, kv, heads, kv_heads, width, tokens, position, window=window)
    for kv, heads, kv_heads, width, tokens, position, eps in (
        ("q8", 2, 1, 16, 1, 0, 0.25), ("f16", 4, 2, 80, 4, 62, 1e-6), ("f32", 4, 1, 256, 8, 120, 1e-6),
    ):  # fmt: skip
        title = f"rope_attention {kv} gains {heads}/{kv_heads}x{width} T{tokens} at {position}"
        yield rope_attention_case(title, kv, heads, kv_heads, width, tokens, position, eps=eps)
    yield rope_attention_case("rope_attention gains window", "f16", 4, 2, 32, 3, 130, window=5, eps=1e-6)


def rope_attention_case(
    name: str,
    kv: str,
    heads: int,
    kv_heads: int,
    width: int,
    tokens: int,
    position: int,
    window: int = 0,
    eps: float | None = None,
) -> Case:
    """New rows are small dyadic numbers, so that every device caches the same bits; older rows are random.

    Rows that no token sees hold NaN and must not be looked at. eps: of the norm of each head, where there is one; then
    a device may cache another f16 or f32 number, and what it sees differs by as much.
    """
    for attempt in range(100):
        rng = generator(f"{name} {attempt}")
        capacity = position + tokens + SPARE_ROWS
        x = rng.choice([-1.0, -0.75, 0.25, 0.625, 1.0], (tokens, heads + 2 * kv_heads, width)).astype(F32)
        table = rng.choice(_QUADRANTS, (capacity, width // 2)).astype(F32)
        span = slice(position, position + tokens)
        inputs: dict[str, np.ndarray] = {"x": x, "rope": table}
        turned, relative = x[:, : heads + kv_heads].astype(np.float64), 0.0
        if eps is not None:
            turned, relative, inputs["gains"] = head_norms(rng, turned, heads, eps)
        rotated = reference.rope(turned, table[span].astype(np.float64))
        # The table's quadrants round nothing.
        rotated_error = relative * np.abs(rotated)
        key_error = np.zeros((position + tokens, kv_heads, width))
        expected: dict[str, np.ndarray] = {}
        checks: dict[str, Check] = {}
        seen: dict[str, np.ndarray] = {}
        exact = True
        for cache, new, error in (
            ("k", rotated[:, heads:], rotated_error[:, heads:]),
            ("v", x[:, heads + kv_heads :].astype(np.float64), np.zeros((tokens, kv_heads, width))),
        ):
            old = rng.normal(size=(position, kv_heads, width)).astype(F32)
            words, scales, _, _ = cached_words(old.astype(np.float64), np.zeros_like(old), kv)
            new_words, new_scales, word_check, scale_check = cached_words(new, error, kv)
            exact &= not isinstance(word_check, Between) or word_check.close() == 0
            if cache == "k" and eps is not None:
                key_error[position:] = error + cached_error(new, kv, scale_check)
            hidden = first_key(position, window)
            words[:hidden], scales[:hidden] = NAN_WORD, np.nan
            rest = np.full((capacity - position, *words.shape[1:]), NAN_WORD)
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
            keys = slice(max(first, first_key(position + t, window)), min(first + CHUNK, position + t + 1))
            if keys.start >= keys.stop:
                # merge_linear reads all of the first four chunks, attention_merge none that is hidden.
                if position + t < 4 * CHUNK:
                    parts[t, :, first // CHUNK] = 0
                    parts[t, :, first // CHUNK, -1, 0] = -3e38
                continue
            for head in range(heads):
                group = head // (heads // kv_heads)
                place = t, head, first // CHUNK
                parts[place], bound[place] = _part(
                    rotated[t, head],
                    seen["k"][keys, group],
                    seen["v"][keys, group],
                    float(F32(scale)),
                    rotated_error[t, head],
                    key_error[keys, group],
                )
    op = {"op": "rope_attention", "x": "x", "heads": heads, "kv_heads": kv_heads, "head_dim": width, "scale": scale}
    op |= {"window": window} | (GAINS | {"eps": eps} if eps is not None else {})
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


def cached_error(keys: np.ndarray, kv: str, scale_check: Check) -> np.ndarray:
    """What keys may differ by from the cached ones that are expected, besides their own error: the other half next to a
    number, or by what the scale of the right integers errs."""
    error: np.ndarray = U * np.abs(keys)
    if kv == "f16":
        error = np.maximum(np.abs(keys) * 2.0**-10, 2.0**-24)
    elif kv == "q8" and isinstance(scale_check, Close):
        error = np.abs(reference.quantize_cache(keys.astype(F32))[1]) * np.asarray(scale_check.bound)[..., None]
    return error


def _part(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, q_error: np.ndarray, k_error: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(part, bound of each element), both ``[D/4 + 1, 4]``, of one query and the keys and values of a chunk.

    A score errs as in ``cases_attention``, and by what query and keys err; a weight by its score, the largest score and
    exp(); then come the sums.
    """
    scores = k @ q * scale
    error = (len(q) + 4) * U * (np.abs(k) @ np.abs(q)) * abs(scale) + U * np.abs(scores)
    error += (np.abs(k) @ q_error + k_error @ (np.abs(q) + q_error)) * abs(scale)
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
    for heads, width, tokens, position, window in ((2, 16, 2, 300, 70), (3, 64, 1, 700, 64), (2, 16, 2, 127, 1)):
        title = f"attention_merge {heads}x{width} T{tokens} at {position} window {window}"
        yield merge_case(title, heads, width, tokens, position, window=window)
    yield merge_case("attention_merge wide window", 2, 16, 2, 700, window=500)


def merge_case(
    name: str,
    heads: int,
    width: int,
    tokens: int,
    position: int,
    tuned: Mapping[str, int] | None = None,
    window: int = 0,
) -> Case:
    """Random parts with maxima far apart and close together; those that no key is seen of hold NaN."""
    rng = generator(name)
    capacity = position + tokens + CHUNK
    parts = rng.normal(size=(tokens, heads, quotient_up(capacity, CHUNK), width // 4 + 1, 4)).astype(F32)
    parts[..., -1, 0] *= 5
    parts[..., -1, 1] = 1 + 100 * rng.random(parts.shape[:3])
    y, bound = np.zeros((tokens, heads, width)), np.zeros((tokens, heads, width))
    for t in range(tokens):
        seen = slice(first_key(position + t, window) // CHUNK, (position + t) // CHUNK + 1)
        used = seen.stop - seen.start
        parts[t, :, : seen.start], parts[t, :, seen.stop :] = np.nan, np.nan
        y[t] = merge(parts[t, :, seen])
        wide = parts[t, :, seen].astype(np.float64)
        below = wide[:, :, -1, 0] - wide[:, :, -1, 0].max(axis=1, keepdims=True)
        factor = np.exp(below)
        magnitude = (np.abs(wide[:, :, :-1]).reshape(heads, used, -1) * factor[..., None]).sum(axis=1)
        magnitude /= (wide[:, :, -1, 1] * factor).sum(axis=1)[:, None]
        # exp(), its argument's rounding, a chain of one addition a chunk in both sums, and the quotient.
        error = EXP_BASE + EXP_SLOPE * np.abs(below).max() + 2 * U * np.abs(wide[:, :, -1, 0]).max() + (used + 2) * U
        bound[t] = 2 * error * magnitude + DIVISION * np.abs(y[t])
    op = {"op": "attention_merge", "out": "y", "heads": heads, "kv_heads": heads, "head_dim": width, "window": window}
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
