"""A student as a checkpoint folder in BitNet's packed form: two bits a weight, one scale a matrix, bf16 embedding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..card import write_card
from ..errors import TrainError
from ..export import LAYER_NAMES, hugging_face_config, pack_trits
from .kit import Kit
from .latents import trits
from .nets import BF16, Net
from .student import Student

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EMBEDDING = "model.embed_tokens.weight"


def fold(student: Net, kit: Kit, out: Path, card: Mapping[str, Any] | None = None) -> None:
    """Write the folder; tokenizer and chat template are the kit's. card: goes beside the config.

    Raises TrainError if the folder is there already.
    """
    if not isinstance(student, Student):
        raise TrainError("export: the teacher is no ternary model; give the folder of a student")
    if out.exists() and any(out.iterdir()):
        raise TrainError(f"{out}: already there and not empty; name a new folder")
    beside = out.with_name(f"{out.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        tensors = student_tensors(student)
        for shard, chosen in zip(SHARDS, (tensors, {EMBEDDING: student.embedding.cpu().to(BF16)}), strict=True):
            save_file(chosen, beside / shard, metadata={"format": "pt"})
        _write(beside / "model.safetensors.index.json", _index(tensors, student))
        ends = [kit.phrases.end_of_turn]
        config = replace(student.config, sub_norms=True, precision="ternary")
        start = kit.tokenizer.token_to_id("<|im_start|>")
        _write(
            beside / "config.json",
            hugging_face_config(config, ends, ends[0]) | {"dtype": "bfloat16", "bos_token_id": start},
        )
        _write(
            beside / "generation_config.json", {"bos_token_id": start, "eos_token_id": ends[0], "pad_token_id": ends[0]}
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(kit.folder / name, beside / name)
        if card is not None:
            write_card(beside, card)
        shutil.rmtree(out, ignore_errors=True)
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@torch.no_grad()
def student_tensors(student: Student) -> dict[str, Tensor]:
    """All tensors but the embedding by Hugging Face's names, on the CPU: uint8 trits, bf16 scales and norms."""
    found = {}
    for name, theirs in LAYER_NAMES.items():
        for layer in range(student.config.layers):
            key = f"model.layers.{layer}.{theirs}.weight"
            if name in student.latents:
                found[key] = pack_trits(trits(student.latents[name][layer : layer + 1])[0].cpu())
                found[f"{key}_scale"] = student.scale(name)[layer].reshape(1).to(BF16).cpu()
            else:
                found[key] = student.gain(name)[layer].to(BF16).cpu().contiguous()
    found["model.norm.weight"] = student.gain("norm").to(BF16).cpu()
    return found


def _index(tensors: dict[str, Tensor], student: Student) -> dict[str, Any]:
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + 2 * student.embedding.numel()
    return {
        "metadata": {"total_size": total},
        "weight_map": {**dict.fromkeys(tensors, SHARDS[0]), EMBEDDING: SHARDS[1]},
    }


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
