"""Turns operations of a program into those that fewer dispatches run: the rewrites of ``kernels.json``.

The JavaScript twin is ``web/engine/rewrite.js``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .contract import document, op_spec

Op = Mapping[str, Any]
#: Whether a kernel of this device runs an operation.
Runs = Callable[[Op], bool]


def rewrite(ops: Sequence[Op], later: Sequence[Op], runs: Runs, software: bool, keys: int) -> list[Op]:
    """The operations of a section, with the first rewrite that fits at each place.

    later: operations that follow the section; a value that any of them reads is kept. runs: a rewrite is left out if
    one of its operations cannot run. software: on a CPU renderer a dispatch costs less than what some rewrites compute
    again. keys: most keys that a token of the step sees.
    """
    rules = [rule for rule in document()["rewrites"] if _allowed(rule, software, keys)]
    made: list[Op] = []
    index = 0
    while index < len(ops):
        for rule in rules:
            matched = ops[index : index + len(rule["ops"])]
            if _matches(rule, matched, [*ops[index + len(matched) :], *later]):
                inner = [_inner(pattern, matched) for pattern in rule["into"]]
                # WebGPU forbids to read and write one buffer in a dispatch.
                if all(op.get("out") not in _inputs(op) and runs(op) for op in inner):
                    made += inner
                    index += len(matched)
                    break
        else:
            made.append(ops[index])
            index += 1
    return made


def _allowed(rule: Mapping[str, Any], software: bool, keys: int) -> bool:
    return not (software and rule.get("gpu")) and keys <= rule.get("most_keys", keys)


def _matches(rule: Mapping[str, Any], matched: Sequence[Op], following: Sequence[Op]) -> bool:
    if [op["op"] for op in matched] != rule["ops"]:
        return False
    for first, second in zip(matched, matched[1:], strict=False):
        if first["out"] not in _inputs(second) or _is_read(first["out"], following):
            return False
        # What a value held before is part of what is read.
        if first.get("accumulate"):
            return False
        shared = (set(first) & set(second)) - {"op", "x", "out"}
        if any(first[field] != second[field] for field in shared & {"k", "v", "heads", "kv_heads", "head_dim"}):
            return False
    return True


def _inputs(op: Op) -> list[str]:
    """Names of the values that the fields of an operation give it to read."""
    return [op[field] for field in op_spec(op["op"]).get("reads", {}) if field in op]


def _read(op: Op) -> list[str]:
    """Names of the values that an operation reads, the one that it adds to included."""
    return [*_inputs(op), op["out"]] if op.get("accumulate") else _inputs(op)


def _is_read(value: str, following: Sequence[Op]) -> bool:
    """Whether a value is read before it is written again."""
    for op in following:
        if value in _read(op):
            return True
        if op.get("out") == value:
            return False
    return False


def _inner(pattern: Mapping[str, Any], matched: Sequence[Op]) -> Op:
    """The operation that a pattern makes: ``1.w`` is field w of the second one that matched."""
    made: dict[str, Any] = {}
    for field, source in pattern.items():
        if field == "op" or not isinstance(source, str):
            made[field] = source
            continue
        index, _, name = source.partition(".")
        if matched[int(index)].get(name) is not None:
            made[field] = matched[int(index)][name]
    return made
