"""Latent weights: what training moves, of which the student sees only the trits.

A latent matrix U has the trits clip(round(U / mean|U|), -1, 1): cells -1, 0, +1 with borders at half the mean of |U|.
Latents are kept so that mean|U| is about 1. All functions take stacked matrices ``[L, N, K]``, means are per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..precision.ternary import straight_through

#: Distance from a cell's border, in units of mean|U|, that a latent is given which lay in another cell.
MARGIN = 0.15
#: The 16 values of a stored latent: five in the cell of -1, six in that of 0, five in that of +1.
LEVELS = (-2.2, -1.6, -1.2, -0.9, -0.65, -0.41, -0.25, -0.08, 0.08, 0.25, 0.41, 0.65, 0.9, 1.2, 1.6, 2.2)
_FIRST_OF_ZERO, _FIRST_OF_PLUS = 5, 11


def mean_magnitude(latents: Tensor) -> Tensor:
    """mean|U| of each layer, ``[L, 1, 1]``."""
    return latents.detach().abs().mean((1, 2), keepdim=True).clamp(min=1e-8)


def trits(latents: Tensor) -> Tensor:
    """-1, 0 or +1 in the dtype of the latents."""
    return (latents / mean_magnitude(latents)).round().clamp(-1, 1)


def rounded(latents: Tensor) -> Tensor:
    """The trits in bf16, with the gradient of U / mean|U| (straight through)."""
    scaled = latents / mean_magnitude(latents)
    return straight_through(scaled, scaled.round().clamp(-1, 1)).to(torch.bfloat16)


def fitted_scales(weights: Tensor) -> Tensor:
    """Per layer, the scale that brings the trits closest to the weights (least squares), f32 ``[L]``."""
    signs = trits(weights)
    return (weights * signs).sum((1, 2)) / signs.abs().sum((1, 2)).clamp(min=1)


def inside(values: Tensor, wanted: Tensor, margin: float = MARGIN) -> Tensor:
    """Latents near values / mean|values| whose trits are the wanted ones.

    wanted: -1, 0, +1. Values in another cell come to rest ``margin`` from its border. Clamping changes mean|U|, on
    which the borders hang; the map from the mean that is assumed to the mean that results contracts, so it is repeated.
    """
    values = values / mean_magnitude(values)
    mean = torch.ones_like(values[:, :1, :1])
    for _ in range(12):
        moved = _clamped(values, wanted, mean, margin)
        mean = mean_magnitude(moved)
    return _clamped(values, wanted, mean, margin) / mean


def _clamped(values: Tensor, wanted: Tensor, mean: Tensor, margin: float) -> Tensor:
    low, high = mean * (0.5 - margin), mean * (0.5 + margin)
    zero = torch.maximum(torch.minimum(values, low), -low)
    return torch.where(wanted == 0, zero, wanted * torch.maximum(values * wanted, high))


def packed(latents: Tensor) -> Tensor:
    """Latents ``[L, N, K]`` in 4 bits each, uint8 ``[L, N, K / 2]``; the trits stay what they are. K is even.

    Codes number ``LEVELS``; the even column is in the low half of a byte.
    """
    scaled = latents / mean_magnitude(latents)
    levels = torch.tensor(LEVELS, device=latents.device)
    codes = torch.bucketize(scaled.contiguous(), (levels[1:] + levels[:-1]) / 2)
    cell = scaled.round().clamp(-1, 1)
    lowest = torch.where(cell < 0, 0, torch.where(cell == 0, _FIRST_OF_ZERO, _FIRST_OF_PLUS))
    highest = torch.where(cell < 0, _FIRST_OF_ZERO - 1, torch.where(cell == 0, _FIRST_OF_PLUS - 1, len(LEVELS) - 1))
    codes = torch.minimum(torch.maximum(codes, lowest), highest).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpacked(codes: Tensor) -> Tensor:
    """What ``packed`` stored: latents f32 ``[L, N, K]`` with the same trits."""
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    levels = torch.tensor(LEVELS, device=codes.device)
    wanted = torch.where(both < _FIRST_OF_ZERO, -1, torch.where(both < _FIRST_OF_PLUS, 0, 1))
    return inside(levels[both], wanted, margin=0.02)
