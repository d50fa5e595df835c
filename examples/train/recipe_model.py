"""The decoder of the public recipe FareedKhan-dev/train-llm-from-scratch, as ``import_recipe.py`` writes it.

A folder has ``config.json`` with ``model_type`` ``recipe_gpt`` and ``model.safetensors`` with Hugging Face's names; the
packer has a family for it, ``packer/models/recipe.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .checkpoint import CONFIG, WEIGHTS
from .errors import TrainError
from .export import LAYER_NAMES
from .model import RMSNorm

MODEL_TYPE = "recipe_gpt"
#: PyTorch's default for LayerNorm, which the recipe keeps.
EPS = 1e-5
_TOP_NAMES = {
    "embedding": "model.embed_tokens",
    "positions": "model.embed_positions",
    "norm": "model.norm",
    "head": "lm_head",
}
#: Our fields of the shape -> Hugging Face's.
_FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "max_context": "max_position_embeddings",
    "ffn_dim": "intermediate_size",
}


@dataclass(frozen=True)
class RecipeConfig:
    """Shape: vocabulary, width, blocks, heads, longest context, width of the MLP."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    max_context: int
    ffn_dim: int


class RecipeBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x f32 ``[B, T, D]``."""

    def __init__(self, config: RecipeConfig) -> None:
        super().__init__()
        dim = config.dim
        self.heads = config.heads
        self.attention_norm, self.ffn_norm = RMSNorm(dim, EPS), RMSNorm(dim, EPS)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, config.ffn_dim), nn.Linear(config.ffn_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, dim = x.shape
        y = self.attention_norm(x)
        q, k, v = (part(y).view(batch, count, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, E]
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, count, dim))
        result: Tensor = x + self.down(F.relu(self.up(self.ffn_norm(x))))
        return result


class RecipeDecoder(nn.Module):
    """The recipe's classic decoder: tokens int64 ``[B, T]`` to logits f32 ``[B, T, V]``."""

    def __init__(self, config: RecipeConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.max_context, config.dim)
        self.blocks = nn.ModuleList(RecipeBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, EPS)
        self.head = nn.Linear(config.dim, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.config.max_context:
            raise TrainError(f"{tokens.shape[1]} tokens are more than the context of {self.config.max_context}")
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def hugging_face_config(config: RecipeConfig) -> dict[str, Any]:
    """``config.json`` for the packer's family of this name."""
    shape = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    return {
        "model_type": MODEL_TYPE,
        **shape,
        "head_dim": config.dim // config.heads,
        "hidden_act": "relu",
        "rms_norm_eps": EPS,
        "tie_word_embeddings": False,
    }


def portable(name: str) -> str:
    """Hugging Face's name of one of our tensors."""
    stem, _, end = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{end}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{end}"


def load_recipe(folder: Path) -> RecipeDecoder:
    """The decoder in a folder that ``import_recipe`` wrote. Raises TrainError."""
    try:
        record: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if record.get("model_type") != MODEL_TYPE:
            raise TrainError(f"{folder / CONFIG}: model_type is {record.get('model_type')!r}, expected {MODEL_TYPE!r}")
        model = RecipeDecoder(RecipeConfig(**{ours: int(record[theirs]) for ours, theirs in _FIELDS.items()}))
        found = load_file(folder / WEIGHTS)
        model.load_state_dict({name: found.pop(portable(name)) for name in model.state_dict()})
        if found:
            raise KeyError(f"{sorted(found)[0]} is superfluous")
    except OSError as error:
        raise TrainError(f"{error.filename or folder}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise TrainError(f"{folder}: not what import-recipe writes ({error})") from None
    return model.eval()
