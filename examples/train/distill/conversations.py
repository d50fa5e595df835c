"""Rows of tokens that a net writes by itself: conversations, whose frame is forced on it, and plain text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .decode import Decoder
from .nets import compiled
from .prompts import LONGEST, Phrases, Prompts

#: Chooses the next tokens int64 ``[rows]`` by normed states bf16 ``[rows, D]``.
Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """Of what a batch of rows is made.

    plain: share of rows that begin with the end-of-text token and nothing else. begun: share of plain rows that begin
    with the first tokens of a real document. given: share of user turns that are prompts; the net writes the others
    too. usual: share of conversations with the usual system message. cold: lowest temperature; 40 % of the rows are
    drawn between it and 0.75, 35 % at 0.85, both with a least probability of 3 % of the greatest, 25 % at 1 without.
    """

    plain: float = 0.10
    begun: float = 0.22
    given: float = 0.6
    usual: float = 0.8
    cold: float = 0.3


#: How the first ternary model's held-out conversations were made; held-out prompts take the place of any.
HELD_OUT_RECIPE = Recipe(plain=0.15, begun=0.0, given=0.5)


class Script:
    """What rows must say: ``forced`` int64 ``[rows, length + 1]``, -1 where the net is free.

    When a net ends its turn, the header of the other's turn is forced next, and after a user's header perhaps a prompt.
    """

    def __init__(
        self, rows: int, length: int, recipe: Recipe, prompts: Prompts, phrases: Phrases,
        rng: np.random.Generator, device: torch.device,
    ) -> None:  # fmt: skip
        self.phrases, self.recipe, self.length = phrases, recipe, length
        forced = np.full((rows, length + 1 + LONGEST + 32), -1, dtype=np.int64)
        answering = np.zeros(rows, dtype=bool)
        talking = np.ones(rows, dtype=bool)
        given = prompts.draw(rng, rows)
        kinds = rng.random(rows)
        for row in range(rows):
            if kinds[row] < recipe.plain + recipe.begun:
                talking[row] = False
                begun = prompts.beginning(rng).tolist() if kinds[row] >= recipe.plain else []
                ids = [phrases.end_of_text, *begun]
            else:
                usual = rng.random() < recipe.usual
                ids = list(phrases.systems[0 if usual else rng.integers(1, len(phrases.systems))])
                if rng.random() < recipe.given:
                    ids += [*given[row][given[row] >= 0], *phrases.answer]
                    answering[row] = True
            forced[row, : len(ids)] = ids[: forced.shape[1]]
        self.forced = torch.from_numpy(forced).to(device)
        self._talking, self._answering = torch.from_numpy(talking).to(device), torch.from_numpy(answering).to(device)
        self._turns(prompts, rng, device)

    def _turns(self, prompts: Prompts, rng: np.random.Generator, device: torch.device) -> None:
        """Tables of what follows an end of turn, ``[n, width]``: one for the assistant, many for users."""
        phrases, count = self.phrases, 4096
        width = len(phrases.user) + LONGEST + len(phrases.answer)
        given = np.full((count, width), -1, dtype=np.int64)
        for row, prompt in zip(given, prompts.draw(rng, count), strict=True):
            ids = [*phrases.user, *prompt[prompt >= 0], *phrases.answer]
            row[: len(ids)] = ids
        free, reply = (np.full((1, width), -1, dtype=np.int64) for _ in range(2))
        free[0, : len(phrases.user)] = phrases.user
        reply[0, : len(phrases.assistant)] = phrases.assistant
        self._given, self._free, self._reply = (torch.from_numpy(table).to(device) for table in (given, free, reply))

    def advance(self, position: int, current: Tensor) -> None:
        """Take note of the tokens ``[rows]`` at a position."""
        ahead = self.forced[:, position + 1 : position + 1 + self._given.shape[1]]
        ended = (current == self.phrases.end_of_turn) & self._talking & (ahead[:, 0] < 0)
        by_user, by_assistant = ended & ~self._answering, ended & self._answering
        prompted = torch.rand(len(current), device=current.device) < self.recipe.given
        which = torch.randint(0, len(self._given), (len(current),), device=current.device)
        user = torch.where(prompted[:, None], self._given[which], self._free)
        turn = torch.where(by_user[:, None], self._reply, user)[:, : ahead.shape[1]]
        ahead.copy_(torch.where(ended[:, None], turn, ahead))
        self._answering = torch.where(by_user, True, torch.where(by_assistant, prompted, self._answering))


def greedy(head: Tensor) -> Pick:
    """The most probable tokens."""
    return lambda hidden: F.linear(hidden, head).float().argmax(-1)


def _drawn(hidden: Tensor, head: Tensor, temperature: Tensor, least: Tensor) -> Tensor:
    """Gumbel-max sampling among tokens of exp(least) times the greatest probability or more; least ``[rows, 1]``."""
    scores = F.linear(hidden, head).float() / temperature
    noise = -torch.log(-torch.log(torch.rand_like(scores).clamp(1e-7, 1 - 1e-7)))
    return torch.where(scores >= scores.amax(-1, keepdim=True) + least, scores + noise, -1e30).argmax(-1)


def sampling(head: Tensor, recipe: Recipe, rows: int, rng: np.random.Generator) -> Pick:
    """Draws with each row's own temperature; see ``Recipe``."""
    draws = compiled(_drawn, head.device)
    kinds = rng.random(rows)
    temperature = np.where(kinds < 0.4, rng.uniform(recipe.cold, 0.75, rows), np.where(kinds < 0.75, 0.85, 1.0))
    least = np.where(kinds < 0.75, math.log(0.03), -1e9)
    on_device = [
        torch.tensor(values, dtype=torch.float32, device=head.device)[:, None] for values in (temperature, least)
    ]
    return lambda hidden: draws(hidden, head, *on_device)


@torch.no_grad()
def write(
    decoder: Decoder, forced: Tensor, pick: Pick, tokens: Tensor,
    hidden: Tensor | None = None, advance: Callable[[int, Tensor], None] | None = None,
) -> None:  # fmt: skip
    """Fill tokens int ``[rows, T]`` from the left.

    forced: int64 ``[rows, > T]``, -1 where ``pick`` chooses; each row's first token is forced. hidden: bf16
    ``[rows, T, D]``, gets the net's normed states. advance: is told the tokens of each position and may change forced.
    """
    current = forced[:, 0]
    for position in range(tokens.shape[1]):
        tokens[:, position] = current
        if advance is not None:
            advance(position, current)
        states = decoder.step(current, position)
        if hidden is not None:
            hidden[:, position] = states
        following = forced[:, position + 1]
        current = torch.where(following >= 0, following, pick(states))
