"""Weight tensors as the GPU holds them, from the disk layout; ternary rows go through the expand kernel."""

from __future__ import annotations

import numpy as np

from .weights import WeightTensor


def disk_words(weight: WeightTensor, rows: slice = slice(None)) -> np.ndarray:
    """The disk layout of some rows as u32 ``[rows, words]``; for all but ternary also the resident layout."""
    data = np.ascontiguousarray(weight.data[rows])
    return data.reshape(len(data), -1).view(np.uint8).view("<u4")


def scale_words(weight: WeightTensor, rows: slice = slice(None)) -> np.ndarray:
    """Scales of some rows as u32: f32 ``[rows]``, or the groups' row after row, the lowest bits of a word first.

    Groups have f16 scales, two of them in q4a, or a byte. The scale of an nvfp4 tensor is the first word.
    """
    if weight.scales is None:
        return np.zeros(0, dtype="<u4")
    if not weight.group:
        return np.ascontiguousarray(weight.row_scales()[rows]).view("<u4")
    scales = np.ascontiguousarray(weight.scales[rows])
    data = scales.astype(scales.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8)
    data = np.append(data, np.zeros(-data.size % 4, dtype=np.uint8))
    if weight.tensor_scale is not None:
        data = np.append(np.array([weight.tensor_scale], dtype="<f4").view(np.uint8), data)
    return data.view("<u4")
