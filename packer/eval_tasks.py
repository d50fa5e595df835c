"""What both models are asked: sums, differences and products of one to three digits, and a few prompts."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from shaders.sampling import Sampling

from .eval_measures import first_difference, rounded
from .eval_run import Runner
from .text import ChatText

OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "sum": ("+", lambda a, b: a + b),
    "difference": ("-", lambda a, b: a - b),
    "product": ("*", lambda a, b: a * b),
}
DIGITS = (1, 2, 3)
#: Tokens of an answer to a sum: 998001 has six digits, and some models repeat the question first.
ANSWER_TOKENS = 24
CONTINUED_TOKENS = 32
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three things that one needs to bake bread.",
    "Explain in two sentences why it rains.",
)
_EXAMPLES = "2 + 5 = 7\n61 - 20 = 41\n3 * 4 = 12\n"
_SEED = 20240229


@dataclass(frozen=True)
class Sum:
    """One arithmetic question."""

    operation: str
    digits: int
    question: str
    answer: int


@dataclass(frozen=True)
class Answers:
    """What a model said: text to each sum, ids to each prompt."""

    sums: list[str]
    prompts: list[list[int]]


def generate_sums(count: int) -> list[Sum]:
    """``count`` different questions for each operation and number of digits, the same in every run.

    Differences are never negative; with one digit there are fewer different ones than may be asked for.
    """
    found = []
    for operation, (sign, compute) in OPERATIONS.items():
        for digits in DIGITS:
            chance = random.Random(f"{_SEED} {operation} {digits}")
            low, high = (1 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
            pairs = [(a, b) for a in range(low, high + 1) for b in range(low, high + 1)] if digits == 1 else None
            chosen: list[tuple[int, int]] = []
            if pairs is not None:
                chosen = chance.sample(pairs, min(count, len(pairs)))
            while pairs is None and len(chosen) < count:
                pair = (chance.randint(low, high), chance.randint(low, high))
                if pair not in chosen:
                    chosen.append(pair)
            for a, b in chosen:
                if operation == "difference":
                    a, b = max(a, b), min(a, b)
                found.append(Sum(operation, digits, f"{a} {sign} {b}", compute(a, b)))
    return found


class Tasks:
    """The questions as token ids, for one pack's tokenizer and chat template. capacity: tokens of context."""

    def __init__(self, text: ChatText, sums: int, prompts: int, eos: Collection[int], capacity: int):
        self.text, self.eos = text, set(eos)
        self.is_chat = text.template is not None
        self.sums = generate_sums(sums)
        self.prompts = PROMPTS[:prompts]
        asked = [(self._sum_ids(one), ANSWER_TOKENS) for one in self.sums]
        asked += [(self._prompt_ids(prompt), CONTINUED_TOKENS) for prompt in self.prompts]
        # A context that is too small for a question leaves it out, for both models.
        fits = [bool(ids) and len(ids) + most <= capacity for ids, most in asked]
        self.sums = [one for one, fit in zip(self.sums, fits, strict=False) if fit]
        self.prompts = tuple(one for one, fit in zip(self.prompts, fits[len(fits) - prompts :], strict=False) if fit)
        self._asked = [one for one, fit in zip(asked, fits, strict=True) if fit]

    @property
    def tokens(self) -> int:
        """Tokens that asking all of it takes at most."""
        return sum(len(ids) + most for ids, most in self._asked)

    @property
    def longest(self) -> int:
        """Context that the longest one needs."""
        return max((len(ids) + most for ids, most in self._asked), default=0)

    def ask(self, model: Runner, advance: Callable[[int], None]) -> Answers:
        """All answers of a model, greedily. advance: called with the tokens that each took at most."""
        found = []
        for index, (ids, most) in enumerate(self._asked):
            found.append(self._answer(model, ids, most, one_line=index < len(self.sums)))
            advance(len(ids) + most)
        count = len(self.sums)
        return Answers([self.text.decode(ids) for ids in found[:count]], found[count:])

    def arithmetic(self, source: Answers, pack: Answers) -> dict[str, Any]:
        """Exact matches of both, by operation and digits."""
        rows = []
        rights = {
            kind: [is_right(answer, one.answer) for one, answer in zip(self.sums, answers.sums, strict=True)]
            for kind, answers in (("source", source), ("pack", pack))
        }
        for operation in OPERATIONS:
            for digits in DIGITS:
                own = [
                    index for index, one in enumerate(self.sums) if (one.operation, one.digits) == (operation, digits)
                ]
                right = {kind: sum(found[index] for index in own) for kind, found in rights.items()}
                rows.append({"operation": operation, "digits": digits, "asked": len(own), **right})
        asked = len(self.sums)
        shares = {kind: rounded(sum(found) / asked) if asked else None for kind, found in rights.items()}
        return {"asked": asked, "prompt": "chat" if self.is_chat else "few-shot", "share": shares, "rows": rows}

    def greedy(self, source: Answers, pack: Answers) -> list[dict[str, Any]]:
        """For each prompt the first token that differs (None: none of those compared)."""
        return [
            {
                "prompt": prompt,
                "tokens": max(len(one), len(other)),
                "first_difference": first_difference(one, other),
                "source": self.text.decode(one),
                "pack": self.text.decode(other),
            }
            for prompt, one, other in zip(self.prompts, source.prompts, pack.prompts, strict=True)
        ]

    def _sum_ids(self, one: Sum) -> list[int]:
        if self.is_chat:
            content = f"What is {one.question}? Answer with the number only."
            return self.text.encode_messages([{"role": "user", "content": content}])
        return self.text.encode_raw(f"{_EXAMPLES}{one.question} =")

    def _prompt_ids(self, prompt: str) -> list[int]:
        if self.is_chat:
            return self.text.encode_messages([{"role": "user", "content": prompt}])
        return self.text.encode_raw(prompt)

    def _answer(self, model: Runner, ids: Sequence[int], most: int, *, one_line: bool) -> list[int]:
        model.truncate(0)
        found: list[int] = []
        for token, _ in model.generate(ids, Sampling(), most, self.eos):
            if token in self.eos:
                break
            found.append(token)
            # Sums end with their line: what a model without chat template writes after it is the next question.
            if one_line and "\n" in self.text.decode(found).lstrip("\n"):
                break
        return found


def is_right(answer: str, expected: int) -> bool:
    """Whether the last whole number in the answer's first line is the expected one; ``1,234`` is 1234."""
    lines = [line for line in answer.splitlines() if line.strip()]
    numbers = re.findall(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?", lines[0]) if lines else []
    text = numbers[-1].replace(",", "") if numbers else ""
    if re.fullmatch(r"-?\d+\.0+", text):
        text = text.partition(".")[0]
    return text == str(expected)
