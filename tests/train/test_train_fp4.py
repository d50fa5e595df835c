"""4-bit floats: the grid, scales and rounding against ml_dtypes and brute force; the three products; fp4-gap."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from packer.encodings import encode_mxfp4, encode_nvfp4, nvfp4_tensor_scale
from shaders.float4 import E2M1 as PACKER_E2M1
from tests.support.training import ALONE, TINY_MODEL, TINY_RUN, run_train, tokens, write_streams

import torch  # isort: skip  (after tests.support.training, which sets it up)
import torch.nn.functional as F  # isort: skip

from examples.train import fp4_gap
from examples.train.config import FP4_OPTIONS, Preset
from examples.train.errors import TrainError
from examples.train.gap_report import Results, verdict
from examples.train.model import Decoder
from examples.train.precision import fp4, make_linear
from examples.train.precision.bf16 import Bf16Linear
from examples.train.precision.fp4 import Fp4Linear
from examples.train.precision.mxfp4 import MXFP4
from examples.train.precision.nvfp4 import NVFP4

#: Sizes that blocks of 32 divide.
GAP_MODEL = replace(TINY_MODEL, precision="bf16", sub_norms=False, kv_heads=4, ffn_dim=64)
FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda format: format.name.split()[0])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of many sizes, so that blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp(2 * torch.randn(shape[0], 1, generator=generator))


def test_the_grid_is_e2m1() -> None:
    every = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert sorted({*fp4.E2M1, *(-value for value in fp4.E2M1)}) == sorted(set(every.tolist()))
    np.testing.assert_array_equal(np.abs(PACKER_E2M1[:8]), fp4.E2M1)


def test_rounding_is_to_the_nearest_number_of_the_grid() -> None:
    """Against all 15 by brute force, and with ties (to even) as ml_dtypes has them."""
    grid = torch.tensor([*fp4.E2M1, *(-value for value in fp4.E2M1)])
    x = torch.cat([torch.linspace(-8, 8, 4001), torch.arange(-32, 33) / 4])  # the latter has all ties
    found = fp4.round_e2m1(x)
    assert torch.equal((found - x).abs(), (grid - x[:, None]).abs().amin(dim=1))
    clipped = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(found.numpy(), clipped)


def test_stochastic_rounding_is_unbiased() -> None:
    """To 3 sigma of the mean, at points between, on and near numbers of the grid; and only to neighbours."""
    count = 40_000
    points = torch.tensor([0.0, 0.1, 0.49, 0.5, 0.74, 1.3, 1.99, 2.01, 2.7, 3.5, 4.5, 5.9, 6.0, -0.2, -1.75, -5.0])
    noise = torch.rand(count, len(points), generator=torch.Generator().manual_seed(7))
    found = fp4.round_e2m1(points.expand(count, -1), noise)
    for place, point in enumerate(points.tolist()):
        column = found[:, place]
        grid = [value for value in fp4.E2M1 if value <= abs(point)][-1], next(v for v in fp4.E2M1 if v >= abs(point))
        assert set(column.abs().unique().tolist()) <= set(grid)
        low, high = grid
        share = (abs(point) - low) / (high - low) if high > low else 0.0
        sigma = (high - low) * math.sqrt(share * (1 - share) / count)
        assert abs(column.mean().item() - point) <= 3 * sigma + 1e-6, point


def test_gradients_of_blocks_are_unbiased_too() -> None:
    """Scales included: MX scales leave nothing above 6, so the mean of many roundings is the number."""
    x, count = random(4, 64, seed=3), 3000
    torch.manual_seed(5)
    mean = sum(fp4.round_rows(x, MXFP4, random=True)[0].double() for _ in range(count)) / count
    step = x.abs().unflatten(1, (2, 32)).amax(-1, keepdim=True).expand(4, 2, 32).flatten(1) / 3  # at least the gap / 2
    assert ((mean - x).abs() <= 4 * step / math.sqrt(count)).all()


def test_mx_scales_are_the_best_of_all_powers_of_two() -> None:
    """Brute force over 2^-40..2^40: the least that leaves nothing above 6."""
    greatest = torch.cat([random(500, 1).abs()[:, 0], torch.tensor([6.0, 3.0, 6.000001, 5.999999, 1.5, 2.0**-30])])
    powers = 2.0 ** torch.arange(-40, 41)
    fits = greatest[:, None].double() / powers.double() <= 6
    expected = powers[fits.int().argmax(dim=1)]
    assert torch.equal(fp4.block_scale(greatest, MXFP4, torch.ones(())), expected)
    assert fp4.block_scale(torch.zeros(3), MXFP4, torch.ones(())).gt(0).all()


def test_nvfp4_scales_are_the_nearest_of_all_e4m3() -> None:
    """Brute force over every E4M3 number above 0, and through ml_dtypes."""
    every = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = random(300, 16)
    whole = fp4.tensor_scale(x)
    assert whole.item() == pytest.approx(float(nvfp4_tensor_scale(x.abs().max().item())), rel=1e-6)
    greatest = x.abs().amax(dim=1)
    found = fp4.block_scale(greatest, NVFP4, whole).numpy()
    wanted = (greatest / (6 * whole)).numpy()
    np.testing.assert_array_equal(np.abs(found - wanted), np.abs(every - wanted[:, None]).min(axis=1).clip(0))
    np.testing.assert_array_equal(found, wanted.clip(every[0], 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_nvfp4_blocks_are_the_packers() -> None:
    """Where the packer, which also tries the scales beside, took the nearest one: the same numbers bit for bit."""
    x = random(64, 64)
    values, whole = fp4.round_rows(x, NVFP4)
    found = (values.float() * whole).numpy()
    nibbles, scales = encode_nvfp4(x.numpy(), np.float32(whole.item()))
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(64, 64)
    wide = np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32), 16, axis=1)
    nearest = np.repeat(fp4.block_scale(x.unflatten(1, (4, 16)).abs().amax(-1), NVFP4, whole).numpy(), 16, axis=1)
    same = wide == nearest
    assert same.mean() > 0.3
    np.testing.assert_allclose(found[same], (PACKER_E2M1[codes] * wide * whole.numpy())[same], rtol=2**-22)


def test_mxfp4_blocks_are_the_packers() -> None:
    x = random(64, 64)
    values, _ = fp4.round_rows(x, MXFP4)
    nibbles, scales = encode_mxfp4(x.numpy())
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(64, 64)
    wide = np.repeat(np.ldexp(np.float32(1), scales.astype(np.int32) - 127), 32, axis=1)
    nearest = fp4.block_scale(x.unflatten(1, (2, 32)).abs().amax(-1), MXFP4, torch.ones(())).numpy()
    same = wide == np.repeat(nearest, 32, axis=1)
    assert same.mean() > 0.3
    np.testing.assert_array_equal(values.float().numpy()[same], (PACKER_E2M1[codes] * wide)[same])


@FORMATS
def test_rows_columns_and_squares_are_one_rounding(format: fp4.Format) -> None:
    x = random(64, 96)
    rows, whole = fp4.round_rows(x, format)
    columns, _ = fp4.round_columns(x.t().contiguous(), format)
    assert torch.equal(columns.t(), rows)
    square, _ = fp4.round_weight(x, format)
    side = format.block
    block = x[:side, side : 2 * side].flatten()[None]
    scale = fp4.block_scale(block.abs().amax(), format, whole)
    expected = (fp4.round_e2m1(block / (scale * whole)) * scale).view(side, side)
    assert torch.equal(square[:side, side : 2 * side].float(), expected)
    turned, _ = fp4.round_weight(x.t().contiguous(), format)
    assert torch.equal(turned.t(), square), "both passes see the same weights"


def test_hadamard_is_orthogonal_and_spreads() -> None:
    matrix = fp4.random_hadamard()
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(16), atol=1e-6, rtol=0)
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25)) and (matrix[:, 0] < 0).any()
    one = torch.zeros(32, 3)
    one[5] = 4.0
    assert torch.equal(fp4.transform(one, matrix)[:16].abs(), torch.ones(16, 3)), "an outlier is shared by all 16"
    x, y = random(64, 8), random(64, 5, seed=1)
    torch.testing.assert_close(fp4.transform(x, matrix).t() @ fp4.transform(y, matrix), x.t() @ y, atol=1e-3, rtol=1e-4)


def products(
    precision: str, options: tuple[str, ...] = (), rows: int = 96, seed: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """(y, dx, dW) of a linear, those of the float linear, and the linear."""
    linear = make_linear(64, 96, precision, 0, 9, options)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(96, 64, generator=torch.Generator().manual_seed(1)))
    x, dy = random(rows, 64, seed=2), random(rows, 96, seed=3)
    x, dy = x.bfloat16().float().requires_grad_(), dy.bfloat16().float()
    torch.manual_seed(seed)
    y = linear(x)
    y.backward(dy.to(y.dtype))
    exact = [x.detach() @ linear.weight.detach().t(), dy @ linear.weight.detach(), dy.t() @ x.detach()]
    return [y.detach().float(), x.grad, linear.weight.grad], exact, linear


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("precision", ["nvfp4", "mxfp4"])
def test_every_product_is_of_rounded_numbers(precision: str) -> None:
    """Recomputed in f64 from the rounded factors; and each of the three is off by what 4 bits cost, no less."""
    options = ("no-hadamard", "no-stochastic-rounding")
    found, exact, linear = products(precision, options)
    format = linear.recipe.format
    x, dy = random(96, 64, seed=2).bfloat16(), random(96, 96, seed=3).bfloat16()
    weight = linear.weight.detach()

    def whole(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0].double() * pair[1].double()

    along, across = (fp4.round_weight(weight, format),) * 2
    if not format.square:
        along, across = fp4.round_rows(weight, format), fp4.round_columns(weight, format)
    expected = [
        whole(fp4.round_rows(x, format)) @ whole(along).t(),
        whole(fp4.round_rows(dy, format)) @ whole(across),
        whole(fp4.round_columns(dy, format)).t() @ whole(fp4.round_columns(x, format)),
    ]
    for one, other, right in zip(found, expected, exact, strict=True):
        assert error(one.double(), other) < 2**-7, "bf16 rounds the result and nothing else"
        assert 0.05 < error(one, right) < 0.5


@pytest.mark.parametrize("precision", ["nvfp4", "mxfp4"])
def test_options_take_away_what_they_name(precision: str) -> None:
    full, exact, _ = products(precision)
    for option in ("backward-only", "forward-only"):
        found, _, _ = products(precision, (option,))
        forward, backward = option == "forward-only", option == "backward-only"
        assert [error(one, right) > 2**-7 for one, right in zip(found, exact, strict=True)] == [
            forward,
            backward,
            backward,
        ]
    plain, _, _ = products(precision, ("no-hadamard",))
    assert torch.equal(plain[0], full[0]) and torch.equal(plain[1], full[1]) and not torch.equal(plain[2], full[2])
    one, two = (products(precision, ("no-stochastic-rounding",), seed=seed)[0] for seed in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)), "nothing is random"
    other, _, _ = products(precision, seed=1)
    assert torch.equal(other[0], full[0]) and not torch.equal(other[1], full[1])


@pytest.mark.parametrize("rows", [1, 17, 33])
def test_any_number_of_tokens(rows: int) -> None:
    """Tokens are filled up to whole blocks with zeros, which change nothing but the roundings' random numbers."""
    found, exact, _ = products("nvfp4", ("no-stochastic-rounding",), rows=rows)
    assert [one.shape for one in found] == [right.shape for right in exact]
    assert all(error(one, right) < 0.4 for one, right in zip(found, exact, strict=True))


def test_which_blocks_stay_in_bf16() -> None:
    def kinds(layers: int, options: tuple[str, ...] = ()) -> str:
        made = [make_linear(32, 32, "nvfp4", layer, layers, options) for layer in range(layers)]
        return "".join("b" if isinstance(linear, Bf16Linear) else "4" for linear in made)

    assert (kinds(7), kinds(14), kinds(2), kinds(1)) == ("444444b", "4" * 12 + "bb", "4b", "4")
    assert kinds(14, ("first-last-bf16",)) == "bb" + "4" * 10 + "bb"


@pytest.mark.parametrize(("precision", "size"), [("nvfp4", 40), ("mxfp4", 48)])
def test_sizes_that_are_no_whole_blocks_are_refused(precision: str, size: int) -> None:
    with pytest.raises(TrainError, match=f"{precision} EMULATED: a linear with {size} inputs has no whole blocks"):
        make_linear(size, 64, precision, 0, 9)
    with pytest.raises(TrainError, match="exclude each other"):
        make_linear(64, 64, precision, 0, 9, ("backward-only", "forward-only"))


def test_zeros_stay_zeros() -> None:
    linear = Fp4Linear(32, 32, fp4.Recipe(NVFP4))
    x = torch.zeros(16, 32, requires_grad=True)
    linear(x).sum().backward()
    assert linear(x).abs().max() == 0 and x.grad.isfinite().all() and linear.weight.grad.abs().max() == 0


@pytest.mark.parametrize("precision", ["nvfp4", "mxfp4"])
def test_a_model_learns_nearly_as_in_bf16(precision: str) -> None:
    """One step's gradients of the whole decoder point the same way."""
    ids, gradients = tokens(2, 32), {}
    for name in ("bf16", precision):
        torch.manual_seed(0)
        made = Decoder(replace(GAP_MODEL, precision=name, layers=3))
        F.cross_entropy(made(ids).flatten(0, 1), ids.flatten()).backward()
        gradients[name] = torch.cat([parameter.grad.flatten() for parameter in made.blocks.parameters()])
    assert 0.8 < F.cosine_similarity(gradients["bf16"], gradients[precision], dim=0) < 0.9999


# ---- fp4-gap

GAP_RUN = replace(TINY_RUN, batch_tokens=128, sequence=32)
HORIZON = 4 * 128 / GAP_MODEL.parameters()  # four steps


def gap_plan(*names: str, seeds: tuple[int, ...] = (0, 1)) -> fp4_gap.Plan:
    arms = tuple(arm for arm in fp4_gap.ARMS if arm.name in ("bf16", *names))
    return fp4_gap.Plan(seeds, (HORIZON,), arms)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Results]:
    folder = tmp_path_factory.mktemp("gap")
    streams, out = write_streams(folder / "streams"), folder / "out"
    preset = Preset("small", GAP_MODEL, {})
    plan = gap_plan("nvfp4", "mxfp4", "ternary", "nvfp4 backward-only")
    return streams, out, fp4_gap.measure(preset, streams, out, plan, GAP_RUN, ALONE)


def test_gaps_are_those_of_the_losses(measured: tuple[Path, Path, Results]) -> None:
    _, out, results = measured
    record = json.loads((out / "fp4-gap.json").read_text())
    assert "EMULATED" in record["what"] and len(record["runs"]) == 10 and record["device"] == "CPU"
    losses = {(run["arm"], run["seed"]): run["held_loss"] for run in record["runs"]}
    assert len(set(losses.values())) == 10, "no two runs are the same"
    for gap in record["gaps"]:
        own = [100 * (losses[gap["arm"], s] / losses["bf16", s] - 1) for s in (0, 1)]
        assert gap["gap_percent"] == pytest.approx(np.mean(own)) and gap["seeds"] == 2
        assert gap["spread_percent"] == pytest.approx(np.std(own, ddof=1), abs=1e-9)
        assert ("EMULATED" in gap["label"]) == (gap["arm"] not in ("bf16", "ternary"))
    assert [gap.mean for gap in results.gaps() if gap.arm == "bf16"] == [0.0]


def test_runs_that_are_there_are_not_repeated(
    measured: tuple[Path, Path, Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, out, results = measured
    monkeypatch.setattr(fp4_gap, "pretrain", None)  # must not be called
    plan = gap_plan("nvfp4")
    preset = Preset("small", GAP_MODEL, {})
    assert fp4_gap.measure(preset, streams, out, plan, GAP_RUN, ALONE).runs == results.runs
    with pytest.raises(TrainError, match="runs of other settings .lr 0.5|runs of other settings"):
        fp4_gap.measure(preset, streams, out, plan, replace(GAP_RUN, lr=0.5), ALONE)
    late = replace(gap_plan("nvfp4", seeds=(7,)), minutes=1e-9)
    assert fp4_gap.measure(preset, streams, out, late, GAP_RUN, ALONE).runs == results.runs, "no time, no run"


def test_the_bound(measured: tuple[Path, Path, Results]) -> None:
    _, _, results = measured
    gap = next(gap for gap in results.gaps() if gap.arm == "nvfp4")
    fine, text = verdict(results, "nvfp4", HORIZON, gap.mean + 0.01)
    assert fine and "EMULATED" in text and "within" in text
    fine, text = verdict(results, "nvfp4", HORIZON, gap.mean - 0.01)
    assert not fine and "ABOVE" in text
    assert not verdict(results, "nvfp4", 99, 100)[0], "what was not measured is not within a bound"


def test_a_run_that_diverges_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = write_streams(tmp_path / "streams")
    real = fp4_gap.pretrain

    def diverge(preset: Preset, *rest: Any) -> dict[str, float]:
        eps = math.nan if preset.model.precision == "nvfp4" else preset.model.norm_eps
        return real(replace(preset, model=replace(preset.model, norm_eps=eps)), *rest)

    monkeypatch.setattr(fp4_gap, "pretrain", diverge)
    preset = Preset("small", GAP_MODEL, {})
    results = fp4_gap.measure(preset, streams, tmp_path / "out", gap_plan("nvfp4", seeds=(0,)), GAP_RUN, ALONE)
    fine, text = verdict(results, "nvfp4", HORIZON, 100.0)
    assert not fine and "the loss is nan" in text
    results.draw(tmp_path / "plot.png")


def test_the_plan_does_formats_first() -> None:
    plan = fp4_gap.Plan((0, 1), (14.0, 28.0), fp4_gap.ARMS)
    names = [(arm.name, seed, horizon) for arm, seed, horizon in plan.runs()]
    assert len(names) == 2 * 4 + 2 * len(FP4_OPTIONS) + 2 * 4 == len(set(names))
    assert names[:4] == [(name, 0, 14.0) for name in ("bf16", "nvfp4", "mxfp4", "ternary")]
    assert all(horizon == 14.0 for name, _, horizon in names if " " in name)


def test_the_command(tmp_path: Path) -> None:
    preset = tmp_path / "small.toml"
    smaller = tmp_path / "smaller.toml"
    fields = {name: value for name, value in vars(GAP_MODEL).items() if name not in ("fp4_options",)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    preset.write_text("[model]\n" + "\n".join(lines) + "\n[pretrain]\nsteps = 1\nbatch_tokens = 128\nsequence = 32\n")
    streams = write_streams(tmp_path / "streams")
    common = ["fp4-gap", "--preset", preset, "--streams", streams, "--out", tmp_path / "out", "--seeds", "0"]
    common += ["--tokens-per-parameter", f"{HORIZON}", "--arms", "nvfp4"]
    smaller.write_text(preset.read_text().replace("layers = 2", "layers = 1"))
    good = run_train(*common, "--max-gap", "50", "--smaller", smaller)
    labels = [run["arm"] for run in json.loads((tmp_path / "out" / "fp4-gap.json").read_text())["runs"]]
    assert labels == ["bf16", "nvfp4", "bf16 smaller"]
    assert good.status == 0 and "within the bound" in good.out and "EMULATED" in good.out, good.err
    assert (tmp_path / "out" / "fp4-gap.png").stat().st_size > 1000
    assert run_train(*common, "--max-gap", "-50").status == 1
    for wrong, message in (
        (["--seeds", "a"], "--seeds is 'a'"),
        (["--arms", "int4"], "no 'int4'"),
        (["--bound-arm", "mxfp4"], "none of the arms"),
        (["--smaller", "tiny"], "its vocabulary is 1024, expected 272"),
    ):
        bad = run_train(*common, *wrong)
        assert bad.status == 1 and message in " ".join(bad.err.split()) and "Traceback" not in bad.err
