"""Runs a program on the native GPU through wgpu: prefill in chunks, decode with the choice of tokens on the GPU."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from .contract import INTEGER_ACTIVATIONS, constant
from .native_cases import require_sound
from .native_device import Device, shared_device
from .native_errors import ContextFull, NativeError, NumbersBroken, OutOfDeviceMemory
from .native_program import Buffers, GpuProgram
from .native_recorder import record
from .native_weights import WeightStore
from .sampling import Sampling
from .weights import WeightTensor

__all__ = ["Device", "NativeError", "NativeModel", "shared_device"]

#: Most logits that are kept on the GPU at once for evaluation, in bytes.
_EVALUATION_BYTES = 64 << 20
#: How long one submit of decode steps may take: a reader sees the words come, and the GPU hardly waits.
_WAVE_SECONDS = 0.05
_STEPS_PER_SUBMIT = 8


class NativeModel:
    """A program with its weights on the GPU and a KV cache of ``capacity`` tokens.

    program: parsed ``program.json``, already checked. tensors: name -> WeightTensor. kv: ``f32``, ``f16`` or
    ``q8``. max_tokens_per_step: tokens of a prefill chunk. binding_limit: most bytes of a buffer that a kernel
    sees, the device's by default; a taller matrix lies in several buffers. keep_logits: ``generate`` yields the
    logits of each step, which costs a read-back a token. Raises a NativeError.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        tensors: Mapping[str, WeightTensor],
        *,
        capacity: int,
        kv: str = "f16",
        max_tokens_per_step: int = 256,
        device: Device | None = None,
        binding_limit: int | None = None,
        keep_logits: bool = False,
    ):
        self.program, self.capacity, self.kv, self.keep_logits = program, capacity, kv, keep_logits
        self.device = device or shared_device()
        require_sound(self.device)
        self.position = 0
        self._chunk = min(max_tokens_per_step, capacity)
        self._logits_name = program["greedy"][0]["logits"]
        self._vocabulary = program["values"][self._logits_name]["shape"][1]
        self._rows = 1
        limit = min(binding_limit or self.device.binding_limit, self.device.binding_limit)
        self._most_rows = max(1, min(_EVALUATION_BYTES, limit) // (4 * self._vocabulary))
        self._store = WeightStore(self.device, limit)
        self._gpu: GpuProgram | None = None
        try:
            for weight in tensors.values():
                self._store.add(weight)
            self._store.finish()
            buffers = Buffers(self.device, program, kv, capacity, self._chunk, self._rows, limit)
            self._gpu = GpuProgram(self.device, program, self._store, buffers, kv, capacity)
        except OutOfDeviceMemory as error:
            self.close()
            weights = sum(weight.resident_bytes for weight in tensors.values())
            raise OutOfDeviceMemory(
                f"{error.message}; the weights need {weights:,} bytes, and a {kv} cache of {capacity:,} tokens",
                error.action,
                weights,
            ) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free all GPU memory of the model."""
        self._store.close()
        if self._gpu:
            self._gpu.close()
            self._gpu = None

    def truncate(self, position: int) -> None:
        """Forget all tokens from ``position`` on; the cache of those before it stays."""
        self.position = min(self.position, position)

    def prefill(self, ids: Sequence[int]) -> None:
        """Append tokens without computing logits. Raises ContextFull."""
        for _, part in self._chunks(ids, self._chunk):
            self._append(part)

    def step(self, ids: Sequence[int], rows: int = 1) -> np.ndarray:
        """Append tokens and return the logits of the last ``rows`` of them, f32 ``[rows, V]``. Raises ContextFull."""
        if not 1 <= rows <= len(ids):
            raise ValueError(f"logits of {rows} rows are wanted, expected 1 to {len(ids)}")
        chunk = min(self._chunk, self._most_rows) if rows > 1 else self._chunk
        self._make_room_for_logits(min(rows, chunk))
        parts: list[np.ndarray] = []
        for start, part in self._chunks(ids, chunk):
            wanted = min(len(part), start + len(part) - (len(ids) - rows))
            self._append(part, max(wanted, 0))
            if wanted > 0:
                parts.append(self._read_logits(wanted))
        return np.concatenate(parts)

    def logits(self, ids: Sequence[int], all_rows: bool = False) -> np.ndarray:
        """Append tokens and return the logits of the last one, or of all of them, f32 ``[rows, V]``."""
        return self.step(ids, len(ids) if all_rows else 1)

    def generate(
        self,
        ids: Sequence[int],
        options: Sampling,
        max_tokens: int,
        stop: Collection[int] = frozenset(),
        history: Sequence[int] = (),
    ) -> Iterator[tuple[int, np.ndarray | None]]:
        """Append ``ids`` and yield ``(id, logits f32 [V] or None)`` for up to ``max_tokens`` new tokens.

        The stop token is yielded too; the last token that was yielded is not in the cache. history: ids that are in
        the cache already; the repetition penalty counts them too. Raises ContextFull and NumbersBroken.
        """
        if max_tokens < 1:
            return
        self._set_sampling(options, [*history, *ids])
        choose = "greedy" if options.greedy else "random"
        for start, part in self._chunks(ids, self._chunk):
            last = start + len(part) == len(ids)
            self._append(part, 1 if last else 0, choose if last else "")
        for wave in self._waves(choose, max_tokens):
            for index, token in enumerate(wave):
                if index:
                    self.position += 1  # the token before this one is in the cache
                if token == constant("invalid_id"):
                    raise NumbersBroken(
                        f"the greatest logit at position {self.position} is NaN or infinite",
                        "run the pack with --backend reference; if that works, report the device",
                    )
                yield token, self._read_logits(1)[0] if self.keep_logits else None
                if token in stop:
                    return

    def _waves(self, choose: str, max_tokens: int) -> Iterator[list[int]]:
        """The ids of one submit after another, until ``max_tokens`` or the end of the cache."""
        yield self._chosen(0, 1)
        produced = steps = 1
        while produced < max_tokens and self.position < self.capacity:
            count = min(steps, max_tokens - produced, self.capacity - self.position)
            start = time.perf_counter()
            self._decode(count, choose)
            wave = self._chosen(produced, count)
            self.position += 1  # the last token of the wave before is in the cache
            produced += count
            if not self.keep_logits:
                fitting = int(_WAVE_SECONDS * count / (time.perf_counter() - start))
                steps = max(1, min(fitting, 2 * steps, constant("ring")))
            yield wave

    # --- one operation at a time, for tests and for finding faults ---------------------------------------------

    def write_value(self, name: str, planes: Mapping[str, np.ndarray]) -> None:
        """Fill a value: plane ``""`` of f32, planes ``q``, ``scale`` and ``sums`` of integer activations."""
        for plane, data in planes.items():
            self.device.write(self._live.buffers.values[name][plane], data)

    def read_value(self, name: str, rows: int) -> dict[str, np.ndarray]:
        """The first rows of a value, in the shapes of kernels.json."""
        value = self.program["values"][name]
        columns, buffers = value["shape"][1], self._live.buffers.values[name]
        if value["dtype"] not in INTEGER_ACTIVATIONS:
            return {"": self.device.read(buffers[""], "<f4", rows * columns).reshape(rows, columns)}
        blocks, planes = -(-columns // 64), 2 if value["dtype"] == "a16" else 1
        return {
            "q": self.device.read(buffers["q"], "<u4", rows * blocks * planes * 16).reshape(rows, blocks, planes, 16),
            "scale": self.device.read(buffers["scale"], "<f4", rows),
            "sums": self.device.read(buffers["sums"], "<i4", rows * blocks).reshape(rows, blocks),
        }

    def run_operation(self, section: str, index: int, tokens: int, rows: int = 1) -> None:
        """Run one operation at the present position on what its values hold."""
        self._write_step(tokens, rows)
        self._run(self._live.one_operation(section, index, tokens, rows))

    # --- inside ------------------------------------------------------------------------------------------------

    @property
    def _live(self) -> GpuProgram:
        if self._gpu is None:
            raise ValueError("the model is closed")
        return self._gpu

    def _chunks(self, ids: Sequence[int], size: int) -> Iterator[tuple[int, np.ndarray]]:
        """(index of the first token, tokens u32) of each chunk of a prompt, all checked before the first."""
        tokens = self._in_vocabulary(ids).astype("<u4")
        if self.position + len(tokens) > self.capacity:
            raise ContextFull(
                f"{self.position + len(tokens):,} tokens do not fit the cache of {self.capacity:,}",
                "shorten the prompt or choose a larger context",
            )
        for start in range(0, len(tokens), size):
            yield start, tokens[start : start + size]

    def _append(self, chunk: np.ndarray, rows: int = 0, choose: str = "") -> None:
        """Run a chunk of a prompt: the body, then logits of the last ``rows`` tokens, then a choice."""
        self.device.write(self._live.buffers.runtime["@ids"], chunk)
        self._write_step(len(chunk), max(rows, 1))
        sections = [section for section in ("body", "logits" if rows else "", choose) if section]
        keys = self.position + len(chunk)
        self._run(self._live.dispatches(sections, len(chunk), max(rows, 1), keys))
        self.position += len(chunk)

    def _decode(self, steps: int, choose: str) -> None:
        """Steps of one token each; every one feeds the next on the GPU, which works while more are recorded."""
        dispatches = self._live.dispatches(["body", "logits", choose], 1, 1, self.position + steps)
        for first in range(0, steps, _STEPS_PER_SUBMIT):
            self._run(dispatches, min(_STEPS_PER_SUBMIT, steps - first))

    def _run(self, dispatches: list, times: int = 1) -> None:
        encoder = self.device.wgpu.create_command_encoder()
        compute = encoder.begin_compute_pass()
        record(compute, dispatches, times)
        compute.end()
        self.device.submit(encoder)

    def _write_step(self, tokens: int, rows: int) -> None:
        self.device.write(self._live.buffers.runtime["@step"], np.array([self.position, tokens, rows, 0], dtype="<u4"))

    def _chosen(self, produced: int, count: int) -> list[int]:
        """The ids that the GPU chose, numbers ``produced`` .. ``produced + count - 1`` of this answer."""
        ring = self.device.read(self._live.buffers.runtime["@ring"], "<u4", constant("ring"))
        return [int(ring[(produced + index) % len(ring)]) for index in range(count)]

    def _read_logits(self, rows: int) -> np.ndarray:
        buffer = self._live.buffers.values[self._logits_name][""]
        return self.device.read(buffer, "<f4", rows * self._vocabulary).reshape(rows, self._vocabulary)

    def _set_sampling(self, options: Sampling, ids: Sequence[int]) -> None:
        self.device.write(self._live.buffers.runtime["@sampling"], options.words())
        seen = np.zeros(-(-self._vocabulary // 32) * 32, dtype=bool)
        seen[self._in_vocabulary(ids)] = True
        self.device.write(self._live.buffers.runtime["@seen"], np.packbits(seen, bitorder="little"))

    def _make_room_for_logits(self, rows: int) -> None:
        if rows > self._rows:
            self._live.forget()
            self._live.buffers.make_values(rows)
            self._rows = rows

    def _in_vocabulary(self, ids: Sequence[int]) -> np.ndarray:
        tokens = np.asarray(ids, dtype=np.int64)
        if tokens.size == 0 or tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise ValueError(f"token ids must be 0 to {self._vocabulary - 1}, found {list(ids)[:8]}")
        return tokens
