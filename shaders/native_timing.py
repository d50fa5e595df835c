"""Times the kernels of a loaded model on the native GPU, for ``native_tuning``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import wgpu

from .contract import constant
from .native_device import Device
from .native_program import GpuProgram, Launch, Operation
from .native_recorder import Dispatch, record
from .native_tuning import BUDGET_MS, Memory, Setting, choose_fastest, kind_of

#: After so many seconds no more candidates are compiled; what is left waits for the next load.
_COMPILE_SECONDS = 2.0


@dataclass
class Tuning:
    """What a load chose. remembered: kinds that an earlier load chose; timed: those that this one did."""

    remembered: int = 0
    timed: int = 0
    measure_ms: float = 0.0
    compile_ms: float = 0.0


@dataclass
class _Kind:
    """Operations of a decode step that the same kernel runs on matrices of one shape, and what may be tried."""

    settings: list[Setting]
    operations: list[Operation]
    #: For each setting that compiles, its launches.
    launches: dict[int, list[Launch]] = field(default_factory=dict)


def tune(
    device: Device,
    program: GpuProgram,
    memory: Memory | None,
    first_logits: Callable[[], np.ndarray],
    *,
    now: Callable[[], float] = time.perf_counter,
    budget_ms: float = BUDGET_MS,
) -> Tuning:
    """Choose the constants of a model whose values and caches hold nothing that is kept.

    first_logits: runs decode steps as the model would; a choice that changes a bit of them is dropped. now: seconds.
    """
    choices, result, kinds = program.choices, Tuning(), _kinds(program)
    if memory:
        known = memory.recall({key: kind.settings for key, kind in kinds.items()})
        choices.chosen |= known
        result.remembered = len(known)
    waiting = {key: kind for key, kind in kinds.items() if key not in choices.chosen}
    if not waiting:
        return result
    before = first_logits()  # the defaults are compiled, and have run
    began = now()
    _compile(device, program, waiting, lambda: now() - began < _COMPILE_SECONDS)
    compiled = now()
    try:
        decided = _measure(device, program, waiting, now, budget_ms)
    finally:
        for launch in (one for kind in waiting.values() for launches in kind.launches.values() for one in launches):
            launch.params.destroy()
    _take(program, waiting, decided, before, first_logits)
    result.timed, result.compile_ms = len(decided), 1000 * (compiled - began)
    result.measure_ms = 1000 * (now() - compiled)
    if memory and decided:
        memory.remember({key: setting for key, setting in choices.chosen.items() if key in kinds})
    return result


def constants_in_force(program: GpuProgram) -> dict[str, dict[str, int]]:
    """Kind -> timed constants of the kernels of decode steps."""
    found = {}
    for operation in (operation for operations in program.decode_operations() for operation in operations):
        for launch in operation.launches(program.device, program.buffers, 1):
            if launch.kernel.timed:
                values = launch.constants()
                names = launch.kernel.timed
                found[kind_of(launch.kernel, launch.symbols)] = {name: int(values[name]) for name in names}
    return found


def _kinds(program: GpuProgram) -> dict[str, _Kind]:
    kinds: dict[str, _Kind] = {}
    for operations in program.decode_operations():
        here: dict[str, _Kind] = {}
        for operation in operations:
            symbols = operation.symbols()[0] | {"T": 1}
            name = operation.op["op"]
            settings = program.choices.settings(name, symbols)
            if len(settings) > 1:
                key = kind_of(program.choices.first(name, symbols), symbols)
                here.setdefault(key, _Kind(settings, [])).operations.append(operation)
        kinds = here | kinds
    return kinds


def _compile(device: Device, program: GpuProgram, kinds: Mapping[str, _Kind], goes_on: Callable[[], bool]) -> None:
    """Bind the candidates of each kind; a kind that comes too late stays without any."""
    for kind in kinds.values():
        if not goes_on():
            return
        for index, setting in enumerate(kind.settings):
            try:
                kind.launches[index] = [
                    launch
                    for operation in kind.operations
                    for launch in operation.launches_with(device, program.buffers, setting)
                ]
            except wgpu.GPUError:  # a candidate that does not compile here is out of the race
                if index == 0:
                    raise


def _measure(
    device: Device, program: GpuProgram, kinds: Mapping[str, _Kind], now: Callable[[], float], budget_ms: float
) -> dict[str, Setting]:
    began = now()
    device.write(program.buffers.runtime["@step"], np.array([0, 1, 1, 0], dtype="<u4"))
    keys = [key for key, kind in kinds.items() if 0 in kind.launches]
    lists: list[list[tuple[int, list[Dispatch]]]] = [
        [
            (index, [(launch, launch.grid(1, 1, constant("key_chunk"))) for launch in launches])
            for index, launches in kinds[key].launches.items()
        ]
        for key in keys
    ]

    def timed(kind: int, setting: int, rounds: float) -> float:
        return _time(device, program, lists[kind][setting][1], rounds, now)

    left = budget_ms - 1000 * (now() - began)
    found = choose_fastest(
        [(key, len(some)) for key, some in zip(keys, lists, strict=True)], timed, lambda: 1000 * now(), left
    )
    return {
        key: kinds[key].settings[some[found[key]][0]] for key, some in zip(keys, lists, strict=True) if key in found
    }


def _time(
    device: Device, program: GpuProgram, dispatches: list[Dispatch], rounds: float, now: Callable[[], float]
) -> float:
    """Milliseconds of some rounds of dispatches, or of a part of one."""
    if rounds < 1:
        dispatches = dispatches[: max(1, -int(-rounds * len(dispatches) // 1))]
    encoder: Any = device.wgpu.create_command_encoder()
    compute = encoder.begin_compute_pass()
    record(compute, dispatches, max(1, round(rounds)))
    compute.end()
    commands = encoder.finish()
    began = now()
    device.queue.submit([commands])
    device.read(program.buffers.runtime["@step"], "<u4", 4)
    return 1000 * (now() - began)


def _take(
    program: GpuProgram,
    kinds: Mapping[str, _Kind],
    decided: Mapping[str, Setting],
    before: np.ndarray,
    first_logits: Callable[[], np.ndarray],
) -> None:
    program.choices.chosen.update(decided)
    program.forget()
    defaults = {key: kinds[key].settings[0] for key in decided}
    if defaults != decided and before.tobytes() != first_logits().tobytes():
        # A device that this makes a difference to runs what the self-check has seen.
        program.choices.chosen.update(defaults)
        program.forget()
