"""Runs a program on the native GPU through wgpu: prefill in chunks, decode with the choice of tokens on the GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from .contract import INTEGER_ACTIVATIONS, ContractError, constant
from .drafts import PromptLookup
from .forced import Forced
from .native_cases import require_sound
from .native_device import Device, shared_device
from .native_errors import ContextFull, DeviceUnsupported, NativeError, NumbersBroken, OutOfDeviceMemory
from .native_program import MOST_VERIFIED, SHORT_KEYS, Buffers, GpuProgram, parts_bytes
from .native_recorder import record
from .native_timing import Tuning, constants_in_force, tune
from .native_tuning import Choices, open_memory
from .native_waves import WAYS, Drafting, waves
from .native_weights import WeightStore
from .program import check_context
from .sampling import Sampling
from .weights import WeightTensor

__all__ = ["Device", "NativeError", "NativeModel", "shared_device"]

#: Most logits that are kept on the GPU at once for evaluation, in bytes.
_EVALUATION_BYTES = 64 << 20
_STEPS_PER_SUBMIT = 8


class NativeModel:
    """A program with its weights on the GPU and a KV cache of ``capacity`` tokens.

    program: parsed ``program.json``, already checked. tensors: name -> WeightTensor. kv: ``f32``, ``f16`` or
    ``q8``. max_tokens_per_step: tokens of a prefill chunk. binding_limit: most bytes of a buffer that a kernel
    sees, the device's by default; a taller matrix lies in several buffers. keep_logits: ``generate`` yields the
    logits of each step, which costs a read-back a token. forced: kernels that a person forces. identity: of the
    weights, under which the constants that are chosen by timing are remembered; without one nothing is timed.
    speculate: one of ``native_waves.WAYS``, whether drafts are guessed and verified, which changes no token; the
    attribute may be set from answer to answer, to verify none meanwhile. Raises a NativeError, or ContractError if the
    model has fewer positions than ``capacity``.
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
        forced: Forced | None = None,
        identity: str = "",
        speculate: str = "off",
    ):
        if speculate not in WAYS:
            raise ValueError(f"speculate is {speculate!r}, expected one of {', '.join(WAYS)}")
        check_context(program, lambda name: tensors[name].rows, capacity)
        self.program, self.capacity, self.kv, self.keep_logits = program, capacity, kv, keep_logits
        self.device = device or shared_device()
        require_sound(self.device)
        self.position = 0
        self._chunk = min(max_tokens_per_step, capacity)
        self._logits_name = program["greedy"][0]["logits"]
        self.vocabulary = program["values"][self._logits_name]["shape"][1]
        limit = min(binding_limit or self.device.binding_limit, self.device.binding_limit)
        self._most_rows = max(1, min(_EVALUATION_BYTES, limit) // (4 * self.vocabulary))
        # A software renderer has no time to gain from drafts, nor has who waits for the logits of every step.
        self.speculate = "off" if speculate == "auto" and (self.device.software or keep_logits) else speculate
        #: Most tokens that are verified at a time; 1: no drafts are.
        self.most_verified = 1 if self.speculate == "off" else self._room_to_verify(limit)
        self._rows = self.most_verified
        self._store = WeightStore(self.device, limit)
        self._gpu: GpuProgram | None = None
        try:
            for weight in tensors.values():
                self._store.add(weight)
            self._store.finish()
            buffers = Buffers(self.device, program, kv, capacity, self._chunk, self.most_verified, limit)
            choices = Choices(forced or Forced(), self.device.features)
            self._gpu = GpuProgram(self.device, program, self._store, buffers, kv, capacity, choices)
            if choices.forced.off:
                self._check_that_it_runs()
            #: What was chosen by timing, and how long it took.
            self.tuning = self._tune(identity) if identity and not self.device.software else Tuning()
            self.drafting = Drafting(self, PromptLookup(), self.speculate)
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

    def kernel_constants(self) -> dict[str, dict[str, int]]:
        """Constants in force of the kernels that may be timed, by kind of operation."""
        return constants_in_force(self._live)

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
        self.set_sampling(options, [*history, *ids])
        choose = "greedy" if options.greedy else "random"
        for start, part in self._chunks(ids, self._chunk):
            last = start + len(part) == len(ids)
            self._append(part, 1 if last else 0, choose if last else "")
        speculation = self.drafting.begin(self.speculate)
        for wave in waves(self, choose, max_tokens, [*history, *ids], speculation):
            logits = self._read_logits(len(wave)) if self.keep_logits else [None] * len(wave)
            for index, token in enumerate(wave):
                if index:
                    self.position += 1  # the token before this one is in the cache
                if token == constant("invalid_id"):
                    raise NumbersBroken(
                        f"the greatest logit at position {self.position} is NaN or infinite",
                        "run the pack with --backend reference; if that works, report the device",
                    )
                yield token, logits[index]
                if token in stop:
                    return

    # --- steps of an answer, for native_waves and for measuring ------------------------------------------------

    def verify(self, ids: Sequence[int], choose: str, produced: int) -> list[int]:
        """One step for the token that was chosen last and for drafts after it, at most ``most_verified`` in all.

        The last token is not in the cache yet. What is chosen is what decoding one by one chooses: drafts are taken as
        long as they are that, and one token comes after them; those are returned, and decoding goes on after them. The
        position stays, as in ``decode``. choose: ``greedy`` or ``random``; produced: ids chosen since the prompt.
        Raises ContextFull, and ValueError for more tokens.
        """
        if len(ids) > self.most_verified:
            raise ValueError(f"{len(ids)} tokens are to be verified, expected at most {self.most_verified}")
        [(_, tokens)] = self._chunks(ids, len(ids))
        self._run_step(tokens, ["body", "logits", choose], rows=len(ids), produced=produced, verifies=True)
        ring = self.chosen(produced, len(ids))
        # What the ring has beyond the first one that differs was not chosen now.
        taken = next((row for row, token in enumerate(ids[1:], 1) if ring[row - 1] != token), len(ids))
        return ring[:taken]

    def decode(self, steps: int, choose: str) -> None:
        """Steps of one token each; every one feeds the next on the GPU, which works while more are recorded."""
        dispatches = self._live.dispatches(["body", "logits", choose], 1, 1, self.position + steps)
        for first in range(0, steps, _STEPS_PER_SUBMIT):
            self._run(dispatches, min(_STEPS_PER_SUBMIT, steps - first))

    def chosen(self, produced: int, count: int) -> list[int]:
        """The ids that the GPU chose, numbers ``produced`` .. ``produced + count - 1`` of this answer."""
        ring = self.device.read(self._live.buffers.runtime["@ring"], "<u4", constant("ring"))
        return [int(ring[(produced + index) % len(ring)]) for index in range(count)]

    def can_verify(self) -> bool:
        """Whether kernels run steps that verify drafts."""
        return self._live.can_verify()

    def logits_at(self, position: int, ids: Sequence[int]) -> np.ndarray:
        """Logits f32 ``[len(ids), V]`` of tokens that go through the model as drafts do, written over the cache."""
        self.position = position
        try:
            [(_, tokens)] = self._chunks(ids, len(ids))
            self._run_step(tokens, ["body", "logits"], rows=len(ids), verifies=True)
            return self._read_logits(len(ids))
        finally:
            self.position = 0

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

    def _tune(self, identity: str) -> Tuning:
        memory = open_memory(self.device.wgpu.adapter.info, identity)
        try:
            return tune(self.device, self._live, memory, self._first_logits)
        finally:
            self.position = 0

    def _first_logits(self) -> np.ndarray:
        """Logits f32 ``[1 or 2, V]`` of one token, before and beyond the keys at which steps are rewritten."""
        found = []
        for self.position in (start for start in (0, SHORT_KEYS) if start < self.capacity):
            self._append(np.array([1 % self.vocabulary], dtype="<u4"), 1)
            found.append(self._read_logits(1))
        return np.concatenate(found)

    def _check_that_it_runs(self) -> None:
        """Raise DeviceUnsupported if kernels that are left out leave an operation without any."""
        try:
            for tokens in {1, min(2, self._chunk)}:
                self._live.dispatches(["body", "logits", "greedy", "random"], tokens, 1, self.capacity)
        except ContractError as error:
            raise DeviceUnsupported(str(error), "leave out fewer kernels") from error

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
        sections = [section for section in ("body", "logits" if rows else "", choose) if section]
        self._run_step(chunk, sections, max(rows, 1))
        self.position += len(chunk)

    def _run_step(
        self, tokens: np.ndarray, sections: Sequence[str], rows: int, produced: int = 0, verifies: bool = False
    ) -> None:
        count = len(tokens)
        self.device.write(self._live.buffers.runtime["@ids"], tokens)
        self._write_step(count, rows, produced)
        self._run(self._live.dispatches(sections, count, rows, self.position + count, verifies))

    def _run(self, dispatches: list, times: int = 1) -> None:
        encoder = self.device.wgpu.create_command_encoder()
        compute = encoder.begin_compute_pass()
        record(compute, dispatches, times)
        compute.end()
        self.device.submit(encoder)

    def _write_step(self, tokens: int, rows: int, produced: int = 0) -> None:
        step = np.array([self.position, tokens, rows, produced], dtype="<u4")
        self.device.write(self._live.buffers.runtime["@step"], step)

    def _read_logits(self, rows: int) -> np.ndarray:
        buffer = self._live.buffers.values[self._logits_name][""]
        return self.device.read(buffer, "<f4", rows * self.vocabulary).reshape(rows, self.vocabulary)

    def set_sampling(self, options: Sampling, ids: Sequence[int]) -> None:
        """How the next tokens are chosen. ids: that count as seen."""
        self.device.write(self._live.buffers.runtime["@sampling"], options.words())
        seen = np.zeros(-(-self.vocabulary // 32) * 32, dtype=bool)
        seen[self._in_vocabulary(ids)] = True
        self.device.write(self._live.buffers.runtime["@seen"], np.packbits(seen, bitorder="little"))

    def _room_to_verify(self, limit: int) -> int:
        most = min(MOST_VERIFIED, self.capacity)
        fits = most <= self._most_rows and parts_bytes(self.program, self.capacity, most) <= limit
        return most if fits else 1

    def _make_room_for_logits(self, rows: int) -> None:
        if rows > self._rows:
            self._live.forget()
            self._live.buffers.make_values(rows)
            self._rows = rows

    def _in_vocabulary(self, ids: Sequence[int]) -> np.ndarray:
        tokens = np.asarray(ids, dtype=np.int64)
        if tokens.size == 0 or tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise ValueError(f"token ids must be 0 to {self.vocabulary - 1}, found {list(ids)[:8]}")
        return tokens
