"""What the stages after pretraining share: they start from a checkpoint, and read rows that must fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor, nn

from .checkpoint import Checkpoint, check_tokenizer, load_model, load_weights, read_checkpoint
from .config import ModelConfig, Preset, TrainConfig, load_preset
from .distributed import World
from .errors import TrainError
from .model import Decoder
from .options import TrainOptions
from .pretrain import check_context
from .streams import rows
from .trainer import Run

T = TypeVar("T")
StagePreset = Annotated[
    str | None, typer.Option("--preset", help="tiny, 13m or a .toml file; default: the one the model was trained with.")
]


def stage_run(
    stage: str, init: Path, out: Path, preset: str | None, options: TrainOptions, here: World
) -> tuple[Preset, TrainConfig, Run]:
    """The preset, its run of a stage, and where it goes; the preset is the checkpoint's where none is named."""
    named = preset or str(read_checkpoint(init).info.get("preset", "tiny"))
    chosen = load_preset(named)
    run = Run(
        stage,
        out,
        here,
        resume=options.resume,
        report_memory=options.report_memory,
        info={"preset": named, "from": init.name},
    )
    return chosen, options.config(chosen, stage), run


def finish(out: Path, here: World, result: Mapping[str, float]) -> None:
    """One line about what a run came to."""
    if here.first:
        said = ", ".join(
            f"{name.replace('_', ' ')} {value:.4g}" for name, value in result.items() if name not in ("step", "lr")
        )
        typer.echo(f"{out}: step {result['step']}, {said}")


class Scorer(Decoder):
    """A decoder with one number for each place beside its logits: a reward, or a value."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.scalar = nn.Linear(config.dim, 1, bias=False)
        nn.init.zeros_(self.scalar.weight)  # it starts without an opinion

    def score(self, hidden: Tensor) -> Tensor:
        """f32 ``[B, T]`` of normed states ``[B, T, D]``."""
        return F.linear(hidden, self.scalar.weight)[..., 0].float()


def begin(init: Path, data: Path, config: TrainConfig, run: Run) -> tuple[Decoder, Checkpoint, Run]:
    """The model that a stage starts from, on its device, and the run with what its checkpoints must say.

    Raises TrainError: no checkpoint, another tokenizer than that of the streams, rows longer than the context.
    """
    model, found = load_model(init, run.world.device)
    check_tokenizer(found, data)
    check_context(found.model, config)
    return model, found, replace(run, tokenizer=found.path, before=found.tokens)


def with_score(model: Decoder) -> Scorer:
    """The same model with a scalar head of zeros."""
    scorer = Scorer(model.config).to(model.embedding.weight.device)
    scorer.load_state_dict(model.state_dict(), strict=False)
    return scorer


def load_scorer(folder: Path, here: World) -> Scorer:
    """A reward model, frozen. Raises TrainError if the checkpoint is none."""
    found = read_checkpoint(folder)
    if found.info.get("stage") != "reward":
        raise TrainError(f"{found.path}: is of {found.info.get('stage')}, expected a reward model; `reward` trains one")
    scorer = Scorer(found.model)
    load_weights(scorer, found.path)
    return scorer.to(here.device).requires_grad_(False)


def fitting(folder: Path, name: str, split: str, length: Callable[[Any], int], most: int, here: World) -> list[Any]:
    """Rows of a stream that have at most ``most`` tokens; says how many do not. Raises TrainError if none do."""
    found, path = rows(folder, name, split), folder / f"{name}-{split}.jsonl"
    try:
        kept = [row for row in found if length(row) <= most]
    except (KeyError, TypeError) as error:
        raise TrainError(f"{path}: a row lacks a field ({error}); prepare it again") from None
    if not kept:
        shortest = min(map(length, found))
        raise TrainError(
            f"{path}: every row is longer than {most} tokens (the shortest has {shortest}); raise --sequence, or "
            "prepare the streams with a smaller one"
        )
    if len(kept) < len(found) and here.first:
        Console(stderr=True, soft_wrap=True).print(
            f"{name}-{split}: {len(found) - len(kept)} of {len(found)} rows are longer than {most} tokens, left out",
            highlight=False,
        )
    return kept


def check_ids(ids: Sequence[int], vocabulary: int, where: Path) -> None:
    """Raises TrainError for an id that the model has no row for."""
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        raise TrainError(f"{where}: ids up to {max(ids)}, but the model's vocabulary is {vocabulary}; prepare it again")


def repeat(sample: Callable[[int], T], start: int, accumulated: int, updates: int) -> Iterator[T]:
    """Micro-batches for a policy that learns from what it writes itself, one after the other without end.

    ``sample(n)`` makes micro-batch n with the policy as it is then. Each optimizer step takes ``accumulated`` of them,
    and ``updates`` steps in a row take the same. start: micro-batches taken before; a run that goes on in the middle of
    such a row samples anew.
    """
    number = start // (accumulated * updates) * accumulated
    while True:
        sampled = [sample(number + i) for i in range(accumulated)]
        for _ in range(updates):
            yield from sampled
        number += accumulated


def frozen_copy(model: Decoder) -> Decoder:
    """The reference: what the model is now, for good."""
    copy = Decoder(model.config).to(model.embedding.weight.device)
    copy.load_state_dict({name: value for name, value in model.state_dict().items() if name in copy.state_dict()})
    return copy.requires_grad_(False)
