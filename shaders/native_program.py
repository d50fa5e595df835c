"""A program on the GPU: buffers for its values, and each operation as kernels with bind groups made once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import wgpu

from . import reference
from .contract import INTEGER_ACTIVATIONS, ContractError, Kernel, document, kernels, op_spec, quotient_up, tuned_for
from .native_device import FIRST_STORAGE_BINDING, Device
from .native_errors import DeviceUnsupported
from .native_recorder import Dispatch
from .native_tuning import Choices, Setting
from .native_weights import Piece, WeightStore
from .rewrite import rewrite
from .symbols import Symbols, cache_symbols, constants, op_symbols, params_bytes, workgroups

_SPARE_STRIDE = 256
_SPARE_BYTES = 16 * _SPARE_STRIDE
#: Most tokens of a step that verifies drafts.
MOST_VERIFIED: int = document()["constants"]["most_drafted"]
#: Fewest and most tokens of each kind of step, which has operations of its own: one token; many, of a prompt; a few,
#: that verify drafts and have as many rows of logits.
STEP_KINDS = {"one": (1, 1), "many": (2, 65536), "few": (2, MOST_VERIFIED)}
#: Up to so many keys a step may be rewritten in other ways than above it.
SHORT_KEYS = min(rule["most_keys"] for rule in document()["rewrites"] if "most_keys" in rule)


@dataclass
class Launch:
    """One kernel of one operation on one piece of its weight."""

    kernel: Kernel
    symbols: Symbols
    pipeline: wgpu.GPUComputePipeline
    bind_group: wgpu.GPUBindGroup
    params: wgpu.GPUBuffer
    grids: dict[tuple[int, int, int], tuple[int, int, int]] = field(default_factory=dict)

    def constants(self) -> Mapping[str, int | float]:
        """What the pipeline was made with."""
        return constants(self.kernel, self.symbols)

    def grid(self, lead: int, rows: int, keys: int) -> tuple[int, int, int]:
        """Workgroups for ``lead`` rows of output, R ``rows`` and tokens that see at most ``keys`` keys."""
        known = (lead, rows, keys)
        if known not in self.grids:
            self.grids[known] = workgroups(self.kernel, self.symbols | {"T": lead, "R": rows, "KEYS": keys})
        return self.grids[known]


class Buffers:
    """Everything on the GPU but weights: values, KV caches, tables, and what a step reads and writes.

    tokens: the most that T will be, but in a step that verifies drafts. verified: the most of such a step, 1 where
    there is none; there is room for the logits of as many rows.
    """

    def __init__(
        self, device: Device, program: Mapping[str, Any], kv: str, capacity: int, tokens: int, verified: int, limit: int
    ):
        self._device, self._limit = device, limit
        tokens = max(tokens, verified)
        vocabulary = program["values"][program["greedy"][0]["logits"]]["shape"][1]
        self.caches = {name: self._cache(name, spec, kv, capacity) for name, spec in program["caches"].items()}
        self.tables = {name: self._table(name, spec, capacity) for name, spec in program["tables"].items()}
        self.runtime = {
            "@step": device.step_buffer(),
            "@ids": self._storage(4 * tokens, "ids", ""),
            "@ring": self._storage(4 * document()["constants"]["ring"], "ring", ""),
            "@seen": self._storage(4 * quotient_up(vocabulary, 32), "seen", ""),
            "@sampling": self._storage(4 * 8, "sampling", ""),
            "@picks": self._storage(picks_bytes(vocabulary, verified), "picks", ""),
            **{name: self._storage(size, name[1:], "") for name, size in weights_bytes(vocabulary, verified).items()},
            "@parts": self._storage(
                parts_bytes(program, capacity, verified), "attention parts", "choose a smaller context"
            ),
        }
        self.spares = {kind: device.storage(_SPARE_BYTES, f"spare to {kind}") for kind in ("read", "write")}
        self._program = program
        self._tokens = tokens
        self.values: dict[str, dict[str, wgpu.GPUBuffer]] = {}
        self.make_values(verified)

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
    """One operation of a step. Its kernels are chosen, and bound, at the first step that wants them."""

    def __init__(
        self, op: Mapping[str, Any], program: Mapping[str, Any], store: WeightStore, known: Symbols, choices: Choices
    ):
        self.op, self._choices = op, choices
        #: ``T`` or ``R``: what the operation's output has rows of.
        self.lead = program["values"][op["out"]]["shape"][0] if "out" in op else "R" if "logits" in op else "T"
        self._store = store
        self._symbols = known
        self._spec = op_spec(op["op"])
        self._launches: dict[str, list[Launch]] = {}
        self._chosen: dict[int, list[Launch]] = {}

    def symbols(self) -> list[Symbols]:
        """Symbols of each piece of the weight, or of the operation alone."""
        pieces = self._store.pieces[self.op["w"]] if "w" in self.op else []
        return [self._symbols | piece.symbols for piece in pieces] or [self._symbols]

    def launches(self, device: Device, buffers: Buffers, lead: int) -> list[Launch]:
        """The kernels for ``lead`` rows of output, one for each piece of the weight."""
        if lead not in self._chosen:
            kernel, tuned = self._choices.choose(self.op["op"], self.symbols()[0] | {"T": lead})
            if kernel.name not in self._launches:
                self._launches[kernel.name] = self._bound(device, buffers, kernel, tuned)
            self._chosen[lead] = self._launches[kernel.name]
        return self._chosen[lead]

    def launches_with(self, device: Device, buffers: Buffers, setting: Setting) -> list[Launch]:
        """The same for one row of output with what is tried; who tries it frees the ``params`` of the launches."""
        kernel = next(one for one in kernels() if one.name == setting.kernel)
        return self._bound(device, buffers, kernel, setting.tuned)

    def _bound(self, device: Device, buffers: Buffers, kernel: Kernel, tuned: Mapping[str, int]) -> list[Launch]:
        pieces: list[Piece | None] = [*self._store.pieces[self.op["w"]]] if "w" in self.op else [None]
        defaults = tuned_for(kernel, software=True) if device.software else {}
        return [
            self._bind(device, buffers, kernel, {**known, **defaults, **tuned}, piece)
            for known, piece in zip(self.symbols(), pieces, strict=True)
        ]

    def forget(self) -> None:
        """Drop the bind groups: a buffer that they name has been replaced."""
        for launch in (launch for launches in self._launches.values() for launch in launches):
            launch.params.destroy()
        self._launches.clear()
        self._chosen.clear()

    def _bind(self, device: Device, buffers: Buffers, kernel: Kernel, symbols: Symbols, piece: Piece | None) -> Launch:
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
        if "+" in source:
            vectors = [self.op[field] for field in source.split("+") if self.op.get(field)]
            return self._store.joined(vectors) if len(vectors) == source.count("+") + 1 else None
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
    """All sections of a program, for each kind of step, ready to be encoded."""

    def __init__(
        self,
        device: Device,
        program: Mapping[str, Any],
        store: WeightStore,
        buffers: Buffers,
        kv: str,
        capacity: int,
        choices: Choices | None = None,
    ):
        self.device, self.buffers, self._program, self._store = device, buffers, program, store
        self.choices = choices or Choices()
        self._kv, self._capacity = kv, capacity
        self._sections: dict[tuple[str, bool, str], list[Operation]] = {}
        self._plain: dict[tuple[str, int], Operation] = {}
        self._steps: dict[tuple, list[Dispatch]] = {}

    def dispatches(
        self, sections: Sequence[str], tokens: int, rows: int, keys: int, verifies: bool = False
    ) -> list[Dispatch]:
        """(launch, workgroups) of a step of these sections, made once for each size.

        keys: at least as many as its last token sees. verifies: whether it verifies drafts.
        """
        kind = "one" if tokens == 1 else "few" if verifies else "many"
        rounded = self._key_count(keys)
        known = (*sections, kind, tokens, rows, rounded)
        if known not in self._steps:
            self._steps[known] = [
                (launch, launch.grid(lead, rows, rounded))
                for section in sections
                for operation in self._operations(kind, rounded > SHORT_KEYS, section)
                for lead in [tokens if operation.lead == "T" else rows]
                for launch in operation.launches(self.device, self.buffers, lead)
            ]
        return self._steps[known]

    def decode_operations(self) -> list[list[Operation]]:
        """Those of a decode step that may run again and again, of steps with few keys and of all others."""
        return [
            [one for section in ("body", "logits") for one in self._operations("one", is_long, section)]
            for is_long in (False, *([True] if self._capacity > SHORT_KEYS else []))
        ]

    def one_operation(self, section: str, index: int, tokens: int, rows: int) -> list[Dispatch]:
        """(launch, workgroups) of one operation as the program has it."""
        place = (section, index)
        if place not in self._plain:
            self._plain[place] = self._operation(self._program[section][index])
        operation = self._plain[place]
        lead = tokens if operation.lead == "T" else rows
        launches = operation.launches(self.device, self.buffers, lead)
        return [(launch, launch.grid(lead, rows, self._capacity)) for launch in launches]

    def _key_count(self, keys: int) -> int:
        """Keys rounded up to a power of two, so that few lists of dispatches are made."""
        chunk: int = document()["constants"]["key_chunk"]
        return min(max(chunk, 1 << (keys - 1).bit_length()), quotient_up(self._capacity, chunk) * chunk)

    def _operations(self, kind: str, is_long: bool, section: str) -> list[Operation]:
        known = (kind, is_long, section)
        if known not in self._sections:
            later = self._program["logits"] if section == "body" else []
            keys = self._capacity if is_long else SHORT_KEYS
            runs = partial(self._runs, kind=kind)
            ops = rewrite(self._program[section], later, runs, self.device.software, keys)
            self._sections[known] = [self._operation(op, kind) for op in ops]
        return self._sections[known]

    def can_verify(self) -> bool:
        """Whether kernels run the program for all numbers of tokens of a step that verifies drafts."""
        return all(
            self._runs(operation.op, "few")
            for is_long in {False, self._capacity > SHORT_KEYS}
            for section in ("body", "logits", "greedy", "random")
            for operation in self._operations("few", is_long, section)
        )

    def _operation(self, op: Mapping[str, Any], kind: str = "one") -> Operation:
        known = op_symbols(op, self._program["values"], self._kv, self._capacity)
        known |= {"software": int(self.device.software), "few": int(kind == "few")}
        return Operation(op, self._program, self._store, known, self.choices)

    def _runs(self, op: Mapping[str, Any], kind: str) -> bool:
        """Whether kernels run an operation for all numbers of tokens of a kind of step."""
        operation = self._operation(op, kind)
        try:
            for lead in _leads(kind, operation.lead):
                self.choices.first(op["op"], operation.symbols()[0] | {"T": lead})
        except ContractError:
            return False
        return True

    def operations(self) -> Iterator[Operation]:
        """All operations that were made."""
        for operations in self._sections.values():
            yield from operations
        yield from self._plain.values()

    def forget(self) -> None:
        """Drop all bind groups."""
        self._steps.clear()
        for operation in self.operations():
            operation.forget()

    def close(self) -> None:
        """Free all buffers."""
        self.forget()
        self.buffers.close()


def _leads(kind: str, lead: str) -> Sequence[int]:
    """Numbers of rows of output, ``T`` or ``R``, that decide whether kernels run a kind of step."""
    least, most = STEP_KINDS[kind if lead == "T" or kind == "few" else "one"]
    return range(least, most + 1) if kind == "few" else (least, most)


def picks_bytes(vocabulary: int, rows: int) -> int:
    """Bytes of what ``pick`` and ``draw`` leave for ``accept``: a key and an id a part and row of logits."""
    return 8 * rows * max(quotient_up(vocabulary, part) for part in _part_sizes())


def weights_bytes(vocabulary: int, rows: int) -> dict[str, int]:
    """Bytes of what ``weigh`` leaves of rows for ``draw``: 256 sums of two words a part, and a key a logit."""
    counts = [(quotient_up(vocabulary, part), part) for part in _part_sizes()]
    return {
        "@bins": rows * max(4 * 256 * 2 * parts for parts, _ in counts),
        "@keys": rows * max(4 * parts * part for parts, part in counts),
    }


def _part_sizes() -> list[int]:
    """Logits of a part, of each operation that has parts of them."""
    return [op["part"] for rule in document()["rewrites"] for op in rule["into"] if "part" in op]


def parts_bytes(program: Mapping[str, Any], capacity: int, tokens: int) -> int:
    """Bytes of what ``rope_attention`` leaves of tokens for ``attention_merge``, over all layers the most."""
    chunks = tokens * quotient_up(capacity, document()["constants"]["key_chunk"])
    sizes = [16 * chunks * op["heads"] * (op["head_dim"] // 4 + 1) for op in program["body"] if op["op"] == "attention"]
    return max(sizes, default=0)
