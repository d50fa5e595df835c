"""What kernel cases are made of: the case itself, random tensors in every layout, and the way to symbols."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import contract, reference
from .checks import Check, Exact
from .resident import disk_words, scale_words
from .symbols import Symbols, binding_bytes, op_symbols, weight_symbols
from .weights import WeightTensor, group_of

F32 = np.float32
#: Rows that a cache of a case has beyond what it uses, to see that they are left alone.
SPARE_ROWS = 2


@dataclass(frozen=True)
class Case:
    """One run of one kernel.

    symbols: everything that parameters, overrides, shapes and dispatch need. step: position, tokens, rows,
    produced. inputs: bindings that are filled; all others are poisoned. expected: bindings that the kernel
    writes. checks: how each is compared.
    """

    name: str
    kernel: str
    symbols: Symbols
    step: tuple[int, int, int, int]
    inputs: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]
    checks: Mapping[str, Check]

    def problems(self, outputs: Mapping[str, np.ndarray]) -> list[str]:
        """What is wrong with a run's outputs, in words."""
        found = []
        for name, expected in self.expected.items():
            problem = self.checks[name].problem(outputs[name], expected, dict(outputs))
            if problem:
                found.append(f"{self.name}: {name}: {problem}")
        return found

    def as_json(self) -> dict[str, Any]:
        """The case as the browser's executor takes it; arrays are base64 of little-endian numbers."""
        return {
            "name": self.name,
            "kernel": self.kernel,
            "symbols": self.symbols,
            "step": list(self.step),
            "inputs": {name: to_base64(data) for name, data in self.inputs.items()},
            "outputs": {
                name: {"dtype": _DTYPES[data.dtype.str], "shape": list(data.shape)}
                for name, data in self.expected.items()
            },
            "tolerance": next(k.tolerance for k in contract.kernels() if k.name == self.kernel),
        }


_DTYPES = {"<u4": "u32", "<i4": "i32", "<f4": "f32"}


def to_base64(data: np.ndarray) -> str:
    """Bytes of an array, C order."""
    return base64.b64encode(np.ascontiguousarray(data).tobytes()).decode()


def from_base64(text: str, like: np.ndarray) -> np.ndarray:
    """The array with the dtype and shape of ``like``."""
    return np.frombuffer(base64.b64decode(text), dtype=like.dtype).reshape(like.shape)


def generator(name: str) -> np.random.Generator:
    """Random numbers that depend on a case's name alone."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def make_case(
    name: str,
    op: Mapping[str, Any],
    values: Mapping[str, Mapping[str, Any]],
    inputs: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    checks: Mapping[str, Check] | None = None,
    *,
    symbols: Mapping[str, Any] | None = None,
    step: tuple[int, int, int, int] = (0, 1, 1, 0),
    kv: str = "f16",
    capacity: int = 0,
) -> Case:
    """A case for the kernel that an executor picks for the operation. Outputs are exact unless ``checks`` says more.

    values: dtype and ``[T or R, columns]`` of the operation's values. The inputs must fill their bindings.
    """
    lead = values[op["out"]]["shape"][0] if "out" in op else "R" if "logits" in op else "T"
    read = next((values[op[f]]["shape"][0] for f in ("x", "q") if f in op), lead)
    dims = {"T": step[1], "R": step[2]}
    found = {**op_symbols(op, values, kv, capacity), "T": dims[lead], "X_T": dims[read], "R": step[2]}
    found["KEYS"] = step[0] + step[1]
    found |= symbols or {}
    kernel = contract.select(op["op"], found)
    sizes = binding_bytes(kernel, found)
    for binding, data in (*inputs.items(), *expected.items()):
        if data.nbytes != sizes[binding]:
            raise ValueError(f"case {name}: {binding} has {data.nbytes} bytes, its shape needs {sizes[binding]}")
    exact = {binding: Exact() for binding in expected}
    return Case(name, kernel.name, found, step, inputs, expected, exact | dict(checks or {}))


def random_weight(
    rng: np.random.Generator,
    encoding: str,
    rows: int,
    columns: int,
    *,
    group: int = 0,
    parts: bool = False,
    powers: bool = False,
) -> WeightTensor:
    """A random matrix in the disk layout.

    group: columns a scale (ternary). parts: two scales by part instead of one a row. powers: powers of two as scales.
    """
    shape = (rows, columns)
    if encoding == "ternary":
        codes = rng.integers(0, 243, (rows, 4 * -(-columns // 20)))
        data = (-(-codes * 256 // 243)).astype(np.uint8)
        if group:
            scales = _scales(rng, (rows, -(-columns // group)), powers)
            return WeightTensor("w", encoding, shape, data, scales, "group", group=group)
        if parts:
            split = (rows - rows // 3, rows // 3)
            return WeightTensor("w", encoding, shape, data, rng.normal(size=2).astype(F32), "parts", parts=split)
        return WeightTensor("w", encoding, shape, data, rng.normal(size=rows).astype(F32), "row")
    if encoding in ("f16", "f32"):
        data = np.zeros((rows, 4 * -(-columns // 4)), dtype=np.float16 if encoding == "f16" else F32)
        data[:, :columns] = rng.normal(size=shape)
        return WeightTensor("w", encoding, shape, data)
    blocks = -(-columns // 32)
    if encoding in ("q4a", "nvfp4", "mxfp4"):
        return _random_low_bits(rng, encoding, rows, columns)
    scales = _scales(rng, (rows, blocks), powers)
    inside = np.arange(32 * blocks) < columns
    if encoding == "q8":
        data = np.where(inside, rng.integers(-128, 128, (rows, 32 * blocks)), 0).astype(np.int8)
    else:
        nibbles = np.where(inside, rng.integers(0, 16, (rows, 32 * blocks)), 8)
        data = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).astype(np.uint8)
    return WeightTensor("w", encoding, shape, data, scales, group=32)


def _random_low_bits(rng: np.random.Generator, encoding: str, rows: int, columns: int) -> WeightTensor:
    """A random matrix of q4a, nvfp4 or mxfp4; no product is so small that a device may take it for zero."""
    blocks, group = -(-columns // 32), group_of(encoding)
    groups = -(-columns // group)
    nibbles = np.where(np.arange(32 * blocks) < columns, rng.integers(0, 16, (rows, 32 * blocks)), 0)
    data = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).astype(np.uint8)
    if encoding == "q4a":
        pairs = _scales(rng, (rows, 2 * groups), powers=False)
        return WeightTensor("w", encoding, (rows, columns), data, pairs, group=group)
    if encoding == "nvfp4":
        codes = rng.integers(0, 0x7F, (rows, groups)).astype(np.uint8)
        own = float(F32(0.01 * rng.normal()))
        return WeightTensor("w", encoding, (rows, columns), data, codes, group=group, tensor_scale=own)
    powers_of_two = rng.integers(110, 130, (rows, groups)).astype(np.uint8)
    return WeightTensor("w", encoding, (rows, columns), data, powers_of_two, group=group)


def _scales(rng: np.random.Generator, shape: tuple[int, ...], powers: bool) -> np.ndarray:
    if powers:
        return np.exp2(rng.integers(-1, 3, shape)).astype(np.float16)
    # From subnormal halves up: a device may flush them, the kernels must not.
    return (rng.normal(size=shape) * np.exp2(rng.integers(-16, 1, shape))).astype(np.float16)


def weight_inputs(weight: WeightTensor) -> dict[str, np.ndarray]:
    """Bindings ``w`` and ``scales`` of a matrix in the resident layout."""
    words = reference.expand(weight) if weight.encoding == "ternary" else disk_words(weight)
    scales = scale_words(weight)
    return {"w": words} | ({"scales": scales} if scales.size else {})


def piece_symbols(weight: WeightTensor, first_row: int = 0, all_rows: int | None = None) -> Symbols:
    """Symbols of a matrix that is rows ``first_row`` .. of one of ``all_rows``."""
    return weight_symbols(weight) | {"ROW0": first_row, "OUT_N": all_rows or weight.rows}


def random_integers(
    rng: np.random.Generator, kind: str, tokens: int, columns: int, limit: int = 0
) -> reference.Quantized:
    """Random integer activations, the extremes among them."""
    largest = limit or contract.constant(f"{kind}_max")
    lowest = -128 if kind == "a8" and not limit else -largest
    q = rng.integers(lowest, largest + 1, (tokens, columns)).astype(np.int32)
    q[rng.random(q.shape) < 0.1] = lowest
    q[rng.random(q.shape) < 0.1] = largest
    return reference.Quantized(q, np.exp(rng.normal(size=tokens)).astype(F32), kind)


def integer_inputs(x: reference.Quantized) -> dict[str, np.ndarray]:
    """Bindings of integer activations."""
    return {"x": x.words, "x_scale": x.scale, "x_sums": x.sums}
