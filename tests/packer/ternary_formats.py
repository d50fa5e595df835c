"""Encoders of the ternary formats, element by element as their layouts are published, for tests to compare with.

Each takes trits int8 ``[N, K]`` and f16 scales ``[N, K / group]`` and gives the bytes of each row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: Number of the type, weights in a block, bytes in it.
Q1_0, Q2_0, PQ2_0, PTQ1_0, TQ1_0, TQ2_0, I2_S = 41, 42, 142, 143, 34, 35, 36


def half(value: np.floating) -> bytes:
    return np.float16(value).tobytes()


def base3(digits: list[int]) -> int:
    """First digit most significant, four digits as if a fifth were 0, then scaled up to a byte."""
    number = 0
    for digit in [*digits, 0][:5]:
        number = number * 3 + digit
    return -(-number * 256 // 243)


def tq1_0(trits: list[int], scale: np.floating) -> bytes:
    codes = [trit + 1 for trit in trits]
    qs = [base3([codes[32 * n + m] for n in range(5)]) for m in range(32)]
    qs += [base3([codes[160 + 16 * n + m] for n in range(5)]) for m in range(16)]
    qh = [base3([codes[240 + 4 * n + m] for n in range(4)]) for m in range(4)]
    return bytes(qs + qh) + half(scale)


def ptq1_0(trits: list[int], scale: np.floating) -> bytes:
    codes = [trit + 1 for trit in trits]
    qs = [base3([codes[16 * n + m] for n in range(5)]) for m in range(16)]
    qs += [base3([codes[80 + 8 * n + m] for n in range(5)]) for m in range(8)]
    qh = [base3([codes[120 + 2 * n + m] for n in range(4)]) for m in range(2)]
    return bytes(qs + qh) + half(scale)


def tq2_0(trits: list[int], scale: np.floating) -> bytes:
    qs = bytearray(64)
    for index, trit in enumerate(trits):
        stage, slot, byte = index // 128, index % 128 // 32, index % 32
        qs[32 * stage + byte] |= (trit + 1) << (2 * slot)
    return bytes(qs) + half(scale)


def q2_0(trits: list[int], scale: np.floating) -> bytes:
    qs = bytearray(len(trits) // 4)
    for index, trit in enumerate(trits):
        qs[index // 4] |= (trit + 1) << (2 * (index % 4))
    return half(scale) + bytes(qs)


def q1_0(trits: list[int], scale: np.floating) -> bytes:
    qs = bytearray(len(trits) // 8)
    for index, trit in enumerate(trits):
        qs[index // 8] |= (trit > 0) << (index % 8)
    return half(scale) + bytes(qs)


def i2_s(trits: np.ndarray, scale: float) -> np.ndarray:
    """The whole tensor: blocks of 128 in 32 bytes, then one f32 scale in 32 bytes, whose rest may be anything."""
    packed = bytearray(trits.size // 4)
    for index, trit in enumerate(trits.reshape(-1).tolist()):
        block, slot, byte = index // 128, index % 128 // 32, index % 32
        packed[32 * block + byte] |= (trit + 1) << (6 - 2 * slot)
    return np.frombuffer(bytes(packed) + np.float32(scale).tobytes() + bytes(range(28)), dtype=np.uint8)


#: Name -> (type, weights in a block, encoder of a block).
BLOCKS: dict[str, tuple[int, int, Callable[[list[int], np.floating], bytes]]] = {
    "TQ1_0": (TQ1_0, 256, tq1_0),
    "TQ2_0": (TQ2_0, 256, tq2_0),
    "Q2_0 of 64": (Q2_0, 64, q2_0),
    "Q2_0 of 128": (Q2_0, 128, q2_0),
    "PQ2_0": (PQ2_0, 128, q2_0),
    "PTQ1_0": (PTQ1_0, 128, ptq1_0),
    "Q1_0": (Q1_0, 128, q1_0),
}


def encode(name: str, trits: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """Rows uint8. group: columns that share one of ``scales``, at least a block of the format."""
    _, block, encoder = BLOCKS[name]
    rows = []
    for row, row_scales in zip(trits.tolist(), scales, strict=True):
        starts = range(0, len(row), block)
        rows.append(b"".join(encoder(row[at : at + block], row_scales[at // group]) for at in starts))
    return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), -1)


def mlx(trits: np.ndarray, scales: np.ndarray, group: int, stored: int) -> dict[str, np.ndarray]:
    """``weight``, ``scales``, ``biases`` of MLX, in groups of ``stored`` columns; 16 codes a word, lowest first."""
    rows, columns = trits.shape
    words = np.zeros((rows, columns // 16), dtype=np.uint32)
    for slot in range(16):
        words |= (trits[:, slot::16] + 1).astype(np.uint32) << np.uint32(2 * slot)
    wide = np.repeat(scales, group // stored, axis=1)
    return {"weight": words, "scales": wide, "biases": -wide}
