"""Cases of kernels that no program runs: they only help to measure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .case_kit import Case, generator
from .checks import Exact
from .contract import kernels


def read_bandwidth_cases() -> Iterator[Case]:
    """Fewer vec4 than threads, a last round that is not full, and rounds of four loads with a rest."""
    for count, readers, workgroup in ((37, 1, 64), (300, 2, 64), (64 * 3 * 9 + 5, 3, 64), (256 * 2 * 4 + 1, 2, 256)):
        yield _case(count, readers, workgroup)


def _case(count: int, readers: int, workgroup: int) -> Case:
    name = f"read_bandwidth {count}"
    data = generator(name).integers(0, 2**32, (count, 4), dtype=np.uint32)
    reader = np.arange(count) % (readers * workgroup) // workgroup
    sums = np.array([data[reader == one].sum(dtype=np.uint32) for one in range(readers)], dtype=np.uint32)
    kernel = next(one for one in kernels() if one.op == "read_bandwidth")
    symbols = {"N": count, "READERS": readers, "WORKGROUP": workgroup}
    return Case(name, kernel.name, symbols, (0, 1, 1, 0), {"data": data}, {"sums": sums}, {"sums": Exact()})
