"""The symbols that ``kernels.json`` speaks of, from operations and tensors; and what follows from them.

Symbols that change from step to step are ``T`` (leading dimension of what an operation writes), ``X_T`` (of
what it reads), ``R`` and ``KEYS`` (at least as many as the step's last token sees); no parameter depends on them, so
parameter blocks are written once. ``few`` is 1 for a step that verifies drafts, ``software`` on a CPU renderer.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from .contract import Kernel, constant, element_count, evaluate, op_spec, override_values, quotient_up
from .weights import WeightTensor

Symbols = dict[str, Any]
#: Bytes of an element of a binding.
DTYPE_BYTES = {"u32": 4, "i32": 4, "f32": 4, "vec2<u32>": 8, "vec2<f32>": 8, "vec4<u32>": 16, "vec4<f32>": 16}
_KV_PER_WORD = {"f32": 1, "f16": 2, "q8": 4}
_MAX_GROUPS = 65535


def weight_symbols(weight: WeightTensor, first_row: int = 0, rows: int | None = None) -> Symbols:
    """Symbols of rows ``first_row .. first_row + rows - 1`` of a matrix, which lie in buffers of their own."""
    rows = weight.rows - first_row if rows is None else rows
    grouped = weight.group > 0
    scale_words = 0 if weight.scales is None else weight.words_of_scales(rows)
    return {
        "encoding": weight.encoding,
        "scale": "group" if grouped else "row",
        "N": rows,
        "K": weight.columns,
        "GROUP": weight.group,
        "GROUPS": weight.groups,
        "ROW_WORDS": weight.row_words,
        "SCALE_WORDS": scale_words,
        "ROW0": first_row,
        "OUT_N": weight.rows,
        "GROUP_BLOCKS": max(1, weight.group // 64),
        "K_REST": weight.columns % 4,
    }


def shared_symbols(columns: int, planes: int) -> Symbols:
    """Symbols of the integer activations of a token in workgroup memory: vec4s, and bytes with their sums."""
    blocks = quotient_up(columns, 64)
    return {"Q_VECTORS": 4 * blocks * planes, "Q_BYTES": (64 * planes + 4) * blocks}


def activation_symbols(dtype: str) -> Symbols:
    """Symbols of the activations that an operation writes (norm, quantize, glu) or multiplies (linear)."""
    return {"activation": dtype, "PLANES": 2 if dtype == "a16" else 1}


def cache_symbols(kv: str, head_dim: int, capacity: int) -> Symbols:
    """Symbols of a KV cache of ``capacity`` tokens."""
    return {"kv": kv, "KV_WORDS": head_dim // _KV_PER_WORD[kv], "S": capacity}


def op_symbols(op: Mapping[str, Any], values: Mapping[str, Mapping[str, Any]], kv: str, capacity: int) -> Symbols:
    """All symbols of an operation but those of its weight and the changing ones.

    values: the program's ``values``.
    """
    spec = op_spec(op["op"])
    symbols: Symbols = {"act": op.get("act", "none"), "RING": constant("ring"), "few": 0, "software": 0}
    symbols |= {name: op.get(name, default) for name, default in spec.get("numbers", {}).items()}
    symbols |= {name: op[name] for name in spec.get("integers", ())}
    symbols |= {name: op.get(name, 0) for name in spec.get("optional_integers", ())}
    symbols |= {name: int(op.get(name, False)) for name in spec.get("flags", ())}
    for name in (*spec.get("vectors", ()), *spec.get("optional_vectors", ())):
        symbols[f"has_{name}"] = int(op.get(name) is not None)
    out = values[op["out"]] if "out" in op else None
    if out:
        reads = [values[op[name]] for name in spec.get("reads", {})]
        weighed = bool(spec.get("weights")) and bool(reads)
        takes_last = out["shape"][0] == "R" and not (not weighed and reads and reads[0]["shape"][0] == "R")
        symbols |= {"last_rows": int(takes_last), "K": out["shape"][1], "K_REST": out["shape"][1] % 4}
        source = values[op[spec["via"]]] if "via" in spec else reads[0] if weighed else out
        symbols |= activation_symbols(source["dtype"])
        if "via" in spec:
            symbols |= shared_symbols(source["shape"][1], symbols["PLANES"])
    if "logits" in op:
        symbols["V"] = values[op["logits"]]["shape"][1]
    if "kv_heads" in op:
        all_heads = op["heads"] + 2 * op["kv_heads"]
        group = op["heads"] // op["kv_heads"]
        symbols |= {"ALL_HEADS": all_heads, "QKV": all_heads * op["head_dim"], "D_REST": op["head_dim"] % 16}
        symbols |= {"GROUP_HEADS": group, "GROUP_DIMS": group * op["head_dim"], "PART_VECTORS": op["head_dim"] // 4 + 1}
        symbols |= cache_symbols(kv, op["head_dim"], capacity)
    return symbols


def params_bytes(kernel: Kernel, symbols: Mapping[str, Any]) -> bytes:
    """The parameter block: one u32 or f32 a parameter, at offset 4 x index."""
    formats = {"u32": "<I", "f32": "<f"}
    return b"".join(struct.pack(formats[kind], evaluate(dim, symbols)) for _, kind, dim in kernel.params)


def constants(kernel: Kernel, symbols: Mapping[str, Any]) -> dict[str, int | float]:
    """Override values; a symbol named like a tuned override replaces its default."""
    chosen = {name: symbols[name] for name in kernel.tuned if name in symbols}
    return override_values(kernel, symbols) | chosen


def binding_bytes(kernel: Kernel, symbols: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of each storage binding."""
    return {b.name: element_count(b.shape, symbols) * DTYPE_BYTES[b.dtype] for b in kernel.bindings}


def workgroups(kernel: Kernel, symbols: Mapping[str, Any]) -> tuple[int, int, int]:
    """Workgroups to dispatch; more than 65535 along x are folded over x and y."""
    x, y, z = (int(evaluate(dim, {**symbols, **constants(kernel, symbols)})) for dim in kernel.dispatch)
    if x > _MAX_GROUPS:
        y = -(-x // _MAX_GROUPS)
        x = -(-x // y)
    return x, y, z
