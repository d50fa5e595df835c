"""Preference pairs without a human judge: the chosen answer is the data's own, the rejected one is spoiled on purpose.

| kind | chosen | rejected |
|---|---|---|
| ``wrong-choice`` | the right answer to a trivia question | another of its choices |
| ``wrong-number`` | a solution with the right number | the same with another number in its last line |
| ``cut-short`` | a whole solution | its first half, without a result |
| ``other-question`` | an answer | the answer to another question of the same source |
| ``echo`` | the reply of a dialogue | what the other had just said, word for word |
| ``loop`` | the reply of a dialogue | its first words, three times over |

Such pairs teach what they hold and no more: to be right where that can be checked, to stay on the subject, to finish,
not to repeat. They say nothing of taste, tone or harm.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .corpora import Document, Message


@dataclass(frozen=True)
class Pair:
    """A conversation up to the answer, a better and a worse answer."""

    kind: str
    prompt: list[Message]
    chosen: str
    rejected: str


def pairs(documents: Sequence[Document]) -> Iterator[Pair]:
    """One pair for each document that can give one; the other question's answer comes from the next of its kind."""
    last: dict[str, str] = {}  # kind -> answer of the document before
    for document in documents:
        if not document.messages or document.messages[-1]["role"] != "assistant":
            continue
        chance = document.chance("preference")
        prompt, answer = _cut(document, chance)
        other = last.get(document.kind)
        last[document.kind] = answer
        spoiled = _spoil(document, prompt, answer, other, chance)
        if spoiled is not None and spoiled[1].strip() and spoiled[1] != answer:
            yield Pair(spoiled[0], prompt, answer, spoiled[1])


def _cut(document: Document, chance: random.Random) -> tuple[list[Message], str]:
    """The conversation up to one of the assistant's turns, and that turn."""
    places = [i for i, message in enumerate(document.messages) if i and message["role"] == "assistant"]
    place = chance.choice(places[:4]) if places else len(document.messages) - 1
    return document.messages[:place], document.messages[place]["content"]


def _spoil(
    document: Document, prompt: list[Message], answer: str, other: str | None, chance: random.Random
) -> tuple[str, str] | None:
    """Kind of the fault and the spoiled answer; None if this document gives none."""
    if document.choices:
        return "wrong-choice", chance.choice(document.choices)
    kinds = ["other-question"] if other is not None else []
    if document.gold:
        kinds += ["wrong-number", "wrong-number", *(["cut-short"] if document.kind == "maths" else [])]
    elif document.kind in ("dialogue", "conversation"):
        kinds += ["echo", "loop"]
    if not kinds:
        return None
    kind = chance.choice(kinds)
    if kind == "other-question":
        return kind, other or ""
    if kind == "wrong-number":
        return kind, wrong_number(answer, document.gold, chance)
    if kind == "cut-short":
        return kind, answer.partition("<answer>")[0][: len(answer) // 2].strip()
    if kind == "echo":
        return kind, prompt[-1]["content"] if prompt else ""
    words = answer.split()[:6]
    return kind, " ".join(words * 3)


def wrong_number(answer: str, gold: str, chance: random.Random) -> str:
    """The answer with another number in its last line: near the right one, or the right one with two digits swapped."""
    body, mark, tail = answer.rpartition("<answer>")
    if not mark or gold not in tail:
        return answer
    try:
        value = int(gold.replace(",", ""))
    except ValueError:
        return f"{body}{mark}{tail.replace(gold, gold + '1')}"
    digits = str(abs(value))
    swapped = int(digits[:-2] + digits[-1] + digits[-2]) if len(digits) > 1 else value
    near = [value + step for step in (-10, -2, -1, 1, 2, 10)]
    wrong = chance.choice([number for number in [*near, swapped, swapped] if number not in (value, -value)])
    # The line before says the result too where it is an equation: one that contradicts itself would be too easy.
    lead = body.rstrip()
    if lead.endswith(f"= {gold}"):
        body = f"{lead[: -len(gold)]}{wrong}{body[len(lead) :]}"
    return f"{body}{mark}{tail.replace(gold, str(wrong), 1)}"
