"""Learning rate and weight decay by step."""

from __future__ import annotations

import math

from .config import TrainConfig

#: BitNet's learning rate at the end of stage one and at the start of stage two, as a share of its peak: for 1.5e-3 it
#: falls to 8e-4, goes on from 5e-4 and ends at 0. Source: "The Era of 1-bit LLMs: Training Tips, Code and FAQ".
STAGE_ONE_END, STAGE_TWO_START = 8 / 15, 5 / 15


def learning_rate(config: TrainConfig, step: int) -> float:
    """For optimizer step ``step``, counted from 0."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)  # 0 to 1
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    if done < 0.5:
        return config.lr * (1 - 2 * done * (1 - STAGE_ONE_END))
    return config.min_lr + (config.lr * STAGE_TWO_START - config.min_lr) * 2 * (1 - done)


def weight_decay(config: TrainConfig, step: int) -> float:
    """For optimizer step ``step``; the second half of ``two-stage`` has none, so that trits may settle."""
    late = config.schedule == "two-stage" and step >= config.warmup + (config.steps - config.warmup) / 2
    return 0.0 if late else config.weight_decay
