"""Weight tensors as executors receive them: the disk layout of FORMAT.md, as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .contract import encoding, quotient_up
from .float4 import e4m3, e8m0


@dataclass(frozen=True)
class WeightTensor:
    """A matrix or vector of a pack.

    name: tensor name. encoding: a name in ``encodings`` of ``kernels.json``. shape: ``(N, K)`` or ``(K,)``.
    data: rows in the disk layout (see ``packer/FORMAT.md``); scales: as on disk, floats or codes of one byte, or None;
    scale_kind: ``parts``, ``row`` or ``group`` for ternary tensors, else None; parts: rows of each part;
    group: columns that share a scale, 0 where rows or parts have one; tensor_scale: of all values of nvfp4, else None.
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    data: np.ndarray
    scales: np.ndarray | None = None
    scale_kind: str | None = None
    parts: tuple[int, ...] = ()
    group: int = 0
    tensor_scale: float | None = None

    @property
    def rows(self) -> int:
        """N; 1 for a vector."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def columns(self) -> int:
        """K."""
        return self.shape[-1]

    @property
    def groups(self) -> int:
        """Groups of scales a row."""
        if self.group:
            return quotient_up(self.columns, self.group)
        return 1 if self.scales is not None else 0

    @property
    def row_words(self) -> int:
        """u32 words of a row in the resident (GPU) layout."""
        block = encoding(self.encoding)
        return quotient_up(self.columns, block["block"]) * block["block_words"]

    @property
    def scale_words(self) -> int:
        """u32 words of all scales in the resident layout."""
        return 0 if self.scales is None else self.words_of_scales(self.rows)

    def words_of_scales(self, rows: int) -> int:
        """u32 words of the scales of some rows: f32 a row, or whole groups, after the tensor's own scale."""
        if not self.group:
            return rows
        block = encoding(self.encoding)
        return block.get("tensor_scale", 0) + quotient_up(rows * self.groups * block["scale_bytes"], 4)

    @property
    def resident_bytes(self) -> int:
        """GPU memory of data and scales."""
        if len(self.shape) == 1:
            return 4 * self.columns
        return 4 * (self.rows * self.row_words + self.scale_words)

    def row_scales(self) -> np.ndarray:
        """Scales as float32: ``[N]`` (parts are repeated over their rows), ``[N, groups]``, or pairs of both in q4a."""
        if self.scales is None:
            raise ValueError(f"tensor {self.name}: encoding {self.encoding} has no scales")
        scales = _TO_FLOATS.get(self.encoding, _floats)(self.scales)
        return np.repeat(scales, self.parts) if self.scale_kind == "parts" else scales


def group_of(name: str, group: int = 0) -> int:
    """Columns that share a scale: what the encoding fixes, else ``group``, which a ternary tensor chooses."""
    return encoding(name)["group"] or group


def _floats(scales: np.ndarray) -> np.ndarray:
    return scales.astype(np.float32)


_TO_FLOATS = {"nvfp4": e4m3, "mxfp4": e8m0}
