"""How near a student is to its teacher on rows that it was not trained on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from .loss import sums
from .nets import Net
from .rows import with_states
from .student import Student


@dataclass(frozen=True)
class Measures:
    """kl: KL(teacher, student) in nats a token. same_top: share of positions with the same most probable token.
    perplexity: of the student on the tokens; teacher_perplexity: of the teacher. tokens: with a next token."""

    kl: float
    same_top: float
    perplexity: float
    teacher_perplexity: float
    tokens: int

    def rounded(self) -> dict[str, float]:
        """For logs."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


@torch.no_grad()
def measure(net: Net, teacher_hidden: Tensor, tokens: Tensor, batch_tokens: int = 32_768) -> Measures:
    """tokens: int ``[N, T]``; teacher_hidden: of ``with_states``. A student is rounded once for all of them."""
    if isinstance(net, Student):
        net.freeze()
    hidden = with_states(net, tokens, batch_tokens)
    if isinstance(net, Student):
        net.thaw()
    batch = max(1, batch_tokens // tokens.shape[1])
    total = torch.zeros(4, dtype=torch.float64, device=tokens.device)
    for first in range(0, len(tokens), batch):
        rows = slice(first, first + batch)
        total += sums(hidden[rows], teacher_hidden[rows], net.head, tokens[rows])
    count = len(tokens) * (tokens.shape[1] - 1)
    kl, same, loss, teacher_loss = (total / count).tolist()
    return Measures(kl, same, math.exp(min(loss, 700)), math.exp(min(teacher_loss, 700)), count)
