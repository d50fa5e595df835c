"""fp32, bf16 and ternary linears: rounding as transformers does it, gradients straight through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.training import TINY_RUN, model, tokens

import torch  # isort: skip  (after tests.support.training, which sets it up)
import torch.nn.functional as F  # isort: skip
from transformers.integrations.bitnet import ActQuant, WeightQuant  # isort: skip

from examples.train.errors import TrainError
from examples.train.precision import frozen, join, make_linear
from examples.train.precision.ternary import BitLinear, integer_product, quantize_activations, quantize_weights
from examples.train.schedule import learning_rate, weight_decay


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-7, 0.02, 30.0])
def test_ternary_rounds_as_transformers(size: float) -> None:
    """Weights and activations, of ordinary sizes and beyond transformers' smallest scales."""
    weight, x = size * random(40, 50), size * random(30, 50, seed=1)
    weight[0, :2] = 0
    trits, scale = quantize_weights(weight)
    assert set(trits.unique().tolist()) <= {-1.0, 0.0, 1.0}
    torch.testing.assert_close(trits * scale, WeightQuant.apply(weight), rtol=2**-22, atol=0)
    codes, step = quantize_activations(x)
    assert torch.equal(codes, codes.round()) and codes.abs().max() <= 128
    torch.testing.assert_close(codes * step, ActQuant.apply(x), rtol=2**-22, atol=0)


def test_ternary_gradients_go_straight_through() -> None:
    """They are those of a float linear whose weights and inputs are the rounded ones."""
    linear, x = BitLinear(48, 20), random(5, 48).requires_grad_()
    torch.nn.init.normal_(linear.weight, std=0.1)
    wanted = random(5, 20, seed=2)
    (linear(x) * wanted).sum().backward()
    weight = WeightQuant.apply(linear.weight).detach().requires_grad_()
    rounded = ActQuant.apply(x).detach().requires_grad_()
    (F.linear(rounded, weight) * wanted).sum().backward()
    torch.testing.assert_close(linear.weight.grad, weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(x.grad, rounded.grad, rtol=1e-4, atol=1e-6)
    assert (weight == 0).any() and linear.weight.grad[weight == 0].abs().min() > 0, "zeros learn too"


def test_whole_numbers_survive_bf16() -> None:
    """Codes and trits are exact in bf16; only the sum is rounded to it."""
    codes = torch.arange(-128, 128.0).repeat(3, 1)
    trits = (random(7, 256) > 0).float() * 2 - 1
    exact = codes @ trits.t()
    assert torch.equal(integer_product(codes, trits), exact)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(integer_product(codes, trits), exact.bfloat16().float())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "ternary", "nvfp4"])
def test_joint_products_are_the_single_ones(precision: str) -> None:
    linears = [make_linear(32, size, precision, 0, 3) for size in (16, 48, 16)]
    for number, linear in enumerate(linears):
        torch.nn.init.normal_(linear.weight, std=0.1 * (number + 1))
    x = random(2, 5, 32)
    for one, other in zip(join(x, linears), [linear(x) for linear in linears], strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7 if precision == "bf16" else 1e-5, atol=1e-5)


def test_fp32_stays_so_under_autocast() -> None:
    linear, x = make_linear(64, 8, "fp32"), random(3, 64)
    expected = x @ linear.weight.t()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(linear(x), expected)
        assert make_linear(64, 8, "bf16")(x).dtype == torch.bfloat16


def test_frozen_weights_are_the_rounded_ones() -> None:
    made, ids = model(), tokens(2, 12)
    with torch.no_grad():
        expected = made(ids)
        with frozen(made):
            assert torch.equal(made(ids), expected)
            made.blocks[0].q.weight.zero_()
            assert torch.equal(made(ids), expected), "they are not rounded again"
        assert not torch.equal(made(ids), expected)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(TrainError, match="no precision 'fp5'"):
        make_linear(8, 8, "fp5")


def test_two_stage_schedule() -> None:
    """BitNet's own figures: 1.5e-3 to 8e-4, then 5e-4 to 0; weight decay 0.1, then none."""
    config = replace(TINY_RUN, steps=1000, lr=1.5e-3, warmup=0, schedule="two-stage", weight_decay=0.1)
    rates = [learning_rate(config, step) for step in (0, 499, 500, 999)]
    assert rates == pytest.approx([1.5e-3, 8e-4, 5e-4, 0], abs=3e-6)
    assert [weight_decay(config, step) for step in (0, 499, 500)] == [0.1, 0.1, 0.0]


def test_other_schedules() -> None:
    config = replace(TINY_RUN, steps=110, lr=1.0, min_lr=0.1, warmup=10, schedule="cosine")
    assert [learning_rate(config, step) for step in (0, 4, 9, 10, 60)] == pytest.approx([0.1, 0.5, 1, 1, 0.55])
    assert learning_rate(config, 109) == pytest.approx(0.1, abs=1e-3)
    assert learning_rate(replace(config, schedule="constant"), 100) == 1.0
    assert weight_decay(config, 109) == config.weight_decay
