"""The choice of kernels, in Python and in JavaScript: the same texts are followed, the same times decide alike."""

from __future__ import annotations

import random
from typing import Any

from shaders.contract import kernels
from shaders.forced import ForcedError, parse_forced
from shaders.native_tuning import choose_fastest, kind_of, settings_of
from tests.engine.node import node_json

TEXTS = [
    "",
    " , ",
    "default",
    "default, norm_linear=off",
    "norm_linear=off,linear_ternary.ROWS=32",
    "linear_ternary.ROWS=32 , linear_ternary.WORKGROUP=64,linear_ternary.ROWS=8",
    "linear_ternary_4.ROWS=24",
    "norm_linear",
    "norm_linear=on",
    "NORM_LINEAR=off",
    "nothing=off",
    "linear_ternary.ROWS=5",
    "linear_ternary.ROWS=032",
    "linear_ternary.ROWS=-8",
    "linear_ternary.ROWS=32.0",
    "linear_ternary.ROWS=33333",
    "linear_ternary.SIZE=4",
    "linear_ternary.rows=32",
    "default=off",
    'a"b=off',
    "größe=off",
    "x" * 200,
]


def forced(text: str) -> Any:
    try:
        found = parse_forced(text)
    except ForcedError as error:
        return str(error)
    tuned = {name: dict(values) for name, values in found.tuned.items()}
    return {"off": sorted(found.off), "tuned": tuned, "defaults": found.defaults}


def race(table: list[list[float]], budget: float) -> Any:
    clock, log = 0.0, []

    def time(kind: int, setting: int, rounds: float) -> float:
        nonlocal clock
        log.append([kind, setting])
        took = table[kind][setting] * max(rounds, 0.0625) + 0.125
        clock += took
        return took

    kinds = [(f"k{index}", len(row)) for index, row in enumerate(table)]
    return {"chosen": choose_fastest(kinds, time, lambda: clock, budget), "log": log}


def test_both_follow_and_decide_alike() -> None:
    rng = random.Random(3)
    races = [
        {
            "table": [
                [rng.choice((0.25, 1, 4, 30)) * rng.choice((1, 0.98, 0.9, 0.5, 1.5)) for _ in range(rng.randint(1, 5))]
                for _ in range(rng.randint(1, 6))
            ],
            "budget": rng.choice((0, 1, 20, 80, 280)),
        }
        for _ in range(60)
    ]
    found = node_json("tuning_answers.mjs", {"texts": TEXTS, "races": races})
    assert found["texts"] == [forced(text) for text in TEXTS]
    assert sum(isinstance(answer, str) for answer in found["texts"]) == 15
    expected = [race(**one) for one in races]
    assert found["races"] == expected
    assert len({str(one["chosen"]) for one in expected}) > 15
    made = {
        kernel.name: [{"kernel": one.kernel, "tuned": dict(one.tuned)} for one in settings_of(kernel)]
        for kernel in kernels()
    }
    assert found["settings"] == made
    first = kernels()[0]
    assert found["kinds"] == [kind_of(first, {"ROW_WORDS": 4, "OUT_N": 7, "K": 9}), kind_of(first, {"K": 9})]
