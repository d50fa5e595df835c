"""Cases of normalize_wide.wgsl: those of normalize.wgsl that it can run, with the same values, and its edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .case_kit import Case
from .cases_rows import glu_cases, norm_cases, quantize_cases, row_case, strict_case
from .contract import select


def wide_cases() -> Iterator[Case]:
    """Columns around the rounds of 256 threads, four each."""
    for case in (*norm_cases(), *quantize_cases(), *glu_cases(), *_edges()):
        symbols = {**case.symbols, "software": 0}
        kernel = select(case.kernel, symbols).name
        if kernel.endswith("_wide") and "WORKGROUP" not in symbols:
            yield replace(case, name=f"{case.name} wide", kernel=kernel, symbols=symbols)


def _edges() -> Iterator[Case]:
    for out in ("a8", "a16"):
        for tokens, columns in ((3, 4), (2, 68), (2, 1020), (2, 1028), (1, 8192)):
            yield row_case(f"norm {out} {tokens}x{columns}", "norm", out, tokens, columns)
        for op in ("norm", "quantize"):
            yield row_case(f"{op} {out} last rows of 132", op, out, 5, 132, last_rows=2)
        yield row_case(f"glu silu {out} last rows of 132", "glu", out, 5, 132, last_rows=2, act="silu")
        yield row_case(f"quantize {out} infinite", "quantize", out, 3, 132, broken=-np.inf)
        yield row_case(f"quantize {out} not a number", "quantize", out, 3, 132, broken=np.nan)
        yield row_case(f"glu gelu_tanh {out} 4100", "glu", out, 2, 4100, act="gelu_tanh")
        yield strict_case(f"norm {out} strict 72", "norm", out, 2, 72)
        yield strict_case(f"quantize {out} strict 72", "quantize", out, 2, 72)
        yield strict_case(f"glu silu {out} strict 72", "glu", out, 2, 72, act="silu")
        yield strict_case(f"glu relu2 norm {out} strict 72", "glu", out, 2, 72, act="relu2", gain=True)
