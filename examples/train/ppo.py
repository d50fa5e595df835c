"""``ppo``: learning from a reward on whole answers, spread over their tokens by a value head (arXiv:1707.06347).

The reward comes from a reward model or from the verifier; each token also costs its distance from the reference.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from .checkpoint import check_tokenizer, read_checkpoint
from .config import TrainConfig
from .distributed import World, world
from .errors import TrainError
from .likelihood import Batch, masked_mean, token_log_probs
from .options import Data, From, Out, TrainOptions, training_command
from .reward import last_scores
from .rollout import PolicyOptions, Writer, clipped_policy, pick_prompts, policy_metrics
from .stage import Scorer, StagePreset, begin, finish, frozen_copy, load_scorer, repeat, stage_run, with_score
from .streams import row_batches
from .tokenizer import ChatTokenizer
from .trainer import Loss, LossFunction, Run, train


def gae(rewards: Tensor, values: Tensor, mask: Tensor, discount: float, trace: float) -> Tensor:
    """Generalized advantage estimation (arXiv:1506.02438), f32 ``[B, T]``; all arguments ``[B, T]``, mask 1 on the
    answer's places, which lie side by side.

    delta_t = r_t + discount * V_{t+1} - V_t; A_t = delta_t + discount * trace * A_{t+1}. Behind it V and A are 0.
    """
    values, advantages = values * mask, torch.zeros_like(values)
    following = torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        value_after = values[:, t + 1] if t + 1 < values.shape[1] else torch.zeros_like(following)
        delta = rewards[:, t] + discount * value_after - values[:, t]
        following = (delta + discount * trace * following) * mask[:, t]
        advantages[:, t] = following
    return advantages


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the places of the mask, 0 elsewhere."""
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def clipped_value(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V clipped to old +- clip - R)^2) / 2 of each place."""
    near = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def make_loss(options: PolicyOptions) -> LossFunction:
    """Clipped policy and clipped value losses over the answers' tokens."""

    def loss(model: Any, batch: Batch) -> Loss:
        hidden, mask = model(batch["tokens"], hidden=True), batch["mask"]
        log_probs = token_log_probs(model.head(hidden), batch["tokens"])  # [B, T - 1]
        values = model.score(hidden)[:, :-1]
        policy = clipped_policy(log_probs, batch["old"], batch["advantages"], options.clip)
        value = clipped_value(values, batch["values"], batch["returns"], options.clip)
        total = ((policy + options.value * value) * mask).sum()
        distance = (batch["old"] - batch["reference"]).detach()
        metrics = policy_metrics(batch, distance) | {"value_loss": (value * mask).detach().sum()}
        return Loss(total, mask.sum(), metrics)

    return loss


def ppo(
    init: Path, data: Path, config: TrainConfig, run: Run, options: PolicyOptions, reward: Path | None
) -> dict[str, float]:
    """Train the checkpoint in ``init`` on the prompts in ``data``; returns what ``train`` does.

    reward: folder of a reward model; None is the verifier. Raises TrainError.
    """
    here = run.world
    start, found, run = begin(init, data, config, run)
    judge = None if reward is None else _judge(reward, data, here, found.model.vocab_size)
    rows = config.micro_batch(here.size)
    prompts = pick_prompts(data, "train", options, config.sequence, here)
    policy = with_score(start)
    writer = Writer(policy, frozen_copy(start), ChatTokenizer(data), options, config, here)

    def sample(number: int) -> Batch:
        asked = [prompts[i] for i in next(row_batches(len(prompts), rows, config.seed, number, here.rank, here.size))]
        batch, rewards = writer.write(asked, number, None if judge else [row["gold"] for row in asked])
        with torch.no_grad(), torch.autocast(here.device.type, torch.bfloat16, enabled=config.amp):
            rewards = last_scores(judge, batch) if judge else rewards
            values = policy.score(policy(batch["tokens"], hidden=True))[:, :-1] * batch["mask"]
        return batch | {"rewards": rewards} | estimate(batch, rewards, values, options)

    accumulated = config.grad_accum
    return train(
        policy,
        found.model,
        lambda first: repeat(sample, first, accumulated, options.updates),
        make_loss(options),
        config,
        replace(run, info={**run.info, "head": "value"}),
    )


def estimate(batch: Batch, rewards: Tensor, values: Tensor, options: PolicyOptions) -> Batch:
    """values, returns and whitened advantages, f32 ``[B, T - 1]``: the reward falls on the answer's last token, and
    each token pays for its distance from the reference."""
    mask = batch["mask"]
    each = -options.kl * (batch["old"] - batch["reference"]) * mask
    each = each.scatter_add(1, batch["last"][:, None] - 1, rewards[:, None].to(each.dtype))
    advantages = gae(each, values, mask, options.discount, options.trace)
    return {"values": values, "returns": advantages + values, "advantages": whiten(advantages, mask)}


def _judge(folder: Path, data: Path, here: World, vocabulary: int) -> Scorer:
    check_tokenizer(read_checkpoint(folder), data)
    judge = load_scorer(folder, here)
    if judge.config.vocab_size != vocabulary:
        raise TrainError(f"{folder}: its vocabulary is {judge.config.vocab_size}, the policy's {vocabulary}")
    return judge


@training_command
def ppo_command(
    data: Data,
    init: From,
    out: Out,
    options: TrainOptions,
    preset: StagePreset = None,
    reward_model: Annotated[Path | None, typer.Option(help="Folder of `reward`'s run; default: the verifier.")] = None,
    task: Annotated[str | None, typer.Option(help="arithmetic, gsm8k or all.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="The longest answer.", min=1)] = None,
    updates: Annotated[int | None, typer.Option(help="Steps with the same answers.", min=1)] = None,
    kl: Annotated[float | None, typer.Option(help="What a token pays for its distance from the start.", min=0)] = None,
) -> None:
    """Learn from a reward model, or from checked answers, with a value head and GAE."""
    changes = {"task": task, "new_tokens": new_tokens, "updates": updates, "kl": kl}
    with world(options.device) as here:
        chosen, config, run = stage_run("ppo", init, out, preset, options, here)
        found = PolicyOptions.of(chosen.options("ppo"), changes)
        finish(out, here, ppo(init, data, config, run, found, reward_model))
