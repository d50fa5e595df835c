"""Guesses at the next tokens, which the model then verifies in one step.

The JavaScript twin is ``web/engine/drafts.js``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DraftSource(Protocol):
    """Where guesses come from; a head of the model that predicts several tokens would be another source."""

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """What may follow ``ids``, at most ``most`` tokens; none when it has no idea.

        Asked after every token, so it must be quick. From call to call ``ids`` is the same list, grown, or another.
        """

    def settle(self, proposed: Sequence[int], accepted: int) -> None:
        """What became of a proposal, or of its beginning.

        The model itself chose the first ``accepted`` tokens of it, and not the one after them.
        """


class PromptLookup:
    """The last occurrence of what was written before most often goes on as it did then: code, tables, quotations.

    Every pair and every triple of tokens leads to where it last ended, so a token costs two look-ups, however long
    the text is.
    """

    def __init__(self) -> None:
        #: What is indexed: the list that was given last, and a copy of its beginning.
        self.seen: Sequence[int] | None = None
        self.ids: list[int] = []
        self.pairs, self.triples = _Trail(), _Trail()

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """As in ``DraftSource``."""
        self._read(ids)
        last = len(ids) - 1
        if last < 0:
            return []
        found = self.triples.before[last]
        if found < 0:
            found = self.pairs.before[last]
        if found < 0:
            return []
        draft: list[int] = []
        # Where what followed reaches the end of the text it goes on with itself: the text repeats with that period.
        for at in range(found + 1, found + 1 + most):
            draft.append(ids[at] if at <= last else draft[at - last - 1])
        return draft

    def settle(self, proposed: Sequence[int], accepted: int) -> None:
        """Nothing: the text is all that it learns from."""

    def _read(self, ids: Sequence[int]) -> None:
        if ids is not self.seen or len(ids) < len(self.ids):
            pairs = zip(self.ids, ids, strict=False)
            shorter = min(len(self.ids), len(ids))
            common = next((index for index, (one, other) in enumerate(pairs) if one != other), shorter)
            self._forget(common)
            self.seen = ids
        for at in range(len(self.ids), len(ids)):
            self.ids.append(ids[at])
            self.pairs.add(None if at < 1 else (ids[at - 1], ids[at]))
            # A pair is known by where it ended first: the same as long as the pair is there.
            self.triples.add(None if at < 2 else (self.pairs.first[at - 1], ids[at]))

    def _forget(self, length: int) -> None:
        del self.ids[length:]
        self.pairs.cut(length)
        self.triples.cut(length)


class _Trail:
    """Where each key occurred last, and before that: what was added last can be taken back."""

    def __init__(self) -> None:
        self.last: dict[tuple[int, int], int] = {}
        self.keys: list[tuple[int, int] | None] = []
        #: By position, the last one before it with the same key; -1: none.
        self.before: list[int] = []
        #: By position, the first one with the same key.
        self.first: list[int] = []

    def add(self, key: tuple[int, int] | None) -> None:
        """key: of the next position; None: it has none."""
        at = len(self.keys)
        before = -1 if key is None else self.last.get(key, -1)
        self.keys.append(key)
        self.before.append(before)
        self.first.append(at if before < 0 else self.first[before])
        if key is not None:
            self.last[key] = at

    def cut(self, length: int) -> None:
        """Keep ``length`` positions."""
        for at in range(len(self.keys) - 1, length - 1, -1):
            key = self.keys[at]
            if key is None:
                continue
            if self.before[at] < 0:
                del self.last[key]
            else:
                self.last[key] = self.before[at]
        for trail in (self.keys, self.before, self.first):
            del trail[length:]
