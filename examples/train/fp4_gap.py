"""``fp4-gap``: what 4-bit training costs, EMULATED, against BF16 and beside ternary, with identical data order.

    python examples/train/fp4_gap.py --seeds 0,1,2 --max-gap 1.0
    python -m examples.train fp4-gap --seeds 0 --tokens-per-parameter 2 --no-ablations    # minutes on one GPU
    python -m examples.train fp4-gap --preset 13m --arms ternary --smaller 2m --bound-arm ternary --max-gap 10

Each run trains the preset's decoder from the same first weights on the same batches as the BF16 run of its seed. The
gap is (held-out loss - BF16's) / BF16's, in percent: its mean over seeds, and its standard deviation. Results are kept
run by run in ``fp4-gap.json``; a later call with the same settings does only the runs that are missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: start again as the module that it is
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from examples.train.cli import main

    main(["fp4-gap", *sys.argv[1:]])
    sys.exit()

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from .config import FP4_OPTIONS, ModelConfig, Preset, TrainConfig, load_preset
from .distributed import World, world
from .errors import NotFinite, TrainError
from .gap_report import Results, print_table, verdict
from .options import PresetName
from .prepare import Options as PrepareOptions
from .prepare import default_data, prepare
from .pretrain import pretrain
from .streams import pretrain_tokens
from .trainer import Run

DEFAULT_STREAMS = Path("artifacts/train/gap10m-streams")
BASELINE = "bf16"


@dataclass(frozen=True)
class Arm:
    """One way to train. name: in tables. ablation: of NVFP4's recipe. shape: another model than the preset's."""

    name: str
    precision: str
    options: tuple[str, ...] = ()
    ablation: bool = False
    shape: ModelConfig | None = None

    def model(self, base: ModelConfig) -> ModelConfig:
        """Ternary comes with BitNet's sub-norms; all else is equal."""
        if self.shape is not None:
            return replace(self.shape, precision=self.precision)
        ternary = self.precision == "ternary"
        return replace(base, precision=self.precision, fp4_options=self.options, sub_norms=ternary or base.sub_norms)

    def config(self, base: TrainConfig) -> TrainConfig:
        """Ternary comes with BitNet's schedule."""
        return replace(base, schedule="two-stage") if self.precision == "ternary" else base


ARMS = (
    Arm(BASELINE, "bf16"),
    Arm("nvfp4", "nvfp4"),
    Arm("mxfp4", "mxfp4"),
    Arm("ternary", "ternary"),
    *(Arm(f"nvfp4 {option}", "nvfp4", (option,), ablation=True) for option in FP4_OPTIONS),
)


@dataclass(frozen=True)
class Plan:
    """seeds, horizons (tokens per parameter) and arms; ablations run at the first horizon. minutes: 0 for no limit."""

    seeds: tuple[int, ...]
    horizons: tuple[float, ...]
    arms: tuple[Arm, ...]
    minutes: float = 0.0

    def runs(self) -> list[tuple[Arm, int, float]]:
        """The most telling first: formats before ablations, the short horizon before the long one."""
        found = []
        for horizon in self.horizons:
            for ablation in (False, True):
                if ablation and horizon != self.horizons[0]:
                    continue
                found += [(arm, s, horizon) for s in self.seeds for arm in self.arms if arm.ablation == ablation]
        return found


def measure(preset: Preset, streams: Path, out: Path, plan: Plan, base: TrainConfig, here: World) -> Results:
    """Do the plan's runs that ``out`` does not have yet; returns all of the plan's. Raises TrainError."""
    parameters = preset.model.parameters()
    settings = {
        "preset": preset.name,
        "parameters": parameters,
        "batch_tokens": base.batch_tokens,
        "sequence": base.sequence,
        "lr": base.lr,
        "distinct_tokens": len(pretrain_tokens(streams, "train")),
        "held_tokens": len(pretrain_tokens(streams, "held")),
    }
    results = Results.open(out, settings, _device_name(here))
    console, began = Console(stderr=True, soft_wrap=True, quiet=not here.first), time.monotonic()
    for arm, seed, horizon in plan.runs():
        if results.find(arm.name, seed, horizon):
            continue
        config = _run_config(arm.config(base), parameters, horizon, seed)
        tokens = config.steps * config.batch_tokens
        left = 60 * plan.minutes - (time.monotonic() - began)
        if plan.minutes and results.seconds_for(arm.name, tokens) > left:
            console.print(f"no time left for {arm.name}, seed {seed}, {horizon:g} tokens a parameter", highlight=False)
            continue
        chosen = replace(preset, model=arm.model(preset.model))
        run = Run(f"gap {horizon:g} seed {seed}", out / "runs" / _folder(arm, seed, horizon), here, keep=False)
        started = time.monotonic()
        failed = {}
        numbers: dict[str, float | None]
        try:
            numbers = {**pretrain(chosen, streams, config, run)}
        except NotFinite as error:  # that a format diverges is a result
            numbers, failed = {"loss": None, "held_loss": None}, {"failed": str(error)}
        results.add(
            {
                "arm": arm.name,
                "label": chosen.model.label,
                "parameters": chosen.model.parameters(),
                "seed": seed,
                "tokens_per_parameter": horizon,
                "tokens": tokens,
                "loss": numbers["loss"],
                "held_loss": numbers["held_loss"],
                "seconds": round(time.monotonic() - started, 1),
                **failed,
            },
            write=here.first,
        )
    return results


def _run_config(base: TrainConfig, parameters: int, horizon: float, seed: int) -> TrainConfig:
    steps = max(1, round(horizon * parameters / base.batch_tokens))
    return replace(base, steps=steps, seed=seed, warmup=min(base.warmup, steps // 10), eval_every=0, save_every=0)


def _folder(arm: Arm, seed: int, horizon: float) -> str:
    return f"{arm.name.replace(' ', '-')}-{horizon:g}-seed{seed}"


def _device_name(here: World) -> str:
    return torch.cuda.get_device_name(here.device) if here.device.type == "cuda" else "CPU"


def _numbers(text: str, what: str, kind: type) -> tuple[Any, ...]:
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise TrainError(f"{what} is {text!r}, expected numbers with commas between them") from None
    if len(set(found)) < len(found) or min(found) < 0:
        raise TrainError(f"{what} is {text!r}, expected different numbers of 0 or more")
    return found


def _chosen_arms(names: str | None, ablations: bool) -> tuple[Arm, ...]:
    if names is None:
        return tuple(arm for arm in ARMS if ablations or not arm.ablation)
    known = {arm.name: arm for arm in ARMS}
    wanted = [BASELINE, *(name.strip() for name in names.split(",") if name.strip() != BASELINE)]
    for name in wanted:
        if name not in known:
            raise TrainError(f"--arms: no {name!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in wanted)


def smaller_arm(preset: str, base: ModelConfig) -> Arm:
    """BF16 in the shape of another preset, on the same tokens. Raises TrainError if its vocabulary is another."""
    shape = load_preset(preset).model
    if shape.vocab_size != base.vocab_size:
        raise TrainError(
            f"--smaller {preset}: its vocabulary is {shape.vocab_size}, expected {base.vocab_size}: losses over "
            "different tokens cannot be compared"
        )
    return Arm(f"{BASELINE} {Path(preset).stem}", "bf16", shape=shape)


def find_streams(streams: Path | None, preset: Preset, here: World) -> Path:
    """The folder that is named, or the default one, which is prepared if it is not there. Raises TrainError."""
    if streams is not None:
        return streams
    if not (DEFAULT_STREAMS / "streams.json").is_file():
        if here.size > 1:
            raise TrainError(f"{DEFAULT_STREAMS}: no streams there; prepare them first, or name a folder by --streams")
        prepare(DEFAULT_STREAMS, default_data(), [], PrepareOptions(**preset.options("prepare")))
    return DEFAULT_STREAMS


def fp4_gap_command(
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0,1,2",
    max_gap: Annotated[float, typer.Option(help="Exit status 1 if the gap of --bound-arm is greater, percent.")] = 1.0,
    bound_arm: Annotated[str, typer.Option(help="The arm that --max-gap is for, at the longest horizon.")] = "nvfp4",
    tokens_per_parameter: Annotated[str, typer.Option(help="Horizons, with commas.")] = "14,28",
    arms: Annotated[str | None, typer.Option(help=f"Of {', '.join(arm.name for arm in ARMS)}; default: all.")] = None,
    ablations: Annotated[bool, typer.Option(help="NVFP4's ablations too, at the first horizon.")] = True,
    streams: Annotated[
        Path | None,
        typer.Option(help=f"Folder that `prepare` has written; default {DEFAULT_STREAMS}, made if need be."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for JSON, plot and loss curves.")] = Path("artifacts/train/fp4-gap"),
    preset: PresetName = "gap10m",
    smaller: Annotated[
        str | None, typer.Option(help="Also BF16 in the shape of this preset: 2m is as large in bytes as 13m packed.")
    ] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a step; default: the preset's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; default: the preset's.")] = None,
    compile_blocks: Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile.")] = None,
    minutes: Annotated[float, typer.Option(help="Leave out runs that would end later; 0: none.")] = 0.0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
) -> None:
    """Measure what 4-bit training (EMULATED) and ternary cost against BF16, over seeds and horizons."""
    chosen = load_preset(preset)
    plan = Plan(
        _numbers(seeds, "--seeds", int),
        _numbers(tokens_per_parameter, "--tokens-per-parameter", float),
        _chosen_arms(arms, ablations) + ((smaller_arm(smaller, chosen.model),) if smaller else ()),
        minutes,
    )
    if bound_arm not in {arm.name for arm in plan.arms}:
        raise TrainError(f"--bound-arm {bound_arm} is none of the arms: {', '.join(arm.name for arm in plan.arms)}")
    config = chosen.train("pretrain", batch_tokens=batch_tokens, lr=lr, compile=compile_blocks)
    with world(device) as here:
        results = measure(chosen, find_streams(streams, chosen, here), out, plan, config, here)
        if here.first:
            _finish(results, out, plan.horizons, bound_arm, max_gap)


def _finish(results: Results, out: Path, horizons: Sequence[float], arm: str, bound: float) -> None:
    results.draw(out / "fp4-gap.png")
    print_table(results)
    typer.echo(f"{out / 'fp4-gap.json'}: all runs")
    fine, text = verdict(results, arm, max(horizons), bound)
    typer.echo(text)
    if not fine:
        raise typer.Exit(1)
