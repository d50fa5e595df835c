"""Options that all training commands share, written once.

    @training_command
    def sft_command(data: Data, out: Out, options: TrainOptions) -> None: ...

is a command with ``--data``, ``--out`` and every option of ``TrainOptions``.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from .config import SCHEDULES, Preset, TrainConfig

Data = Annotated[Path, typer.Option("--streams", help="Folder that `prepare` has written.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run: checkpoint and loss curves.")]
From = Annotated[Path, typer.Option("--from", help="Folder of the run, or the checkpoint, to start from.")]
PresetName = Annotated[str, typer.Option("--preset", help="tiny, 13m, gap10m, or a .toml file.")]


@dataclass(frozen=True)
class TrainOptions:
    """What the command line says of a run; None is what the preset says."""

    steps: Annotated[int | None, typer.Option(help="Optimizer steps.", min=1)] = None
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a step, all processes together.", min=1)] = None
    sequence: Annotated[int | None, typer.Option(help="Tokens of a row.", min=1)] = None
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None
    min_lr: Annotated[float | None, typer.Option(help="Last learning rate.")] = None
    warmup: Annotated[int | None, typer.Option(help="Steps of rising learning rate.", min=0)] = None
    weight_decay: Annotated[float | None, typer.Option(help="Of matrices.")] = None
    schedule: Annotated[str | None, typer.Option(help=f"One of {', '.join(SCHEDULES)}.")] = None
    seed: Annotated[int | None, typer.Option(help="Of first weights, order and all else that is random.")] = None
    amp: Annotated[bool | None, typer.Option("--amp/--no-amp", help="bf16 autocast.")] = None
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile the blocks.")] = None
    grad_checkpointing: Annotated[
        bool | None,
        typer.Option("--grad-checkpointing/--no-grad-checkpointing", help="Compute activations twice, keep few."),
    ] = None
    grad_accum: Annotated[int | None, typer.Option(help="Micro-batches of a step, for each process.", min=1)] = None
    log_every: Annotated[int | None, typer.Option(help="Steps between lines.", min=1)] = None
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: at the end.", min=0)] = None
    eval_every: Annotated[int | None, typer.Option(help="Steps between held-out losses; 0: at the end.", min=0)] = None
    minutes: Annotated[float | None, typer.Option(help="Save and stop after so long; --resume goes on.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False
    report_memory: Annotated[bool, typer.Option("--report-memory", help="Say where the memory goes.")] = False
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU if there is one.")] = None

    def config(self, preset: Preset, stage: str) -> TrainConfig:
        """The preset's run of a stage with these changes. Raises TrainError."""
        names = {entry.name for entry in fields(TrainConfig)}
        return preset.train(stage, **{name: value for name, value in vars(self).items() if name in names})


def training_command(function: Callable[..., None]) -> Callable[..., None]:
    """A command function whose parameter ``options`` typer sees as the options of TrainOptions."""
    hints = typing.get_type_hints(TrainOptions, include_extras=True)
    own = inspect.signature(function, eval_str=True)
    shared = [
        inspect.Parameter(
            entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default, annotation=hints[entry.name]
        )
        for entry in fields(TrainOptions)
        if entry.default is not MISSING
    ]
    kept = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.parameters.items()
        if name != "options"
    ]

    @functools.wraps(function)
    def command(**given: Any) -> None:
        options = TrainOptions(**{parameter.name: given.pop(parameter.name) for parameter in shared})
        function(**given, options=options)

    command.__signature__ = own.replace(parameters=[*kept, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *shared]}
    return command
