"""The teacher: a Llama-style float model, read from any checkpoint that the packer reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from packer.checkpoints import Checkpoint, open_checkpoint

from ..config import ModelConfig
from ..errors import TrainError
from .nets import BF16, Net, rms, turned

#: Our name -> Hugging Face's inside a layer.
LINEARS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


class Teacher(Net):
    """Matrices in bf16, the sum of the blocks in f32.

    stacked: f32 tensors by the names of ``LINEARS`` and ``NORMS``, layers first, and ``norm`` ``[D]``.
    """

    def __init__(self, config: ModelConfig, embedding: Tensor, stacked: dict[str, Tensor]) -> None:
        super().__init__(config, embedding)
        self.stacked = stacked
        parts = (
            stacked["attention_norm"],
            torch.cat([stacked["q"], stacked["k"], stacked["v"]], dim=1).to(BF16),
            stacked["o"].to(BF16),
            stacked["ffn_norm"],
            torch.cat([stacked["gate"], stacked["up"]], dim=1).to(BF16),
            stacked["down"].to(BF16),
        )
        self._layers = list(zip(*(part.unbind(0) for part in parts), strict=True))

    def layers(self) -> list[tuple[Tensor, ...]]:
        return self._layers

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norm, qkv, *_ = weights
        y = F.linear(rms(x, norm, self.split.eps).to(BF16), qkv).float()
        return turned(*self.split.qkv(y), cos, sin)

    def _finish(self, x: Tensor, mixed: Tensor, *weights: Tensor) -> Tensor:
        _, _, o, norm, gate_up, down = weights
        x = x + F.linear(mixed, o).float()
        gate, up = F.linear(rms(x, norm, self.split.eps).to(BF16), gate_up).float().chunk(2, dim=-1)
        return x + F.linear((F.silu(gate) * up).to(BF16), down).float()

    def last(self, x: Tensor) -> Tensor:
        return rms(x, self.stacked["norm"], self.split.eps).to(BF16)


def load_teacher(source: Path, device: torch.device) -> Teacher:
    """The teacher in a checkpoint folder or GGUF file. Raises CheckpointError, or TrainError for other models."""
    checkpoint = open_checkpoint(source)
    config = model_config(checkpoint.info.config, source)
    stacked = {}
    for name, theirs in (LINEARS | NORMS).items():
        rows = [_values(checkpoint, f"model.layers.{layer}.{theirs}.weight") for layer in range(config.layers)]
        stacked[name] = torch.stack(rows).to(device)
    stacked["norm"] = _values(checkpoint, "model.norm.weight").to(device)
    return Teacher(config, _values(checkpoint, "model.embed_tokens.weight").to(device), stacked)


def random_teacher(config: ModelConfig, device: torch.device, seed: int = 0) -> Teacher:
    """A teacher that says nothing: for trying the machinery, and for timing it."""
    generator = torch.Generator().manual_seed(seed)
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "q": (width, config.dim), "k": (kv_width, config.dim), "v": (kv_width, config.dim), "o": (config.dim, width),
        "gate": (config.ffn_dim, config.dim), "up": (config.ffn_dim, config.dim), "down": (config.dim, config.ffn_dim),
    }  # fmt: skip

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(device)

    stacked = {name: drawn(config.layers, *shape) for name, shape in shapes.items()}
    stacked |= {name: torch.ones(config.layers, config.dim, device=device) for name in NORMS}
    stacked["norm"] = torch.ones(config.dim, device=device)
    return Teacher(config, drawn(config.vocab_size, config.dim), stacked)


def model_config(info: Mapping[str, Any], where: object) -> ModelConfig:
    """The shape in a Hugging Face config. Raises TrainError for models that these nets do not compute."""
    if info.get("attention_bias") or info.get("mlp_bias") or not info.get("tie_word_embeddings"):
        raise TrainError(f"{where}: expected a model without biases whose head is its embedding")
    rope = info.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise TrainError(f"{where}: rotary positions of type {rope['rope_type']} are not known here, expected default")
    try:
        return ModelConfig(
            vocab_size=info["vocab_size"], dim=info["hidden_size"], layers=info["num_hidden_layers"],
            heads=info["num_attention_heads"], kv_heads=info["num_key_value_heads"], head_dim=info["head_dim"],
            ffn_dim=info["intermediate_size"], activation=info["hidden_act"],
            rope_theta=float(rope.get("rope_theta") or info["rope_theta"]), norm_eps=info["rms_norm_eps"],
            max_context=info["max_position_embeddings"],
        )  # fmt: skip
    except KeyError as error:
        raise TrainError(f"{where}: the config has no {error}") from None


def _values(checkpoint: Checkpoint, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(checkpoint.rows(name)))
