"""The two readers of packs, Python's and JavaScript's, must agree about what is wrong with a pack."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packer.errors import PackError
from packer.manifest import check_manifest
from packer.pack import Pack
from shaders.contract import ContractError
from shaders.program import check as check_program
from tests.engine.node import node_json
from tests.support.packs import tiny_pack

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    1.5,
    64,
    2**31,
    1e39,
    "",
    "x",
    "T",
    "R",
    "f32",
    "a8",
    [],
    [1],
    {},
    ...,
]


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every place in a JSON value, as the keys that lead there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple, to: Any) -> Any:
    """A copy with another value at a place; ... (Ellipsis) takes it out."""
    result = copy.deepcopy(value)
    holder = result
    for key in path[:-1]:
        holder = holder[key]
    if to is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = to
    return result


def mutations(value: Any, count: int, seed: int) -> list[Any]:
    """Random single changes; also swaps of two values of the file, which are more likely to look right."""
    generator = random.Random(seed)
    where = list(places(value))

    def at(path: tuple) -> Any:
        inner = value
        for key in path:
            inner = inner[key]
        return inner

    options: Callable[[], Any] = lambda: generator.choice([generator.choice(VALUES), at(generator.choice(where))])  # noqa: E731
    return [changed(value, generator.choice(where), options()) for _ in range(count)]


def rule_of(check: Callable[[], Any]) -> str | None:
    try:
        check()
    except (PackError, ContractError) as error:
        return error.rule
    return None


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return Pack(tiny_pack(tmp_path_factory.mktemp("twins"), num_hidden_layers=1, attention_bias=True))


def test_both_find_the_same_rule(pack: Pack) -> None:
    shapes = {name: (entry.encoding, entry.shape) for name, entry in pack.entries.items()}
    question = {
        "manifest": pack.manifest,
        "manifests": [pack.manifest, *mutations(pack.manifest, 500, 1)],
        "programs": [pack.program, *mutations(pack.program, 700, 2)],
    }
    found = node_json("twins_answers.mjs", question)
    kinds: dict[str, Callable[[Any], Any]] = {
        "manifests": lambda one: check_manifest(one, Path("pack.json")),
        "programs": lambda one: check_program(one, shapes),
    }
    for kind, check in kinds.items():
        rules = []
        for one, javascript in zip(question[kind], found[kind], strict=True):
            python = rule_of(lambda one=one, check=check: check(one))
            assert javascript == python, json.dumps(difference(question[kind][0], one))
            rules.append(python)
        assert rules[0] is None and len(set(rules)) >= 5, "the changes break many rules, and not all do"


def difference(good: Any, other: Any) -> list[Any]:
    """The first place where two JSON values differ, for the message."""
    for path in places(good):
        inner = [good, other]
        try:
            for key in path:
                inner = [one[key] for one in inner]
        except (KeyError, IndexError, TypeError):
            return [*path, "missing"]
        if inner[0] != inner[1] and not isinstance(inner[0], dict | list):
            return [*path, *inner]
        if type(inner[0]) is not type(inner[1]):
            return [*path, *inner]
    return ["something was added"]
