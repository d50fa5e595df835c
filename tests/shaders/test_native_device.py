"""Devices that are missing or can do too little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import wgpu

from shaders.native_device import Device, shared_device
from shaders.native_errors import DeviceFailed, DeviceMissing, DeviceUnsupported


def with_limits(**changes: int) -> Any:
    limits = {**shared_device().limits, **{name.replace("_", "-"): value for name, value in changes.items()}}
    adapter = SimpleNamespace(info={"device": "Tiny GPU", "description": ""})
    return SimpleNamespace(limits=limits, features=(), queue=None, adapter=adapter)


@pytest.mark.parametrize(
    ("limit", "found", "needed"),
    [
        ("max_storage_buffers_per_shader_stage", 4, 8),
        ("max_compute_workgroup_storage_size", 8192, 16384),
        ("max_compute_invocations_per_workgroup", 128, 256),
        ("min_storage_buffer_offset_alignment", 512, 256),
    ],
)
def test_a_limit_that_is_too_low(limit: str, found: int, needed: int) -> None:
    with pytest.raises(
        DeviceUnsupported, match=f"Tiny GPU has {limit.replace('_', '-')} {found}, .* need {needed}"
    ) as caught:
        Device(with_limits(**{limit: found}))
    assert (caught.value.needed, caught.value.found) == (needed, found)


def test_the_binding_limit_is_the_lower_of_two_and_aligned() -> None:
    device = Device(with_limits(max_buffer_size=1 << 30, max_storage_buffer_binding_size=(1 << 27) + 255))
    assert device.binding_limit == 1 << 27


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: Any) -> None:
        raise RuntimeError("Request adapter failed (2): no adapter")

    monkeypatch.setattr(wgpu.gpu, "request_adapter_sync", none)
    with pytest.raises(DeviceMissing, match=r"wgpu found no GPU \(Request adapter failed.*install a Vulkan driver"):
        shared_device.__wrapped__()


def test_a_driver_error_is_typed() -> None:
    class Lost:
        def submit(self, _: Any) -> None:
            raise wgpu.GPUInternalError("Parent device is lost")

    device = Device(with_limits())
    device.queue = Lost()
    with pytest.raises(DeviceFailed, match="Tiny GPU failed: Parent device is lost; start again"):
        device.submit(SimpleNamespace(finish=lambda: None))


def test_one_device_a_process() -> None:
    assert shared_device() is shared_device()
