"""Products in f32, whatever autocast says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Fp32Linear(nn.Linear):
    """x ``[..., K]`` to f32 ``[..., N]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight)

    @staticmethod
    def joint(x: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """All of them as one product."""
        weight = torch.cat([linear.weight for linear in linears])
        found: Sequence[Tensor] = _product(x, weight).split([linear.out_features for linear in linears], dim=-1)
        return found


def _product(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight)
