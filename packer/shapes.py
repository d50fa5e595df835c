"""Shapes of known models, for plans and benchmarks without their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shaders.weights import WeightTensor, group_of

from .errors import PackerError
from .manifest import TensorEntry, data_layout, scale_layout
from .models import Matrix, Transformer, Vector, bitnet, qwen3
from .models.fields import Fields


@dataclass(frozen=True)
class Shape:
    """A model without weights.

    activations: of the ternary products. group: columns that share a scale, 0: one scale a stacked part.
    embedding: encoding of the embedding and the head.
    """

    name: str
    title: str
    model: Transformer
    activations: str
    group: int = 0
    embedding: str = "q8"

    def tensors(self) -> list[WeightTensor]:
        """All tensors in the order of the program, without their bytes: for sizes only."""
        return [stand_in(self._entry(one)) for one in self.model.tensors()]

    def encodings(self) -> dict[str, str]:
        """Tensor name -> encoding."""
        return {tensor.name: tensor.encoding for tensor in self.tensors()}

    def program(self) -> dict[str, Any]:
        """``program.json`` of the shape."""
        return self.model.program(self.encodings(), self.activations)

    def _entry(self, tensor: Matrix | Vector) -> TensorEntry:
        if isinstance(tensor, Vector):
            return TensorEntry(tensor.name, "f32", (tensor.length,), None, (), 0, (1,))
        shape = (tensor.rows, tensor.columns)
        if tensor.is_embedding and self.embedding != "ternary":
            return TensorEntry(tensor.name, self.embedding, shape, None, (), group_of(self.embedding), (tensor.rows,))
        if self.group:
            return TensorEntry(tensor.name, "ternary", shape, "group", (), self.group, (tensor.rows,))
        parts = tuple(rows for _, rows in tensor.sources)
        return TensorEntry(tensor.name, "ternary", shape, "parts", parts, 0, (tensor.rows,))


def stand_in(entry: TensorEntry) -> WeightTensor:
    """The entry as a tensor without bytes: for sizes only."""
    if len(entry.shape) == 1:
        return WeightTensor(entry.name, "f32", entry.shape, np.broadcast_to(np.float32(0), entry.shape))
    data = np.broadcast_to(np.uint8(0), (entry.shape[0], data_layout(entry.encoding, entry.shape[1])[1]))
    scales = None
    if entry.group:
        dtype, width = scale_layout(entry.encoding, entry.shape[1], entry.group)
        zero = np.zeros((), dtype={"F16": np.float16, "U8": np.uint8}[dtype])
        scales = np.broadcast_to(zero, (entry.shape[0], width))
    elif entry.scale:
        count = entry.shape[0] if entry.scale == "row" else len(entry.parts)
        scales = np.broadcast_to(np.float32(0), (count,))
    return WeightTensor(entry.name, entry.encoding, entry.shape, data, scales, entry.scale, entry.parts, entry.group)


def _config(**fields: Any) -> Fields:
    return Fields({"tie_word_embeddings": True, "attention_bias": False, **fields}, "shape")


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, context: int, tied: bool) -> Transformer:
    return qwen3.build(
        _config(
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=context,
            hidden_act="silu",
            rms_norm_eps=1e-6,
            rope_theta=1_000_000.0,
            tie_word_embeddings=tied,
        )
    )


def _bitnet_2b() -> Shape:
    model = bitnet.build(
        _config(
            hidden_size=2560,
            intermediate_size=6912,
            num_hidden_layers=30,
            num_attention_heads=20,
            num_key_value_heads=5,
            vocab_size=128256,
            max_position_embeddings=4096,
            hidden_act="relu2",
            rms_norm_eps=1e-5,
            rope_theta=500_000.0,
        )
    )
    return Shape("bitnet-2b", "BitNet b1.58 2B-4T", model, "a8")


def _smollm2_135m() -> Shape:
    model = bitnet.build(
        _config(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            max_position_embeddings=8192,
            hidden_act="silu",
            rms_norm_eps=1e-5,
            rope_theta=100_000.0,
        )
    )
    return Shape("smollm2-135m", "SmolLM2 135M ternary", model, "a8")


def _bonsai_1_7b() -> Shape:
    model = _qwen3(2048, 6144, 28, 16, context=32768, tied=True)
    return Shape("bonsai-1.7b", "Ternary Bonsai 1.7B", model, "a16", 128, "ternary")


def _bonsai_8b() -> Shape:
    model = _qwen3(4096, 12288, 36, 32, context=65536, tied=False)
    return Shape("bonsai-8b", "Ternary Bonsai 8B", model, "a16", 128, "ternary")


SHAPES: Mapping[str, Shape] = {
    shape.name: shape for shape in (_bitnet_2b(), _bonsai_1_7b(), _bonsai_8b(), _smollm2_135m())
}


def shape_named(name: str) -> Shape:
    """A shape of the table. Raises PackerError that lists the known ones."""
    if name not in SHAPES:
        raise PackerError(f"shape {name!r} is unknown, expected one of {', '.join(sorted(SHAPES))}")
    return SHAPES[name]
