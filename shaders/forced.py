"""Kernels that a person forces, for debugging: ``--kernels`` of the command line.

The JavaScript twin is ``web/engine/forced.js``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .contract import kernels

_SETTING = re.compile(r"(\w+)(?:=off|\.([A-Z_]+)=([1-9]\d{0,3}))", re.ASCII)


class ForcedError(ValueError):
    """The option cannot be followed; names the setting, and what there is."""


@dataclass(frozen=True)
class Forced:
    """By name of kernel: those that are not used, and tuned constants."""

    off: frozenset[str] = frozenset()
    tuned: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    #: Nothing is timed or remembered: constants are the defaults.
    defaults: bool = False


def parse_forced(text: str) -> Forced:
    """Comma-separated settings.

    ``norm_linear=off`` leaves a kernel out, ``linear_ternary.ROWS=32`` sets a constant, ``default`` times nothing.
    Raises ForcedError.
    """
    off: set[str] = set()
    tuned: dict[str, dict[str, int]] = {}
    defaults = False
    for setting in (part.strip() for part in text.split(",")):
        if setting == "default":
            defaults = True
        elif setting:
            name, constant, value = _setting(setting)
            if constant is None:
                off.add(name)
            else:
                tuned.setdefault(name, {})[constant] = value
    return Forced(frozenset(off), tuned, defaults)


def _setting(setting: str) -> tuple[str, str | None, int]:
    """(kernel, constant or None for off, value). Raises ForcedError."""
    found = _SETTING.fullmatch(setting)
    if not found:
        raise _refused(f"{_show(setting)} is no setting, expected default, KERNEL=off or KERNEL.CONSTANT=NUMBER")
    name, constant, value = found[1], found[2], int(found[3] or 0)
    kernel = next((one for one in kernels() if one.name == name), None)
    if kernel is None:
        known = ", ".join(one.name for one in kernels())
        raise _refused(f"there is no kernel {_show(name)}; known are {known}")
    if constant is None:
        return name, None, 0
    allowed = kernel.tuned.get(constant)
    if not allowed or value not in allowed:
        expected = f"expected one of {', '.join(map(str, allowed))}" if allowed else "which it does not have"
        raise _refused(f"{name}.{constant} is {value}, {expected}")
    return name, constant, value


def _show(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if len(quoted) <= 80 else f"{quoted[:77]}..."


def _refused(what: str) -> ForcedError:
    return ForcedError(f"The option kernels cannot be followed: {what}.")
