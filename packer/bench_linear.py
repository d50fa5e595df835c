"""Times the matrices of a program, each alone: a small program of many copies of one product, run by the executor.

The twin is web/engine/measure_linear.js.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from shaders.contract import INTEGER_ACTIVATIONS
from shaders.native import NativeModel
from shaders.native_device import Device
from shaders.native_errors import OutOfDeviceMemory
from shaders.weights import WeightTensor

from .bench_engine import record, timings
from .manifest import TensorEntry
from .shapes import stand_in
from .synthesize import random_weights

if TYPE_CHECKING:
    from .bench_native import Sizes

#: Copies of a matrix, at most: each has buffers and a bind group.
_MOST_COPIES = 1024
#: Of all outputs of a timing, about.
_OUTPUT_BYTES = 64 << 20
#: Ids that the little program knows.
_VOCABULARY = 64


@dataclass(frozen=True)
class Linear:
    """One kind of matrix product. dtype: of its activations. is_head: run for one token only."""

    name: str
    op: Mapping[str, Any]
    dtype: str
    entry: TensorEntry
    is_head: bool


def distinct_linears(program: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> list[Linear]:
    """One of each kind, in the order of the program: same sizes, encoding, scales and activations."""
    found: dict[tuple, Linear] = {}
    for section in ("body", "logits"):
        for op in program[section]:
            if op["op"] != "linear":
                continue
            entry, dtype = entries[op["w"]], program["values"][op["x"]]["dtype"]
            kind = (entry.encoding, entry.scale == "group", entry.group, dtype)
            key = (section, entry.shape, kind, bool(op.get("accumulate")), op.get("bias") is None)
            is_head = section == "logits"
            name = "head" if is_head else op["w"].rpartition(".")[2]
            found.setdefault(key, Linear(name, op, dtype, entry, is_head))
    return list(found.values())


def tensor_bytes(entry: TensorEntry) -> int:
    """Bytes of a tensor on the GPU, scales included."""
    return stand_in(entry).resident_bytes


def measure_linear(device: Device, linear: Linear, sizes: Sizes) -> dict[str, Any]:
    """Times of one kind of product; keys as in ``bench_report.KEYS``, without the share. Raises NativeError."""
    size = tensor_bytes(linear.entry)
    rows, columns = linear.entry.shape
    copies = max(1, min(_MOST_COPIES, -(-sizes.copy_bytes // size)))
    products = max(copies, min(sizes.products, -(-_OUTPUT_BYTES // (4 * rows))))
    with _model(device, linear, copies, products, 1) as model:
        apart = median(timings(device, lambda: record(model, ["logits"], 1), sizes)) / products
        chained = median(timings(device, lambda: record(model, ["random"], 1), sizes)) / products
    batch = None
    if not linear.is_head:
        with _model(device, linear, 1, 1, sizes.batch) as model:
            batch = median(timings(device, lambda: record(model, ["logits"], sizes.batch), sizes))
    return {
        "name": linear.name,
        "rows": rows,
        "columns": columns,
        "encoding": linear.entry.encoding,
        "bytes": size,
        "seconds": apart,
        "dependentSeconds": chained,
        "batchTokens": None if linear.is_head else sizes.batch,
        "batchSeconds": batch,
    }


def _model(device: Device, linear: Linear, copies: int, products: int, tokens: int) -> NativeModel:
    """The copies on the GPU, as many as there is room for, with activations made from random rows."""
    program, tensors = copies_program(linear, copies, products), _tensors(linear, copies)
    try:
        model = NativeModel(program, tensors, capacity=tokens, kv="f32", max_tokens_per_step=tokens, device=device)
    except OutOfDeviceMemory:
        if copies == 1:
            raise
        return _model(device, linear, copies // 2, products, tokens)
    model.prefill([index % _VOCABULARY for index in range(tokens)])
    return model


def copies_program(linear: Linear, copies: int, products: int) -> dict[str, Any]:
    """A program whose products go round in ``copies`` of the weights.

    ``body`` makes the activations; ``logits`` has the products, with outputs of their own; ``random`` the same with
    one output ``y``, so that each waits for the one before. ``greedy`` is there because it must be.
    """
    rows, columns = linear.entry.shape
    values = {"x": {"dtype": linear.dtype, "shape": ["T", columns]}, "y": {"dtype": "f32", "shape": ["T", rows]}}
    values |= {f"y.{index}": {"dtype": "f32", "shape": ["T", rows]} for index in range(products)}
    values["chosen"] = {"dtype": "f32", "shape": ["R", _VOCABULARY]}
    integer = linear.dtype in INTEGER_ACTIVATIONS
    body: list[dict[str, Any]] = [{"op": "embed", "w": "table", "multiplier": 1.0, "out": "h" if integer else "x"}]
    if integer:
        values["h"] = {"dtype": "f32", "shape": ["T", columns]}
        body.append({"op": "quantize", "x": "h", "out": "x"})
    apart = [{**linear.op, "x": "x", "w": f"w.{index % copies}", "out": f"y.{index}"} for index in range(products)]
    return {
        "ops_version": 1,
        "values": values,
        "caches": {},
        "tables": {},
        "body": body,
        "logits": apart,
        "greedy": [{"op": "argmax", "logits": "chosen"}],
        "random": [{**product, "out": "y"} for product in apart],
    }


def _tensors(linear: Linear, copies: int) -> dict[str, WeightTensor]:
    rng = np.random.default_rng(0)
    like = stand_in(linear.entry)
    weight = random_weights(rng, like)
    rows, columns = linear.entry.shape
    tensors = {f"w.{index}": replace(weight, name=f"w.{index}") for index in range(copies)}
    table = np.zeros((_VOCABULARY, 4 * -(-columns // 4)), dtype=np.float32)
    table[:, :columns] = rng.standard_normal((_VOCABULARY, columns))
    tensors["table"] = WeightTensor("table", "f32", (_VOCABULARY, columns), table)
    bias = linear.op.get("bias")
    if bias is not None:
        tensors[bias] = WeightTensor(bias, "f32", (rows,), rng.standard_normal(rows).astype(np.float32))
    return tensors
