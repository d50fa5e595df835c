"""Records dispatches into a compute pass. At a thousand tokens a second this is the hot loop of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import wgpu
from wgpu.backends.wgpu_native import ffi, lib

if TYPE_CHECKING:
    from .native_program import Launch

#: A kernel with its buffers, and the workgroups along x, y and z.
Dispatch = tuple["Launch", tuple[int, int, int]]


def record(compute: wgpu.GPUComputePassEncoder, dispatches: Sequence[Dispatch], times: int = 1) -> None:
    """Record all dispatches, ``times`` times over; errors show at the submit, as for any encoder.

    The C functions of wgpu-native are called directly: wgpu's methods check and copy on every call, which took twice
    the time of a token on the GPU.
    """
    handle = compute._internal
    set_pipeline, set_bind_group = lib.wgpuComputePassEncoderSetPipeline, lib.wgpuComputePassEncoderSetBindGroup
    dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
    commands = [(launch.pipeline._internal, launch.bind_group._internal, *grid) for launch, grid in dispatches]
    current = None
    for pipeline, group, x, y, z in commands * times:
        if pipeline is not current:
            set_pipeline(handle, pipeline)
            current = pipeline
        set_bind_group(handle, 0, group, 0, ffi.NULL)
        dispatch(handle, x, y, z)
