"""Checks a program (``program.json``) against the operations of ``kernels.json`` and the pack's tensors.

The JavaScript twin is in ``web/engine/contract.js``: both refuse a program before any weight is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .contract import INTEGER_ACTIVATIONS, ContractError, document, short

SECTIONS = ("body", "logits", "greedy", "random")
MAX_HEAD_DIM = 256
_DTYPES = ("f32", *INTEGER_ACTIVATIONS)
_F32_MAX = 3.4028234663852886e38


def operations(program: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(section, name for messages such as ``body[3] linear``, operation) of all operations."""
    for section in SECTIONS:
        for index, op in enumerate(program[section]):
            yield section, f"{section}[{index}] {short(op.get('op') if isinstance(op, dict) else op)}", op


def check(program: Any, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise ContractError (a rule of FORMAT.md) unless the program can run on these tensors.

    tensors: name -> (encoding, shape).
    """
    found = program.get("ops_version") if isinstance(program, dict) else type(program).__name__
    if found != document()["ops_version"] or isinstance(found, bool):
        raise ContractError(
            "ops-version",
            f"program.json: ops_version is {short(found)}, expected {document()['ops_version']}; use a newer Tercet",
        )
    for section in SECTIONS:
        _expect(isinstance(program.get(section), list), "operation", f"{section!r} is no list of operations")
    _check_declarations(program)
    known = document()["ops"]
    written: set[str] = set()
    for _, where, op in operations(program):
        name = op.get("op") if isinstance(op, dict) else None
        if not isinstance(name, str) or name not in known:
            raise ContractError("operation", f"program.json: {where}: unknown operation; use a newer Tercet")
        _Checker(program, tensors, where, op, known[name]).run(written)
    _check_choice(program, tensors)


def check_context(program: Mapping[str, Any], rows: Callable[[str], int], context: int) -> None:
    """Raise ContractError unless a checked program has a row for each position of a context of so many tokens.

    rows: of a tensor.
    """
    for _, where, op in operations(program):
        found = rows(op["w"]) if op["op"] == "position" else context
        _expect(found >= context, "program-shape", f"{where}: {found} positions, the context is {context} tokens")


def _expect(condition: bool, rule: str, message: str) -> None:
    if not condition:
        raise ContractError(rule, f"program.json: {message}")


def _check_declarations(program: Mapping[str, Any]) -> None:
    for kind in ("values", "caches", "tables"):
        _expect(isinstance(program.get(kind), dict), "operation", f"{kind!r} is missing or no object")
    for name, value in program["values"].items():
        shape = value.get("shape") if isinstance(value, dict) else None
        good = isinstance(shape, list) and len(shape) == 2 and shape[0] in ("T", "R") and _positive(shape[1])
        _expect(
            good and value.get("dtype") in _DTYPES,
            "operation",
            f"value {name!r}: found {short(value)}, expected dtype and [T|R, columns]",
        )
    for name, cache in program["caches"].items():
        good = isinstance(cache, dict) and _positive(cache.get("heads")) and _positive(cache.get("head_dim"))
        _expect(good, "operation", f"cache {name!r}: found {short(cache)}, expected heads and head_dim")
        _expect(
            cache["head_dim"] % 4 == 0 and cache["head_dim"] <= MAX_HEAD_DIM,
            "program-shape",
            f"cache {name!r}: head_dim is {cache['head_dim']}, expected a multiple of 4 up to {MAX_HEAD_DIM}",
        )
    for name, table in program["tables"].items():
        good = isinstance(table, dict) and table.get("kind") == "rope" and _numbers(table.get("inv_freq"))
        _expect(good, "operation", f"table {name!r}: expected kind 'rope' with inv_freq numbers")
        _expect(_number(table.get("scale")), "operation", f"table {name!r}: scale is no number")


def _check_choice(program: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Token choice: one operation each, on the same logits, whose columns are the ids that embeddings hold."""
    for section, name in (("greedy", "argmax"), ("random", "sample")):
        ops = [op["op"] for op in program[section]]
        _expect(ops == [name], "operation", f"{section!r} holds {short(ops)}, expected one {name}")
    names = [program[section][0]["logits"] for section in ("greedy", "random")]
    _expect(names[0] == names[1], "reference", f"greedy and random read different logits: {short(names)}")
    vocabulary = logits_columns(program)
    for section, where, op in operations(program):
        choice = op["op"] in ("argmax", "sample")
        _expect(not choice or section in ("greedy", "random"), "operation", f"{where}: not allowed in {section}")
        rows = tensors[op["w"]][1][0] if op["op"] == "embed" else vocabulary
        _expect(rows == vocabulary, "program-shape", f"{where}: {rows} rows, expected one a logit, {vocabulary}")


def logits_columns(program: Mapping[str, Any]) -> int:
    """Size of the vocabulary that a checked program chooses from."""
    return int(program["values"][program["greedy"][0]["logits"]]["shape"][1])


def _number(value: Any) -> bool:
    """A finite number that float32 holds; not True and False, which are integers to Python."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_F32_MAX <= value <= _F32_MAX


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(_number(item) for item in value)


class _Checker:
    """One operation's fields, references and shapes."""

    def __init__(self, program: Mapping[str, Any], tensors: Mapping, where: str, op: Mapping, spec: Mapping[str, Any]):
        self.program, self.tensors, self.where, self.op, self.spec = program, tensors, where, op, spec

    def run(self, written: set[str]) -> None:
        self._scalars()
        reads: dict[str, str] = self.spec.get("reads", {})
        writes: dict[str, str] = self.spec.get("writes", {})
        values = {field: self._value(field, kind) for field, kind in {**reads, **writes}.items()}
        read = [self.op[field] for field in reads]
        for field in writes:
            name = self.op[field]
            self._expect(name not in read, "reference", f"value {name!r} is read and written at once")
            if self.op.get("accumulate"):
                read.append(name)
        for name in read:
            self._expect(name in written, "reference", f"value {name!r} is read before it is written")
        getattr(self, f"_shapes_{self.op['op']}")(values)
        written.update(self.op[field] for field in writes)

    def _expect(self, condition: bool, rule: str, message: str) -> None:
        _expect(condition, rule, f"{self.where}: {message}")

    def _field(self, field: str, good: bool, expected: str) -> None:
        self._expect(good, "operation", f"{field} is {short(self.op.get(field))}, expected {expected}")

    def _scalars(self) -> None:
        for field, default in self.spec.get("numbers", {}).items():
            self._field(field, _number(self.op.get(field, default)), "a number")
        for field in self.spec.get("integers", ()):
            self._field(field, _positive(self.op.get(field)), "a positive integer")
        for field in self.spec.get("optional_integers", ()):
            value = self.op.get(field, 0)
            self._field(field, _positive(value) or (value == 0 and type(value) is int), "a positive integer, or 0")
        for field, allowed in self.spec.get("strings", {}).items():
            self._field(field, self.op.get(field) in allowed, f"one of {', '.join(allowed)}")
        for field in self.spec.get("flags", ()):
            self._field(field, isinstance(self.op.get(field, False), bool), "true or false")

    def _named(self, field: str, kind: str) -> str:
        """The name in a field, of a value, cache or table."""
        name = self.op.get(field)
        known = isinstance(name, str) and name in self.program[f"{kind}s"]
        self._expect(known, "reference", f"{field} names no {kind}: {short(name)}")
        return str(name)

    def _value(self, field: str, kind: str) -> tuple[str, int]:
        """(leading symbol, columns) of the value that a field names."""
        value = self.program["values"][self._named(field, "value")]
        dtype = value["dtype"]
        right = kind == "any" or (dtype in INTEGER_ACTIVATIONS if kind == "integer" else dtype == kind)
        self._expect(right, "operation", f"{field} is {dtype}, expected {kind}")
        return value["shape"][0], value["shape"][1]

    def _tensor(self, field: str, dimensions: int) -> tuple[int, ...]:
        name = self.op.get(field)
        known = isinstance(name, str) and name in self.tensors
        self._expect(known, "reference", f"{field} names no tensor: {short(name)}")
        shape: tuple[int, ...] = self.tensors[name][1]
        self._equal(f"number of dimensions of tensor {name!r}", len(shape), dimensions)
        return shape

    def _equal(self, what: str, found: Any, expected: Any) -> None:
        self._expect(found == expected, "program-shape", f"{what} is {found}, expected {expected}")

    def _same_lead(self, values: Mapping[str, tuple[str, int]], field: str) -> None:
        self._equal("leading dimension of out", values["out"][0], values[field][0])

    def _vector(self, field: str, length: int) -> None:
        if field in self.spec.get("vectors", ()) or self.op.get(field) is not None:
            self._equal(f"length of {field}", self._tensor(field, 1)[0], length)

    def _shapes_embed(self, values: Mapping) -> None:
        self._equal("out", values["out"], ("T", self._tensor("w", 2)[1]))

    def _shapes_position(self, values: Mapping) -> None:
        self._equal("out", values["out"], ("T", self._tensor("w", 2)[1]))
        encoding = self.tensors[self.op["w"]][0]
        self._expect(encoding == "f32", "operation", f"positions need a tensor of f32, found {encoding}")
        self._expect(self.op.get("accumulate") is True, "operation", "accumulate must be true")

    def _shapes_norm(self, values: Mapping) -> None:
        self._equal("columns of out", values["out"][1], values["x"][1])
        self._vector("gain", values["x"][1])
        dtype = self.program["values"][self.op["out"]]["dtype"]
        fits = dtype == "f32" or not self.op.get("accumulate")
        self._expect(fits, "operation", f"accumulate needs an out of f32, found {dtype}")
        if values["out"][0] != "R":
            self._same_lead(values, "x")

    def _shapes_quantize(self, values: Mapping) -> None:
        self._equal("out", values["out"], values["x"])

    def _shapes_activate(self, values: Mapping) -> None:
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
        dtype = self.program["values"][self.op["x"]]["dtype"]
        most = self.spec["most_columns"].get(dtype, columns)
        fits = columns <= most
        self._expect(fits, "program-shape", f"{dtype} sums of {columns} columns can overflow, expected at most {most}")
        fits = encoding == "ternary" or dtype not in INTEGER_ACTIVATIONS
        self._expect(fits, "operation", f"integer activations need a ternary tensor, found {encoding}")

    def _caches(self) -> tuple[int, int, int]:
        heads, kv_heads, head_dim = (self.op[name] for name in ("heads", "kv_heads", "head_dim"))
        self._equal("heads modulo kv_heads", heads % kv_heads, 0)
        names = [self._named(field, "cache") for field in self.spec["caches"]]
        self._expect(len(set(names)) == len(names), "reference", f"k and v are the same cache {names[0]!r}")
        for name in names:
            cache = self.program["caches"][name]
            self._equal(f"cache {name!r}", (cache["heads"], cache["head_dim"]), (kv_heads, head_dim))
        return heads, kv_heads, head_dim

    def _shapes_rope_append(self, values: Mapping) -> None:
        heads, kv_heads, head_dim = self._caches()
        self._equal("x", values["x"], ("T", (heads + 2 * kv_heads) * head_dim))
        self._equal("out", values["out"], ("T", heads * head_dim))
        gains = [field for field in ("q_gain", "k_gain") if self.op.get(field) is not None]
        both = len(gains) != 1
        self._expect(both, "operation", f"found {' '.join(gains)} alone, expected q_gain and k_gain, or neither")
        for field in gains:
            self._vector(field, head_dim)
        name = self._named("rope", "table")
        found = len(self.program["tables"][name]["inv_freq"])
        self._equal(f"length of table {name!r}", found, head_dim // 2)

    def _shapes_attention(self, values: Mapping) -> None:
        heads, _, head_dim = self._caches()
        self._equal("q", values["q"], ("T", heads * head_dim))
        self._equal("out", values["out"], ("T", heads * head_dim))

    def _shapes_argmax(self, values: Mapping) -> None:
        self._equal("leading dimension of logits", values["logits"][0], "R")

    _shapes_sample = _shapes_argmax
