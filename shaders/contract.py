"""The contract between programs, kernels and executors: ``kernels.json`` and the checks that it allows.

The JavaScript twin is ``web/engine/contract.js``; both read the same file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

KERNELS_FILE = Path(__file__).parent / "kernels.json"
INTEGER_ACTIVATIONS = ("a8", "a16")

#: A dimension as ``kernels.json`` writes it: a number, a symbol, or ``[dimension, divisor]`` rounded up.
Dim = int | str | list


class ContractError(Exception):
    """A program or pack that the kernels cannot run. ``rule`` is the rule's name in FORMAT.md."""

    def __init__(self, rule: str, message: str):
        super().__init__(message)
        self.rule = rule


class ExecutionError(Exception):
    """A model that cannot go on: its numbers are broken, its cache is full, its device failed."""


@dataclass(frozen=True)
class Binding:
    """One storage buffer of a kernel: where it comes from and what it holds."""

    name: str
    source: str
    dtype: str
    shape: tuple[Dim, ...]
    access: str


@dataclass(frozen=True)
class Kernel:
    """One entry of ``kernels.json``."""

    name: str
    op: str
    file: str
    when: Mapping[str, list]
    needs: tuple[str, ...]
    language: tuple[str, ...]
    uniforms: tuple[str, ...]
    params: tuple[tuple[str, str, Dim], ...]
    bindings: tuple[Binding, ...]
    overrides: Mapping[str, Dim]
    tuned: Mapping[str, list[int]]
    dispatch: tuple[Dim, ...]
    tolerance: str
    #: Tuned constants that change no bit of a result, so that a device may be asked which value is the fastest.
    timed: tuple[str, ...] = ()
    #: Timed against the first kernel that fits; gives the same bits.
    rival: bool = False


@cache
def document() -> dict[str, Any]:
    """``kernels.json`` as parsed JSON."""
    contract: dict[str, Any] = json.loads(KERNELS_FILE.read_text(encoding="utf-8"))
    return contract


@cache
def kernels() -> tuple[Kernel, ...]:
    """All kernels, in the order in which they are tried."""
    return tuple(_kernel(tile) for entry in document()["kernels"] for tile in _tiles(entry))


def _tiles(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One kernel for each number of tokens that an entry with ``tiles`` is compiled for."""
    least = 1
    for tile in entry.get("tiles", ()):
        when = {**entry["when"], "T": [least, tile]}
        if tile > 1:
            when["few"] = [1, 1]
        name = entry["name"] if tile == 1 else f"{entry['name']}_{tile}"
        yield {**entry, "name": name, "when": when, "overrides": {**entry["overrides"], "TOKENS": tile}}
        least = tile + 1
    if "tiles" not in entry:
        yield entry


def _kernel(entry: Mapping[str, Any]) -> Kernel:
    bindings = tuple(
        Binding(b["name"], b["from"], b["dtype"], tuple(b["shape"]), b["access"]) for b in entry["bindings"]
    )
    return Kernel(
        name=entry["name"],
        op=entry["op"],
        file=entry["file"],
        when=entry["when"],
        needs=tuple(entry.get("needs", ())),
        language=tuple(entry.get("language", ())),
        uniforms=tuple(entry["uniforms"]),
        params=tuple((name, kind, dim) for name, kind, dim in entry["params"]),
        bindings=bindings,
        overrides=entry.get("overrides", {}),
        tuned=entry.get("tuned", {}),
        dispatch=tuple(entry["dispatch"]),
        tolerance=entry["tolerance"],
        timed=tuple(entry.get("timed", ())),
        rival=entry.get("rival", False),
    )


def constant(name: str) -> Any:
    """A number that several executors share."""
    return document()["constants"][name]


def enum(kind: str, value: str) -> int:
    """The number that stands for ``value`` in WGSL overrides."""
    return int(document()["enums"][kind][value])


def op_spec(name: str) -> Mapping[str, Any]:
    """Fields of an operation: of programs, or of those that rewrites make. Empty for the utilities."""
    spec: Mapping[str, Any] = document()["ops"].get(name) or document()["inner_ops"].get(name, {})
    return spec


def encoding(name: str) -> Mapping[str, int]:
    """Block sizes of a weight encoding, resident and on disk, in elements and u32 words."""
    blocks: Mapping[str, int] = document()["encodings"][name]
    return blocks


def short(value: Any) -> str:
    """A value for a message: at most 80 characters, whatever a hostile file holds."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def quotient_up(number: int, divisor: int) -> int:
    """``ceil(number / divisor)`` for non-negative integers."""
    return -(-number // divisor)


def evaluate(dim: Dim, symbols: Mapping[str, Any]) -> int | float:
    """Value of a dimension. Raises KeyError for an unknown symbol."""
    if isinstance(dim, str):
        value: int | float = symbols[dim]
        return value
    if isinstance(dim, list):
        number, divisor = (evaluate(part, symbols) for part in dim)
        return quotient_up(int(number), int(divisor))
    return dim


def element_count(shape: tuple[Dim, ...], symbols: Mapping[str, Any]) -> int:
    """Number of elements of a binding."""
    count = 1
    for dim in shape:
        count *= int(evaluate(dim, symbols))
    return count


def tuned_for(kernel: Kernel, software: bool) -> dict[str, int]:
    """Tuned overrides for a device that nobody has timed: the first candidates, on a CPU renderer the smallest.

    A CPU runs the threads of a workgroup one after another: idle ones and barriers cost it far more than a GPU.
    """
    return {name: min(sizes) if software else sizes[0] for name, sizes in kernel.tuned.items()}


def override_values(kernel: Kernel, symbols: Mapping[str, Any]) -> dict[str, int | float]:
    """Pipeline constants of a kernel: symbols resolved, enum names turned to numbers, defaults of tuned ones."""
    values: dict[str, int | float] = {**tuned_for(kernel, software=False)}
    enums = document()["enums"]
    for name, source in kernel.overrides.items():
        value = symbols[source] if isinstance(source, str) else evaluate(source, symbols)
        values[name] = enums[source][value] if isinstance(value, str) else value
    return values


def fitting(op: str, symbols: Mapping[str, Any], features: frozenset[str] = frozenset()) -> Iterator[Kernel]:
    """The kernels for ``op`` that the symbols and the device's features allow, in the order in which they are tried."""
    for kernel in kernels():
        if kernel.op == op and set(kernel.needs) <= features and _applies(kernel.when, symbols):
            yield kernel


def select(
    op: str,
    symbols: Mapping[str, Any],
    features: frozenset[str] = frozenset(),
    off: frozenset[str] = frozenset(),
) -> Kernel:
    """First kernel for ``op`` that the symbols and the device's features allow; none of those named ``off``.

    Raises ContractError if there is none.
    """
    for kernel in fitting(op, symbols, features):
        if kernel.name not in off:
            return kernel
    raise ContractError("operation", f"no kernel for operation {op!r} with {dict(symbols)}; use a newer Tercet")


def _applies(when: Mapping[str, list], symbols: Mapping[str, Any]) -> bool:
    for symbol, allowed in when.items():
        value = symbols[symbol]
        if isinstance(value, str):
            if value not in allowed:
                return False
        elif not allowed[0] <= value <= allowed[1]:
            return False
    return True
