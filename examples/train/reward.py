"""``reward``: one number for an answer, learned from pairs of which one is better (Bradley and Terry, 1952)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import TrainConfig
from .distributed import world
from .likelihood import Batch, answers
from .options import Data, From, Out, TrainOptions, training_command
from .stage import StagePreset, begin, finish, fitting, stage_run, with_score
from .streams import row_batches
from .trainer import Loss, Run, train

Pair = Mapping[str, Any]


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected), f32 ``[P]``: how surprising it is that the better answer was the better one."""
    return -F.logsigmoid(chosen - rejected)


def pair_length(row: Pair) -> int:
    """Tokens of the longer of both."""
    return len(row["prompt"]) + max(len(row["chosen"]), len(row["rejected"]))


def pair_batch(pairs: Sequence[Pair]) -> Batch:
    """2P rows: the chosen answers, then the rejected ones."""
    prompts = [row["prompt"] for row in pairs]
    return answers([*prompts, *prompts], [row["chosen"] for row in pairs] + [row["rejected"] for row in pairs])


def last_scores(model: Any, batch: Batch) -> Tensor:
    """The score at each answer's end, f32 ``[B]``."""
    scores: Tensor = model.score(model(batch["tokens"], hidden=True))
    return scores.gather(1, batch["last"][:, None])[:, 0]


def reward_loss(model: Any, batch: Batch) -> Loss:
    """Bradley-Terry over pairs; metrics: accuracy (the better one scores higher) and margin."""
    chosen, rejected = last_scores(model, batch).chunk(2)
    margin = (chosen - rejected).detach()
    metrics = {"accuracy": (margin > 0).sum(), "margin": margin.sum()}
    return Loss(bradley_terry(chosen, rejected).sum(), len(chosen), metrics)


def reward(init: Path, data: Path, config: TrainConfig, run: Run) -> dict[str, float]:
    """Train a reward model from the checkpoint in ``init``; returns what ``train`` does, and ``held_accuracy``.

    Two rows of ``sequence`` tokens make a pair. Raises TrainError.
    """
    here = run.world
    model, found, run = begin(init, data, config, run)
    scorer = with_score(model)
    learned, held = (fitting(data, "preferences", s, pair_length, config.sequence, here) for s in ("train", "held"))
    pairs = max(config.micro_batch(here.size) // 2, 1)
    looked = [pair_batch(held[i : i + pairs]) for i in range(0, min(len(held), pairs * config.eval_batches), pairs)]
    numbers = train(
        scorer,
        found.model,
        lambda start: (
            pair_batch([learned[i] for i in chosen])
            for chosen in row_batches(len(learned), pairs, config.seed, start, here.rank, here.size)
        ),
        reward_loss,
        config,
        replace(run, info={**run.info, "head": "reward"}),
        looked,
    )
    with torch.no_grad():
        losses = [reward_loss(scorer, {n: t.to(here.device) for n, t in batch.items()}) for batch in looked]
    right = sum(float(loss.metrics["accuracy"]) for loss in losses)
    return {**numbers, "held_accuracy": right / sum(float(loss.weight) for loss in losses)}


@training_command
def reward_command(data: Data, init: From, out: Out, options: TrainOptions, preset: StagePreset = None) -> None:
    """Train a reward model on preference pairs (Bradley-Terry)."""
    with world(options.device) as here:
        _, config, run = stage_run("reward", init, out, preset, options, here)
        finish(out, here, reward(init, data, config, run))
