"""Runs one kernel case on the native GPU, between guards and over poison."""

from __future__ import annotations

import numpy as np

from . import contract
from .case_kit import Case
from .native_device import Device
from .native_errors import SelfCheckFailed
from .selfcheck import stored_cases
from .symbols import binding_bytes, constants, params_bytes, workgroups

#: NaN as f32, so that whatever reads it shows; outputs have another one around them, so that a NaN that was read
#: and written on does not pass for untouched.
_POISON, _OUTPUT_GUARD = np.uint32(0x7FC0A5A5), np.uint32(0x7FC1B6B6)
_GUARD_BYTES = 256


class WroteOutside(Exception):
    """A kernel wrote beyond the elements that its contract gives it."""


def run_case(device: Device, case: Case) -> dict[str, np.ndarray]:
    """Run a case and return the outputs that it expects, with their dtypes and shapes.

    Every binding lies between guards; the guard behind it is part of the binding, so that a write past the end
    is seen instead of being clamped away. What the case gives no input for is poisoned. Raises WroteOutside.
    """
    kernel = next(k for k in contract.kernels() if k.name == case.kernel)
    sizes = binding_bytes(kernel, case.symbols)
    buffers, images = {}, {}
    for binding in kernel.bindings:
        size = sizes[binding.name]
        guard = _POISON if binding.access == "read" else _OUTPUT_GUARD
        image = np.full((size + 2 * _GUARD_BYTES) // 4, guard, dtype="<u4")
        image[_GUARD_BYTES // 4 : -_GUARD_BYTES // 4] = _POISON
        if binding.name in case.inputs:
            image[_GUARD_BYTES // 4 :][: size // 4] = _words(case, binding.name, size)
        buffers[binding.name], images[binding.name] = device.storage(image.nbytes, binding.name), image
        device.write(buffers[binding.name], image)
    params = device.uniform(params_bytes(kernel, case.symbols), "params")
    step = device.step_buffer()
    device.write(step, np.array(case.step, dtype="<u4"))
    storage = [(buffers[b.name], _GUARD_BYTES, sizes[b.name] + _GUARD_BYTES) for b in kernel.bindings]
    encoder = device.wgpu.create_command_encoder(label=case.name)
    compute = encoder.begin_compute_pass(label=case.name)
    compute.set_pipeline(device.pipeline(kernel, constants(kernel, case.symbols)))
    compute.set_bind_group(0, device.bind_group(kernel, params, step, storage))
    compute.dispatch_workgroups(*workgroups(kernel, case.symbols))
    compute.end()
    device.submit(encoder)
    try:
        return _outputs(device, case, buffers, images)
    finally:
        for buffer in (params, step, *buffers.values()):
            buffer.destroy()


def require_sound(device: Device) -> None:
    """Run the stored cases once a device. Raises SelfCheckFailed with the names of the kernels that fail."""
    if device.self_checked:
        return
    needs = {kernel.name: set(kernel.needs) for kernel in contract.kernels()}
    able = [case for case in stored_cases() if needs[case.kernel] <= device.features]
    failed = {case.kernel for case in able if case.problems(run_case(device, case))}
    if failed:
        raise SelfCheckFailed(
            f"{device.name} computes wrongly: {', '.join(sorted(failed))}",
            "update the GPU driver, or use the reference",
            tuple(sorted(failed)),
        )
    device.self_checked = True


def _words(case: Case, name: str, size: int) -> np.ndarray:
    data = np.ascontiguousarray(case.inputs[name])
    if data.nbytes != size:
        raise ValueError(f"case {case.name}: input {name} has {data.nbytes} bytes, its shape needs {size}")
    return data.reshape(-1).view("<u4")


def _outputs(device: Device, case: Case, buffers: dict, images: dict) -> dict[str, np.ndarray]:
    outputs = {}
    guard = _GUARD_BYTES // 4
    for name, before in images.items():
        after = device.read(buffers[name], "<u4", before.size)
        written = name in case.expected
        if (after[:guard] != before[:guard]).any() or (after[-guard:] != before[-guard:]).any():
            raise WroteOutside(f"case {case.name}: the kernel {case.kernel} wrote outside of {name}")
        if not written and (after != before).any():
            raise WroteOutside(f"case {case.name}: the kernel {case.kernel} wrote to {name}, which it has no use for")
        if written:
            expected = case.expected[name]
            outputs[name] = after[guard:-guard].view(expected.dtype).reshape(expected.shape)
    return outputs
