"""Weight tensors as executors receive them: the disk layout of FORMAT.md, as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .contract import encoding, quotient_up


@dataclass(frozen=True)
class WeightTensor:
    """A matrix or vector of a pack.

    name: tensor name. encoding: ``ternary``, ``q8``, ``q4``, ``f16`` or ``f32``. shape: ``(N, K)`` or ``(K,)``.
    data: rows in the disk layout (see ``packer/FORMAT.md``); scales: float array or None;
    scale_kind: ``parts``, ``row`` or ``group`` for ternary tensors, else None; parts: rows of each part;
    group: columns that share a scale (32 for q8 and q4, 0 where rows or parts have one scale).
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    data: np.ndarray
    scales: np.ndarray | None = None
    scale_kind: str | None = None
    parts: tuple[int, ...] = ()
    group: int = 0

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
        """Scales a row."""
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
        """u32 words of all scales in the resident layout: f32 a row, or f16 pairs where scales are grouped."""
        if self.scales is None:
            return 0
        return quotient_up(self.rows * self.groups, 2) if self.group else self.rows

    @property
    def resident_bytes(self) -> int:
        """GPU memory of data and scales."""
        if len(self.shape) == 1:
            return 4 * self.columns
        return 4 * (self.rows * self.row_words + self.scale_words)

    def row_scales(self) -> np.ndarray:
        """Scales as float32: ``[N]`` (parts are repeated over their rows) or ``[N, groups]``."""
        if self.scales is None:
            raise ValueError(f"tensor {self.name}: encoding {self.encoding} has no scales")
        scales = self.scales.astype(np.float32)
        return np.repeat(scales, self.parts) if self.scale_kind == "parts" else scales
