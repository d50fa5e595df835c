"""The one error that a command shows to a person: a complete message, no traceback."""

from __future__ import annotations

from packer.errors import PackerError


class TrainError(PackerError):
    """Something about the data, the options, a checkpoint or the machine; the message says what to do."""


class NotFinite(TrainError):
    """The loss became NaN or infinite."""
