"""Guessing in Python and in JavaScript: the same guesses, and the same ones of them are verified."""

from __future__ import annotations

import random
from typing import Any

from shaders.drafts import PromptLookup
from shaders.speculation import Costs, Speculation
from tests.engine.node import node_json


def guesses(turns: list[list[int]]) -> Any:
    lookup, found = PromptLookup(), []
    for turn in turns:
        ids: list[int] = []
        found.append([])
        for token in turn:
            ids.append(token)
            found[-1].append(lookup.propose(ids, 5))
    return found


def log(
    text: list[int],
    prompt: int,
    plain: float,
    measured: list[list[float]],
    most: int,
    always: bool,
    wave: int,
    times: list[float],
) -> Any:
    costs = Costs(plain, {int(k): ms for k, ms in measured}, most)
    subject = Speculation(PromptLookup(), None if always else costs, most)
    ids, steps = text[:prompt], []
    while len(ids) < len(text):
        ms = times[len(steps) % len(times)]
        draft = subject.draft(ids, min(most, len(text) - len(ids)) - 1, len(steps) % 3 > 0)
        if draft:
            accepted = 0
            while accepted < len(draft) and draft[accepted] == text[len(ids) + accepted]:
                accepted += 1
            ids += text[len(ids) : len(ids) + accepted + 1]
            subject.saw_verified(draft, accepted, ms)
        else:
            subject.ended()
            for _ in range(int(min(wave, subject.wave, len(text) - len(ids)))):
                ids.append(text[len(ids)])
                subject.saw_token(ids)
            costs.saw_plain(ms)
        known = [list(subject.acceptance), subject.streak, subject.usual_run]
        steps.append([draft, len(ids), *known, costs.plain, list(costs.verify)])
    return steps


def texts(rng: random.Random) -> list[int]:
    """A text that quotes what it has said, for stretches of random length."""
    text = [rng.randrange(6 * rng.choice((1, 9))) for _ in range(30)]
    while len(text) < 500:
        start, length = rng.randrange(len(text)), rng.randrange(1, 40)
        text += [*text[start : start + length], *(rng.randrange(50) for _ in range(rng.randrange(12)))]
    return text


def test_both_guess_and_verify_alike() -> None:
    rng = random.Random(7)
    base = [rng.randrange(4) for _ in range(50)]
    turns = [
        [*base[: rng.randrange(50)], *(rng.randrange(rng.choice((3, 5))) for _ in range(rng.randrange(40)))]
        for _ in range(20)
    ]
    answers: list[dict[str, Any]] = []
    for _ in range(40):
        sizes = rng.choice(([1, 2, 4, 8], [1, 8], [1]))
        slope = rng.choice((0.02, 0.1, 0.5, 1))
        answers.append(
            {
                "text": texts(rng),
                "prompt": rng.randrange(1, 60),
                "plain": 1 + rng.random(),
                "measured": [[k, 1.5 + slope * k + rng.random() / 4] for k in sizes],
                "most": rng.choice((8, 8, 5, 2, 1)),
                "always": rng.random() < 0.2,
                "wave": rng.choice((1, 4, 32)),
                "times": [1 + slope * rng.random() * 4 for _ in range(17)],
            }
        )
    found = node_json("speculation_answers.mjs", {"turns": turns, "answers": answers})
    assert found["guesses"] == guesses(turns)
    expected = [log(**answer) for answer in answers]
    for one, other in zip(found["logs"], expected, strict=True):
        assert one == other
    verified = [sum(bool(step[0]) for step in steps) for steps in expected]
    assert 5 < sum(count > 0 for count in verified) < 38 and max(verified) > 20
