"""``pretrain``: next-token prediction on the flat stream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch.nn.functional as F
import typer
from torch import Tensor

from .config import PRECISIONS, ModelConfig, Preset, TrainConfig, load_preset
from .distributed import World, world
from .errors import TrainError
from .model import Decoder
from .options import Data, Out, PresetName, TrainOptions, training_command
from .streams import IGNORED, check_vocabulary, held_batches, pretrain_batches, pretrain_tokens
from .trainer import Loss, Run, seed_step, train


def next_token_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Loss:
    """Cross-entropy, nats, summed over targets that are not ``IGNORED``. batch: tokens and targets int64 ``[B, T]``."""
    tokens, targets = batch
    total = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return Loss(total, (targets != IGNORED).sum())


def new_model(config: ModelConfig, seed: int, here: World) -> Decoder:
    """A model whose first weights follow from the seed, on every process alike."""
    seed_step(seed, -1, 0)
    return Decoder(config).to(here.device)


def check_context(model: ModelConfig, config: TrainConfig) -> None:
    """Raises TrainError for rows longer than the model's context."""
    if config.sequence > model.max_context:
        raise TrainError(
            f"--sequence {config.sequence} is longer than the model's context of {model.max_context}; make it shorter, "
            "or give the preset a greater max_context"
        )


def pretrain(preset: Preset, data: Path, config: TrainConfig, run: Run) -> dict[str, float]:
    """Train the preset's model on the streams in ``data``; returns what ``train`` does. Raises TrainError."""
    check_context(preset.model, config)
    here = run.world
    rows = config.micro_batch(here.size)
    for split in ("train", "held"):
        check_vocabulary(pretrain_tokens(data, split), preset.model.vocab_size, data / f"pretrain-{split}.bin")
    held = held_batches(data, rows, config.sequence, config.eval_batches)
    return train(
        new_model(preset.model, config.seed, here),
        preset.model,
        lambda start: pretrain_batches(
            data, "train", rows, config.sequence, config.seed, start, rank=here.rank, world=here.size
        ),
        next_token_loss,
        config,
        replace(run, tokenizer=run.tokenizer or data),
        held,
    )


@training_command
def pretrain_command(
    data: Data,
    out: Out,
    options: TrainOptions,
    preset: PresetName = "tiny",
    precision: Annotated[str | None, typer.Option(help=f"Of the linears: {', '.join(PRECISIONS)}.")] = None,
    fp4_option: Annotated[list[str] | None, typer.Option(help="For nvfp4 and mxfp4: see fp4-gap.")] = None,
    sub_norms: Annotated[
        bool | None, typer.Option("--sub-norms/--no-sub-norms", help="BitNet's norms before o and down.")
    ] = None,
) -> None:
    """Train a model from scratch on the flat stream, on one process or under torchrun."""
    chosen = load_preset(preset).with_model(
        precision=precision, fp4_options=tuple(fp4_option) if fp4_option else None, sub_norms=sub_norms
    )
    config = options.config(chosen, "pretrain")
    with world(options.device) as here:
        run = Run(
            "pretrain",
            out,
            here,
            resume=options.resume,
            report_memory=options.report_memory,
            info={"preset": preset},
        )
        result = pretrain(chosen, data, config, run)
        if here.first:
            typer.echo(
                f"{out}: {chosen.model.label}, {chosen.model.parameters():,} parameters, step {result['step']}, "
                f"loss {result['loss']:.4f}, held out {result['held_loss']:.4f}"
            )
