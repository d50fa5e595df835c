"""How likely a model finds answers: batches of prompt and answer, and the log-probability of each token.

A batch is a dict: ``tokens`` int64 ``[B, T]``, prompt and answer, filled up on the right; ``mask`` f32 ``[B, T - 1]``,
1 at the places from which a token of the answer is predicted; ``last`` int64 ``[B]``, the place of the answer's last
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .streams import pad

Batch = dict[str, Tensor]


def answers(prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], length: int | None = None) -> Batch:
    """Prompts with their answers as one batch of ``length`` columns, by default the longest row's.

    Raises TrainError for a row that is longer.
    """
    whole = [[*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True)]
    mask = [[0] * (len(p) - 1) + [1] * len(r) for p, r in zip(prompts, replies, strict=True)]
    tokens = pad(whole, length)
    return {
        "tokens": tokens,
        "mask": pad(mask, tokens.shape[1] - 1).float(),
        "last": torch.tensor([len(row) - 1 for row in whole]),
    }


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p(token t+1 | tokens up to t), f32 ``[B, T - 1]``, of logits ``[B, T, V]`` and tokens ``[B, T]``."""
    logits, following = logits[:, :-1].float(), tokens[:, 1:, None]
    return logits.gather(-1, following)[..., 0] - torch.logsumexp(logits, dim=-1)


def answer_log_probs(model: Any, batch: Batch) -> Tensor:
    """Log-probability of each whole answer, f32 ``[B]``."""
    return (token_log_probs(model(batch["tokens"]), batch["tokens"]) * batch["mask"]).sum(dim=-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values where the mask is 1."""
    return (values * mask).sum() / mask.sum().clamp(min=1)
