"""BitNet b1.58: weights -1, 0, +1 times one scale a matrix, activations int8 with one scale a token.

Forward: trits = clip(round(W / mean|W|), -1, 1); codes = clip(round(x * 127 / max|x|), -128, 127);
y = (codes . trits) * mean|W| * max|x| / 127. Backward: straight through, as if nothing had been rounded. Formulas and
their order of operations: transformers ``integrations/bitnet.py``, ``WeightQuant`` and ``ActQuant``, so that a
checkpoint rounds there as it did here. The product itself is of whole numbers: exact in bf16 (up to 2^8) as in f32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST = 1e-5  # transformers' clamp of mean|W| and max|x|


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """The value of ``rounded`` with the gradient of ``exact``."""
    return exact + (rounded - exact).detach()


def quantize_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Trits ``[N, K]`` in f32, straight-through, and the scale mean|W| ``[]`` that multiplies them."""
    scale = 1.0 / weight.detach().abs().mean().clamp(min=LEAST)
    exact = weight * scale
    return straight_through(exact, exact.round().clamp(-1, 1)), 1.0 / scale


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -128..127 ``[..., K]`` in f32, straight-through, and the scale max|x| / 127 ``[..., 1]``."""
    x = x.float()
    scale = 127.0 / x.detach().abs().amax(dim=-1, keepdim=True).clamp(min=LEAST)
    exact = x * scale
    return straight_through(exact, exact.round().clamp(-128, 127)), 1.0 / scale


def integer_product(codes: Tensor, trits: Tensor) -> Tensor:
    """codes ``[..., K]`` . trits ``[N, K]`` to f32 ``[..., N]``; in bf16 under autocast, else in f32."""
    device = codes.device.type
    dtype = torch.bfloat16 if torch.is_autocast_enabled(device) else torch.float32
    with torch.autocast(device, enabled=False):
        return F.linear(codes.to(dtype), trits.to(dtype)).float()


class BitLinear(nn.Linear):
    """x ``[..., K]`` to f32 ``[..., N]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self._rounded: tuple[Tensor, Tensor] | None = None

    def rounded(self) -> tuple[Tensor, Tensor]:
        """Trits and scale, as ``quantize_weights``."""
        return quantize_weights(self.weight) if self._rounded is None else self._rounded

    def forward(self, x: Tensor) -> Tensor:
        codes, step = quantize_activations(x)
        trits, scale = self.rounded()
        return integer_product(codes, trits) * (step * scale)

    @staticmethod
    def joint(x: Tensor, linears: Sequence[BitLinear]) -> Sequence[Tensor]:
        """All of them as one product: x is rounded once, and each column has its matrix's scale."""
        codes, step = quantize_activations(x)
        parts = [linear.rounded() for linear in linears]
        sizes = [linear.out_features for linear in linears]
        columns = torch.cat([scale.expand(size) for (_, scale), size in zip(parts, sizes, strict=True)])  # [N]
        y = integer_product(codes, torch.cat([trits for trits, _ in parts]))
        found: Sequence[Tensor] = (y * (step * columns)).split(sizes, dim=-1)
        return found

    @torch.no_grad()
    def freeze(self) -> None:
        """Keep the rounded weights until ``thaw``."""
        trits, scale = quantize_weights(self.weight)
        self._rounded = trits.bfloat16(), scale

    def thaw(self) -> None:
        """Round at each forward pass again."""
        self._rounded = None
