"""Programs built by hand, with random tensors in every encoding, for the executors' tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shaders.case_kit import random_weight
from shaders.weights import WeightTensor


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model; none is a multiple of a block."""

    hidden: int = 36
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    ffn: int = 50
    vocabulary: int = 301
    layers: int = 2


def tiny_model(
    activations: str = "a8",
    *,
    shape: Shape = Shape(),  # noqa: B008 - frozen
    embedding: str = "q8",
    linears: str = "ternary",
    scales: str = "parts",
    sub_norms: bool = True,
    bias: bool = False,
    act: str = "silu",
    head_norms: bool = False,
    window: int = 0,
    post_norms: bool = False,
    seed: int = 0,
) -> tuple[dict[str, Any], dict[str, WeightTensor]]:
    """(program, tensors) of a transformer with a tied head.

    activations: of the linears. scales: ``parts``, ``row`` or ``group`` (ternary). sub_norms: BitNet's norms
    before the output and the down projection. head_norms: Qwen 3's norms of query and key heads. window: of the first
    layer. post_norms: Gemma's norms of what attention and the gated product add.
    """
    rng = np.random.default_rng(seed)
    tensors: dict[str, WeightTensor] = {}

    def add(name: str, weight: WeightTensor, spread: float = 1.0) -> str:
        scaled, own = weight.scales, weight.tensor_scale
        if weight.encoding == "nvfp4":
            own = spread / 300  # E4M3 scales are up to 448
        elif weight.encoding == "mxfp4":
            scaled = (weight.scales.astype(int) - 4 + round(np.log2(spread))).astype(np.uint8)
        elif weight.scales is not None:
            scaled = (weight.scales * spread).astype(weight.scales.dtype)
        tensors[name] = replace(weight, name=name, scales=scaled, tensor_scale=own)
        return name

    def matrix(name: str, rows: int, columns: int) -> str:
        group = 64 if scales == "group" and linears == "ternary" else 0
        weight = random_weight(rng, linears, rows, columns, group=group, parts=scales == "parts")
        return add(name, weight, columns**-0.5)

    def vector(name: str, length: int, offset: float = 1.0) -> str:
        data = (offset + 0.2 * rng.normal(size=length)).astype(np.float32)
        return add(name, WeightTensor(name, "f32", (length,), data))

    width = shape.heads * shape.head_dim
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    add(
        "embed",
        random_weight(rng, embedding, shape.vocabulary, shape.hidden),
        0.02 if embedding != "f16" else 1.0,
    )
    body: list[dict[str, Any]] = [{"op": "embed", "w": "embed", "multiplier": 1.5, "out": "h"}]
    for layer in range(shape.layers):
        at = f"layers.{layer}"
        body += [
            {
                "op": "norm",
                "x": "h",
                "gain": vector(f"{at}.input_norm", shape.hidden),
                "eps": 1e-5,
                "out": "a",
            },
            {"op": "linear", "x": "a", "w": matrix(f"{at}.qkv", qkv, shape.hidden), "out": "qkv"},
            {
                "op": "rope_append",
                "x": "qkv",
                **heads,
                "rope": "rope",
                "k": f"k.{layer}",
                "v": f"v.{layer}",
                "out": "q",
            },
            {
                "op": "attention",
                "q": "q",
                "k": f"k.{layer}",
                "v": f"v.{layer}",
                **heads,
                "scale": shape.head_dim**-0.5,
                "out": "o",
            },
        ]
        if head_norms:
            gains = {f"{kind}_gain": vector(f"{at}.{kind}_norm", shape.head_dim) for kind in "qk"}
            body[-2] |= gains | {"eps": 1e-3}
        if layer == 0:
            body[-1]["window"] = window
        if bias:
            body[-3]["bias"] = vector(f"{at}.qkv_bias", qkv, 0.0)
        to_integers: dict[str, Any] = {
            "op": "norm",
            "gain": vector(f"{at}.attn_sub_norm", width),
            "eps": 1e-5,
        }
        if not sub_norms:
            to_integers = {"op": "quantize"}
        if sub_norms or activations != "f32":
            body.append({**to_integers, "x": "o", "out": "oa"})
        attended = body[-1]["out"]
        body += [
            {
                "op": "linear",
                "x": attended,
                "w": matrix(f"{at}.o", shape.hidden, width),
                "out": "h",
                "accumulate": True,
            },
            {
                "op": "norm",
                "x": "h",
                "gain": vector(f"{at}.post_norm", shape.hidden),
                "eps": 1e-5,
                "out": "a",
            },
            {
                "op": "linear",
                "x": "a",
                "w": matrix(f"{at}.gate_up", 2 * shape.ffn, shape.hidden),
                "out": "gu",
            },
            {"op": "glu", "x": "gu", "act": act, "out": "ga"},
            {
                "op": "linear",
                "x": "ga",
                "w": matrix(f"{at}.down", shape.hidden, shape.ffn),
                "out": "h",
                "accumulate": True,
            },
        ]
        if sub_norms:
            body[-2] |= {"gain": vector(f"{at}.ffn_sub_norm", shape.ffn), "eps": 1e-5}
        if post_norms:
            for op in [op for op in body if op.get("accumulate") and op["op"] == "linear"]:
                op |= {"out": "y", "accumulate": False}
                gain = vector(f"{op['w']}_post_norm", shape.hidden)
                added = {"op": "norm", "x": "y", "gain": gain, "eps": 1e-5, "out": "h", "accumulate": True}
                body.insert(body.index(op) + 1, added)
    value = {
        "h": "f32",
        "y": "f32",
        "a": activations,
        "qkv": "f32",
        "q": "f32",
        "o": "f32",
        "oa": activations,
        "gu": "f32",
        "ga": activations,
    }
    columns = {
        "h": shape.hidden,
        "y": shape.hidden,
        "a": shape.hidden,
        "qkv": qkv,
        "q": width,
        "o": width,
        "oa": width,
        "gu": 2 * shape.ffn,
        "ga": shape.ffn,
    }
    values = {name: {"dtype": dtype, "shape": ["T", columns[name]]} for name, dtype in value.items()}
    values["hn"] = {"dtype": "f32", "shape": ["R", shape.hidden]}
    values["logits"] = {"dtype": "f32", "shape": ["R", shape.vocabulary]}
    frequencies = 10000.0 ** (-np.arange(shape.head_dim // 2) * 2 / shape.head_dim)
    cache = {"heads": shape.kv_heads, "head_dim": shape.head_dim}
    program = {
        "ops_version": 1,
        "values": values,
        "caches": {f"{kind}.{layer}": cache for kind in "kv" for layer in range(shape.layers)},
        "tables": {"rope": {"kind": "rope", "inv_freq": [float(np.float32(f)) for f in frequencies], "scale": 1.0}},
        "body": body,
        "logits": [
            {"op": "norm", "x": "h", "gain": vector("final_norm", shape.hidden), "eps": 1e-5, "out": "hn"},
            {"op": "linear", "x": "hn", "w": "embed", "out": "logits"},
        ],
        "greedy": [{"op": "argmax", "logits": "logits"}],
        "random": [{"op": "sample", "logits": "logits"}],
    }
    return program, tensors
