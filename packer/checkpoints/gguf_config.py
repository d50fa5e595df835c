"""GGUF metadata as a Hugging Face config, for the architectures that the packer has a graph for.

Names of fields and their defaults: llama.cpp ``src/llama-arch.cpp`` and ``src/llama-model.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..models.fields import Fields
from ..models.refused import refuse_rotated
from .gguf_header import GgufHeader, GgufTensor
from .huggingface import read_json


@dataclass(frozen=True)
class Architecture:
    """What a name in ``general.architecture`` means.

    act: None where files of both kinds exist. interleaved: whether rows of Q and K are in the order for
    rotary pairs (2i, 2i + 1), llama.cpp's "normal" rope, rather than (i, i + head_dim/2), its "neox" rope.
    norms: names in a block of all norms but those before o and down -> Hugging Face names in a layer.
    """

    model_type: str
    act: str | None
    interleaved: bool
    norms: Mapping[str, str]


_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QWEN3_NORMS = {**_NORMS, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3_NORMS = {
    **_QWEN3_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES = {
    "llama": Architecture("llama", "silu", True, _NORMS),  # also Mistral, Falcon3, SmolLM2
    "qwen2": Architecture("qwen2", "silu", False, _NORMS),
    "qwen3": Architecture("qwen3", "silu", False, _QWEN3_NORMS),
    "gemma3": Architecture("gemma3_text", "gelu_pytorch_tanh", False, _GEMMA3_NORMS),
    # 1bitLLM's models under this name use SiLU, Microsoft's relu2.
    "bitnet": Architecture("bitnet", None, False, _NORMS),
    "bitnet-25": Architecture("bitnet", "relu2", False, _NORMS),
    "bitnet-b1.58": Architecture("bitnet", "relu2", False, _NORMS),
}
ACTS = ("relu2", "silu")

#: Fields that are read below or say nothing about the mathematics. Any other field must be neutral.
_READ = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length",
    "hidden_activation", "tensor_data_layout", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.scale",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
#: Neutral values other than 0 and false.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "attention.output_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}
ROPE_FREQS = "rope_freqs.weight"
#: Gemma 3 where a file does not say it: one layer in six sees all keys, the others rotate by this base.
_GEMMA3_PERIOD, _GEMMA3_LOCAL_BASE = 6, 10_000.0
_GEMMA3_READ = {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}
#: Layers of the Gemma 3 whose attention scale is not that of its head size.
_GEMMA3_27B_LAYERS = 62


def architecture(header: GgufHeader) -> Architecture:
    """The file's architecture. Raises CheckpointError for one that is not supported."""
    kind = header.metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise CheckpointError(f"{header.path}: field 'general.type' is {kind!r}, expected 'model'")
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name.lower() not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path}: field 'general.architecture' is {name!r}, expected one of "
            f"{', '.join(sorted(ARCHITECTURES))}; this architecture is not supported"
        )
    return ARCHITECTURES[name.lower()]


def hf_config(header: GgufHeader, rope_freqs: np.ndarray | None, original: Path | None) -> dict[str, Any]:
    """The config of ``config.json``, without the special tokens.

    rope_freqs: ``[head_dim/2]``, what the file divides rotary frequencies by. original: a folder that may
    have the model's own config.json, asked for what the file does not say.
    Raises CheckpointError naming file and field.
    """
    kind, fields = architecture(header), _fields(header)
    refuse_rotated(header.metadata, f"{header.path}: metadata")
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_dim = _head_dim(fields, heads, hidden)
    _check_neutral(fields, kind, head_dim)
    config = {
        "model_type": kind.model_type,
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": _act(kind, fields, original),
        "rms_norm_eps": _positive(fields, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.integer("context_length"),
        "vocab_size": _vocabulary(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": kind.model_type != "qwen2" and "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
    }
    rope = _rope(fields, config, rope_freqs)
    if kind.model_type == "gemma3_text":
        return config | _gemma3(fields, config, rope)
    return config | {"rope_theta": rope["rope_theta"], "rope_parameters": rope}


def _gemma3(fields: Fields, config: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3 has besides; llama.cpp ``src/models/gemma3.cpp``. Gains in its files are 1 + weight already."""
    layers, window = config["num_hidden_layers"], fields.get("attention.sliding_window")
    period = fields.integer("attention.sliding_window_pattern", _GEMMA3_PERIOD)
    slides = [bool(window) and (layer + 1) % period != 0 for layer in range(layers)]
    scalar = config["head_dim"]
    if layers == _GEMMA3_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    local_base = _positive(fields, "rope.freq_base_swa", _GEMMA3_LOCAL_BASE)
    return {
        "hidden_activation": config["hidden_act"],
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.integer("attention.sliding_window") if window else None,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
        },
        "norm_gain_offset": 0.0,
    }


def _fields(header: GgufHeader) -> Fields:
    """The architecture's own fields, without its name in front; a list of equal numbers counts as one."""
    name = header.metadata["general.architecture"].lower()
    values = {
        key.removeprefix(f"{name}."): value for key, value in header.metadata.items() if key.startswith(f"{name}.")
    }
    for key, value in values.items():
        if isinstance(value, np.ndarray):
            values[key] = value[0].item() if value.size and (value == value[0]).all() else value.tolist()
    return Fields(values, f"{header.path}: metadata {name}.*")


def _head_dim(fields: Fields, heads: int, hidden: int) -> int:
    if fields.get("attention.key_length") is None and hidden % heads:
        raise CheckpointError(
            f"{fields.where}: field 'embedding_length' is {hidden}, no multiple of 'attention.head_count' "
            f"{heads}, and 'attention.key_length' is missing"
        )
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        found = fields.integer(name, head_dim)
        if found != head_dim:
            raise CheckpointError(
                f"{fields.where}: field {name!r} is {found}, expected the head size {head_dim}; heads of "
                "which only a part is rotated, or with values of another size than keys, are not supported"
            )
    if head_dim % 2:
        raise CheckpointError(f"{fields.where}: the head size is {head_dim}, expected an even number")
    return head_dim


def _check_neutral(fields: Fields, kind: Architecture, head_dim: int) -> None:
    """Refuse what changes the mathematics: experts, sliding windows, soft caps, multipliers, the unknown."""
    read = _READ | (_GEMMA3_READ if kind.model_type == "gemma3_text" else set())
    for name in sorted(set(fields.values) - read):
        fields.refuse(name, _NEUTRAL.get(name, (0, False, "", "none")))
    name = "attention.scale"
    if fields.get(name) and not math.isclose(fields.number(name), head_dim**-0.5, rel_tol=1e-6):
        fields.refuse(name, ())


def _positive(fields: Fields, name: str, default: float | None = None) -> float:
    if default is not None and fields.get(name) is None:
        return default
    value = fields.number(name)
    if not 0 < value < math.inf:
        raise CheckpointError(f"{fields.where}: field {name!r} is {value}, expected a positive number")
    return value


def _act(kind: Architecture, fields: Fields, original: Path | None) -> str:
    act: str | None = fields.get("hidden_activation", kind.act)
    acts = ACTS if kind.model_type in ("bitnet", "llama") else (str(kind.act),)
    if act is None and original is not None and (original / "config.json").is_file():
        act = read_json(original / "config.json", "").get("hidden_act")
    if act is None:
        raise CheckpointError(
            f"{fields.where}: field 'hidden_activation' is missing, expected one of {', '.join(acts)}: files "
            "of this architecture exist with each; give --tokenizer FOLDER with the model's own config.json "
            "and tokenizer.json"
        )
    if act not in acts:
        raise CheckpointError(
            f"{fields.where}: field 'hidden_activation' is {act!r}, expected one of {', '.join(acts)}"
        )
    return act


def _vocabulary(header: GgufHeader) -> int:
    """Rows of the embedding; tokens may be fewer, where the vocabulary is padded."""
    embedding: GgufTensor | None = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{header.path}: tensor token_embd.weight is missing; the file is no whole model")
    rows = embedding.shape[0]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise CheckpointError(
            f"{header.path}: field 'tokenizer.ggml.tokens' has {len(tokens)} tokens, but token_embd.weight "
            f"only {rows} rows"
        )
    return rows


def _rope(fields: Fields, config: Mapping[str, Any], freqs: np.ndarray | None) -> dict[str, Any]:
    """``rope_parameters`` as transformers has them, and ``rope_freqs`` where the file has such factors."""
    theta = _positive(fields, "rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_theta": theta, **_scaling(fields, config["max_position_embeddings"])}
    if freqs is not None and (freqs != 1).any():
        half = config["head_dim"] // 2
        if freqs.shape != (half,) or (freqs <= 0).any():
            raise CheckpointError(
                f"{fields.where}: tensor {ROPE_FREQS} has shape {list(freqs.shape)}, expected {half} positive numbers"
            )
        if rope["rope_type"] != "default":
            raise CheckpointError(
                f"{fields.where}: field 'rope.scaling.type' is {rope['rope_type']!r}, which together with "
                f"tensor {ROPE_FREQS} is not supported"
            )
        rope["rope_freqs"] = [float(factor) for factor in freqs]
    return rope


def _scaling(fields: Fields, context: int) -> dict[str, Any]:
    name = "rope.scaling.factor" if fields.get("rope.scaling.factor") else "rope.scale_linear"
    kind = str(fields.get("rope.scaling.type", "linear" if fields.get(name) else "none")).lower()
    if kind == "none" or (kind == "linear" and fields.get(name, 0) in (0, 1)):
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{fields.where}: field 'rope.scaling.type' is {kind!r}, expected one of none, linear, yarn; "
            "ignoring it would give wrong text on long prompts"
        )
    factor = _positive(fields, name)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length", context)
    scaling["beta_fast"] = _positive(fields, "rope.scaling.yarn_beta_fast", 32.0)
    scaling["beta_slow"] = _positive(fields, "rope.scaling.yarn_beta_slow", 1.0)
    # llama.cpp multiplies YaRN's own factor by this one; transformers takes the product.
    attention = _positive(fields, "rope.scaling.attn_factor", 1.0)
    scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return scaling
