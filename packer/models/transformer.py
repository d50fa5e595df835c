"""The decoder that Llama and BitNet share: which tensors a pack holds, and the program that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Matrix:
    """A pack matrix made of checkpoint tensors stacked by rows.

    name: in the pack. sources: (checkpoint tensor, rows) in order. columns: K. is_embedding: whether it is the
    embedding or output head rather than a linear inside the layers.
    """

    name: str
    sources: tuple[tuple[str, int], ...]
    columns: int
    is_embedding: bool = False

    @property
    def rows(self) -> int:
        """N."""
        return sum(rows for _, rows in self.sources)


@dataclass(frozen=True)
class Vector:
    """A pack vector (norm gain, bias) made of checkpoint vectors put end to end."""

    name: str
    sources: tuple[tuple[str, int], ...]

    @property
    def length(self) -> int:
        """K."""
        return sum(length for _, length in self.sources)


@dataclass(frozen=True)
class Transformer:
    """Shape of a decoder. Field names follow Hugging Face configs; sub_norms: BitNet's norms before o and down."""

    family: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    act: str
    eps: float
    tied: bool
    sub_norms: bool
    attention_bias: bool
    mlp_bias: bool
    rope: Mapping[str, Any]

    def tensors(self) -> list[Matrix | Vector]:
        """All pack tensors in the order of first use."""
        found: list[Matrix | Vector] = [
            Matrix("embed", (("model.embed_tokens.weight", self.vocabulary),), self.hidden, is_embedding=True)
        ]
        for layer in range(self.layers):
            found += self._layer_tensors(layer)
        found.append(Vector("final_norm", (("model.norm.weight", self.hidden),)))
        if not self.tied:
            found.append(Matrix("lm_head", (("lm_head.weight", self.vocabulary),), self.hidden, is_embedding=True))
        return found

    def _layer_tensors(self, layer: int) -> list[Matrix | Vector]:
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        width = self.heads * self.head_dim
        qkv = {
            "q_proj": width,
            "k_proj": self.kv_heads * self.head_dim,
            "v_proj": self.kv_heads * self.head_dim,
        }
        gate_up = {"gate_proj": self.ffn, "up_proj": self.ffn}
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        found: list[Matrix | Vector | None] = [
            Vector(f"{ours}.input_norm", ((f"{theirs}.input_layernorm.weight", self.hidden),)),
            *self._linear(f"{ours}.qkv", attention, qkv, self.hidden, self.attention_bias),
            Vector(f"{ours}.attn_sub_norm", ((f"{attention}.attn_sub_norm.weight", width),))
            if self.sub_norms
            else None,
            *self._linear(f"{ours}.o", attention, {"o_proj": self.hidden}, width, self.attention_bias),
            Vector(f"{ours}.post_norm", ((f"{theirs}.post_attention_layernorm.weight", self.hidden),)),
            *self._linear(f"{ours}.gate_up", mlp, gate_up, self.hidden, self.mlp_bias),
            Vector(f"{ours}.ffn_sub_norm", ((f"{mlp}.ffn_sub_norm.weight", self.ffn),)) if self.sub_norms else None,
            *self._linear(f"{ours}.down", mlp, {"down_proj": self.hidden}, self.ffn, self.mlp_bias),
        ]
        return [tensor for tensor in found if tensor is not None]

    @staticmethod
    def _linear(name: str, module: str, rows: Mapping[str, int], columns: int, bias: bool) -> list[Matrix | Vector]:
        found: list[Matrix | Vector] = [
            Matrix(name, tuple((f"{module}.{part}.weight", count) for part, count in rows.items()), columns)
        ]
        if bias:
            found.append(Vector(f"{name}.bias", tuple((f"{module}.{part}.bias", n) for part, n in rows.items())))
        return found

    def program(self, encodings: Mapping[str, str], activations: str) -> dict[str, Any]:
        """``program.json`` for tensors of these encodings (name -> encoding).

        activations: ``a8``, ``a16`` or ``f32``, of the ternary products; others take float activations.
        """
        return _ProgramBuilder(self, encodings, activations).build()


class _ProgramBuilder:
    """Writes the operations one after another and declares each value on first use."""

    def __init__(self, model: Transformer, encodings: Mapping[str, str], activations: str):
        self.model, self.encodings, self.activations = model, encodings, activations
        self.values: dict[str, dict[str, Any]] = {}
        self.body: list[dict[str, Any]] = []

    def build(self) -> dict[str, Any]:
        model = self.model
        hidden = self._value("h", "f32", model.hidden)
        self.body.append({"op": "embed", "w": "embed", "multiplier": 1.0, "out": hidden})
        for layer in range(model.layers):
            self._attention(f"layers.{layer}", layer, hidden)
            self._mlp(f"layers.{layer}", hidden)
        last = self._value("last", "f32", model.hidden, rows="R")
        logits = self._value("logits", "f32", model.vocabulary, rows="R")
        head = "embed" if model.tied else "lm_head"
        cache = {"heads": model.kv_heads, "head_dim": model.head_dim}
        return {
            "ops_version": 1,
            "values": self.values,
            "caches": {f"{kind}.{layer}": cache for layer in range(model.layers) for kind in "kv"},
            "tables": {"rope": dict(model.rope)},
            "body": self.body,
            "logits": [
                {"op": "norm", "x": hidden, "gain": "final_norm", "eps": model.eps, "out": last},
                {"op": "linear", "x": last, "w": head, "out": logits},
            ],
            "greedy": [{"op": "argmax", "logits": logits}],
            "random": [{"op": "sample", "logits": logits}],
        }

    def _value(self, name: str, dtype: str, columns: int, rows: str = "T") -> str:
        full = name if dtype == "f32" else f"{name}.{dtype}"
        self.values[full] = {"dtype": dtype, "shape": [rows, columns]}
        return full

    def _input_dtype(self, weight: str) -> str:
        return self.activations if self.encodings[weight] == "ternary" else "f32"

    def _linear(self, x: str, weight: str, out: str, accumulate: bool = False) -> None:
        op: dict[str, Any] = {"op": "linear", "x": x, "w": weight, "out": out}
        if f"{weight}.bias" in self.encodings:
            op["bias"] = f"{weight}.bias"
        if accumulate:
            op["accumulate"] = True
        self.body.append(op)

    def _norm(self, x: str, gain: str, out: str) -> None:
        self.body.append({"op": "norm", "x": x, "gain": gain, "eps": self.model.eps, "out": out})

    def _attention(self, prefix: str, layer: int, hidden: str) -> None:
        model = self.model
        shape = {"heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
        width = model.heads * model.head_dim
        normed = self._value("attn_in", self._input_dtype(f"{prefix}.qkv"), model.hidden)
        qkv = self._value("qkv", "f32", width + 2 * model.kv_heads * model.head_dim)
        q = self._value("q", "f32", width)
        mixed = self._value("attn_out", "f32", width)
        caches = {"k": f"k.{layer}", "v": f"v.{layer}"}
        self._norm(hidden, f"{prefix}.input_norm", normed)
        self._linear(normed, f"{prefix}.qkv", qkv)
        self.body.append({"op": "rope_append", "x": qkv, **shape, "rope": "rope", **caches, "out": q})
        scale = float(model.head_dim) ** -0.5
        self.body.append({"op": "attention", "q": q, **caches, **shape, "scale": scale, "out": mixed})
        dtype = self._input_dtype(f"{prefix}.o")
        ready = mixed
        if model.sub_norms:
            ready = self._value("o_in", dtype, width)
            self._norm(mixed, f"{prefix}.attn_sub_norm", ready)
        elif dtype != "f32":
            ready = self._value("o_in", dtype, width)
            self.body.append({"op": "quantize", "x": mixed, "out": ready})
        self._linear(ready, f"{prefix}.o", hidden, accumulate=True)

    def _mlp(self, prefix: str, hidden: str) -> None:
        model = self.model
        normed = self._value("ffn_in", self._input_dtype(f"{prefix}.gate_up"), model.hidden)
        both = self._value("gate_up", "f32", 2 * model.ffn)
        gated = self._value("down_in", self._input_dtype(f"{prefix}.down"), model.ffn)
        self._norm(hidden, f"{prefix}.post_norm", normed)
        self._linear(normed, f"{prefix}.gate_up", both)
        op: dict[str, Any] = {"op": "glu", "x": both, "act": model.act, "out": gated}
        if model.sub_norms:
            op |= {"gain": f"{prefix}.ffn_sub_norm", "eps": model.eps}
        self.body.append(op)
        self._linear(gated, f"{prefix}.down", hidden, accumulate=True)
