"""NumPy reference of every operation: plain, exact where integers are, and the contract of each kernel.

Shapes: T tokens, K columns in, N rows (columns out). Formulas and layouts: ``shaders/README.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .contract import INTEGER_ACTIVATIONS, constant, quotient_up
from .float4 import E2M1, nibbles
from .weights import WeightTensor

F32 = np.float32
_POWERS = np.array([1, 3, 9, 27, 81], dtype=np.uint16)


# --- layouts ---------------------------------------------------------------------------------------------------


def unpack_trits(packed: np.ndarray, columns: int) -> np.ndarray:
    """Base-3 bytes ``[N, 4*ceil(K/20)]`` to trits int8 ``[N, K]``: digit n is ``(((b*3^n) & 255) * 3) >> 8``."""
    shifted = (packed[..., None].astype(np.uint16) * _POWERS) & 255
    codes = (shifted * 3) >> 8
    return codes.reshape(*packed.shape[:-1], -1)[..., :columns].astype(np.int8) - np.int8(1)


def resident_codes(trits: np.ndarray) -> np.ndarray:
    """Trits int8 ``[N, K]`` to the GPU layout u32 ``[N, ceil(K/64), 4]``: byte b, slot s is element 4s+b."""
    rows, columns = trits.shape
    blocks = quotient_up(columns, 64)
    codes = np.ones((rows, blocks * 64), dtype=np.uint32)
    codes[:, :columns] = (trits + 1).astype(np.uint32)
    slots = codes.reshape(rows, blocks, 4, 4, 4)  # [N, block, word, slot s, byte b]
    shifts = (8 * np.arange(4) + 2 * np.arange(4)[:, None]).astype(np.uint32)
    words: np.ndarray = np.bitwise_or.reduce(slots << shifts, axis=(-1, -2)).astype(np.uint32)
    return words


def expand(weight: WeightTensor) -> np.ndarray:
    """Disk layout of a ternary tensor to the resident layout u32 ``[N, ceil(K/64), 4]``."""
    return resident_codes(unpack_trits(weight.data, weight.columns))


def dequantize(weight: WeightTensor, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
    """Any matrix to f32 ``[rows, K]`` (code x scale, + minimum in q4a, x tensor scale in nvfp4: one rounding)."""
    values = _codes(weight, weight.data[rows]).astype(F32)
    if weight.scales is None:
        return values
    scales = weight.row_scales()[rows]
    if weight.encoding == "q4a":
        values *= _by_column(weight, scales[:, 0::2])
        values += _by_column(weight, scales[:, 1::2])
        return values
    values *= _by_column(weight, scales) if weight.group else scales[:, None]
    if weight.tensor_scale is not None:
        values *= F32(weight.tensor_scale)
    return values


def _codes(weight: WeightTensor, data: np.ndarray) -> np.ndarray:
    """What stands in rows of the disk layout, ``[rows, K]``, without scales."""
    if weight.encoding == "ternary":
        return unpack_trits(data, weight.columns)
    if weight.encoding not in ("q4", "q4a", "nvfp4", "mxfp4"):
        return data[:, : weight.columns]
    codes = nibbles(data)[:, : weight.columns]
    if weight.encoding == "q4":
        return codes.astype(np.int8) - 8
    return codes if weight.encoding == "q4a" else E2M1[codes]


def _by_column(weight: WeightTensor, scales: np.ndarray) -> np.ndarray:
    """Scales ``[rows, groups]`` of each column, ``[rows, K]``."""
    return np.repeat(scales, weight.group, axis=1)[:, : weight.columns]


# --- activations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantized:
    """Integer activations: q i32 ``[T, K]``, scale f32 ``[T]``, kind ``a8`` or ``a16``."""

    q: np.ndarray
    scale: np.ndarray
    kind: str

    @property
    def sums(self) -> np.ndarray:
        """Sums of q over blocks of 64 columns, i32 ``[T, ceil(K/64)]``."""
        sums: np.ndarray = _blocks(self.q).sum(axis=-1, dtype=np.int32)
        return sums

    @property
    def words(self) -> np.ndarray:
        """q as the GPU holds it: u32 ``[T, ceil(K/64), planes, 16]``; a16 has a high and a low int8 plane."""
        blocks = _blocks(self.q)
        if self.kind == "a8":
            planes = blocks[:, :, None, :]
        else:
            low = ((blocks + 128) & 255) - 128
            planes = np.stack([(blocks - low) >> 8, low], axis=2)
        return np.ascontiguousarray(planes.astype(np.int8)).view("<u4")


def _blocks(q: np.ndarray) -> np.ndarray:
    tokens, columns = q.shape
    padded = np.zeros((tokens, quotient_up(columns, 64) * 64), dtype=np.int32)
    padded[:, :columns] = q
    return padded.reshape(tokens, -1, 64)


def quantize(x: np.ndarray, kind: str) -> Quantized:
    """f32 ``[T, K]`` to integers: s = max / absmax, q = round half to even (x s).

    The a8 formula is BitNet's (transformers ``BitLinear.activation_quant``); a16 has 32639 steps instead of 127.
    """
    limit = constant(f"{kind}_max")
    absmax = np.maximum(np.abs(x).max(axis=-1), F32(constant("absmax_floor"))).astype(F32)
    scaled = np.rint(x * (F32(limit) / absmax)[:, None])
    low = -128 if kind == "a8" else -limit
    return Quantized(np.clip(scaled, low, limit).astype(np.int32), absmax / F32(limit), kind)


def activation(x: np.ndarray, kind: str) -> np.ndarray | Quantized:
    """f32 values as the next operation wants them."""
    return quantize(x, kind) if kind in INTEGER_ACTIVATIONS else x


# --- operations ------------------------------------------------------------------------------------------------


def embed(weight: WeightTensor, ids: np.ndarray, multiplier: float = 1.0) -> np.ndarray:
    """Rows of an embedding, f32 ``[T, K]``."""
    return dequantize(weight, np.asarray(ids, dtype=np.int64)) * F32(multiplier)


def position(weight: WeightTensor, first: int, count: int) -> np.ndarray:
    """Rows ``first .. first + count - 1`` of a table of learned positions, f32 ``[T, K]``."""
    return dequantize(weight, slice(first, first + count))


def norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * gain, f32 ``[T, K]``."""
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    normed: np.ndarray = x * (1.0 / np.sqrt(mean + eps)).astype(F32) * gain
    return normed


def activate(x: np.ndarray, act: str) -> np.ndarray:
    """act(x), f32 ``[T, K]``."""
    value: np.ndarray = _ACTS[act](x)
    return value


def glu(x: np.ndarray, act: str, gain: np.ndarray | None = None, eps: float = 0.0) -> np.ndarray:
    """act(gate) * up of ``[T, 2K]`` (gate first), then RMSNorm if there is a gain; f32 ``[T, K]``."""
    gate, up = np.split(x, 2, axis=-1)
    value = _ACTS[act](gate) * up
    return value if gain is None else norm(value, gain, eps)


def _silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        y: np.ndarray = x / (F32(1) + np.exp(-x))
        return y


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    y: np.ndarray = F32(0.5) * x * (F32(1) + np.tanh(F32(np.sqrt(2 / np.pi)) * (x + F32(0.044715) * x**3)))
    return y


_ACTS = {
    "silu": _silu,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.square(np.maximum(x, 0)),
    "gelu_tanh": _gelu_tanh,
}


def integer_sums(trits: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Exact products of trits ``[N, K]`` (any dtype) and integers ``[T, K]``, i64 ``[T, N]``.

    A float32 product is exact while every partial sum stays below 2^24; wider integers go in two int8 planes.
    """
    weights = trits.T.astype(F32, copy=False)
    if q.shape[1] * 128 >= 1 << 24:
        return np.rint(q.astype(np.float64) @ weights.astype(np.float64)).astype(np.int64)
    low = ((q + 128) & 255) - 128
    sums = (low.astype(F32) @ weights).astype(np.int64)
    high = (q - low) >> 8
    return sums + 256 * (high.astype(F32) @ weights).astype(np.int64) if high.any() else sums


def linear(
    x: np.ndarray | Quantized,
    weight: WeightTensor,
    bias: np.ndarray | None = None,
    dense: np.ndarray | None = None,
) -> np.ndarray:
    """y = x W^T, f32 ``[T, N]``; with integer activations the product is exact and scaled as the kernels do.

    ``dense`` may hold the decoded weight (trits for integer activations, else f32) to save time.
    """
    if isinstance(x, Quantized):
        y = _linear_integer(x, weight, unpack_trits(weight.data, weight.columns) if dense is None else dense)
    else:
        y = x @ (dequantize(weight) if dense is None else dense).T
    return y if bias is None else y + bias


def _linear_integer(x: Quantized, weight: WeightTensor, trits: np.ndarray) -> np.ndarray:
    scales = weight.row_scales()
    if not weight.group:
        y = integer_sums(trits, x.q).astype(F32)
        y *= x.scale[:, None]
        y *= scales
        return y
    total = np.zeros((len(x.q), weight.rows), dtype=F32)
    for index in range(weight.groups):
        columns = slice(index * weight.group, (index + 1) * weight.group)
        total += integer_sums(trits[:, columns], x.q[:, columns]).astype(F32) * scales[:, index]
    total *= x.scale[:, None]
    return total


def rope_table(inv_freq: np.ndarray, scale: float, capacity: int) -> np.ndarray:
    """(cos, sin) of position x frequency, f32 ``[S, head_dim/2, 2]``; the product is rounded to f32, as in torch."""
    angles = np.arange(capacity, dtype=F32)[:, None] * np.asarray(inv_freq, dtype=F32)
    wide = angles.astype(np.float64)
    return (np.stack([np.cos(wide), np.sin(wide)], axis=-1) * scale).astype(F32)


def rope(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """rotate_half rotary embedding of ``[T, heads, head_dim]`` by table rows ``[T, head_dim/2, 2]``."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    cos, sin = table[:, None, :, 0], table[:, None, :, 1]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def cache_round_trip(x: np.ndarray, kv: str) -> np.ndarray:
    """What a KV cache of this kind gives back for ``[T, heads, head_dim]``."""
    if kv == "f16":
        limit = F32(constant("kv_f16_max"))
        halves: np.ndarray = np.clip(x, -limit, limit).astype(np.float16).astype(F32)
        return halves
    if kv == "q8":
        scale, q = quantize_cache(x)
        q *= scale[..., None]
        return q
    return x


def quantize_cache(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales f32 ``[T, heads]`` and q i8-valued f32 ``[T, heads, head_dim]`` of a q8 cache."""
    scale = (np.abs(x).max(axis=-1) / F32(127)).astype(F32)
    inverse = np.where(scale > 0, F32(1) / np.where(scale > 0, scale, 1), 0).astype(F32)
    return scale, np.clip(np.rint(x * inverse[..., None]), -127, 127).astype(F32)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, scale: float, window: int = 0) -> np.ndarray:
    """Causal attention: q ``[T, H, D]`` at ``position``.., k and v ``[position+T, KVH, D]``; f32 ``[T, H*D]``.

    window: most keys that a token sees, the last ones, its own among them (``sliding_window`` of transformers); 0: all.
    """
    tokens, heads, _ = q.shape
    repeat = heads // k.shape[1]
    k, v = (np.repeat(cache, repeat, axis=1) for cache in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * F32(scale)
    behind = position + np.arange(tokens)[:, None] - np.arange(len(k))[None, :]
    hidden = (behind < 0) | ((behind >= window) if window else False)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: np.ndarray = np.einsum("hts,shd->thd", weights, v).astype(F32).reshape(tokens, -1)
    return mixed
