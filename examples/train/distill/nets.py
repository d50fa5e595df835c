"""What teacher and student share: a pass over whole rows, and the two halves of a block that decoding needs.

Shapes in comments: B rows, T tokens, D dim, H heads, G kv heads, E head_dim, F ffn_dim, V vocabulary, L layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from ..errors import TrainError
from ..model import rotate

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Split:
    """How the columns of one product for q, k and v divide. eps: of all norms."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    def qkv(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, T, (H + 2G) E]`` to q ``[B, T, H, E]``, k and v ``[B, T, G, E]``."""
        y = y.view(*y.shape[:2], -1, self.head_dim)
        q, k, v = y.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        return q, k, v

    @classmethod
    def of(cls, config: ModelConfig) -> Split:
        """The split of a model. Raises TrainError for what these nets do not compute."""
        if config.activation != "silu":
            raise TrainError(f"distillation: the teacher's activation is {config.activation}, expected silu")
        return cls(config.heads, config.kv_heads, config.head_dim, config.norm_eps)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in f32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, q ``[B, T, H, E]``, k and v ``[B, T, G, E]`` bf16 to ``[B, T, H E]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def turned(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary positions for q and k; all three in bf16. cos, sin: ``[T, 1, E]``."""
    return rotate(q, cos, sin).to(BF16), rotate(k, cos, sin).to(BF16), v.to(BF16)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function through ``torch.compile`` on a GPU, as it is elsewhere."""
    if device.type != "cuda":
        return function
    return torch.compile(function, dynamic=False)


def set_up(device: torch.device) -> None:
    """Settings of torch under which a run was measured."""
    torch.set_float32_matmul_precision("high")
    if device.type == "cuda":
        from torch._dynamo import config  # late: it is slow to import

        config.recompile_limit = 64
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class Net(ABC):
    """A decoder whose embedding is its head.

    embedding: f32 ``[V, D]``, on the device of the net. head: the same in bf16. cos, sin: f32 ``[longest, 1, E]``.
    """

    def __init__(self, config: ModelConfig, embedding: Tensor, longest: int = 2048) -> None:
        self.config, self.split = config, Split.of(config)
        self.embedding, self.head = embedding, embedding.to(BF16)
        self.device = embedding.device
        frequencies = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.arange(longest, dtype=torch.float32)[:, None] / config.rope_theta**frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None].to(self.device)
        self.cos, self.sin = angles.cos(), angles.sin()

        # One compiled function each, for all blocks; new nets of the same shape use them again.
        self.project = compiled(self._project, self.device)
        self.finish = compiled(self._finish, self.device)
        self.block = compiled(self._block, self.device)

    @abstractmethod
    def layers(self) -> list[tuple[Tensor, ...]]:
        """The weights of each block, in the order in which the functions below take them."""

    @abstractmethod
    def _project(self, x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The half of a block before its attention: x f32 ``[B, T, D]`` to q, k, v in bf16, as in ``attend``."""

    @abstractmethod
    def _finish(self, x: Tensor, mixed: Tensor, *weights: Tensor) -> Tensor:
        """The half of a block after its attention: x f32 and mixed bf16 ``[B, T, H E]`` to f32 ``[B, T, D]``."""

    def _block(self, x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Tensor:
        return self._finish(x, attend(*self._project(x, cos, sin, *weights)), *weights)

    @abstractmethod
    def last(self, x: Tensor) -> Tensor:
        """The final norm, bf16 ``[..., D]``: what ``head`` multiplies."""

    def hidden(self, tokens: Tensor, states: list[Tensor] | None = None, train: bool = False) -> Tensor:
        """Normed last states ``[B, T, D]`` of tokens int ``[B, T]``.

        states: gets the blocks' outputs, ``[B, T, D]`` each. train: let gradients through. Raises TrainError for rows
        longer than the rotary table.
        """
        if tokens.shape[1] > len(self.cos):
            raise TrainError(
                f"a row of {tokens.shape[1]} tokens is longer than the {len(self.cos)} that a net was made for"
            )
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        with torch.set_grad_enabled(train):
            x = self.embedding[tokens.long()]
            if train:
                x.requires_grad_(True)  # else the first block is another graph than the rest
            for weights in self.layers():
                x = self.block(x, cos, sin, *weights)
                if states is not None:
                    states.append(x)
            return self.last(x)
