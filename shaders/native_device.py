"""The GPU through wgpu: one shared device a process, buffers, and pipelines built from ``kernels.json``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import wgpu

from .contract import Kernel
from .native_errors import DeviceFailed, DeviceMissing, DeviceUnsupported, OutOfDeviceMemory

FOLDER = Path(__file__).parent
FIRST_STORAGE_BINDING = 2
#: Position, tokens, rows, produced.
STEP_WORDS = 4

_STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.COPY_SRC
_UNIFORM = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
#: What any WebGPU device has, and no kernel exceeds (tests/shaders/test_wgsl.py).
_BASE_LIMITS = {
    "max-storage-buffers-per-shader-stage": 8,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroups-per-dimension": 65535,
    "min-storage-buffer-offset-alignment": 256,
}
#: Features that kernels want where a device has them: wgpu's names and those of WebGPU, which kernels.json has.
_FEATURES = {"subgroup": "subgroups"}
_RAISED_LIMITS = ("max-buffer-size", "max-storage-buffer-binding-size")


class Device:
    """A wgpu device with what the kernels need. Raises DeviceUnsupported if a limit is too low."""

    def __init__(self, device: wgpu.GPUDevice):
        self.wgpu = device
        self.queue = device.queue
        self.limits: Mapping[str, int] = device.limits
        self.features = frozenset(_FEATURES.get(name, name) for name in device.features)
        self.name = str(device.adapter.info["device"] or device.adapter.info["description"])
        #: Whether this is a program on the processor, such as lavapipe.
        self.software = device.adapter.info.get("adapter_type") == "CPU"
        self.self_checked = False
        self._modules: dict[str, wgpu.GPUShaderModule] = {}
        self._layouts: dict[str, tuple[wgpu.GPUBindGroupLayout, wgpu.GPUPipelineLayout]] = {}
        self._pipelines: dict[tuple, wgpu.GPUComputePipeline] = {}
        for limit, needed in _BASE_LIMITS.items():
            found = self.limits[limit]
            if found > needed if limit.startswith("min") else found < needed:
                raise DeviceUnsupported(
                    f"{self.name} has {limit} {found}, the kernels need {needed}", "use another GPU", needed, found
                )

    @property
    def binding_limit(self) -> int:
        """Most bytes that a kernel can see of one buffer, a multiple of 256."""
        return min(self.limits[name] for name in _RAISED_LIMITS) // 256 * 256

    def storage(self, n_bytes: int, label: str) -> wgpu.GPUBuffer:
        """A zeroed storage buffer, at least 16 bytes. Raises OutOfDeviceMemory."""
        size = max(16, -(-n_bytes // 16) * 16)
        return self._buffer(size, _STORAGE, label)

    def step_buffer(self) -> wgpu.GPUBuffer:
        """The step buffer, which kernels read as a uniform and the sampler writes."""
        return self._buffer(4 * STEP_WORDS, _STORAGE | _UNIFORM, "step")

    def uniform(self, data: bytes, label: str) -> wgpu.GPUBuffer:
        """A uniform buffer with these bytes, padded to a multiple of 16, at least 16."""
        padded = data.ljust(max(16, -(-len(data) // 16) * 16), b"\0")
        buffer = self._buffer(len(padded), _UNIFORM, label)
        self.queue.write_buffer(buffer, 0, padded)
        return buffer

    def _buffer(self, size: int, usage: int, label: str) -> wgpu.GPUBuffer:
        try:
            return self.wgpu.create_buffer(size=size, usage=usage, label=label)
        except wgpu.GPUError as error:
            raise OutOfDeviceMemory(
                f"{self.name} gave no buffer of {size:,} bytes for {label} ({_last_line(error)})",
                "close other programs that use the GPU, or choose a smaller context or model",
                size,
            ) from error

    def write(self, buffer: wgpu.GPUBuffer, data: np.ndarray, offset: int = 0) -> None:
        """Copy an array's bytes (a multiple of four) into a buffer, before the next submit."""
        if data.nbytes:
            self.queue.write_buffer(buffer, offset, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def read(self, buffer: wgpu.GPUBuffer, dtype: Any, count: int, offset: int = 0) -> np.ndarray:
        """``count`` numbers of a buffer, after all submitted work. ``offset`` is in bytes."""
        n_bytes = np.dtype(dtype).itemsize * count
        try:
            return np.frombuffer(self.queue.read_buffer(buffer, offset, n_bytes), dtype=dtype).copy()
        except wgpu.GPUError as error:
            raise self.failure(error) from error

    def submit(self, encoder: wgpu.GPUCommandEncoder) -> None:
        """Finish an encoder and submit it. Raises DeviceFailed."""
        try:
            self.queue.submit([encoder.finish()])
        except wgpu.GPUError as error:
            raise self.failure(error) from error

    def failure(self, error: wgpu.GPUError) -> DeviceFailed:
        """The typed error for an error of the driver."""
        return DeviceFailed(
            f"{self.name} failed: {_last_line(error)}", "start again; if it stays, update the GPU driver"
        )

    def layout(self, kernel: Kernel) -> tuple[wgpu.GPUBindGroupLayout, wgpu.GPUPipelineLayout]:
        """Bind group layout and pipeline layout of a kernel, from its bindings."""
        if kernel.name not in self._layouts:
            kinds = {index: "uniform" for index, name in enumerate(("params", "step")) if name in kernel.uniforms}
            for index, binding in enumerate(kernel.bindings, FIRST_STORAGE_BINDING):
                kinds[index] = "read-only-storage" if binding.access == "read" else "storage"
            entries = [
                {"binding": index, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": {"type": kind}}
                for index, kind in kinds.items()
            ]
            group = self.wgpu.create_bind_group_layout(entries=entries, label=kernel.name)
            pipeline = self.wgpu.create_pipeline_layout(bind_group_layouts=[group], label=kernel.name)
            self._layouts[kernel.name] = group, pipeline
        return self._layouts[kernel.name]

    def pipeline(self, kernel: Kernel, constants: Mapping[str, int | float]) -> wgpu.GPUComputePipeline:
        """The compute pipeline of a kernel with these override values, compiled once."""
        key = (kernel.name, *sorted(constants.items()))
        if key not in self._pipelines:
            self._pipelines[key] = self.wgpu.create_compute_pipeline(
                layout=self.layout(kernel)[1],
                compute={"module": self._module(kernel.file), "entry_point": "main", "constants": dict(constants)},
                label=kernel.name,
            )
        return self._pipelines[key]

    def _module(self, file: str) -> wgpu.GPUShaderModule:
        if file not in self._modules:
            code = (FOLDER / file).read_text(encoding="utf-8")
            self._modules[file] = self.wgpu.create_shader_module(code=code, label=file)
        return self._modules[file]

    def bind_group(
        self,
        kernel: Kernel,
        params: wgpu.GPUBuffer,
        step: wgpu.GPUBuffer,
        storage: list[tuple[wgpu.GPUBuffer, int, int]],
    ) -> wgpu.GPUBindGroup:
        """Bind group of a kernel; ``storage`` has (buffer, byte offset, bytes) for each binding in order."""
        slots = {0: (params, 0, params.size)}
        if "step" in kernel.uniforms:
            slots[1] = (step, 0, 4 * STEP_WORDS)
        slots.update(enumerate(storage, FIRST_STORAGE_BINDING))
        entries = [
            {"binding": index, "resource": {"buffer": buffer, "offset": offset, "size": size}}
            for index, (buffer, offset, size) in slots.items()
        ]
        return self.wgpu.create_bind_group(layout=self.layout(kernel)[0], entries=entries, label=kernel.name)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()


@cache
def shared_device() -> Device:
    """The process's one device, with the largest buffers that its adapter allows. Raises DeviceMissing."""
    # Vulkan drivers look for a screen and print an error where this is not set, as on servers and in containers.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    try:
        adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
    except RuntimeError as error:
        raise DeviceMissing(
            f"wgpu found no GPU ({_last_line(error)})",
            "install a Vulkan driver, for instance Debian's mesa-vulkan-drivers",
        ) from error
    wanted = {name: adapter.limits[name] for name in _RAISED_LIMITS}
    features = [name for name in _FEATURES if name in adapter.features]
    return Device(adapter.request_device_sync(label="tercet", required_limits=wanted, required_features=features))
