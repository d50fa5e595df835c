"""The decoder that all families share: which tensors a pack holds, and the program that runs them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any


def plane_name(weight: str, plane: int) -> str:
    """The pack tensor of a ternary plane of a linear; the first has the linear's own name."""
    return f"{weight}.plane{plane}" if plane else weight


def plane_names(weight: str, names: Container[str]) -> list[str]:
    """The pack tensors whose sum a linear is: itself, and the other ternary planes among these names."""
    found = [weight]
    while plane_name(weight, len(found)) in names:
        found.append(plane_name(weight, len(found)))
    return found


@dataclass(frozen=True)
class Matrix:
    """A pack matrix made of checkpoint tensors stacked by rows.

    name: in the pack. sources: (checkpoint tensor, rows) in order. columns: K. is_embedding: whether it is an
    embedding or the output head rather than a linear inside the layers. fixed: its encoding, if nobody may choose it.
    """

    name: str
    sources: tuple[tuple[str, int], ...]
    columns: int
    is_embedding: bool = False
    fixed: str | None = None

    @property
    def rows(self) -> int:
        """N."""
        return sum(rows for _, rows in self.sources)


@dataclass(frozen=True)
class Vector:
    """A pack vector (norm gain, bias) made of checkpoint vectors put end to end; offset is added to each number."""

    name: str
    sources: tuple[tuple[str, int], ...]
    offset: float = 0.0

    @property
    def length(self) -> int:
        """K."""
        return sum(length for _, length in self.sources)


@dataclass(frozen=True)
class Transformer:
    """Shape of a decoder. Field names follow Hugging Face configs.

    sub_norms: the checkpoint's names of BitNet's norms before o and down. head_norms: whether each head of q and k has
    a norm. post_norms: whether what attention and MLP give has one before it is added. gain_offset: what is added to
    the gains of all norms. multiplier: of the embedding. scale: of attention scores; None: 1 / sqrt(head_dim). windows:
    keys that a token of each layer sees, 0 for all; empty: all layers see all. local_rope: table of layers with a
    window, where it is not ``rope``. positions: whether each position has a learned vector, added to the embedding.
    gated: whether the MLP has a gate; without one it is down(act(up)). head_bias: of the output head.
    """

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
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope: Mapping[str, Any]
    sub_norms: tuple[str, str] | None = None
    head_norms: bool = False
    post_norms: bool = False
    gain_offset: float = 0.0
    multiplier: float = 1.0
    scale: float | None = None
    windows: tuple[int, ...] = ()
    local_rope: Mapping[str, Any] | None = None
    positions: bool = False
    gated: bool = True
    head_bias: bool = False

    @property
    def into_mlp(self) -> str:
        """What the first matrix of the MLP is called in a layer."""
        return "gate_up" if self.gated else "up"

    def tensors(self) -> list[Matrix | Vector]:
        """All pack tensors in the order of first use."""
        found: list[Matrix | Vector] = [
            Matrix("embed", (("model.embed_tokens.weight", self.vocabulary),), self.hidden, is_embedding=True)
        ]
        if self.positions:  # of all numbers these are in every token, and few: they stay as they are
            source = (("model.embed_positions.weight", self.context),)
            found.append(Matrix("positions", source, self.hidden, is_embedding=True, fixed="f32"))
        for layer in range(self.layers):
            found += self._layer_tensors(layer)
        found.append(self._gain("final_norm", "model.norm", self.hidden))
        if not self.tied:
            found.append(Matrix("lm_head", (("lm_head.weight", self.vocabulary),), self.hidden, is_embedding=True))
        if self.head_bias:
            found.append(Vector("lm_head.bias", (("lm_head.bias", self.vocabulary),)))
        return found

    def _layer_tensors(self, layer: int) -> list[Matrix | Vector]:
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        width = self.heads * self.head_dim
        qkv = {
            "q_proj": width,
            "k_proj": self.kv_heads * self.head_dim,
            "v_proj": self.kv_heads * self.head_dim,
        }
        into_mlp = {"gate_proj": self.ffn, "up_proj": self.ffn} if self.gated else {"up_proj": self.ffn}
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        sub_norms = self.sub_norms or ("", "")
        before_mlp = "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"
        found: list[Matrix | Vector | None] = [
            self._gain(f"{ours}.input_norm", f"{theirs}.input_layernorm", self.hidden),
            *self._linear(f"{ours}.qkv", attention, qkv, self.hidden, self.qkv_bias),
            self._gain(f"{ours}.q_norm", f"{attention}.q_norm", self.head_dim) if self.head_norms else None,
            self._gain(f"{ours}.k_norm", f"{attention}.k_norm", self.head_dim) if self.head_norms else None,
            self._gain(f"{ours}.attn_sub_norm", f"{attention}.{sub_norms[0]}", width) if self.sub_norms else None,
            *self._linear(f"{ours}.o", attention, {"o_proj": self.hidden}, width, self.o_bias),
            self._gain(f"{ours}.attn_out_norm", f"{theirs}.post_attention_layernorm", self.hidden)
            if self.post_norms
            else None,
            self._gain(f"{ours}.post_norm", f"{theirs}.{before_mlp}", self.hidden),
            *self._linear(f"{ours}.{self.into_mlp}", mlp, into_mlp, self.hidden, self.mlp_bias),
            self._gain(f"{ours}.ffn_sub_norm", f"{mlp}.{sub_norms[1]}", self.ffn) if self.sub_norms else None,
            *self._linear(f"{ours}.down", mlp, {"down_proj": self.hidden}, self.ffn, self.mlp_bias),
            self._gain(f"{ours}.ffn_out_norm", f"{theirs}.post_feedforward_layernorm", self.hidden)
            if self.post_norms
            else None,
        ]
        return [tensor for tensor in found if tensor is not None]

    def _gain(self, name: str, module: str, length: int) -> Vector:
        return Vector(name, ((f"{module}.weight", length),), self.gain_offset)

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
        self.body.append({"op": "embed", "w": "embed", "multiplier": model.multiplier, "out": hidden})
        if model.positions:
            self.body.append({"op": "position", "w": "positions", "accumulate": True, "out": hidden})
        for layer in range(model.layers):
            self._attention(f"layers.{layer}", layer, hidden)
            self._mlp(f"layers.{layer}", hidden)
        head = "embed" if model.tied else "lm_head"
        last = self._value("last", self._input_dtype(head), model.hidden, rows="R")
        logits = self._value("logits", "f32", model.vocabulary, rows="R")
        cache = {"heads": model.kv_heads, "head_dim": model.head_dim}
        return {
            "ops_version": 1,
            "values": self.values,
            "caches": {f"{kind}.{layer}": cache for layer in range(model.layers) for kind in "kv"},
            "tables": self._tables(),
            "body": self.body,
            "logits": [
                {"op": "norm", "x": hidden, "gain": "final_norm", "eps": model.eps, "out": last},
                {"op": "linear", "x": last, "w": head, "out": logits}
                | ({"bias": "lm_head.bias"} if model.head_bias else {}),
            ],
            "greedy": [{"op": "argmax", "logits": logits}],
            "random": [{"op": "sample", "logits": logits}],
        }

    def _tables(self) -> dict[str, dict[str, Any]]:
        """The rotary tables that some layer uses."""
        tables = {"rope": self.model.rope, "local_rope": self.model.local_rope or {}}
        used = {self._table(layer) for layer in range(self.model.layers)}
        return {name: dict(table) for name, table in tables.items() if name in used}

    def _window(self, layer: int) -> int:
        return self.model.windows[layer] if self.model.windows else 0

    def _table(self, layer: int) -> str:
        return "local_rope" if self.model.local_rope is not None and self._window(layer) else "rope"

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
        for plane in plane_names(weight, self.encodings)[1:]:  # the bias came with the first
            self.body.append({"op": "linear", "x": x, "w": plane, "out": out, "accumulate": True})

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
        rotation: dict[str, Any] = {"op": "rope_append", "x": qkv, **shape, "rope": self._table(layer), **caches}
        if model.head_norms:
            rotation |= {"q_gain": f"{prefix}.q_norm", "k_gain": f"{prefix}.k_norm", "eps": model.eps}
        scale = float(model.head_dim) ** -0.5 if model.scale is None else model.scale
        attention: dict[str, Any] = {"op": "attention", "q": q, **caches, **shape, "scale": scale}
        if self._window(layer):
            attention["window"] = self._window(layer)
        self.body += [{**rotation, "out": q}, {**attention, "out": mixed}]
        dtype = self._input_dtype(f"{prefix}.o")
        ready = mixed
        if model.sub_norms:
            ready = self._value("o_in", dtype, width)
            self._norm(mixed, f"{prefix}.attn_sub_norm", ready)
        elif dtype != "f32":
            ready = self._value("o_in", dtype, width)
            self.body.append({"op": "quantize", "x": mixed, "out": ready})
        self._branch(ready, f"{prefix}.o", f"{prefix}.attn_out_norm", hidden)

    def _mlp(self, prefix: str, hidden: str) -> None:
        model, first = self.model, f"{prefix}.{self.model.into_mlp}"
        normed = self._value("ffn_in", self._input_dtype(first), model.hidden)
        wide = self._value(model.into_mlp, "f32", 2 * model.ffn if model.gated else model.ffn)
        activated = self._value("down_in", self._input_dtype(f"{prefix}.down"), model.ffn)
        self._norm(hidden, f"{prefix}.post_norm", normed)
        self._linear(normed, first, wide)
        op: dict[str, Any] = {"op": "glu" if model.gated else "activate", "x": wide, "act": model.act, "out": activated}
        if model.sub_norms:
            op |= {"gain": f"{prefix}.ffn_sub_norm", "eps": model.eps}
        self.body.append(op)
        self._branch(activated, f"{prefix}.down", f"{prefix}.ffn_out_norm", hidden)

    def _branch(self, x: str, weight: str, gain: str, hidden: str) -> None:
        """The last linear of attention or MLP, added to the hidden state, through a norm where the family has one."""
        if not self.model.post_norms:
            self._linear(x, weight, hidden, accumulate=True)
            return
        branch = self._value("branch", "f32", self.model.hidden)
        self._linear(x, weight, branch)
        self.body.append(
            {"op": "norm", "x": branch, "gain": gain, "eps": self.model.eps, "accumulate": True, "out": hidden}
        )
