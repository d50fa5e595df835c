"""An answer of the native executor: which steps go to the GPU next, plain ones or one that verifies drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .contract import constant
from .drafts import DraftSource
from .native_program import SHORT_KEYS
from .sampling import Sampling
from .speculation import SHORT_WAVE, Costs, Speculation, measure_costs

if TYPE_CHECKING:
    from .native import NativeModel

#: ``auto``: drafts are verified while that is measured to be faster, on a software renderer never; ``on``: always.
WAYS = ("auto", "on", "off")
#: How long one submit of decode steps may take: a reader sees the words come, and the GPU hardly waits.
WAVE_SECONDS = 0.05
#: One size for each tile of kernels that take several tokens, with a token less than the tile has.
_SIZES = (3, 7)
#: How long costs are measured at load, and the plain steps of one timing.
_COSTS_MS, _PLAIN_STEPS = 150.0, 32


class Drafting:
    """Whether a loaded model verifies drafts, and what that costs; made while its cache holds nothing that is kept."""

    def __init__(self, model: NativeModel, source: DraftSource, way: str):
        self._source, self._most = source, model.most_verified
        #: Whether the same tokens give the same bits, alone and together.
        self.verifies = model.most_verified > 1 and verifies_exactly(model)
        self._costs = costs_of(model) if self.verifies and way == "auto" else None

    def begin(self, way: str) -> Speculation | None:
        """The guessing of one answer. None: no drafts are verified."""
        if not self.verifies or way == "off" or (way == "auto" and not self._costs):
            return None
        return Speculation(self._source, self._costs if way == "auto" else None, self._most)


def waves(
    model: NativeModel, choose: str, max_tokens: int, prompt: Sequence[int], speculation: Speculation | None
) -> Iterator[list[int]]:
    """The ids of one submit after another, until ``max_tokens`` or the end of the cache.

    The first was chosen already, after the prompt; a wave may go on beyond a token that stops the answer. The model's
    position counts the last token of a wave when the next one is asked for; whoever takes the others counts them.
    """
    text, steps, verified = [*prompt], 1, False
    wave = model.chosen(0, 1)
    produced = 1
    while True:
        for token in wave:
            text.append(token)
            if speculation and not verified:
                speculation.saw_token(text)
        yield wave
        room = min(max_tokens - produced, model.capacity - model.position)
        if room <= 0:
            return
        draft = speculation.draft(text, min(model.most_verified, room) - 1) if speculation else []
        began = time.perf_counter()
        if speculation and draft:
            wave = model.verify([text[-1], *draft], choose, produced)
            speculation.saw_verified(draft, len(wave) - 1, 1000 * (time.perf_counter() - began))
        else:
            if speculation and verified:
                speculation.ended()
            count = int(min(steps, room, speculation.wave if speculation else room))
            model.decode(count, choose)
            wave = model.chosen(produced, count)
            took = time.perf_counter() - began
            if not model.keep_logits:
                steps = max(1, min(int(WAVE_SECONDS * count / took), 2 * steps, constant("ring")))
            # The wait for the result must not count as a part of the steps.
            if speculation and speculation.costs and count >= SHORT_WAVE:
                speculation.costs.saw_plain(1000 * took / count)
        verified = bool(draft)
        model.position += 1  # the last token of the wave before is in the cache
        produced += len(wave)


def verifies_exactly(model: NativeModel) -> bool:
    """Whether tokens give the same logits one by one and several at a time. Overwrites the cache.

    That is so before and beyond the number of keys at which steps are rewritten. False where nothing can be compared.
    """
    if not model.can_verify():
        return False
    starts = [start for start in (0, SHORT_KEYS) if start + max(_SIZES) <= model.capacity]
    for start in starts:
        for size in _SIZES:
            ids = [7919 * (index + 1) % model.vocabulary for index in range(size)]
            apart = [model.logits_at(start + index, [token]) for index, token in enumerate(ids)]
            if np.concatenate(apart).tobytes() != model.logits_at(start, ids).tobytes():
                return False
    return bool(starts)


def costs_of(model: NativeModel) -> Costs:
    """Time plain steps and verifications. Overwrites the cache and the options of sampling."""
    model.set_sampling(Sampling(temperature=1.0), [0])

    def verify(size: int) -> int:
        model.position = 0
        return len(model.verify([0] * size, "random", 0))

    def plain(steps: int, position: int) -> float:
        began = time.perf_counter()
        model.position = position
        model.decode(steps, "random")
        model.chosen(position, steps)
        return 1000 * (time.perf_counter() - began) / steps

    try:
        return measure_costs(
            verify,
            plain,
            model.most_verified,
            model.capacity,
            now=lambda: 1000 * time.perf_counter(),
            budget_ms=_COSTS_MS,
            plain_steps=_PLAIN_STEPS,
        )
    finally:
        model.position = 0
