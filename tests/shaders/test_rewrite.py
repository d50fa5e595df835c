"""Rewrites: where each rule applies, and everything that keeps it from a program."""

from __future__ import annotations

from typing import Any

import pytest

from shaders import contract
from shaders.rewrite import rewrite

HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 16}
CACHES = {"k": "k.0", "v": "v.0"}
NORM = {"op": "norm", "x": "h", "gain": "g", "eps": 1e-5, "out": "a"}
QUANTIZE = {"op": "quantize", "x": "h", "out": "a"}
GLU = {"op": "glu", "x": "gu", "act": "relu2", "gain": "g", "eps": 1e-6, "out": "a"}
LINEAR = {"op": "linear", "x": "a", "w": "w", "bias": "b", "accumulate": True, "out": "y"}
PRODUCT = {"w": "w", "bias": "b", "accumulate": True, "out": "y"}
ROPE = {"op": "rope_append", "x": "qkv", "rope": "rope", **CACHES, **HEADS, "out": "q"}
ATTENTION = {"op": "attention", "q": "q", **CACHES, **HEADS, "scale": 0.25, "out": "o"}
PARTS = {"op": "rope_attention", "x": "qkv", "rope": "rope", **CACHES, **HEADS, "scale": 0.25}
MERGE = {"op": "merge_linear", **HEADS, "via": "a", **PRODUCT}
ARGMAX, SAMPLE = ({"op": op, "logits": "logits"} for op in ("argmax", "sample"))
CHAIN = [ROPE, ATTENTION, {**NORM, "x": "o"}, LINEAR]

#: Operations, and what becomes of them.
RULES: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    (CHAIN, [PARTS, {**MERGE, "gain": "g", "eps": 1e-5}]),
    ([ROPE, ATTENTION, {**QUANTIZE, "x": "o"}, LINEAR], [PARTS, MERGE]),
    ([NORM, LINEAR], [{"op": "norm_linear", "x": "h", "gain": "g", "eps": 1e-5, "via": "a", **PRODUCT}]),
    ([QUANTIZE, LINEAR], [{"op": "quantize_linear", "x": "h", "via": "a", **PRODUCT}]),
    (
        [GLU, LINEAR],
        [{"op": "glu_linear", "x": "gu", "act": "relu2", "gain": "g", "eps": 1e-6, "via": "a", **PRODUCT}],
    ),
    ([ROPE, ATTENTION], [PARTS, {"op": "attention_merge", **HEADS, "out": "o"}]),
    ([ARGMAX], [{"op": "pick", "logits": "logits", "part": 1024}, {"op": "accept", "logits": "logits", "part": 1024}]),
    ([SAMPLE], [{"op": name, "logits": "logits", "part": 1024} for name in ("pick", "weigh", "draw", "accept")]),
]
IDS = ["-".join(op["op"] for op in ops) for ops, _ in RULES]


def made(ops: list[dict[str, Any]], **options: Any) -> list[Any]:
    arguments: dict[str, Any] = {"later": [], "runs": lambda op: True, "software": False, "keys": 256} | options
    return rewrite(ops, **arguments)


def names(ops: list[Any]) -> list[str]:
    return [op["op"] for op in ops]


def test_every_rule_is_in_the_list() -> None:
    assert [rule["ops"] for rule in contract.document()["rewrites"]] == [names(ops) for ops, _ in RULES]


@pytest.mark.parametrize(("ops", "inner"), RULES, ids=IDS)
def test_a_rule_applies(ops: list[Any], inner: list[Any]) -> None:
    assert made(ops) == inner
    around = {"op": "embed", "w": "e", "out": "h"}
    assert made([around, *ops, around]) == [around, *inner, around]


def test_fields_that_may_be_left_out_stay_out() -> None:
    plain = {"op": "linear", "x": "a", "w": "w", "out": "y"}
    [inner] = made([{"op": "glu", "x": "gu", "act": "silu", "out": "a"}, plain])
    assert inner == {"op": "glu_linear", "x": "gu", "act": "silu", "via": "a", "w": "w", "out": "y"}


@pytest.mark.parametrize(("ops", "inner"), [rule for rule in RULES if len(rule[0]) > 1])
def test_a_value_that_is_read_later_is_made(ops: list[Any], inner: list[Any]) -> None:
    for op in ops[:-1]:
        reader = {"op": "quantize", "x": op["out"], "out": "z"}
        for found in (made([*ops, reader])[:-1], made(ops, later=[reader])):
            assert len([one for one in found if one.get("out") == op["out"]]) == 1, f"{op['out']} is read later"
        adder = {"op": "linear", "x": "z", "w": "w", "accumulate": True, "out": op["out"]}
        found = made(ops, later=[adder])
        assert op["out"] in [one.get("out") for one in found], "an operation that adds to a value reads it"


def test_a_norm_that_adds_is_left() -> None:
    """What it adds to is read besides its inputs, and inner operations know nothing of it."""
    for at, (ops, _) in enumerate(RULES):
        adding = [{**op, "accumulate": True} if op["op"] == "norm" else op for op in ops]
        assert all(op in made(adding) for op in adding if op["op"] == "norm"), IDS[at]
    adding = [*CHAIN[:2], {**CHAIN[2], "accumulate": True}, LINEAR]
    assert made(adding) == [PARTS, {"op": "attention_merge", **HEADS, "out": "o"}, *adding[2:]]


def test_fields_of_heads_reach_the_inner_operations() -> None:
    gains, window = {"q_gain": "g.q", "k_gain": "g.k", "eps": 1e-6}, {"window": 7}
    for ops, inner in RULES:
        if ops[0] == ROPE:
            found = made([{**ROPE, **gains}, {**ATTENTION, **window}, *ops[2:]])
            assert found[0] == {**inner[0], **gains, **window}
            merges = window if inner[1]["op"] == "attention_merge" else {}
            assert found[1:] == [{**inner[1], **merges}, *inner[2:]]


@pytest.mark.parametrize(("ops", "inner"), RULES, ids=IDS)
def test_a_value_that_is_written_before_it_is_read_is_not_made(ops: list[Any], inner: list[Any]) -> None:
    writers = [{**QUANTIZE, "x": "h", "out": op["out"]} for op in ops if "out" in op]
    readers = [{**QUANTIZE, "x": op["out"], "out": "z"} for op in ops if "out" in op]
    assert made(ops, later=[*writers, *readers]) == inner


@pytest.mark.parametrize("field", ["k", "v", "heads", "kv_heads", "head_dim"])
def test_both_halves_of_attention_must_agree(field: str) -> None:
    other = {**ATTENTION, field: 8 if isinstance(ATTENTION[field], int) else "other"}
    ops = [ROPE, other, *CHAIN[2:]]
    assert not {"rope_attention", "attention_merge"} & set(names(made(ops)))


@pytest.mark.parametrize(("ops", "inner"), [rule for rule in RULES if len(rule[0]) > 1])
def test_operations_that_only_stand_side_by_side_are_left(ops: list[Any], inner: list[Any]) -> None:
    last = dict(ops[-1])
    read = "q" if last["op"] == "attention" else "x"
    last[read] = "another"
    assert made([*ops[:-1], last])[-1] == last


def test_a_software_renderer_keeps_what_costs_it_more() -> None:
    for (ops, inner), rule in zip(RULES, contract.document()["rewrites"], strict=True):
        found = made(ops, software=True)
        assert (found == inner) == (not rule.get("gpu"))
    assert made(CHAIN, software=True) == CHAIN


def test_more_keys_than_a_merge_takes() -> None:
    [most] = {rule["most_keys"] for rule in contract.document()["rewrites"] if "most_keys" in rule}
    assert names(made(CHAIN, keys=most)) == ["rope_attention", "merge_linear"]
    assert names(made(CHAIN, keys=most + 1)) == ["rope_attention", "attention_merge", "norm_linear"]
    # merge_linear keeps at most four parts of a head (linear_fused.wgsl).
    assert most == 4 * contract.constant("key_chunk")


@pytest.mark.parametrize(
    ("broken", "left"),
    [
        ("merge_linear", ["rope_attention", "attention_merge", "norm_linear"]),
        ("norm_linear", ["rope_attention", "merge_linear"]),
        ("rope_attention", ["rope_append", "attention", "norm_linear"]),
    ],
)
def test_a_kernel_that_does_not_run_leaves_a_shorter_rule(broken: str, left: list[str]) -> None:
    assert names(made(CHAIN, runs=lambda op: op["op"] != broken)) == left


@pytest.mark.parametrize(("ops", "inner"), RULES, ids=IDS)
def test_nothing_runs(ops: list[Any], inner: list[Any]) -> None:
    asked: list[str] = []

    def runs(op: Any) -> bool:
        asked.append(op["op"])
        return False

    assert made(ops, runs=runs) == ops
    assert set(asked) <= set(contract.document()["inner_ops"]) and inner[0]["op"] in asked


def test_the_operations_that_come_in_are_not_changed() -> None:
    ops = [dict(op) for op in CHAIN]
    made(ops)
    assert ops == CHAIN


def test_a_value_that_is_only_added_to_is_no_link() -> None:
    other = [{**NORM, "out": "y"}, {"op": "linear", "x": "b", "w": "w", "accumulate": True, "out": "y"}]
    assert made(other) == other


def test_no_operation_reads_and_writes_one_value() -> None:
    in_place = [NORM, {"op": "linear", "x": "a", "w": "w", "accumulate": True, "out": "h"}]
    assert made(in_place) == in_place
