"""When guessing pays: the cost of both ways is measured, and so is how often guesses are right.

Verifying k tokens in one step takes less than k steps, but it has to wait for its result, and only the guesses that
were right count. The JavaScript twin is ``web/engine/speculation.js``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from .drafts import DraftSource

#: Of guesses, and of a token that comes after them, where nothing is known yet; and as how many observations it counts.
_PRIOR, _PRIOR_WEIGHT = 0.5, 3
#: How much a new observation counts at least: of a guess, of a cost.
_LEARNING, _COST_LEARNING = 1 / 16, 1 / 8
#: A pause of the machine is no cost: an observation counts as at most this many times what was expected.
_OUTLIER = 2
#: Guessing must win by this, for what is measured is never exact.
_MARGIN = 1.1
#: After this many tokens without it a verification is tried, where guesses are good: its cost may have changed.
_RETRY = 256
#: Steps of a plain wave where guessing would pay once a guess was right: to know soon that one was.
SHORT_WAVE = 8
#: Verifications between two times of plain steps, where nothing is known yet, and the least.
_RUN_PRIOR, _LEAST_RUN = 2, 0.1
#: Sizes that are timed at load: the extremes first, for there may be no time for more.
_TIMED = (1, 8, 4, 2)
_ROUNDS = 3


def _towards(average: float, value: float, rate: float) -> float:
    return average + (value - average) * rate


class Costs:
    """What steps take on this device, in ms: running averages.

    plain: a plain step of many. measured: k -> verifying k tokens, with the wait for the result; k = 1 at least.
    most: tokens that are ever verified at a time.
    """

    def __init__(self, plain: float, measured: Mapping[int, float], most: int):
        self.plain = plain
        #: By k.
        self.verify: list[float] = [0, *(_between(measured, k) for k in range(1, most + 1))]
        for k in range(most - 1, 0, -1):
            self.verify[k] = min(self.verify[k], self.verify[k + 1])
        #: The device is idle this long when it gets no work before the last token is known here.
        self.wait = max(0.0, self.verify[1] - plain)

    def saw_plain(self, ms: float) -> None:
        """A plain step took this long."""
        self.plain = _towards(self.plain, min(ms, _OUTLIER * self.plain), _COST_LEARNING)

    def saw_verify(self, k: int, ms: float) -> None:
        """Verifying k tokens took this long."""
        cost = _towards(self.verify[k], min(ms, _OUTLIER * self.verify[k]), _COST_LEARNING)
        # Fewer tokens never cost more: what one size teaches holds for the others as a bound.
        for other in range(1, len(self.verify)):
            bound = min if other <= k else max
            self.verify[other] = bound(self.verify[other], cost)
        self.verify[k] = cost


def _between(measured: Mapping[int, float], k: int) -> float:
    sizes = sorted(measured)
    below = max((size for size in sizes if size <= k), default=sizes[0])
    above = min((size for size in sizes if size >= k), default=None)
    if above is None:  # it is taken that nothing is shared: guessing never pays there
        return measured[below] * k / below
    low, high = measured[below], measured[above]
    return low if below == above else low + (high - low) * (k - below) / (above - below)


def measure_costs(
    verify: Callable[[int], int],
    plain: Callable[[int, int], float],
    most: int,
    capacity: int,
    *,
    now: Callable[[], float],
    budget_ms: float,
    plain_steps: int,
) -> Costs:
    """Time both ways; no step begins later than the budget.

    verify: verifies so many tokens at the start of the cache, and tells how many were taken. plain: ms of a step of so
    many plain ones, the first of them at a position. most: tokens of a verification. now: ms.
    """
    end, best, measured = now() + budget_ms, math.inf, dict[int, float]()
    for _ in range(_ROUNDS):  # the least of each size: a step may be disturbed, and the first ones warm up
        for size in (size for size in _TIMED if size <= most):
            began = now()
            if began >= end and measured:
                break
            taken = verify(size)
            took = now() - began
            measured[size] = min(took, measured.get(size, math.inf))
            if size > 1:
                continue
            steps = min(plain_steps, (capacity - taken) >> 1, int((end - now()) // (2 * took)))
            if steps >= 1:
                best = min(best, plain(steps, taken))
    return Costs(min(best, *measured.values(), math.inf), measured, most)


class Speculation:
    """The guessing of one answer. costs: None where guesses are verified whatever it costs. most: tokens at a time."""

    def __init__(self, source: DraftSource, costs: Costs | None, most: int):
        self.source, self.costs = source, costs
        #: How often a guess was right after i in a row that were; the last one counts for more too.
        self.acceptance = [_PRIOR] * max(0, most - 1)
        #: Observations of each, and the prior's.
        self.known = [_PRIOR_WEIGHT] * len(self.acceptance)
        #: A draft that is not verified, and how much of it plain steps have shown to be right.
        self.shadow: tuple[list[int], int] | None = None
        #: Of the last tokens, so many were guessed right in a row.
        self.streak = 0
        self.plain_tokens = 0
        self.run = 0
        self.usual_run: float = _RUN_PRIOR

    def length(self, most: float, drained: bool = True, streak: int | None = None) -> int:
        """Guesses to verify, so that the tokens per ms are most; 0: plain steps are better.

        most: that there is room for. drained: whether the device waits already; else guessing has to pay for that too.
        """
        costs, limit = self.costs, int(min(most, len(self.acceptance)))
        if costs is None:
            return max(0, limit)
        row = self.streak if streak is None else streak
        switching = 0.0 if drained else costs.wait / max(_LEAST_RUN, self.usual_run)
        best, best_rate, tokens, chance = 0, 0.0, 1.0, 1.0
        for guesses in range(1, limit + 1):
            chance *= self.acceptance[self._place(row + guesses - 1)]
            tokens += chance
            rate = tokens / (costs.verify[guesses + 1] + switching)
            if rate > best_rate:
                best, best_rate = guesses, rate
        if best_rate * costs.plain > _MARGIN:
            return best
        # No verification costs less than that of one token.
        might_pay = tokens * costs.plain > _MARGIN * costs.verify[1]
        return best if might_pay and self.plain_tokens >= _RETRY else 0

    def draft(self, ids: Sequence[int], most: int, drained: bool = True) -> list[int]:
        """Guesses at what follows ``ids`` that are worth a verification."""
        wanted = self.length(most, drained)
        if not wanted:
            return []
        draft = self.source.propose(ids, wanted)
        return draft[: self.length(len(draft), drained) if len(draft) < wanted else wanted]

    @property
    def wave(self) -> float:
        """The most steps of a plain wave."""
        if self.costs is None:
            return 1
        return SHORT_WAVE if self.length(math.inf, False, max(1, self.streak)) else math.inf

    def saw_token(self, ids: Sequence[int]) -> None:
        """A plain step chose the last one of these.

        Whether a guess is right does not depend on how the token is made, so the acceptance is known before anything is
        verified, and after it has become bad.
        """
        if self.costs is None:
            return
        self.plain_tokens += 1
        if self.shadow:
            draft, right = self.shadow
            is_right = ids[-1] == draft[right]
            self._learn(is_right)
            right += is_right
            if is_right and right < len(draft):
                self.shadow = draft, right
                return
            self.source.settle(draft, right)
        else:
            self.streak = 0
        guesses = self.source.propose(ids, len(self.acceptance))
        self.shadow = (guesses, 0) if guesses else None

    def saw_verified(self, draft: Sequence[int], accepted: int, ms: float) -> None:
        """The model chose the first ``accepted`` guesses of a draft; ms: that the verification took."""
        self.plain_tokens = 0
        self.run += 1
        self.shadow = None
        self.source.settle(draft, accepted)
        for guess in range(min(len(draft), accepted + 1)):
            self._learn(guess < accepted)
        if self.costs:
            self.costs.saw_verify(len(draft) + 1, ms)

    def ended(self) -> None:
        """The device waited for guesses, and now it goes on with plain steps."""
        self.usual_run = _towards(self.usual_run, self.run, _COST_LEARNING)
        self.run = 0

    def _place(self, row: int) -> int:
        """Where ``acceptance`` has what follows so many guesses that were right in a row."""
        return min(row, len(self.acceptance) - 1)

    def _learn(self, is_right: bool) -> None:
        place = self._place(self.streak)
        self.known[place] += 1
        rate = max(_LEARNING, 1 / self.known[place])
        self.acceptance[place] = _towards(self.acceptance[place], 1.0 if is_right else 0.0, rate)
        self.streak = self.streak + 1 if is_right else 0
