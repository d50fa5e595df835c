"""A program on the GPU: buffers for its values, and each operation as kernels with bind groups made once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import wgpu

from . import reference
from .contract import INTEGER_ACTIVATIONS, Kernel, document, quotient_up, select, tuned_for
from .native_device import FIRST_STORAGE_BINDING, Device
from .native_errors import DeviceUnsupported
from .native_weights import Piece, WeightStore
from .symbols import Symbols, cache_symbols, constants, op_symbols, params_bytes, workgroups

_SPARE_STRIDE = 256
_SPARE_BYTES = 16 * _SPARE_STRIDE


@dataclass
class Launch:
    """One kernel of one operation on one piece of its weight."""

    kernel: Kernel
    symbols: Symbols
    pipeline: wgpu.GPUComputePipeline
    bind_group: wgpu.GPUBindGroup
    params: wgpu.GPUBuffer
    grids: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def encode(self, compute: wgpu.GPUComputePassEncoder, lead: int) -> None:
        """Dispatch for ``lead`` rows of output."""
        if lead not in self.grids:
            self.grids[lead] = workgroups(self.kernel, self.symbols | {"T": lead})
        compute.set_pipeline(self.pipeline)
        compute.set_bind_group(0, self.bind_group)
        compute.dispatch_workgroups(*self.grids[lead])


class Buffers:
    """Everything on the GPU but weights: values, KV caches, tables, and what a step reads and writes.

    tokens and rows: the most that T and R will be.
    """

    def __init__(
        self, device: Device, program: Mapping[str, Any], kv: str, capacity: int, tokens: int, rows: int, limit: int
    ):
        self._device, self._limit = device, limit
        vocabulary = program["values"][program["greedy"][0]["logits"]]["shape"][1]
        self.caches = {name: self._cache(name, spec, kv, capacity) for name, spec in program["caches"].items()}
        self.tables = {name: self._table(name, spec, capacity) for name, spec in program["tables"].items()}
        self.runtime = {
            "@step": device.step_buffer(),
            "@ids": self._storage(4 * tokens, "ids", ""),
            "@ring": self._storage(4 * document()["constants"]["ring"], "ring", ""),
            "@seen": self._storage(4 * quotient_up(vocabulary, 32), "seen", ""),
            "@sampling": self._storage(4 * 8, "sampling", ""),
        }
        self.spares = {kind: device.storage(_SPARE_BYTES, f"spare to {kind}") for kind in ("read", "write")}
        self._program = program
        self._tokens = tokens
        self.values: dict[str, dict[str, wgpu.GPUBuffer]] = {}
        self.make_values(rows)

    def make_values(self, rows: int) -> None:
        """Buffers of the values; for those of R rows anew, with room for ``rows``."""
        lead = {"T": self._tokens, "R": rows}
        for name, value in self._program["values"].items():
            if name in self.values and value["shape"][0] == "T":
                continue
            for old in self.values.get(name, {}).values():
                old.destroy()
            self.values[name] = self._value(name, value["dtype"], lead[value["shape"][0]], value["shape"][1])

    def _value(self, name: str, dtype: str, rows: int, columns: int) -> dict[str, wgpu.GPUBuffer]:
        action = "lower max_tokens_per_step"
        if dtype not in INTEGER_ACTIVATIONS:
            return {"": self._storage(4 * rows * columns, name, action)}
        blocks = quotient_up(columns, 64)
        planes = 2 if dtype == "a16" else 1
        sizes = {"q": 64 * rows * blocks * planes, "scale": 4 * rows, "sums": 4 * rows * blocks}
        return {plane: self._storage(size, f"{name}.{plane}", action) for plane, size in sizes.items()}

    def _cache(self, name: str, spec: Mapping[str, int], kv: str, capacity: int) -> dict[str, wgpu.GPUBuffer]:
        row_bytes = 4 * spec["heads"] * cache_symbols(kv, spec["head_dim"], capacity)["KV_WORDS"]
        action = f"choose a context of at most {self._limit // row_bytes:,} tokens"
        buffers = {"data": self._storage(capacity * row_bytes, f"cache {name}", action)}
        if kv == "q8":
            buffers["scale"] = self._storage(4 * capacity * spec["heads"], f"cache {name} scales", action)
        return buffers

    def _table(self, name: str, spec: Mapping[str, Any], capacity: int) -> wgpu.GPUBuffer:
        table = reference.rope_table(np.array(spec["inv_freq"]), spec["scale"], capacity)
        buffer = self._storage(table.nbytes, f"table {name}", "choose a smaller context")
        self._device.write(buffer, table)
        return buffer

    def _storage(self, n_bytes: int, label: str, action: str) -> wgpu.GPUBuffer:
        if n_bytes > self._limit:
            raise DeviceUnsupported(
                f"{label} needs a buffer of {n_bytes:,} bytes, the GPU binds {self._limit:,}",
                action,
                n_bytes,
                self._limit,
            )
        return self._device.storage(n_bytes, label)

    def close(self) -> None:
        """Free all buffers."""
        groups = (self.runtime, self.spares, self.tables, *self.caches.values(), *self.values.values())
        for buffer in (buffer for group in groups for buffer in group.values()):
            buffer.destroy()


class Operation:
    """One operation of a program. Its kernels are chosen, and bound, at the first step that wants them."""

    def __init__(self, op: Mapping[str, Any], program: Mapping[str, Any], store: WeightStore, kv: str, capacity: int):
        self.op = op
        #: ``T`` or ``R``: what the operation's output has rows of.
        self.lead = program["values"][op["out"]]["shape"][0] if "out" in op else "R"
        self._store = store
        self._symbols = op_symbols(op, program["values"], kv, capacity)
        self._spec = document()["ops"][op["op"]]
        self._launches: dict[str, list[Launch]] = {}
        self._chosen: dict[int, list[Launch]] = {}

    def launches(self, device: Device, buffers: Buffers, lead: int) -> list[Launch]:
        """The kernels for ``lead`` rows of output, one for each piece of the weight."""
        if lead not in self._chosen:
            pieces: list[Piece | None] = [*self._store.pieces[self.op["w"]]] if "w" in self.op else [None]
            symbols = [self._symbols | (piece.symbols if piece else {}) for piece in pieces]
            kernel = select(self.op["op"], symbols[0] | {"T": lead})
            if kernel.name not in self._launches:
                self._launches[kernel.name] = [
                    self._bind(device, buffers, kernel, known, piece)
                    for known, piece in zip(symbols, pieces, strict=True)
                ]
            self._chosen[lead] = self._launches[kernel.name]
        return self._chosen[lead]

    def forget(self) -> None:
        """Drop the bind groups: a buffer that they name has been replaced."""
        for launch in (launch for launches in self._launches.values() for launch in launches):
            launch.params.destroy()
        self._launches.clear()
        self._chosen.clear()

    def _bind(self, device: Device, buffers: Buffers, kernel: Kernel, symbols: Symbols, piece: Piece | None) -> Launch:
        if device.software:
            symbols = symbols | tuned_for(kernel, software=True)
        storage = []
        for index, binding in enumerate(kernel.bindings, FIRST_STORAGE_BINDING):
            buffer = self._source(buffers, binding.source, piece)
            if buffer is None:
                spare = buffers.spares["read" if binding.access == "read" else "write"]
                storage.append((spare, _SPARE_STRIDE * index, _SPARE_STRIDE))
            else:
                storage.append((buffer, 0, buffer.size))
        params = device.uniform(params_bytes(kernel, symbols), f"{self.op['op']} params")
        group = device.bind_group(kernel, params, buffers.runtime["@step"], storage)
        return Launch(kernel, symbols, device.pipeline(kernel, constants(kernel, symbols)), group, params)

    def _source(self, buffers: Buffers, source: str, piece: Piece | None) -> wgpu.GPUBuffer | None:
        """The buffer that ``from`` of a binding names; None where the operation has none."""
        if source.startswith("@"):
            return buffers.runtime[source]
        name, _, part = source.partition(".")
        if name == "w":
            return piece.buffers[part] if piece else None
        target = self.op.get(name)
        if target is None:
            return None
        if name in self._spec.get("caches", ()):
            return buffers.caches[target].get(part)
        if name in self._spec.get("tables", ()):
            return buffers.tables[target]
        if name in (*self._spec.get("vectors", ()), *self._spec.get("optional_vectors", ())):
            return self._store.vectors[target]
        return buffers.values[target].get(part)


class GpuProgram:
    """All sections of a program, ready to be encoded."""

    def __init__(
        self, device: Device, program: Mapping[str, Any], store: WeightStore, buffers: Buffers, kv: str, capacity: int
    ):
        self._device, self.buffers = device, buffers
        self._sections = {
            name: [Operation(op, program, store, kv, capacity) for op in program[name]]
            for name in ("body", "logits", "greedy", "random")
        }

    def encode(self, compute: wgpu.GPUComputePassEncoder, section: str, tokens: int, rows: int) -> None:
        """Dispatch all operations of a section."""
        for operation in self._sections[section]:
            self._encode(compute, operation, tokens, rows)

    def encode_one(self, compute: wgpu.GPUComputePassEncoder, section: str, index: int, tokens: int, rows: int) -> None:
        """Dispatch one operation."""
        self._encode(compute, self._sections[section][index], tokens, rows)

    def _encode(self, compute: wgpu.GPUComputePassEncoder, operation: Operation, tokens: int, rows: int) -> None:
        lead = tokens if operation.lead == "T" else rows
        for launch in operation.launches(self._device, self.buffers, lead):
            launch.encode(compute, lead)

    def operations(self) -> Iterator[Operation]:
        """All operations of all sections."""
        for operations in self._sections.values():
            yield from operations

    def forget(self) -> None:
        """Drop all bind groups."""
        for operation in self.operations():
            operation.forget()

    def close(self) -> None:
        """Free all buffers."""
        self.forget()
        self.buffers.close()
