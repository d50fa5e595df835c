"""Errors of the native GPU executor. Each says what was needed, what was found and, in ``action``, what to do."""

from __future__ import annotations

from .contract import ExecutionError


class NativeError(ExecutionError):
    """Base class. ``str(error)`` is the message followed by the action."""

    def __init__(self, message: str, action: str):
        super().__init__(f"{message}; {action}")
        self.message, self.action = message, action


class DeviceMissing(NativeError):
    """No GPU driver that wgpu can use."""


class DeviceUnsupported(NativeError):
    """The device cannot do something that a kernel or a model needs. ``needed`` and ``found`` are numbers."""

    def __init__(self, message: str, action: str, needed: int = 0, found: int = 0):
        super().__init__(message, action)
        self.needed, self.found = needed, found


class OutOfDeviceMemory(NativeError):
    """A buffer could not be made. ``needed``: bytes of all the model's buffers."""

    def __init__(self, message: str, action: str, needed: int = 0):
        super().__init__(message, action)
        self.needed = needed


class DeviceFailed(NativeError):
    """The driver reported an error while work was running; the device may be lost."""


class SelfCheckFailed(NativeError):
    """The device computes a stored example wrongly. ``kernels``: names of those that do."""

    def __init__(self, message: str, action: str, kernels: tuple[str, ...]):
        super().__init__(message, action)
        self.kernels = kernels


class ContextFull(NativeError):
    """More tokens than the KV cache holds."""


class NumbersBroken(NativeError):
    """The greatest logit is NaN or infinite."""
