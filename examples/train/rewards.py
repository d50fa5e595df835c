"""The verifier: what an answer to a question with a known number is worth, read from its text alone.

1.0 for the right number plus 0.2 for exactly one ``<answer>`` block, so 0, 0.2, 1.0 or 1.2. A learned reward
can be flattered; this one can only be satisfied.
"""

from __future__ import annotations

import re
from decimal import Decimal

import torch

RIGHT, FORMAT = 1.0, 0.2
_BLOCK = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
#: 1,234.50 and -7 and .5; digits of other scripts are not what the data writes.
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+")


def numbers(text: str) -> list[Decimal]:
    """All numbers in the text, in order; thousands may be set off by commas.

    A minus sign that follows a digit or a letter subtracts: ``7-3`` holds 7 and 3.
    """
    found = []
    for match in _NUMBER.finditer(text):
        digits = match.group().replace(",", "")
        before = text[match.start() - 1] if match.start() else " "
        found.append(Decimal(digits.lstrip("-") if before.isalnum() or before == ")" else digits))
    return found


def has_format(text: str) -> bool:
    """Whether the text holds exactly one ``<answer>…</answer>`` block and no loose tag beside it."""
    return text.count("<answer>") == text.count("</answer>") == len(_BLOCK.findall(text)) == 1


def final_number(text: str) -> Decimal | None:
    """What the text gives as its result: the last number of the last ``<answer>`` block; without a block, of the text.

    A block without a number is no answer, whatever stands before it.
    """
    blocks = _BLOCK.findall(text)
    found = numbers(blocks[-1] if blocks else text)
    return found[-1] if found else None


def verifier_reward(text: str, gold: str) -> float:
    """0, 0.2, 1.0 or 1.2. gold: text whose last number is the right one, ``1,234`` or ``#### 72``."""
    expected, given = numbers(gold), final_number(text)
    right = bool(expected) and given is not None and given == expected[-1]
    return RIGHT * right + FORMAT * has_format(text)


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """(r - mean) / (std + 1e-4) within each group of answers to one prompt: the group is its own baseline.

    rewards: f32 ``[prompts * group]``, the answers of one prompt side by side. A group of equal rewards gives zeros.
    Source: DeepSeekMath (arXiv:2402.03300), section 4.1, population standard deviation.
    """
    grouped = rewards.view(-1, group)  # [prompts, group]
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, correction=0, keepdim=True) + 1e-4)).view(-1)
