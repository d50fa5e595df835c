"""Products of bf16 numbers, summed in f32, result in bf16; masters stay f32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bf16Linear(nn.Linear):
    """x ``[..., K]`` to bf16 ``[..., N]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16())

    @staticmethod
    def joint(x: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """All of them as one product."""
        weight = torch.cat([linear.weight.bfloat16() for linear in linears])
        y = F.linear(x.bfloat16(), weight)
        found: Sequence[Tensor] = y.split([linear.out_features for linear in linears], dim=-1)
        return found
