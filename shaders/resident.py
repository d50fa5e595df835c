"""Weight tensors as the GPU holds them, from the disk layout; ternary rows go through the expand kernel."""

from __future__ import annotations

import numpy as np

from .weights import WeightTensor


def disk_words(weight: WeightTensor, rows: slice = slice(None)) -> np.ndarray:
    """The disk layout of some rows as u32 ``[rows, words]``; for all but ternary also the resident layout."""
    data = np.ascontiguousarray(weight.data[rows])
    return data.reshape(len(data), -1).view(np.uint8).view("<u4")


def scale_words(weight: WeightTensor, rows: slice = slice(None)) -> np.ndarray:
    """Scales of some rows as u32: f32 ``[rows]``, or f16 ``[rows, groups]`` two a word, low half first."""
    if weight.scales is None:
        return np.zeros(0, dtype="<u4")
    if not weight.group:
        return np.ascontiguousarray(weight.row_scales()[rows]).view("<u4")
    halves = np.ascontiguousarray(weight.scales[rows], dtype="<f2").reshape(-1)
    return np.append(halves, np.zeros(halves.size % 2, dtype="<f2")).view("<u4")
