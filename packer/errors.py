"""Errors that a person can act on: they name the thing, what was expected, what was found, what to do."""

from __future__ import annotations


class PackerError(Exception):
    """Something about the input, the options or the disk; the message is complete and needs no traceback."""


class CheckpointError(PackerError):
    """A source checkpoint that cannot be read or used."""


class PackError(PackerError):
    """A pack that breaks a rule of FORMAT.md; ``rule`` is the rule's name there."""

    def __init__(self, rule: str, message: str):
        super().__init__(f"{message} [{rule}]")
        self.rule = rule
