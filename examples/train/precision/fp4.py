"""4-bit floats, EMULATED: E2M1 numbers in blocks that share a scale, and a linear that multiplies nothing else.

A rounded tensor comes back as E2M1 values times their block scales, in bf16, which holds such a product exactly (2 and
at most 4 significant bits), and one f32 scale for the tensor. A bf16 product of two such tensors with f32 sums is what
4-bit tensor cores compute. Recipe: "Pretraining Large Language Models with NVFP4", arXiv 2509.25149; formats: OCP
Microscaling Formats (MX) v1.0 for E2M1, E8M0.

The three products of a linear y = x W^T, all in 4 bits, blocks along the dimension that is summed over:

    forward            y  = x  . W^T    x by rows of k            W in weight blocks
    input gradient     dx = dy . W      dy by rows of n, random   W as in the forward pass where its blocks are square
    weight gradient    dW = dy^T . x    both by columns of tokens, after the Hadamard transform; dy random

"random" is stochastic rounding: up or down with chances that make the mean exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import TrainError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
E4M3_LEAST = 2.0**-9  # the smallest E4M3 above 0
HADAMARD = 16  # size of the transform: 16 tokens


@dataclass(frozen=True)
class Format:
    """How blocks are made.

    block: numbers that share a scale. square: weights have blocks of block x block, the same for both passes.
    power_of_two: scales are powers of two, no tensor scale (MX); else E4M3 under an f32 tensor scale (NVFP4).
    """

    name: str
    block: int
    square: bool
    power_of_two: bool


@dataclass(frozen=True)
class Recipe:
    """What is done in 4 bits and how.

    hadamard: transform the inputs of the weight gradient. stochastic: round gradients at random. forward, backward:
    whether that pass is in 4 bits, else in bf16.
    """

    format: Format
    hadamard: bool = True
    stochastic: bool = True
    forward: bool = True
    backward: bool = True


def round_e2m1(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """Nearest E2M1 number of each, ties to even, beyond 6 to 6. noise: uniform in [0, 1), for stochastic rounding."""
    size = x.abs().clamp(max=E2M1_MAX)
    # Numbers are 0.5 apart up to 2, then 1 up to 4, then 2.
    gap = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = size / gap
    steps = steps.round() if noise is None else (steps + noise).floor()
    return torch.copysign(steps * gap, x)


def tensor_scale(x: Tensor) -> Tensor:
    """NVFP4's f32 scale ``[]``: block scales then reach up to 448."""
    return (x.abs().amax() / (E2M1_MAX * E4M3_MAX)).clamp(min=2.0**-100)


def block_scale(greatest: Tensor, format: Format, whole: Tensor) -> Tensor:
    """Scales of blocks with these greatest magnitudes; whole: the tensor scale (1 for MX).

    NVFP4: greatest / 6 rounded to the nearest E4M3. MX: the least power of two that leaves nothing above 6, so that
    rounding stays unbiased at the top too.
    """
    if format.power_of_two:
        # The exponent of an f32 is its bits from 23 up; any bit below them takes it to the next.
        exponent = ((greatest / E2M1_MAX).view(torch.int32) + 0x7FFFFF) >> 23
        return (exponent.clamp(min=1) << 23).view(torch.float32)
    wanted = greatest / (E2M1_MAX * whole)
    return wanted.clamp(E4M3_LEAST, E4M3_MAX).to(torch.float8_e4m3fn).float()


def round_blocks(x: Tensor, format: Format, dims: tuple[int, ...], random: bool = False) -> tuple[Tensor, Tensor]:
    """x whose dimensions ``dims`` are the inside of a block, to (E2M1 times block scales in bf16, tensor scale f32)."""
    x = x.float()
    whole = x.new_ones(()) if format.power_of_two else tensor_scale(x)
    scale = block_scale(x.abs().amax(dim=dims, keepdim=True), format, whole)
    values = round_e2m1(x / (scale * whole), torch.rand_like(x) if random else None)
    return (values * scale).bfloat16(), whole


def round_rows(x: Tensor, format: Format, random: bool = False) -> tuple[Tensor, Tensor]:
    """``[N, K]``, blocks of K."""
    values, whole = round_blocks(x.unflatten(-1, (-1, format.block)), format, (-1,), random)
    return values.flatten(-2), whole


def round_columns(x: Tensor, format: Format, random: bool = False) -> tuple[Tensor, Tensor]:
    """``[T, K]``, blocks of T."""
    values, whole = round_blocks(x.unflatten(0, (-1, format.block)), format, (1,), random)
    return values.flatten(0, 1), whole


def round_weight(weight: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """``[N, K]`` in square blocks."""
    rows, columns = weight.shape
    side = format.block
    values, whole = round_blocks(weight.view(rows // side, side, columns // side, side), format, (1, 3))
    return values.view(rows, columns), whole


@lru_cache
def _random_hadamard() -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < HADAMARD:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (HADAMARD, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    return signs * matrix * math.sqrt(1 / HADAMARD)


def random_hadamard(device: torch.device | str = "cpu") -> Tensor:
    """f32 ``[16, 16]``, orthogonal: Sylvester's Hadamard matrix with rows of random sign, one for all of training."""
    return _random_hadamard().to(device)


def transform(x: Tensor, matrix: Tensor) -> Tensor:
    """``[T, K]`` with each 16 tokens turned by an orthogonal matrix; products over tokens stay the same."""
    blocks = x.unflatten(0, (-1, HADAMARD))  # [T/16, 16, K]
    # bmm, because matmul of a matrix and a batch may copy the batch to turn it.
    return torch.bmm(matrix.t().to(x.dtype).expand(len(blocks), -1, -1), blocks).flatten(0, 1)


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """``[M, K]`` . ``[K, N]`` of rounded tensors, bf16."""
    return ((a[0] @ b[0]).float() * (a[1] * b[1])).bfloat16()


class _Product(torch.autograd.Function):
    """x ``[T, K]``, weight ``[N, K]`` to ``[T, N]``, bf16; recipe and Hadamard matrix get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matrix: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight, matrix)
        ctx.recipe = recipe
        if not recipe.forward:
            return x @ weight.bfloat16().t()
        values, scale = _weight(weight, recipe.format, along_rows=True)
        return product(round_rows(x, recipe.format), (values.t(), scale))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, matrix = ctx.saved_tensors
        recipe, format = ctx.recipe, ctx.recipe.format
        dy = gradients[0].bfloat16()
        if not recipe.backward:
            return dy @ weight.bfloat16(), (dy.t() @ x).float(), None, None
        dx = product(round_rows(dy, format, recipe.stochastic), _weight(weight, format, along_rows=False))
        if recipe.hadamard:
            dy, x = transform(dy, matrix), transform(x, matrix)
        turned, scale = round_columns(dy, format, recipe.stochastic)
        dw = product((turned.t(), scale), round_columns(x, format)).float()
        return dx, dw, None, None


def _weight(weight: Tensor, format: Format, along_rows: bool) -> tuple[Tensor, Tensor]:
    if format.square:
        return round_weight(weight, format)
    return round_rows(weight, format) if along_rows else round_columns(weight, format)


class Fp4Linear(nn.Linear):
    """x ``[..., K]`` to bf16 ``[..., N]``; all products EMULATED in 4 bits. Tokens must fill whole blocks."""

    def __init__(self, inputs: int, outputs: int, recipe: Recipe) -> None:
        for what, size in (("inputs", inputs), ("outputs", outputs)):
            if size % recipe.format.block:
                raise TrainError(
                    f"{recipe.format.name}: a linear with {size} {what} has no whole blocks of {recipe.format.block}; "
                    "choose dim, heads * head_dim, kv_heads * head_dim and ffn_dim as multiples of it"
                )
        super().__init__(inputs, outputs, bias=False)
        self.recipe = recipe
        self.register_buffer("matrix", random_hadamard(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2).bfloat16()
        missing = -len(flat) % max(self.recipe.format.block, HADAMARD)
        padded = F.pad(flat, (0, 0, 0, missing)) if missing else flat  # zeros add nothing to any product
        with torch.autocast(x.device.type, enabled=False):
            y: Tensor = _Product.apply(padded, self.weight, self.matrix, self.recipe)
        return y[: len(flat)].view(*x.shape[:-1], -1)


def keep_bf16(layer: int, layers: int, options: Sequence[str]) -> bool:
    """Whether a block stays in bf16: about a seventh of them, the last ones; an option adds the first."""
    last = max(1, round(layers / 7)) if layers > 1 else 0
    return layer >= layers - last or ("first-last-bf16" in options and layer < last)


def fp4_linear(inputs: int, outputs: int, format: Format, layer: int, layers: int, options: Sequence[str]) -> nn.Linear:
    """A linear of a block by the recipe and ``config.FP4_OPTIONS``. Raises TrainError."""
    from .bf16 import Bf16Linear

    if "backward-only" in options and "forward-only" in options:
        raise TrainError("fp4_options: backward-only and forward-only exclude each other")
    if keep_bf16(layer, layers, options):
        return Bf16Linear(inputs, outputs)
    recipe = Recipe(
        format,
        hadamard="no-hadamard" not in options,
        stochastic="no-stochastic-rounding" not in options,
        forward="backward-only" not in options,
        backward="forward-only" not in options,
    )
    return Fp4Linear(inputs, outputs, recipe)
