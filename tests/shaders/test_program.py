"""Program checks: every fault is refused under its rule's name, and nothing makes the checker itself fail."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.models import build_model
from shaders.contract import ContractError, document
from shaders.interpreter import ReferenceModel
from shaders.program import SECTIONS, check, check_context, operations
from tests.support.checkpoints import tiny_config

Program = dict[str, Any]
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def whole() -> tuple[Program, Tensors]:
    """A program with every operation: BitNet's norms in layer 0, a bias, a quantize op, and its tensors."""
    changes = {"attention_bias": True, "num_hidden_layers": 1}
    bitnet = build_model(tiny_config("bitnet", **changes), Path("c"), set())
    tensors: Tensors = {}
    for tensor in bitnet.tensors():
        if hasattr(tensor, "columns"):
            encoding = "f16" if tensor.is_embedding else "ternary"
            tensors[tensor.name] = (encoding, (tensor.rows, tensor.columns))
        else:
            tensors[tensor.name] = ("f32", (tensor.length,))
    program = bitnet.program({name: encoding for name, (encoding, _) in tensors.items()}, "a8")
    tensors["heads"] = ("f32", (12,))
    program["values"]["again.a8"] = {"dtype": "a8", "shape": ["T", 72]}
    program["body"].insert(1, {"op": "quantize", "x": "h", "out": "again.a8"})
    program["values"]["active"] = {"dtype": "f32", "shape": ["T", 72]}
    tensors["positions"] = ("f32", (99, 72))
    program["body"] += [
        {"op": "position", "w": "positions", "accumulate": True, "out": "h"},
        {"op": "activate", "x": "h", "act": "relu", "out": "active"},
    ]
    return json.loads(json.dumps(program)), tensors


def find(program: Program, name: str) -> dict[str, Any]:
    return next(op for _, _, op in operations(program) if op["op"] == name)


def test_a_whole_program_passes() -> None:
    program, tensors = whole()
    check(program, tensors)
    assert {op["op"] for _, _, op in operations(program)} == set(document()["ops"])


def test_a_context_has_positions() -> None:
    program, tensors = whole()
    check_context(program, lambda name: tensors[name][1][0], 99)
    with pytest.raises(ContractError, match=r"body\[\d+\] 'position': 99 positions, the context is 100") as caught:
        check_context(program, lambda name: tensors[name][1][0], 100)
    assert caught.value.rule == "program-shape"


def test_optional_fields_pass() -> None:
    for window in (0, 1, 2**31 - 1):
        program, tensors = whole()
        edit("attention", window=window)(program, tensors)
        edit("rope_append", q_gain="heads", k_gain="heads", eps=1e-6)(program, tensors)
        add_norm(program, "attn_out")
        check(program, tensors)


def test_every_operation_has_its_checks_and_its_reference() -> None:
    from shaders.program import _Checker

    for name, spec in document()["ops"].items():
        assert hasattr(_Checker, f"_shapes_{name}")
        assert hasattr(ReferenceModel, f"_op_{name}") or not spec.get("writes")


def edit(name: str, **changes: Any) -> Callable[[Program, Tensors], None]:
    """Change fields of the first operation of a name; ... (Ellipsis) takes a field out."""

    def change(program: Program, tensors: Tensors) -> None:
        op = find(program, name)
        for field, value in changes.items():
            if value is ...:
                del op[field]
            else:
                op[field] = value

    return change


def put(kind: str, name: str, value: Any) -> Callable[[Program, Tensors], None]:
    """Declare a value, cache or table anew."""
    return lambda program, tensors: program[kind].__setitem__(name, value)


def tensor(name: str, encoding: str, *shape: int) -> Callable[[Program, Tensors], None]:
    return lambda program, tensors: tensors.__setitem__(name, (encoding, shape))


def section(name: str, value: Any) -> Callable[[Program, Tensors], None]:
    return lambda program, tensors: program.__setitem__(name, value)


def value(columns: Any, dtype: Any = "f32", rows: Any = "T") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [rows, columns]}


QKV = 72 + 2 * 24
FAULTS: dict[str, list[tuple[str, Callable[[Program, Tensors], None]]]] = {
    "ops-version": [
        ("newer", section("ops_version", 2)),
        ("missing", lambda program, tensors: program.pop("ops_version")),
        ("text", section("ops_version", "1")),
        ("true", section("ops_version", True)),
        ("list", section("ops_version", [1])),
    ],
    "operation": [
        ("unknown", edit("norm", op="normalise")),
        ("no name", edit("norm", op=...)),
        ("name is a list", edit("norm", op=["norm"])),
        ("name is an object", edit("norm", op={})),
        ("no object", lambda program, tensors: program["body"].__setitem__(2, "norm")),
        ("null", lambda program, tensors: program["logits"].__setitem__(0, None)),
        *((f"no {name}", lambda p, t, name=name: p.pop(name)) for name in (*SECTIONS, "values", "caches", "tables")),
        *((f"{name} is a number", section(name, 3)) for name in (*SECTIONS, "values", "caches", "tables")),
        ("no eps", edit("norm", eps=...)),
        ("eps is text", edit("norm", eps="1e-5")),
        ("eps is true", edit("norm", eps=True)),
        ("eps is infinite", edit("norm", eps=float("inf"))),
        ("eps is NaN", edit("norm", eps=float("nan"))),
        ("eps is beyond f32", edit("norm", eps=10**400)),
        ("multiplier is null", edit("embed", multiplier=None)),
        ("heads is 0", edit("attention", heads=0)),
        ("heads is a fraction", edit("attention", heads=6.0)),
        ("heads is huge", edit("rope_append", heads=2**31)),
        ("no head_dim", edit("rope_append", head_dim=...)),
        ("no scale", edit("attention", scale=...)),
        ("unknown act", edit("glu", act="tanh")),
        ("a gate of relu", edit("glu", act="relu")),
        ("unknown act without gate", edit("activate", act="tanh")),
        ("positions that replace", edit("position", accumulate=...)),
        ("positions of f16", tensor("positions", "f16", 99, 72)),
        ("act is a list", edit("glu", act=["silu"])),
        ("accumulate is 1", edit("linear", accumulate=1)),
        ("integers are accumulated", lambda program, tensors: add_norm(program, "attn_in.a8")),
        ("eps of heads is text", edit("rope_append", eps="0")),
        ("q_gain alone", edit("rope_append", q_gain="heads")),
        ("k_gain alone", edit("rope_append", k_gain="heads")),
        *((f"window is {wrong!r}", edit("attention", window=wrong)) for wrong in (-1, 2**31, 4.0, "4", True, None)),
        ("value without dtype", put("values", "h", {"shape": ["T", 72]})),
        ("value of unknown dtype", put("values", "h", value(72, "f16"))),
        ("value of a dtype list", put("values", "h", value(72, ["f32"]))),
        ("value with rows S", put("values", "h", value(72, rows="S"))),
        ("value with three sizes", put("values", "h", {"dtype": "f32", "shape": ["T", 72, 1]})),
        ("value with no columns", put("values", "h", value(0))),
        ("value with text columns", put("values", "h", value("72"))),
        ("value is null", put("values", "h", None)),
        ("cache is null", put("caches", "k.0", None)),
        ("cache without heads", put("caches", "k.0", {"head_dim": 12})),
        ("cache with heads -1", put("caches", "k.0", {"heads": -1, "head_dim": 12})),
        ("table of another kind", put("tables", "rope", {"kind": "alibi", "inv_freq": [1.0] * 6, "scale": 1})),
        ("table of text", put("tables", "rope", {"kind": "rope", "inv_freq": ["1"] * 6, "scale": 1})),
        ("table without scale", put("tables", "rope", {"kind": "rope", "inv_freq": [1.0] * 6})),
        ("table of infinite scale", put("tables", "rope", {"kind": "rope", "inv_freq": [1.0] * 6, "scale": 1e999})),
        ("quantize to floats", put("values", "again.a8", value(72))),
        ("norm of integers", edit("norm", x="again.a8")),
        ("float weights for integers", tensor("layers.0.qkv", "q8", QKV, 72)),
        ("embedding to integers", edit("embed", out="again.a8")),
        ("argmax of integers", put("values", "logits", value(272, "a8", "R"))),
        ("no argmax", section("greedy", [])),
        ("no sample", section("random", [])),
        ("two argmax", section("greedy", [{"op": "argmax", "logits": "logits"}] * 2)),
        ("sample for argmax", section("greedy", [{"op": "sample", "logits": "logits"}])),
        ("argmax in logits", lambda p, t: p["logits"].append({"op": "argmax", "logits": "logits"})),
    ],
    "reference": [
        ("unknown value", edit("norm", x="nothing")),
        ("value is a number", edit("norm", x=3)),
        ("value is a list", edit("norm", x=["h"])),
        ("value is missing", edit("norm", x=...)),
        ("unknown out", edit("norm", out="nothing")),
        ("unknown tensor", edit("linear", w="nothing")),
        ("unknown positions", edit("position", w="nothing")),
        ("positions added before written", lambda program, tensors: program["body"].insert(0, program["body"][-2])),
        ("no tensor", edit("linear", w=...)),
        ("tensor is a list", edit("linear", w=["layers.0.qkv"])),
        ("unknown gain", edit("norm", gain="nothing")),
        ("no gain", edit("norm", gain=...)),
        ("unknown sub-norm", edit("glu", gain="nothing")),
        ("unknown bias", edit("linear", bias="nothing")),
        ("unknown k_gain", edit("rope_append", q_gain="heads", k_gain="nothing")),
        ("a norm added before written", lambda program, tensors: add_norm(program, "late")),
        ("unknown cache", edit("attention", k="k.9")),
        ("cache is null", edit("rope_append", v=None)),
        ("k and v are one cache", edit("rope_append", v="k.0")),
        ("unknown table", edit("rope_append", rope="alibi")),
        ("table is a list", edit("rope_append", rope=[])),
        ("read before written", lambda program, tensors: program["body"].pop(0)),
        ("added before written", edit("linear", accumulate=True)),
        ("read and written at once", edit("norm", x="h", out="h")),
        ("logits before the head", lambda program, tensors: program["logits"].pop()),
        ("different logits", lambda program, tensors: different_logits(program)),
    ],
    "program-shape": [
        ("embedding columns", tensor("embed", "f16", 272, 71)),
        ("embedding rows", tensor("embed", "f16", 271, 72)),
        ("embedding is a vector", tensor("embed", "f32", 72)),
        ("gain length", tensor("layers.0.input_norm", "f32", 71)),
        ("gain is a matrix", tensor("layers.0.input_norm", "f32", 72, 1)),
        ("norm columns", put("values", "attn_in.a8", value(73, "a8"))),
        ("quantize columns", put("values", "again.a8", value(71, "a8"))),
        ("quantize rows", put("values", "again.a8", value(72, "a8", "R"))),
        ("linear columns", tensor("layers.0.qkv", "ternary", QKV, 73)),
        ("linear rows", tensor("layers.0.qkv", "ternary", QKV + 1, 72)),
        ("bias length", tensor("layers.0.qkv.bias", "f32", 71)),
        ("glu columns", tensor("layers.0.ffn_sub_norm", "f32", 99)),
        ("columns of positions", tensor("positions", "f32", 99, 73)),
        ("positions are a vector", tensor("positions", "f32", 72)),
        ("activate columns", put("values", "active", value(73))),
        ("glu of odd columns", put("values", "gate_up", value(199))),
        ("length of gains of heads", edit("rope_append", q_gain="heads", k_gain="layers.0.input_norm")),
        ("gain of heads is a matrix", edit("rope_append", q_gain="layers.0.qkv", k_gain="heads")),
        ("heads", edit("rope_append", heads=5)),
        ("heads no multiple", edit("attention", heads=7)),
        ("kv_heads", edit("rope_append", kv_heads=3)),
        ("cache heads", put("caches", "k.0", {"heads": 3, "head_dim": 12})),
        ("cache width", put("caches", "v.0", {"heads": 2, "head_dim": 16})),
        ("head_dim no multiple of 4", put("caches", "k.0", {"heads": 2, "head_dim": 10})),
        ("head_dim too large", put("caches", "k.0", {"heads": 2, "head_dim": 260})),
        ("table length", put("tables", "rope", {"kind": "rope", "inv_freq": [1.0] * 5, "scale": 1.0})),
        ("query columns", put("values", "q", value(71))),
        ("attention columns", put("values", "attn_out", value(71))),
        ("norm from last rows to all", put("values", "h", value(72, rows="R"))),
        ("logits of all rows", put("values", "logits", value(272, rows="T"))),
    ],
}  # fmt: skip


def add_norm(program: Program, out: str) -> None:
    """A norm whose result is added to a value."""
    program["values"].setdefault(out, value(72))
    gained = {"op": "norm", "x": "h", "gain": "layers.0.input_norm", "eps": 1e-5, "out": out, "accumulate": True}
    program["body"].append(gained)


def different_logits(program: Program) -> None:
    program["values"]["logits2"] = dict(program["values"]["logits"])
    program["logits"].append({**program["logits"][-1], "out": "logits2"})
    program["random"][0]["logits"] = "logits2"


CASES = [(rule, name, change) for rule, faults in FAULTS.items() for name, change in faults]


@pytest.mark.parametrize(("rule", "name", "change"), CASES, ids=[f"{rule}-{name}" for rule, name, _ in CASES])
def test_faults_are_refused_by_rule(rule: str, name: str, change: Callable[[Program, Tensors], Any]) -> None:
    program, tensors = whole()
    change(program, tensors)
    with pytest.raises(ContractError) as caught:
        check(program, tensors)
    assert caught.value.rule == rule, str(caught.value)
    assert str(caught.value).startswith("program.json: ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("program", [None, [], "program", 1])
def test_what_is_no_object_is_refused(program: Any) -> None:
    with pytest.raises(ContractError) as caught:
        check(program, {})
    assert caught.value.rule == "ops-version"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.sampled_from(["h", "embed", "T", "norm", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["op", "x", "out"]), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_change_passes_or_is_refused(data: st.DataObject) -> None:
    """A random place of the program becomes a random value: never an error of another class."""
    program, tensors = whole()
    place: Any = program
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.integers(0, 3)) == 0:
            place[key] = data.draw(JSON)
            break
        place = inner
    before = copy.deepcopy(program)
    try:
        check(program, tensors)
    except ContractError as error:
        assert error.rule in FAULTS
    assert repr(program) == repr(before)


@pytest.mark.parametrize("columns", [65795, 65796])
def test_a16_sums_that_could_overflow_are_refused(columns: int) -> None:
    program = {
        "ops_version": 1,
        "values": {
            "h": value(columns),
            "a": value(columns, "a16"),
            "y": value(16),
            "last": value(columns, rows="R"),
            "logits": value(32, rows="R"),
        },
        "caches": {},
        "tables": {},
        "body": [
            {"op": "embed", "w": "embed", "out": "h"},
            {"op": "quantize", "x": "h", "out": "a"},
            {"op": "linear", "x": "a", "w": "wide", "out": "y"},
        ],
        "logits": [
            {"op": "norm", "x": "h", "gain": "gain", "eps": 1e-5, "out": "last"},
            {"op": "linear", "x": "last", "w": "embed", "out": "logits"},
        ],
        "greedy": [{"op": "argmax", "logits": "logits"}],
        "random": [{"op": "sample", "logits": "logits"}],
    }
    tensors = {"embed": ("q8", (32, columns)), "gain": ("f32", (columns,)), "wide": ("ternary", (16, columns))}
    if columns == 65795:
        check(program, tensors)
        return
    with pytest.raises(ContractError, match="overflow") as caught:
        check(program, tensors)
    assert caught.value.rule == "program-shape"
