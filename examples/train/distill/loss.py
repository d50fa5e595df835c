"""How far the student is from the teacher: KL over the whole vocabulary in pieces, and terms on hidden states."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .nets import BF16, compiled

#: Positions whose logits exist at one time.
PIECE = 8192


def _kl_piece(student: Tensor, teacher: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of KL(teacher, student) over positions, and its gradient by the student's states.

    student, teacher: bf16 ``[n, D]``; head: bf16 ``[V, D]``. The gradient by the logits is the difference of the two
    distributions, so nothing has to be kept for a backward pass.
    """
    ours = torch.log_softmax(F.linear(student, head).float(), dim=-1)
    theirs = torch.log_softmax(F.linear(teacher, head).float(), dim=-1)
    wanted = theirs.exp()
    gradient = (ours.exp() - wanted).to(BF16)
    return (wanted * (theirs - ours)).sum(), F.linear(gradient, head.t())


def _measure_piece(student: Tensor, teacher: Tensor, head: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """Sums over the positions that count, f32 ``[4]``: KL, same top token, -log p of targets by student and teacher."""
    ours = torch.log_softmax(F.linear(student, head).float(), dim=-1)
    theirs = torch.log_softmax(F.linear(teacher, head).float(), dim=-1)
    rows = (
        (theirs.exp() * (theirs - ours)).sum(-1),
        (ours.argmax(-1) == theirs.argmax(-1)).float(),
        -ours.gather(1, targets[:, None])[:, 0],
        -theirs.gather(1, targets[:, None])[:, 0],
    )
    return torch.stack([(row * counts).sum() for row in rows])


def _state_error(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared distance of hidden states ``[B, T, D]``, relative to the teacher's, mean over positions."""
    teacher = teacher.float()
    return ((student - teacher).pow(2).sum(-1) / (teacher.pow(2).sum(-1) + 1e-3)).mean()


@lru_cache
def _compiled(name: str, device: torch.device) -> Any:
    return compiled(globals()[name], device)


@torch.no_grad()
def kl(student: Tensor, teacher: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Mean KL(teacher, student) in nats a position, f32 ``[]``, and its gradient by ``student``.

    student, teacher: normed last states bf16 ``[B, T, D]``; head: bf16 ``[V, D]``.
    """
    ours, theirs = student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
    gradient, total = torch.empty_like(ours), torch.zeros((), device=ours.device)
    for first in range(0, len(ours), PIECE):
        piece = slice(first, first + PIECE)
        part, gradient[piece] = _compiled("_kl_piece", ours.device)(ours[piece], theirs[piece], head)
        total += part
    return total / len(ours), (gradient / len(ours)).view_as(student)


@torch.no_grad()
def sums(student: Tensor, teacher: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """Sums of ``_measure_piece`` over all positions with a next token. tokens: int ``[B, T]``. f32 ``[4]``."""
    ours, theirs = student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
    targets = tokens.roll(-1, dims=1).long().reshape(-1)
    counts = torch.ones(tokens.shape, device=tokens.device)
    counts[:, -1] = 0
    counts = counts.reshape(-1)
    total = torch.zeros(4, device=tokens.device)
    for first in range(0, len(ours), PIECE):
        piece = slice(first, first + PIECE)
        total += _compiled("_measure_piece", ours.device)(
            ours[piece], theirs[piece], head, targets[piece], counts[piece]
        )
    return total


def state_error(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Mean of ``_state_error`` over the blocks."""
    error = _compiled("_state_error", student[0].device)
    return torch.stack([error(ours, theirs) for ours, theirs in zip(student, teacher, strict=True)]).mean()


def relation_error(student: Tensor, teacher: Tensor) -> Tensor:
    """How differently tokens relate to each other: KL of softmax(x x^T / sqrt(E)) over earlier tokens, f32 ``[]``.

    student, teacher: ``[B, T, heads, E]``: q, k or v of one block (MiniLMv2, arXiv 2012.15828, causal here).
    """
    logs = []
    for x in (student, teacher):
        x = x.transpose(1, 2).float()
        scores = x @ x.transpose(2, 3) / x.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        logs.append(torch.log_softmax(scores.masked_fill(later, -1e9), dim=-1))
    ours, theirs = logs
    return (theirs.exp() * (theirs - ours)).sum(-1).mean()
