"""How a distillation goes."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import TrainError


@dataclass(frozen=True)
class Options:
    """seconds, or steps: how long; one of them. batch_tokens: of a step. lr: peak, of latents (which have a mean
    magnitude of 1); vector_lr: of scales and norms, as a part of that. warmup: steps of linear rise; then it falls
    linearly to zero at the end. clip: greatest norm of the gradient.

    state_weight, relation_weight: of the terms on hidden states and on the relations of q, k and v in block
    ``relation_layer``; both fade to nothing at ``extra_until`` of the run.

    log_every: steps. measure_every, save_every: seconds. Raises TrainError.
    """

    seconds: float = 0.0
    steps: int = 0
    batch_tokens: int = 32_768
    lr: float = 8e-3
    vector_lr: float = 0.2
    warmup: int = 100
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    state_weight: float = 0.0
    relation_weight: float = 0.0
    relation_layer: int = -3
    extra_until: float = 0.3
    seed: int = 0
    log_every: int = 50
    measure_every: float = 60.0
    save_every: float = 240.0

    def __post_init__(self) -> None:
        if (self.seconds > 0) == (self.steps > 0):
            raise TrainError("training: give either seconds or steps, more than 0")
        if not self.lr > 0 or not self.vector_lr > 0 or self.batch_tokens < 1:
            raise TrainError("training: lr, vector_lr and batch_tokens must be more than 0")

    def rate(self, step: int, progress: float) -> float:
        """Learning rate of a step (from 0) at a progress from 0 to 1."""
        return self.lr * min(1.0, (step + 1) / max(self.warmup, 1)) * max(1.0 - progress, 0.0)
