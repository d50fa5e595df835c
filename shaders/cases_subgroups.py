"""Cases of the kernels that use subgroups: those of the kernels that they replace, with the same expected values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from .case_kit import Case
from .cases_fused import fused_case, fused_cases, merge_case, merge_cases
from .cases_linear import linear_case, linear_ternary_cases
from .contract import kernels

#: Constants other than the defaults, by operation.
_TUNED: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "linear": ({"ROWS": 32}, {"SPLIT": 2}, {"ROWS": 32, "SPLIT": 2}),
    **{op: ({"ROWS": 32}, {"ROWS": 128}) for op in ("norm_linear", "quantize_linear", "glu_linear", "merge_linear")},
}
#: Cases that run with them too.
_TUNED_CASES = (
    "linear_ternary a8 33x576",
    "linear_ternary a16 33x576",
    "norm_linear a8 33x576",
    "quantize_linear a8",
    "glu_linear relu2 norm a8",
    "merge_linear a8 at 150",
)


def rows_kernel(name: str) -> str:
    """``linear_ternary_4`` -> ``linear_ternary_rows_4``."""
    base, _, tile = name.rpartition("_")
    return f"{base}_rows_{tile}" if tile.isdigit() else f"{name}_rows"


def subgroup_cases() -> Iterator[Case]:
    """All cases with scales by row and default constants of which there is such a kernel, and a few with others."""
    op_of = {kernel.name: kernel.op for kernel in kernels()}
    for case in (*linear_ternary_cases(), *fused_cases(), *merge_cases(), *_more()):
        if case.symbols["scale"] == "group" or "WORKGROUP" in case.symbols or rows_kernel(case.kernel) not in op_of:
            continue
        rows = replace(case, name=f"{case.name} rows", kernel=rows_kernel(case.kernel))
        yield rows
        if case.name in _TUNED_CASES:
            for tuned in _TUNED[op_of[rows.kernel]]:
                title = " ".join(f"{name} {value}" for name, value in tuned.items())
                yield replace(rows, name=f"{rows.name} {title}", symbols={**rows.symbols, **tuned})


def _more() -> Iterator[Case]:
    """A small one of drafts, for the self-check, and what the others have by groups only."""
    yield linear_case("linear_ternary tiny few 4", "a8", "ternary", 3, 36, 4, few=True)
    yield fused_case("norm_linear accumulate", "norm", "a8", 7, 68, accumulate=True)
    yield merge_case("merge_linear alone", "a8", 2, 16, 3, accumulate=False)
