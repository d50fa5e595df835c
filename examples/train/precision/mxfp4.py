"""MXFP4, EMULATED: blocks of 32 with power-of-two scales; weights are rounded along the sum of each product."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .fp4 import Format, fp4_linear

MXFP4 = Format("mxfp4 EMULATED", block=32, square=False, power_of_two=True)


def mxfp4_linear(inputs: int, outputs: int, layer: int, layers: int, options: Sequence[str]) -> nn.Linear:
    """As ``fp4.fp4_linear``."""
    return fp4_linear(inputs, outputs, MXFP4, layer, layers, options)
