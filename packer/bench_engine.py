"""The one place that reaches into the native executor to measure it: recording, counting, timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu

from shaders.contract import kernels
from shaders.native import NativeModel
from shaders.native_device import Device
from shaders.native_errors import OutOfDeviceMemory
from shaders.native_recorder import record as record_dispatches
from shaders.symbols import constants, params_bytes, workgroups

if TYPE_CHECKING:
    from .bench_native import Sizes

#: Command lists of a timing, at most: their memory is the driver's.
_MOST_ROUNDS = 4096
_CPU_STEPS = 16
#: Workgroups that share a buffer: the best of these counts.
_READERS = (1024, 4096, 16384)
_NOISE_BYTES = 8 << 20
#: Tokens of the steps whose costs are compared.
_VERIFIED = (1, 2, 4, 8)
_LEAST_BYTES = 1 << 20


def record(model: NativeModel, sections: Sequence[str], tokens: int) -> wgpu.GPUCommandBuffer:
    """A command list of some sections of the model's program for a step of ``tokens``."""
    encoder = model.device.wgpu.create_command_encoder()
    compute = encoder.begin_compute_pass()
    record_dispatches(compute, model._live.dispatches(sections, tokens, 1, tokens), 1)
    compute.end()
    return encoder.finish()


def cpu_seconds(model: NativeModel, sizes: Sizes) -> float:
    """Seconds that the processor takes to record and submit a decode step."""
    model.truncate(0)
    model.prefill([0])
    steps, times = min(_CPU_STEPS, sizes.tokens, model.capacity - 1), []
    for _ in range(sizes.repeats + 1):
        model.truncate(1)
        began = time.perf_counter()
        model.decode(steps, "greedy")
        times.append((time.perf_counter() - began) / steps)
        model.chosen(0, 1)
    return median(times[1:])


def verify_seconds(model: NativeModel, context: int, sizes: Sizes) -> list[dict[str, Any]]:
    """Seconds of a greedy step of one token, and of several that are verified where this device verifies drafts.

    ``[{tokens, seconds}]``: time on the GPU with many steps in flight, the wait for a result not in it. context: tokens
    in the cache before, whose numbers do not matter.
    """
    position = max(0, min(context, model.capacity - model.most_verified))
    buffers = model._live.buffers.runtime
    model.device.write(buffers["@ids"], np.zeros(model.most_verified, dtype="<u4"))
    found = []
    for tokens in _VERIFIED if model.drafting.verifies else _VERIFIED[:1]:
        if tokens > model.most_verified:
            break
        step = model._live.dispatches(["body", "logits", "greedy"], tokens, tokens, position + tokens, verifies=True)
        start = model.device.storage(16, "start of a step")
        model.device.write(start, np.array([position, tokens, tokens, 0], dtype="<u4"))

        def encode(step=step, start=start) -> wgpu.GPUCommandBuffer:
            encoder = model.device.wgpu.create_command_encoder()
            # The choice moves the position on: each step begins where the first one did.
            encoder.copy_buffer_to_buffer(start, 0, buffers["@step"], 0, start.size)
            compute = encoder.begin_compute_pass()
            record_dispatches(compute, step, 1)
            compute.end()
            return encoder.finish()

        try:
            found.append({"tokens": tokens, "seconds": median(timings(model.device, encode, sizes))})
        finally:
            start.destroy()
    model.truncate(0)
    return found


def dispatches(model: NativeModel, program: Mapping[str, Any]) -> dict[str, Any]:
    """Dispatches of a decode step: ``dispatchesPerToken`` and ``dispatchesPerLayer``."""
    step = model._live.dispatches(["body", "logits", "greedy"], 1, 1, model.capacity)
    body = model._live.dispatches(["body"], 1, 1, model.capacity)
    embeds = sum(op["op"] in ("embed", "position") for op in program["body"])
    layers = max(1, len(program["caches"]) / 2)
    return {"dispatchesPerToken": len(step), "dispatchesPerLayer": (len(body) - embeds) / layers}


def timings(device: Device, encode: Callable[[], wgpu.GPUCommandBuffer], sizes: Sizes) -> list[float]:
    """Seconds of a round of work on the GPU, of each of several timings.

    Rounds are recorded first, then all are submitted and waited for. The wait is not taken off, so a timing is made
    long enough to drown it. wgpu puts what a round must wait for before the round: inside, products with outputs of
    their own do not wait for each other.
    """
    marker = device.storage(16, "marker")

    def run(rounds: int) -> float:
        lists = [encode() for _ in range(rounds)]
        began = time.perf_counter()
        device.queue.submit(lists)
        device.read(marker, "<u4", 1)
        return time.perf_counter() - began

    try:
        rounds = 1
        took = run(rounds)
        while took < sizes.seconds and rounds < _MOST_ROUNDS:
            factor = max(2, min(16, int(sizes.seconds / max(took, 1e-4)) + 1))
            rounds = min(_MOST_ROUNDS, rounds * factor)
            took = run(rounds)
        end = time.perf_counter() + sizes.budget
        found = [run(rounds) / rounds]
        while len(found) < sizes.repeats and time.perf_counter() < end:
            found.append(run(rounds) / rounds)
        return found
    finally:
        marker.destroy()


def read_bandwidth(device: Device, sizes: Sizes) -> dict[str, Any]:
    """How fast the kernel ``read_bandwidth`` reads a buffer that no cache holds."""
    kernel = next(one for one in kernels() if one.op == "read_bandwidth")
    data = _noise(device, min(sizes.buffer_bytes, device.binding_limit))
    chosen = {"WORKGROUP": min(kernel.tuned["WORKGROUP"])} if device.software else {}
    found = []
    for readers in (16,) if device.software else _READERS:
        symbols = {"N": data.size // 16, "READERS": readers, **chosen}
        params = device.uniform(params_bytes(kernel, symbols), "read params")
        sums = device.storage(4 * readers, "read sums")
        group = device.bind_group(kernel, params, params, [(data, 0, data.size), (sums, 0, 4 * readers)])
        pipeline, grid = device.pipeline(kernel, constants(kernel, symbols)), workgroups(kernel, symbols)

        def encode(group=group, pipeline=pipeline, grid=grid) -> wgpu.GPUCommandBuffer:
            encoder = device.wgpu.create_command_encoder()
            compute = encoder.begin_compute_pass()
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*grid)
            compute.end()
            return encoder.finish()

        found.append(timings(device, encode, sizes))
        sums.destroy()
        params.destroy()
    best, size = min(found, key=median), data.size
    data.destroy()
    return {
        "bytesPerSecond": size / min(best),
        "medianBytesPerSecond": size / median(best),
        "bufferBytes": size,
    }


def _noise(device: Device, size: int) -> wgpu.GPUBuffer:
    """A buffer of random bytes; half as large, and so on, where there is no room."""
    while True:
        try:
            data = device.storage(size, "read data")
            break
        except OutOfDeviceMemory:
            size = size // 512 * 256
            if size < _LEAST_BYTES:
                raise
    noise = np.random.default_rng(0).integers(0, 2**32, _NOISE_BYTES // 4, dtype=np.uint32)
    for at in range(0, size, _NOISE_BYTES):
        device.write(data, noise[: (size - at) // 4], at)
    return data
