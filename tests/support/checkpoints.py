"""Tiny checkpoints as Hugging Face folders, written with NumPy and safetensors alone.

Their linears are exactly ternary and their embeddings exact in f16, so a pack of one loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Ids of the byte tokenizer: 0..255 are bytes in the order of ByteLevel's alphabet, then these.
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
VOCABULARY = 272  # a little padding, as real embeddings have

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": IM_START,
    "eos_token_id": IM_END,
}


@cache
def byte_tokenizer() -> Tokenizer:
    """One token a byte, and ChatML's special tokens: any text goes in and comes back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """``tokenizer_config.json`` of the byte tokenizer."""
    return {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def tiny_config(family: str = "bitnet", **changes: Any) -> dict[str, Any]:
    """``config.json`` of a model of a few thousand weights; a change to ... (Ellipsis) takes a field out."""
    config = {"model_type": family, **TINY, **changes}
    return {name: value for name, value in config.items() if value is not ...}


def tiny_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor that a model of this config has, f32; linears are trits times one f16-exact scale each."""
    random = np.random.default_rng(seed)
    kind = config["model_type"]
    heads, hidden, ffn = config["num_attention_heads"], config["hidden_size"], config["intermediate_size"]
    width, kv_width = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]

    def gain(length: int) -> np.ndarray:
        middle = 0 if kind == "gemma3_text" else 1  # which adds 1 itself
        return (middle + 0.2 * random.standard_normal(length)).astype(np.float32)

    def embedding() -> np.ndarray:
        values = 0.25 * random.standard_normal((config["vocab_size"], hidden))  # small, so that the layers matter
        return values.astype(np.float16).astype(np.float32)

    tensors = {"model.embed_tokens.weight": embedding(), "model.norm.weight": gain(hidden)}
    if not config.get("tie_word_embeddings", True):
        tensors["lm_head.weight"] = embedding()
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        linears = {
            "self_attn.q_proj": (width, hidden),
            "self_attn.k_proj": (kv_width, hidden),
            "self_attn.v_proj": (kv_width, hidden),
            "self_attn.o_proj": (hidden, width),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for name, shape in linears.items():
            tensors[f"{prefix}.{name}.weight"] = ternary_matrix(random, shape)
            biased = name[-6:] in ("q_proj", "k_proj", "v_proj") if kind == "qwen2" else None
            if config.get("attention_bias" if "attn" in name else "mlp_bias", False) if biased is None else biased:
                tensors[f"{prefix}.{name}.bias"] = random.standard_normal(shape[0]).astype(np.float32)
        tensors[f"{prefix}.input_layernorm.weight"] = gain(hidden)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = gain(hidden)
        if kind == "bitnet":
            tensors[f"{prefix}.self_attn.attn_sub_norm.weight"] = gain(width)
            tensors[f"{prefix}.mlp.ffn_sub_norm.weight"] = gain(ffn)
        if kind in ("qwen3", "gemma3_text"):
            tensors[f"{prefix}.self_attn.q_norm.weight"] = gain(config["head_dim"])
            tensors[f"{prefix}.self_attn.k_norm.weight"] = gain(config["head_dim"])
        if kind == "gemma3_text":
            tensors[f"{prefix}.pre_feedforward_layernorm.weight"] = gain(hidden)
            tensors[f"{prefix}.post_feedforward_layernorm.weight"] = gain(hidden)
    return tensors


def ternary_matrix(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Trits times a scale of about 1/sqrt(columns), f32, exact in f16 and bf16."""
    scale = np.float32(2.0 ** -np.ceil(np.log2(shape[1]) / 2) * random.choice([0.75, 1.0, 1.25, 1.5]))
    return random.integers(-1, 2, size=shape).astype(np.float32) * scale


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    shards: int = 1,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint folder with the byte tokenizer; with ``shards`` > 1 also an index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    where = {}
    for index in range(shards):
        name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        keys = sorted(tensors)[index::shards]
        save_file({key: tensors[key] for key in keys}, folder / name)
        where |= dict.fromkeys(keys, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    return folder


def tiny_checkpoint(
    folder: Path,
    family: str = "bitnet",
    *,
    seed: int = 0,
    shards: int = 1,
    generation: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A tiny model as a checkpoint folder; ``changes`` are fields of its config."""
    config = tiny_config(family, **changes)
    tensors = tiny_tensors({**TINY, **config}, seed)
    return write_folder(folder, config, tensors, shards=shards, generation=generation)


def write_json(path: Path, value: Any) -> None:
    """JSON in UTF-8."""
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def change_json(path: Path, **changes: Any) -> None:
    """Replace fields of a JSON file; ... (Ellipsis) takes a field out."""
    value = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    write_json(path, {name: field for name, field in value.items() if field is not ...})
