"""The two planners, Python's and JavaScript's, must rewrite the same programs in the same way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packer.pack import Pack
from shaders.rewrite import rewrite
from tests.engine.node import node_json
from tests.support.packs import tiny_pack

FAMILIES = ("bitnet", "llama")
#: Changed programs for each family.
CHANGES = 150
VALUES = ("h", "q", "qkv", "attn_in.a8", "attn_out", "o_in.a8", "ffn_in.a8", "gate_up", "down_in.a8")


def question(ops: list[Any], later: list[Any], **options: Any) -> dict[str, Any]:
    return {"ops": ops, "later": later, "refused": [], "software": False, "keys": 512} | options


def questions(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The program itself in every kind of step, and with operations that are moved, lost or wired otherwise."""
    body, later = program["body"], program["logits"]
    for keys in (1, 512, 513):
        for software in (False, True):
            yield question(body, later, keys=keys, software=software)
    for refused in ("merge_linear", "norm_linear", "glu_linear", "rope_attention", "attention_merge"):
        yield question(body, later, refused=[refused])
    yield question(body, [{"op": "quantize", "x": "attn_out", "out": "h"}])
    gained = {"q_gain": "g", "k_gain": "g", "eps": 1e-6, "window": 9, "accumulate": True}
    fields = {"rope_append": ("q_gain", "k_gain", "eps"), "attention": ("window",), "norm": ("accumulate",)}
    for most in (256, 512):
        more = [op | {name: gained[name] for name in fields.get(op["op"], ())} for op in body]
        yield question(more, later, keys=most)
    for section in ("logits", "greedy", "random"):
        yield question(program[section], [])
    rng = random.Random(7)
    for _ in range(CHANGES):
        ops = [dict(op) for op in body]
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(ops))
            if rng.random() < 0.2:
                ops.insert(rng.randrange(len(ops)), ops.pop(at))
            elif rng.random() < 0.2:
                del ops[at]
            else:
                field = rng.choice([name for name in ("x", "q", "out", "k", "heads", "accumulate") if name in ops[at]])
                ops[at][field] = {"heads": 1, "accumulate": False, "k": "k.9"}.get(field, rng.choice(VALUES))
        yield question(ops, later, keys=rng.choice((512, 513)))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_rewrite_alike(family: str, tmp_path: Path) -> None:
    program = Pack(tiny_pack(tmp_path, family)).program
    asked = list(questions(program))
    expected = [
        rewrite(
            one["ops"],
            one["later"],
            lambda op, one=one: op["op"] not in one["refused"],
            one["software"],
            one["keys"],
        )
        for one in asked
    ]
    assert node_json("rewrite_answers.mjs", asked) == expected
    assert expected[0] != asked[0]["ops"] and len({str(one) for one in expected}) > CHANGES / 2
