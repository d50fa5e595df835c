"""How the linears of a block multiply: one file each. Masters are f32 everywhere; gradients and optimizer see those.

``fp32``: products in f32. ``bf16``: products in bf16, sums in f32. ``ternary``: BitNet b1.58. ``nvfp4``, ``mxfp4``:
4-bit floats, EMULATED: every number is rounded as the format would, the product itself is done in bf16.
``--amp`` concerns what is beside them (attention, the head) and the form in which ternary's integers are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import TrainError


def make_linear(
    inputs: int, outputs: int, precision: str, layer: int = 0, layers: int = 1, options: Sequence[str] = ()
) -> nn.Linear:
    """A linear without bias, ``weight`` f32 ``[outputs, inputs]``, x ``[..., inputs]`` to ``[..., outputs]``.

    layer, layers: which block of how many it is in; the 4-bit recipe keeps some blocks in bf16. options: of
    ``config.FP4_OPTIONS``. Raises TrainError for an unknown precision or a size that a format cannot have.
    """
    if precision == "fp32":
        from .fp32 import Fp32Linear

        return Fp32Linear(inputs, outputs)
    if precision == "bf16":
        from .bf16 import Bf16Linear

        return Bf16Linear(inputs, outputs)
    if precision == "ternary":
        from .ternary import BitLinear

        return BitLinear(inputs, outputs)
    if precision == "nvfp4":
        from .nvfp4 import nvfp4_linear

        return nvfp4_linear(inputs, outputs, layer, layers, options)
    if precision == "mxfp4":
        from .mxfp4 import mxfp4_linear

        return mxfp4_linear(inputs, outputs, layer, layers, options)
    raise TrainError(f"no precision {precision!r}; there are fp32, bf16, ternary, nvfp4, mxfp4")


def join(x: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Several linears of one x, as one product where the precision has a way (its static ``joint``)."""
    joint = getattr(type(linears[0]), "joint", None)
    if joint is None or any(type(linear) is not type(linears[0]) for linear in linears):
        return [linear(x) for linear in linears]
    found: Sequence[Tensor] = joint(x, linears)
    return found


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """While this lasts, ternary weights are rounded once, not at each forward pass; for generating. No gradients."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "freeze")]
    for module in modules:
        module.freeze()
    try:
        yield model
    finally:
        for module in modules:
            module.thaw()
