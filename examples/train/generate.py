"""Answers from a decoder: a batch of prompts of any lengths, one static cache, one new token a row and step.

Prompts are padded on the left, so that all rows grow at the same place; the cache hides the padding, and every row
gets the tokens that it would get alone, by a full forward pass over everything so far.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import TrainError
from .model import Decoder, KVCache
from .streams import pad

#: Steps between two looks at whether all rows have ended: each look waits for the GPU.
_LOOK = 8


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Raises TrainError."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0, 100), ("top_k", 0, 2**31), ("top_p", 1e-6, 1), ("min_p", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise TrainError(f"--{name.replace('_', '-')} is {getattr(self, name)}, expected {low} to {high}")


GREEDY = Sampling(temperature=0)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What is drawn from: f32 ``[B, V]`` of logits ``[B, V]``, zero for tokens that the filters drop; temperature > 0.

    The filters work on the tempered distribution, in the order top-k, top-p, min-p. top-p keeps the smallest set of the
    likeliest tokens that holds that share of what top-k has left; min-p those at least that share of the likeliest.
    """
    weights = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    if 0 < sampling.top_k < weights.shape[-1]:
        weights = weights * (weights >= weights.topk(sampling.top_k, dim=-1).values[:, -1:])
    if sampling.top_p < 1:
        ordered = weights.sort(dim=-1, descending=True).values
        before = ordered.cumsum(dim=-1) - ordered  # what the likelier ones hold
        kept = before < sampling.top_p * weights.sum(dim=-1, keepdim=True)
        weights = weights * (weights >= ordered.masked_fill(~kept, 2.0).amin(dim=-1, keepdim=True))
    if sampling.min_p > 0:
        weights = weights * (weights >= sampling.min_p * weights.amax(dim=-1, keepdim=True))
    return weights / weights.sum(dim=-1, keepdim=True)


def choose(logits: Tensor, sampling: Sampling, random: torch.Generator | None = None) -> Tensor:
    """One token a row, int64 ``[B]``, of logits ``[B, V]``."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    return torch.multinomial(probabilities(logits, sampling), 1, generator=random)[:, 0]


@torch.no_grad()
def steps(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    random: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """``count`` new tokens for each prompt, int64 ``[B]`` at a time, whether or not a row has ended.

    random: on the model's device. Raises TrainError if a prompt is empty or its answer would leave the context.
    """
    if not prompts or not all(prompts):
        raise TrainError("a prompt without tokens cannot be continued")
    device = model.embedding.weight.device
    tokens = pad(prompts, left=True).to(device)  # [B, T]
    longest = tokens.shape[1]
    if longest + count > model.config.max_context:
        raise TrainError(
            f"a prompt of {longest} tokens and {count} new ones do not fit the context of {model.config.max_context}; "
            "ask for fewer new tokens, or give a shorter prompt"
        )
    start = torch.tensor([longest - len(prompt) for prompt in prompts])
    dtype = torch.bfloat16 if torch.is_autocast_enabled(device.type) else torch.float32
    cache = KVCache(model.config, len(prompts), longest + count, dtype, device, start)
    for _ in range(count):
        state = model(tokens, cache, hidden=True)[:, -1]  # [B, D]
        tokens = choose(model.head(state), sampling, random)[:, None]
        yield tokens[:, 0]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    ends: Collection[int],
    random: torch.Generator | None = None,
) -> list[list[int]]:
    """Answers of at most ``count`` tokens, each up to and with the first of ``ends``. Raises TrainError."""
    found: list[Tensor] = []
    finals = torch.tensor(sorted(ends), dtype=torch.long, device=model.embedding.weight.device)
    over = torch.zeros(len(prompts), dtype=torch.bool, device=finals.device)
    for number, tokens in enumerate(steps(model, prompts, count, sampling, random), 1):
        found.append(tokens)
        over |= torch.isin(tokens, finals)
        if number % _LOOK == 0 and bool(over.all()):
            break
    return [cut(row, ends) for row in torch.stack(found, dim=1).tolist()] if found else [[] for _ in prompts]


def cut(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """Tokens up to and with the first that ends an answer."""
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return list(tokens[: last + 1])


def generator(device: torch.device, seed: int) -> torch.Generator:
    """Random numbers for a device."""
    return torch.Generator(device=device).manual_seed(seed)
