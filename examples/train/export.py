"""``export``: a checkpoint as a Hugging Face folder, which transformers loads and ``python -m packer export`` packs.

| precision | sub-norms | class | linears |
|---|---|---|---|
| ternary | yes | BitNetForCausalLM | packed trits uint8, weight_scale f32 that multiplies (offline autobitlinear) |
| ternary | no | LlamaForCausalLM with the same quantization_config | the same |
| any float | yes | BitNetForCausalLM without quantization_config | f32 masters |
| any float | no | LlamaForCausalLM | f32 masters |

nvfp4 and mxfp4 are EMULATED in training; what is exported are their masters, which ``--keep '*=nvfp4'`` of the packer
rounds again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn

from .card import QUESTIONS, stage_card, write_card
from .checkpoint import TOKENIZER_FILES, Checkpoint, load_model
from .config import ModelConfig
from .errors import TrainError
from .model import Decoder
from .options import From
from .precision.ternary import BitLinear, quantize_weights

#: Our names inside ``blocks.N`` -> Hugging Face's inside ``model.layers.N``.
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "attention_sub_norm": "self_attn.attn_sub_norm",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
    "down": "mlp.down_proj",
}
#: Of ``tokenizer.py``: what ends an answer first, then what ends a text.
END_TOKENS, PAD_TOKEN = ("<|im_end|>", "<|endoftext|>"), "<pad>"


def pack_trits(trits: Tensor) -> Tensor:
    """Trits ``[N, K]`` to BitNet's uint8 ``[ceil(N/4), K]``: with R rows of bytes, bits 2i and 2i+1 of byte row r hold
    row r + i * R, plus 1; rows beyond N hold 0."""
    rows = -(-len(trits) // 4)
    codes = torch.zeros(4 * rows, trits.shape[1], dtype=torch.uint8)
    codes[: len(trits)] = (trits + 1).to(torch.uint8)
    a, b, c, d = codes.view(4, rows, -1).unbind()
    packed: Tensor = a | b << 2 | c << 4 | d << 6
    return packed


def hugging_face_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under Hugging Face's name, on the CPU."""
    yield "model.embed_tokens.weight", model.embedding.weight
    for index, block in enumerate(model.blocks):
        for name, module in block.named_children():
            if not isinstance(module, nn.Identity):
                yield from _module_tensors(f"model.layers.{index}.{LAYER_NAMES[name]}", module)
    yield "model.norm.weight", model.norm.weight


def _module_tensors(name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(module, BitLinear):
        trits, scale = quantize_weights(module.weight)
        yield f"{name}.weight", pack_trits(trits.cpu())
        yield f"{name}.weight_scale", scale.reshape(1)
    else:
        yield f"{name}.weight", module.weight


def hugging_face_config(config: ModelConfig, ends: list[int], pad: int | None) -> dict[str, Any]:
    """``config.json``. ends: ids that end an answer, the first being the tokenizer's own."""
    kind = ("BitNetForCausalLM", "bitnet") if config.sub_norms else ("LlamaForCausalLM", "llama")
    found: dict[str, Any] = {
        "architectures": [kind[0]],
        "model_type": kind[1],
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": ends[0] if ends else None,
        "pad_token_id": pad,
        "dtype": "float32",
    }
    if config.precision == "ternary":
        found["quantization_config"] = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": ["lm_head"],
            "use_rms_norm": False,
        }
    return found


def export(
    source: Path, out: Path, describe: Callable[[Decoder, Checkpoint], Mapping[str, Any]] | None = None
) -> Checkpoint:
    """Write the model of a run as a new folder ``out``; returns what it was. describe: makes its card.

    Raises TrainError. Written beside and renamed: a run that fails leaves nothing behind.
    """
    if out.exists() and any(out.iterdir()):
        raise TrainError(f"{out}: already there and not empty; name a new folder")
    model, checkpoint = load_model(source)
    tokenizer = special_ids(checkpoint.path)
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        with torch.no_grad():
            tensors = {name: tensor.detach().contiguous() for name, tensor in hugging_face_tensors(model)}
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        ends = [tokenizer[token] for token in END_TOKENS if token in tokenizer]
        pad = tokenizer.get(PAD_TOKEN)
        _write_json(fresh / "config.json", hugging_face_config(checkpoint.model, ends, pad))
        if ends:
            _write_json(fresh / "generation_config.json", {"eos_token_id": ends, "pad_token_id": pad})
        for name in TOKENIZER_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, fresh / name)
        if describe is not None:
            write_card(fresh, describe(model, checkpoint))
        shutil.rmtree(out, ignore_errors=True)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return checkpoint


def special_ids(folder: Path) -> dict[str, int]:
    """Special tokens of a folder's tokenizer and their ids; none without one. Raises TrainError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])
        return {entry["content"]: int(entry["id"]) for entry in added}
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise TrainError(f"{path}: not a tokenizer ({error!r}); copy the one that the model was trained with") from None


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def export_command(
    source: From,
    out: Annotated[Path, typer.Option("--out", help="Folder to create.")],
    streams: Annotated[
        Path | None, typer.Option(help="Folder of the streams it was trained on: makes a card of losses and answers.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers on the card.", min=0, max=len(QUESTIONS))] = 3,
    note: Annotated[str, typer.Option(help="What the card says beside.")] = "",
) -> None:
    """Write a checkpoint as a Hugging Face folder, for transformers and for the packer."""
    describe = None if streams is None else lambda model, found: stage_card(model, found, streams, samples, note)
    checkpoint = export(source, out, describe)
    emulated = " (its f32 masters: the format was EMULATED)" if "EMULATED" in checkpoint.model.label else ""
    typer.echo(
        f"{out}: {checkpoint.model.label}{emulated}, {checkpoint.model.parameters():,} parameters, "
        f"{checkpoint.tokens:,} tokens of training\nnow: python -m packer export {out} --out examples/packs/NAME"
    )
