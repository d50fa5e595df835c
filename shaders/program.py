"""Checks a program (``program.json``) against the operations of ``kernels.json`` and the pack's tensors.

The JavaScript twin is in ``web/engine/contract.js``: both refuse a program before any weight is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .contract import INTEGER_ACTIVATIONS, ContractError, document

SECTIONS = ("body", "logits", "greedy", "random")
_DTYPES = ("f32", *INTEGER_ACTIVATIONS)


def operations(program: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All operations with a name for messages, such as ``body[3] linear``."""
    for section in SECTIONS:
        for index, op in enumerate(program[section]):
            yield f"{section}[{index}] {op.get('op') if isinstance(op, dict) else op}", op


def check(program: Any, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise ContractError (a rule of FORMAT.md) unless the program can run on these tensors.

    tensors: name -> (encoding, shape).
    """
    if not isinstance(program, dict) or program.get("ops_version") != document()["ops_version"]:
        found = program.get("ops_version") if isinstance(program, dict) else type(program).__name__
        raise ContractError(
            "ops-version",
            f"program.json: ops_version is {found!r}, expected {document()['ops_version']}; use a newer Tercet",
        )
    for section in SECTIONS:
        if not isinstance(program.get(section), list):
            raise ContractError("operation", f"program.json: {section!r} is missing or no list of operations")
    _check_declarations(program)
    known = document()["ops"]
    written: set[str] = set()
    for where, op in operations(program):
        if not isinstance(op, dict) or op.get("op") not in known:
            raise ContractError("operation", f"program.json: {where}: unknown operation; use a newer Tercet")
        _Checker(program, tensors, where, op, known[op["op"]]).run(written)


def _check_declarations(program: Mapping[str, Any]) -> None:
    for kind in ("values", "caches", "tables"):
        if not isinstance(program.get(kind), dict):
            raise ContractError("operation", f"program.json: {kind!r} is missing or no object")
    for name, value in program["values"].items():
        shape = value.get("shape") if isinstance(value, dict) else None
        good = isinstance(shape, list) and len(shape) == 2 and shape[0] in ("T", "R") and _positive(shape[1])
        if not good or value.get("dtype") not in _DTYPES:
            raise ContractError(
                "operation", f"program.json: value {name!r}: found {value}, expected dtype and [T|R, columns]"
            )
    for name, cache in program["caches"].items():
        if not (
            isinstance(cache, dict) and _positive(cache.get("heads")) and _positive(cache.get("head_dim"))
        ):
            raise ContractError(
                "operation", f"program.json: cache {name!r}: found {cache}, expected heads and head_dim"
            )
        if cache["head_dim"] % 4 or cache["head_dim"] > 256:
            raise ContractError(
                "program-shape",
                f"program.json: cache {name!r}: head_dim is {cache['head_dim']}, expected a multiple of 4 up to 256",
            )
    for name, table in program["tables"].items():
        if not (isinstance(table, dict) and table.get("kind") == "rope" and _numbers(table.get("inv_freq"))):
            raise ContractError(
                "operation", f"program.json: table {name!r}: expected kind 'rope' with inv_freq numbers"
            )
        if not _number(table.get("scale")):
            raise ContractError("operation", f"program.json: table {name!r}: scale is no number")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(_number(item) for item in value)


class _Checker:
    """One operation's fields, references and shapes."""

    def __init__(self, program: Mapping, tensors: Mapping, where: str, op: Mapping, spec: Mapping):
        self.program, self.tensors, self.where, self.op, self.spec = program, tensors, where, op, spec

    def run(self, written: set[str]) -> None:
        self._scalars()
        reads = {field: self._value(field, kind) for field, kind in self._reads().items()}
        for field in self._reads():
            self._expect(
                self.op[field] in written,
                "reference",
                f"value {self.op[field]!r} is read before it is written",
            )
        writes = {field: self._value(field, kind) for field, kind in self.spec.get("writes", {}).items()}
        if self.op.get("accumulate"):
            self._expect(
                self.op["out"] in written,
                "reference",
                f"value {self.op['out']!r} is read before it is written",
            )
        self._shapes({**reads, **writes})
        written.update(self.op[field] for field in writes)

    def _reads(self) -> Mapping[str, str]:
        return self.spec.get("reads", {})

    def _expect(self, condition: bool, rule: str, message: str) -> None:
        if not condition:
            raise ContractError(rule, f"program.json: {self.where}: {message}")

    def _scalars(self) -> None:
        for field, default in self.spec.get("numbers", {}).items():
            self._expect(
                _number(self.op.get(field, default)),
                "operation",
                f"{field} is {self.op.get(field)!r}, expected a number",
            )
        for field in self.spec.get("integers", ()):
            self._expect(
                _positive(self.op.get(field)),
                "operation",
                f"{field} is {self.op.get(field)!r}, expected a positive integer",
            )
        for field, allowed in self.spec.get("strings", {}).items():
            self._expect(
                self.op.get(field) in allowed,
                "operation",
                f"{field} is {self.op.get(field)!r}, expected one of {', '.join(allowed)}",
            )
        for field in self.spec.get("flags", ()):
            self._expect(
                isinstance(self.op.get(field, False), bool),
                "operation",
                f"{field} is {self.op.get(field)!r}, expected true or false",
            )

    def _value(self, field: str, kind: str) -> tuple[str, int]:
        """(leading symbol, columns) of the value that a field names."""
        name = self.op.get(field)
        self._expect(
            isinstance(name, str) and name in self.program["values"],
            "reference",
            f"{field} names no value: {name!r}",
        )
        value = self.program["values"][name]
        dtype = value["dtype"]
        right = kind == "any" or (dtype in INTEGER_ACTIVATIONS if kind == "integer" else dtype == kind)
        self._expect(right, "operation", f"{field} is {dtype}, expected {kind}")
        return value["shape"][0], value["shape"][1]

    def _tensor(self, field: str, dimensions: int) -> tuple[int, ...]:
        name = self.op.get(field)
        self._expect(
            isinstance(name, str) and name in self.tensors, "reference", f"{field} names no tensor: {name!r}"
        )
        shape = self.tensors[name][1]
        self._expect(
            len(shape) == dimensions,
            "program-shape",
            f"tensor {name!r} has shape {list(shape)}, expected {dimensions} dimensions",
        )
        return shape

    def _shapes(self, values: Mapping[str, tuple[str, int]]) -> None:
        getattr(self, f"_shapes_{self.op['op']}")(values)

    def _equal(self, what: str, found: Any, expected: Any) -> None:
        self._expect(found == expected, "program-shape", f"{what} is {found}, expected {expected}")

    def _same_lead(self, values: Mapping[str, tuple[str, int]], field: str) -> None:
        self._equal("leading dimension of out", values["out"][0], values[field][0])

    def _vector(self, field: str, length: int) -> None:
        if field in self.spec.get("vectors", ()) or self.op.get(field) is not None:
            self._equal(f"length of {field}", self._tensor(field, 1)[0], length)

    def _shapes_embed(self, values: Mapping) -> None:
        self._equal("out", values["out"], ("T", self._tensor("w", 2)[1]))

    def _shapes_norm(self, values: Mapping) -> None:
        self._equal("columns of out", values["out"][1], values["x"][1])
        self._vector("gain", values["x"][1])
        if values["out"][0] != "R":
            self._same_lead(values, "x")

    def _shapes_quantize(self, values: Mapping) -> None:
        self._equal("out", values["out"], values["x"])

    def _shapes_glu(self, values: Mapping) -> None:
        self._equal("columns of x", values["x"][1], 2 * values["out"][1])
        self._vector("gain", values["out"][1])
        self._same_lead(values, "x")

    def _shapes_linear(self, values: Mapping) -> None:
        rows, columns = self._tensor("w", 2)
        self._equal("columns of x", values["x"][1], columns)
        self._equal("columns of out", values["out"][1], rows)
        self._vector("bias", rows)
        self._same_lead(values, "x")
        encoding = self.tensors[self.op["w"]][0]
        integer = self.program["values"][self.op["x"]]["dtype"] in INTEGER_ACTIVATIONS
        self._expect(
            encoding == "ternary" or not integer,
            "operation",
            f"integer activations need a ternary tensor, found {encoding}",
        )

    def _caches(self) -> tuple[int, int, int]:
        heads, kv_heads, head_dim = (self.op[name] for name in ("heads", "kv_heads", "head_dim"))
        self._equal("heads modulo kv_heads", heads % kv_heads, 0)
        for field in self.spec["caches"]:
            name = self.op.get(field)
            self._expect(
                isinstance(name, str) and name in self.program["caches"],
                "reference",
                f"{field} names no cache: {name!r}",
            )
            cache = self.program["caches"][name]
            self._equal(f"cache {name!r}", (cache["heads"], cache["head_dim"]), (kv_heads, head_dim))
        return heads, kv_heads, head_dim

    def _shapes_rope_append(self, values: Mapping) -> None:
        heads, kv_heads, head_dim = self._caches()
        self._equal("x", values["x"], ("T", (heads + 2 * kv_heads) * head_dim))
        self._equal("out", values["out"], ("T", heads * head_dim))
        name = self.op.get("rope")
        self._expect(
            isinstance(name, str) and name in self.program["tables"],
            "reference",
            f"rope names no table: {name!r}",
        )
        self._equal(f"length of table {name!r}", len(self.program["tables"][name]["inv_freq"]), head_dim // 2)

    def _shapes_attention(self, values: Mapping) -> None:
        heads, _, head_dim = self._caches()
        self._equal("q", values["q"], ("T", heads * head_dim))
        self._equal("out", values["out"], ("T", heads * head_dim))

    def _shapes_argmax(self, values: Mapping) -> None:
        self._equal("leading dimension of logits", values["logits"][0], "R")

    _shapes_sample = _shapes_argmax
