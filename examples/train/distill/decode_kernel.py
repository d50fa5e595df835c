"""Attention of one new token a row to what a row has so far, in Triton."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor


@triton.jit
def _kernel(
    q, k, v, keys, values, out, position, length, scale,
    SHARED: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row and kv head: online softmax over the positions before this one, a block at a time.

    The new key and value start the sums, so that nobody reads back what is stored here. SHARED queries use one key;
    PADDED is the least number of rows that a matrix product takes.
    """
    pair = tl.program_id(0).to(tl.int64)  # row * kv heads + kv head
    now = tl.load(position)
    e = tl.arange(0, SIZE)
    head = tl.arange(0, PADDED)
    queries = (pair * SHARED + head)[:, None] * SIZE + e[None, :]
    real = (head < SHARED)[:, None]
    query = tl.load(q + queries, mask=real, other=0.0)
    key = tl.load(k + pair * SIZE + e)
    value = tl.load(v + pair * SIZE + e)
    first = pair * length
    tl.store(keys + (first + now) * SIZE + e, key)
    tl.store(values + (first + now) * SIZE + e, value)
    greatest = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * scale
    total = tl.full([PADDED], 1.0, tl.float32)
    mixed = tl.zeros([PADDED, SIZE], tl.float32) + value.to(tl.float32)[None, :]
    for start in range(0, now, BLOCK):
        t = start + tl.arange(0, BLOCK)
        earlier = t < now
        where = (first + t)[:, None] * SIZE + e[None, :]
        block = tl.load(keys + where, mask=earlier[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(block)) * scale
        scores = tl.where(earlier[None, :], scores, float("-inf"))
        higher = tl.maximum(greatest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(greatest - higher)
        block = tl.load(values + where, mask=earlier[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(block.dtype), block)
        total = total * shrink + tl.sum(weights, axis=1)
        greatest = higher
    tl.store(out + queries, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)


def attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """As ``decode.plain_attention``. All tensors of one 16-bit type; E is a power of two of 16 or more."""
    rows, kv_heads, length, size = keys.shape
    heads = q.shape[2]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty(rows, 1, heads * size, dtype=q.dtype, device=q.device)
    _kernel[(rows * kv_heads,)](
        q, k, v, keys, values, out, position, length, size**-0.5,
        SHARED=heads // kv_heads, PADDED=max(16, heads // kv_heads), SIZE=size, BLOCK=64,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
