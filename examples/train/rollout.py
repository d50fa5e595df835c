"""What ppo and grpo share: a policy writes answers, and how likely they were to it and to the reference is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import TrainConfig
from .distributed import World
from .errors import TrainError
from .generate import Sampling, generate, generator
from .likelihood import Batch, answers, masked_mean, token_log_probs
from .model import Decoder
from .rewards import RIGHT, verifier_reward
from .stage import fitting
from .tokenizer import ChatTokenizer

TASKS = ("all", "arithmetic", "gsm8k")


@dataclass(frozen=True)
class PolicyOptions:
    """task: which prompts. new_tokens: the longest answer. temperature: of sampling. group: answers to a prompt (GRPO).
    updates: optimizer steps with the same answers. clip: how far a step may move a token's probability. kl: weight of
    the distance from the reference. discount, trace: gamma and lambda of GAE; value: weight of the value loss (PPO)."""

    task: str = "all"
    new_tokens: int = 64
    temperature: float = 1.0
    group: int = 8
    updates: int = 1
    clip: float = 0.2
    kl: float = 0.02
    discount: float = 1.0
    trace: float = 0.95
    value: float = 0.5

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise TrainError(f"--task is {self.task!r}, expected one of {', '.join(TASKS)}")
        if not self.temperature > 0:
            raise TrainError(f"temperature is {self.temperature}, expected more than 0: a policy that learns must vary")

    @classmethod
    def of(cls, table: Mapping[str, Any], changes: Mapping[str, Any]) -> PolicyOptions:
        """From a stage's table in a preset and the command line; None there is what the preset says."""
        unknown = set(table) - {entry.name for entry in fields(cls)}
        if unknown:
            raise TrainError(f"the preset has an option {sorted(unknown)[0]} that this stage does not know")
        return cls(**{**table, **{name: value for name, value in changes.items() if value is not None}})


def pick_prompts(data: Path, split: str, options: PolicyOptions, sequence: int, here: World) -> list[dict[str, Any]]:
    """Prompts of the task that leave room for an answer. Raises TrainError if there is none."""
    room = sequence - options.new_tokens
    if room < 1:
        raise TrainError(f"--new-tokens {options.new_tokens} leaves no room for a prompt in --sequence {sequence}")
    found = fitting(data, "prompts", split, lambda row: len(row["prompt"]), room, here)
    kept = [row for row in found if options.task in ("all", row.get("task"))]
    if not kept:
        raise TrainError(f"{data / f'prompts-{split}.jsonl'}: no prompt of task {options.task} that fits; prepare more")
    return kept


@dataclass(frozen=True)
class Writer:
    """Lets a policy write answers. reference: what it must not go too far from."""

    policy: Decoder
    reference: Decoder
    tokenizer: ChatTokenizer
    options: PolicyOptions
    config: TrainConfig
    here: World

    @torch.no_grad()
    def write(
        self, asked: Sequence[Mapping[str, Any]], number: int, gold: Sequence[str] | None
    ) -> tuple[Batch, Tensor]:
        """Answers to prompts, drawn by micro-batch ``number``'s own random numbers, and their rewards f32 ``[B]``.

        The batch has ``old`` and ``reference``, log-probabilities f32 ``[B, T - 1]``, and ``rewards``.
        gold: right answers; without, rewards are zeros.
        """
        device, prompts = self.here.device, [row["prompt"] for row in asked]
        random = generator(device, (self.config.seed * 7919 + number) * 1009 + self.here.rank)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.amp):
            sampling = Sampling(self.options.temperature)
            replies = generate(self.policy, prompts, self.options.new_tokens, sampling, self.tokenizer.ends, random)
            batch = {name: value.to(device) for name, value in answers(prompts, replies).items()}
            for name, model in (("old", self.policy), ("reference", self.reference)):
                batch[name] = token_log_probs(model(batch["tokens"]), batch["tokens"]) * batch["mask"]
        texts = [self.tokenizer.decode(reply) for reply in replies] if gold is not None else []
        rewards = torch.tensor([verifier_reward(text, right) for text, right in zip(texts, gold or (), strict=True)])
        rewards = rewards.to(device) if gold is not None else torch.zeros(len(asked), device=device)
        return batch | {"rewards": rewards}, rewards


def clipped_policy(log_probs: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """-min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A) a token, f32 ``[B, T - 1]`` (arXiv:1707.06347)."""
    ratio = torch.exp(log_probs - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def policy_metrics(batch: Batch, distance: Tensor) -> dict[str, Tensor]:
    """Mean reward, share of right numbers, length of answers and KL, each as a sum over the answers' tokens."""
    tokens, rewards = batch["mask"].sum(), batch["rewards"]
    return {
        "reward": rewards.mean() * tokens,
        "right": (rewards >= RIGHT).float().mean() * tokens,
        "length": batch["mask"].sum(dim=-1).mean() * tokens,
        "kl": masked_mean(distance, batch["mask"]) * tokens,
    }
