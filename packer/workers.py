"""Threads for pieces of tensors: an ordered map, of which a bounded number of pieces is under way at a time.

Threads, not processes: NumPy lets others run while it works on a piece, and results need not be copied.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_workers() -> int:
    """As many as there are processors that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)  # Linux: a container may have fewer than the machine
    return max(1, len(usable(0)) if usable else os.cpu_count() or 1)


class Workers:
    """So many threads until the end of a ``with`` block; with one of them all work is done by the caller."""

    def __init__(self, count: int):
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="worker") if count > 1 else None

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
        """Results in the order of the items, whose first error is raised in its place.

        Twice as many as there are threads are begun, so that none of them waits for the caller. Pieces that nobody asks
        for any more, after an error or an interrupt too, are not begun.
        """
        if self._pool is None:
            yield from map(work, items)
            return
        begun: deque[Future[Result]] = deque()
        try:
            for item in items:
                begun.append(self._pool.submit(work, item))
                if len(begun) > 2 * self.count:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


#: No threads at all.
SERIAL = Workers(1)
