"""NVFP4, EMULATED: blocks of 16 with E4M3 scales under one f32 scale for the tensor; weights in blocks of 16 x 16."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .fp4 import Format, fp4_linear

NVFP4 = Format("nvfp4 EMULATED", block=16, square=True, power_of_two=False)


def nvfp4_linear(inputs: int, outputs: int, layer: int, layers: int, options: Sequence[str]) -> nn.Linear:
    """As ``fp4.fp4_linear``."""
    return fp4_linear(inputs, outputs, NVFP4, layer, layers, options)
