"""Small files in the formats of the training data, the same in every run."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_PLACES = ["garden", "kitchen", "river", "harbour", "station", "market", "forest", "library"]
_THINGS = ["apples", "stamps", "books", "coins", "marbles", "pencils", "shells", "cards"]
_NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn"]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """JSON lines; gzip if the name ends so."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_corpus(folder: Path, count: int = 120) -> Path:
    """A data folder with the five files, ``count`` rows or less in each."""
    chance = random.Random(5)
    folder.mkdir(parents=True, exist_ok=True)
    dialogues = [{"topic": "places", "turns": _turns(chance, i)} for i in range(count)]
    write_lines(folder / "self-dialogues.jsonl.gz", dialogues)
    write_lines(folder / "persona-chat.jsonl.gz", ({"turns": _turns(chance, 1000 + i)} for i in range(count // 4)))
    write_lines(folder / "gsm8k-train.jsonl.gz", (_maths(chance) for _ in range(count)))
    write_lines(folder / "gsm8k-test.jsonl", (_maths(chance) for _ in range(count // 8)))
    write_lines(folder / "trivia.jsonl.gz", (_trivia(i) for i in range(count)))
    return folder


def _turns(chance: random.Random, number: int) -> list[str]:
    place, other = chance.sample(_PLACES, 2)
    name = chance.choice(_NAMES)
    turns = [
        f"Did you see the {place} number {number}?",
        f"Yes, {name} and I went to the {place} on Monday.",
        f"What did you find in the {place}?",
        f"We found {chance.randint(2, 90)} {chance.choice(_THINGS)} – and a café.",
        f"Shall we go to the {other} too?",
        f"The {other} is closed, sorry!",
    ]
    return turns[: chance.choice((2, 4, 5, 6))]


def _maths(chance: random.Random) -> dict[str, str]:
    a, b = chance.randint(2, 60), chance.randint(2, 60)
    name, thing = chance.choice(_NAMES), chance.choice(_THINGS)
    return {
        "question": f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?",
        "answer": f"{name} has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} {thing}.\n#### {a + b}",
    }


def _trivia(number: int) -> dict[str, Any]:
    place = _PLACES[number % len(_PLACES)]
    return {
        "category": "general",
        "question": f"Where does one look for thing number {number}?",
        "answer": f"In the {place}",
        "choices": [f"In the {place}", "In the attic", "In the sea", "Nowhere"],
    }
