"""Per tensor: how far its weights are from the source's, and its output, on activations of the source's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shaders.reference import Quantized, dequantize
from shaders.weights import WeightTensor

from .eval_measures import rounded
from .eval_run import StreamedReference
from .eval_source import Subject
from .models import plane_names

#: Tokens whose activations are looked at. Few are enough: every row of every matrix sees each of them.
CAPTURED_TOKENS = 64
#: Decoded rows at a time, in bytes of float32.
_PIECE_BYTES = 64 << 20

Advance = Callable[[int], None]


def compare_tensors(source: Subject, pack: Subject, ids: Sequence[int], advance: Advance) -> dict[str, dict[str, Any]]:
    """For each tensor of the pack: weight_error, output_error (None where unknown) and the share of zeros.

    ids: tokens of text that no calibration has seen. NumPy runs the source on them. advance: called with the weights of
    each tensor that is done.
    """
    watched = _Watched(source, pack, advance)
    watched.step(ids, rows=len(ids))
    for name in pack.tensors:
        if name not in watched.found:
            watched.compare(name, None)
    return watched.found


class _Watched(StreamedReference):
    """Runs the source and holds each of its products against that of the pack's weights."""

    def __init__(self, source: Subject, pack: Subject, advance: Advance):
        capacity = min(CAPTURED_TOKENS, source.context)
        super().__init__(source.program, source.tensors, capacity=capacity, kv="f32")
        self._pack, self._advance = pack, advance
        self.found: dict[str, dict[str, Any]] = {}

    def _op_linear(self, op: Mapping, values: Mapping) -> np.ndarray:
        x = values[op["x"]]
        self.compare(op["w"], x.q * x.scale[:, None] if isinstance(x, Quantized) else x)
        return super()._op_linear(op, values)

    def compare(self, name: str, x: np.ndarray | None) -> None:
        """Compare a tensor, or the sum of its planes; x: its input f32 ``[T, K]``, if it is a linear's."""
        if name not in self._pack.tensors:
            return
        theirs, ours = self.tensors.get(name), self._pack.tensors[name]
        others = [self._pack.tensors[plane] for plane in plane_names(name, self._pack.tensors)[1:]]
        self.found[name] = measure(theirs, ours, x, others)
        self._advance(ours.rows * ours.columns)


def measure(
    source: WeightTensor | None, pack: WeightTensor, x: np.ndarray | None, others: Sequence[WeightTensor] = ()
) -> dict[str, Any]:
    """Errors of one tensor as relative RMS; None where the source has no such tensor of this shape.

    others: ternary planes that are added to it before it is compared; its zeros are its own.
    """
    weights = pack.rows * pack.columns
    comparable = source is not None and source.shape == pack.shape
    squares = errors = out_squares = out_errors = 0.0
    zeros, exact = 0, comparable
    step = max(1, _PIECE_BYTES // (4 * pack.columns))
    for first in range(0, pack.rows, step):
        rows = slice(first, min(first + step, pack.rows))
        found = _values(pack, rows)
        zeros += found.size - int(np.count_nonzero(found))
        if source is None or not comparable:
            continue
        original = _values(source, rows)
        found = sum((_values(other, rows) for other in others), found)
        squares += float(np.square(original, dtype=np.float64).sum())
        difference = found - original
        errors += float(np.square(difference, dtype=np.float64).sum())
        exact = exact and not difference.any()
        if x is not None:
            out_squares += float(np.square(x @ original.T, dtype=np.float64).sum())
            out_errors += float(np.square(x @ difference.T, dtype=np.float64).sum())
    result: dict[str, Any] = {"zeros": rounded(zeros / weights), "weight_error": None, "output_error": None}
    if comparable:
        result |= {"weight_error": _ratio(errors, squares), "exact": exact}
        if x is not None:
            result["output_error"] = _ratio(out_errors, out_squares)
    return result


def _values(weight: WeightTensor, rows: slice) -> np.ndarray:
    if len(weight.shape) == 1:
        return weight.data.reshape(1, -1)[rows]
    return dequantize(weight, rows)


def _ratio(errors: float, squares: float) -> float:
    return rounded(np.sqrt(errors / squares)) if squares else 0.0
