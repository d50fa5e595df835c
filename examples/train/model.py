"""One decoder, read from top to bottom: embedding, blocks of attention and a gated MLP, norm, tied head.

Llama's graph; with ``sub_norms`` it is BitNet b1.58's. Shapes in comments: B rows, T new tokens, S cached positions,
D dim, H heads, G kv heads, E head_dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .config import ModelConfig
from .errors import TrainError
from .precision import join, make_linear


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed and returned in f32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin f32 ``[max_context, E]``; the frequencies twice, side by side (the rotate_half convention)."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.arange(config.max_context, dtype=torch.float32)[:, None] * (1.0 / config.rope_theta**half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[B, heads, T, E]`` in f32; cos and sin broadcast to it."""
    x = x.float()
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class KVCache:
    """Keys and values of tokens already seen, in tensors that never move.

    keys, values: ``[layers, B, G, length, E]``. position: slots filled, the same for all rows. start: int64 ``[B]``,
    the slot of each row's first token; slots before it are padding on the left, which nobody sees and which gets no
    rotary position. Setting ``position`` back forgets what came after.
    """

    #: Attention reads the cache up to the next multiple of this, so that shapes change seldom.
    STRIDE = 128

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        start: Tensor | None = None,
    ) -> None:
        if length > config.max_context:
            raise TrainError(f"a cache of {length} tokens is longer than the model's context of {config.max_context}")
        shape = (config.layers, batch, config.kv_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.start = torch.zeros(batch, dtype=torch.long, device=device) if start is None else start.to(device)
        self.position = 0

    @property
    def length(self) -> int:
        """Slots that there are."""
        return self.keys.shape[3]

    def window(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """For the next ``count`` tokens: slots int64 ``[T]``, positions ``[B, T]``, mask bool ``[B, 1, T, S]``.

        Raises TrainError if they do not fit.
        """
        end = self.position + count
        if end > self.length:
            raise TrainError(f"{end} tokens do not fit a cache of {self.length}; make it longer or the text shorter")
        slots = torch.arange(self.position, end, device=self.start.device)
        positions = (slots - self.start[:, None]).clamp(min=0)
        keys = torch.arange(min(-(-end // self.STRIDE) * self.STRIDE, self.length), device=self.start.device)
        mask = (keys <= slots[:, None]) & (keys >= self.start[:, None, None])
        # A padding token would see nothing, and the softmax of nothing is NaN: it sees itself.
        return slots, positions, (mask | (keys == slots[:, None]))[:, None]


@dataclass
class LayerCache:
    """What one block needs of a KVCache: keys, values ``[B, G, S, E]``, slots ``[T]``, mask ``[B, 1, T, S]``."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    mask: Tensor


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x f32 ``[B, T, D]``."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.activation = config.activation
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return make_linear(inputs, outputs, config.precision, index, config.layers, config.fp4_options)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.norm_eps)

        self.attention_norm = norm(config.dim)
        self.q = linear(config.dim, width)
        self.k = linear(config.dim, kv_width)
        self.v = linear(config.dim, kv_width)
        self.attention_sub_norm = norm(width) if config.sub_norms else nn.Identity()
        self.o = linear(width, config.dim)
        self.ffn_norm = norm(config.dim)
        self.gate = linear(config.dim, config.ffn_dim)
        self.up = linear(config.dim, config.ffn_dim)
        self.ffn_sub_norm = norm(config.ffn_dim) if config.sub_norms else nn.Identity()
        self.down = linear(config.ffn_dim, config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        """cos, sin: f32, broadcast to ``[B, 1, T, E]``."""
        x = x + self.o(self.attention_sub_norm(self.attend(self.attention_norm(x), cos, sin, cache))).float()
        gate, up = join(self.ffn_norm(x), (self.gate, self.up))
        branch: Tensor = self.down(self.ffn_sub_norm(self.gated(gate.float(), up.float())))
        return x + branch.float()

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up, in f32: relu2 grows beyond half precision."""
        return (F.silu(gate) if self.activation == "silu" else F.relu(gate).square()) * up

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None) -> Tensor:
        """Softmax attention over the tokens seen so far, ``[B, T, D]`` to ``[B, T, H * E]``."""
        batch, count, _ = x.shape
        q, k, v = (
            y.view(batch, count, -1, self.head_dim).transpose(1, 2)  # [B, heads, T, E]
            for y in join(x, (self.q, self.k, self.v))
        )
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else torch.float32
        q, k, v = rotate(q, cos, sin).to(dtype), rotate(k, cos, sin).to(dtype), v.to(dtype)
        if cache is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        else:
            cache.keys.index_copy_(2, cache.slots, k.to(cache.keys.dtype))
            cache.values.index_copy_(2, cache.slots, v.to(cache.values.dtype))
            # Heads that share a key are queries of one head: [B, G, H/G * T, E]. No key is copied.
            q = q.reshape(batch, self.kv_heads, -1, self.head_dim).to(cache.keys.dtype)
            mask = cache.mask.repeat(1, 1, self.heads // self.kv_heads, 1)
            mixed = F.scaled_dot_product_attention(q, cache.keys, cache.values, attn_mask=mask)
            mixed = mixed.reshape(batch, self.heads, count, self.head_dim)
        return mixed.transpose(1, 2).reshape(batch, count, -1)


class Decoder(nn.Module):
    """Tokens to logits. ``grad_checkpointing``: keep only the blocks' inputs for the backward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.grad_checkpointing = False
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():  # branches add up: GPT-2's scaling by how many there are
            if name.endswith((".o.weight", ".down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, cache: KVCache | None = None, hidden: bool = False) -> Tensor:
        """tokens: int64 ``[B, T]``; with a cache, those after what it holds. Returns logits f32 ``[B, T, V]``, or with
        ``hidden`` the normed last state f32 ``[B, T, D]``. Raises TrainError for more tokens than the context has."""
        if tokens.shape[1] > self.config.max_context:
            raise TrainError(
                f"a sequence of {tokens.shape[1]} tokens is longer than the model's context of "
                f"{self.config.max_context}; shorten it, or train with a greater max_context"
            )
        x = self.embedding(tokens).float()  # [B, T, D]
        x = self._plain(x) if cache is None else self._cached(x, cache)
        x = self.norm(x)
        return x if hidden else self.head(x)

    def head(self, x: Tensor) -> Tensor:
        """Logits f32 ``[..., V]`` of normed states ``[..., D]``."""
        return F.linear(x, self.embedding.weight).float()

    def _plain(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]  # [T, E]
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return x

    def _cached(self, x: Tensor, cache: KVCache) -> Tensor:
        slots, positions, mask = cache.window(x.shape[1])
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # [B, 1, T, E]
        size = mask.shape[-1]
        for index, block in enumerate(self.blocks):
            layer = LayerCache(cache.keys[index][:, :, :size], cache.values[index][:, :, :size], slots, mask)
            x = block(x, cos, sin, layer)
        cache.position += len(slots)
        return x

    def compile_blocks(self) -> None:
        """``torch.compile`` of each block by itself: one graph for all of them, and nothing breaks it."""
        import torch._dynamo.config  # late: it takes a second

        # All models of a process share the limit, and a comparison of precisions makes many kinds of block.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for block in self.blocks:
            block.compile(dynamic=False)
