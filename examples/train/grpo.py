"""``grpo``: learning from answers that are checked, each measured against others to the same question.

Group-relative policy optimization (DeepSeekMath, arXiv:2402.03300): no value head; the baseline of an answer is the
mean reward of its group.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from .config import TrainConfig
from .distributed import world
from .errors import TrainError
from .likelihood import Batch, token_log_probs
from .options import Data, From, Out, TrainOptions, training_command
from .rewards import group_advantages
from .rollout import PolicyOptions, Writer, clipped_policy, pick_prompts, policy_metrics
from .stage import StagePreset, begin, finish, frozen_copy, repeat, stage_run
from .streams import row_batches
from .tokenizer import ChatTokenizer
from .trainer import Loss, LossFunction, Run, train


def divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) a token, estimated without bias and never negative: exp(d) - d - 1, d = reference -
    policy (Schulman's k3). f32, of any shape."""
    difference = reference - log_probs
    return torch.exp(difference) - difference - 1


def make_loss(options: PolicyOptions) -> LossFunction:
    """Clipped surrogate and KL penalty over the answers' tokens."""

    def loss(model: Any, batch: Batch) -> Loss:
        log_probs = token_log_probs(model(batch["tokens"]), batch["tokens"])  # [B, T - 1]
        mask, distance = batch["mask"], divergence(log_probs, batch["reference"])
        policy = clipped_policy(log_probs, batch["old"], batch["advantages"], options.clip)
        total = ((policy + options.kl * distance) * mask).sum()
        return Loss(total, mask.sum(), policy_metrics(batch, distance.detach()))

    return loss


def grpo(init: Path, data: Path, config: TrainConfig, run: Run, options: PolicyOptions) -> dict[str, float]:
    """Train the checkpoint in ``init`` on the prompts in ``data``; returns what ``train`` does.

    A micro-batch is some prompts with ``options.group`` answers each. Raises TrainError.
    """
    here = run.world
    model, found, run = begin(init, data, config, run)
    rows = config.micro_batch(here.size)
    if rows % options.group or options.group < 2:
        raise TrainError(
            f"--group is {options.group}, but a micro-batch has {rows} answers (batch_tokens {config.batch_tokens} of "
            f"sequence {config.sequence}); give a group of 2 or more that divides it"
        )
    prompts = pick_prompts(data, "train", options, config.sequence, here)
    writer = Writer(model, frozen_copy(model), ChatTokenizer(data), options, config, here)

    def sample(number: int) -> Batch:
        order = row_batches(len(prompts), rows // options.group, config.seed, number, here.rank, here.size)
        asked = [prompts[i] for i in next(islice(order, 1)) for _ in range(options.group)]
        batch, rewards = writer.write(asked, number, [row["gold"] for row in asked])
        advantages = group_advantages(rewards, options.group)
        return batch | {"advantages": advantages[:, None] * batch["mask"]}

    accumulated = config.grad_accum
    return train(
        model,
        found.model,
        lambda start: repeat(sample, start, accumulated, options.updates),
        make_loss(options),
        config,
        run,
    )


@training_command
def grpo_command(
    data: Data,
    init: From,
    out: Out,
    options: TrainOptions,
    preset: StagePreset = None,
    task: Annotated[str | None, typer.Option(help="arithmetic, gsm8k or all.")] = None,
    group: Annotated[int | None, typer.Option(help="Answers to each prompt.", min=2)] = None,
    new_tokens: Annotated[int | None, typer.Option(help="The longest answer.", min=1)] = None,
    updates: Annotated[int | None, typer.Option(help="Steps with the same answers.", min=1)] = None,
    kl: Annotated[float | None, typer.Option(help="Weight of the distance from the start.", min=0)] = None,
) -> None:
    """Learn from checked answers: 1.0 for the right number, 0.2 for exactly one <answer> block."""
    changes = {"task": task, "group": group, "new_tokens": new_tokens, "updates": updates, "kl": kl}
    with world(options.device) as here:
        chosen, config, run = stage_run("grpo", init, out, preset, options, here)
        finish(out, here, grpo(init, data, config, run, PolicyOptions.of(chosen.options("grpo"), changes)))
