"""``import-recipe``: checkpoints of the public recipe FareedKhan-dev/train-llm-from-scratch, made portable.

Its "classic" decoder is not the one of ``model.py``: LayerNorm with bias, learned positions added to the embedding,
attention with q, k and v of their own for each head and without bias, an o projection with bias, an MLP of four times
the width with ReLU and biases, and a head with bias that is not the embedding. A checkpoint is a PyTorch file with
``model_state_dict`` (or a bare state dict), whose names are

    token_embed.weight  position_embed.weight  layer_norm.*  lm_head.*
    attn_blocks.N.ln1.*  .ln2.*  .attn.heads.H.{query,key,value}.weight  .attn.proj.*  .mlp.hidden.*  .mlp.proj.*

and buffers (``tril``, ``pos_idxs``) that follow from the shape. Wrappers' prefixes (``module.``, ``_orig_mod.``) may
stand before them. The folder written here has the heads joined and Hugging Face's names, of a family of the packer's:

    model.embed_tokens.weight  model.embed_positions.weight  model.norm.weight  lm_head.{weight,bias}
    model.layers.N.{input,post_attention}_layernorm.weight
    model.layers.N.self_attn.{q,k,v,o}_proj.{weight,bias}  .mlp.{up,down}_proj.{weight,bias}

It has RMSNorm where the recipe has LayerNorm, with the same logits: all that writes to the residual stream (embedding,
positions, o, down) is centred over the width, so that the stream's mean is 0 and its variance its mean square; what a
norm adds goes through the linears behind it, into their biases.

Early revisions divided attention scores by the square root of the width, later ones by that of a head's width; nothing
in a file tells which. ``--attention-scale`` says it, and q is scaled here so that the folder always means the latter.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint import CONFIG, TOKENIZER_FILES, WEIGHTS
from .errors import TrainError
from .export import special_ids
from .recipe_model import RecipeConfig, hugging_face_config, load_recipe, portable

SCALES = ("head", "width")
#: What ends a text in GPT-2's tokenizer, which the recipe uses.
END = "<|endoftext|>"
_PREFIXES = ("module.", "_orig_mod.")
_HEAD = re.compile(r"attn_blocks\.(\d+)\.attn\.heads\.(\d+)\.(query|key|value)\.weight")
_BUFFER = re.compile(r"(^|\.)(tril|pos_idxs)$")
_BLOCK_NAMES = {
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    "attn.proj": "o",
    "mlp.hidden": "up",
    "mlp.proj": "down",
}


def read_recipe(path: Path) -> dict[str, Tensor]:
    """The state dict of a recipe's checkpoint, f32, without wrappers' prefixes and buffers.

    Nothing in the file is run. Raises TrainError.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise TrainError(
            f"{path}: holds Python objects beside tensors and plain values, which are not run here; save its "
            "model_state_dict alone, with torch.save, where you trust the file"
        ) from None
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # a broken zip or pickle raises all kinds
        raise TrainError(f"{path}: no PyTorch checkpoint ({error})") from None
    state = found.get("model_state_dict", found) if isinstance(found, Mapping) else None
    if not isinstance(state, Mapping) or not state:
        raise TrainError(f"{path}: expected a dict with model_state_dict, or of tensors; found {type(found).__name__}")
    tensors = {_bare(str(name)): value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value.float() for name, value in tensors.items() if not _BUFFER.search(name)}


def shape_of(state: Mapping[str, Tensor], path: Path) -> RecipeConfig:
    """The shape that a state dict has. Raises TrainError if it is not of the recipe's classic decoder."""
    needed = ("token_embed.weight", "position_embed.weight", "lm_head.weight", "attn_blocks.0.mlp.hidden.weight")
    missing = [name for name in needed if name not in state]
    heads = [match for name in state if (match := _HEAD.fullmatch(name))]
    if missing or not heads:
        raise TrainError(
            f"{path}: no classic decoder of the recipe: {missing[0] if missing else 'attention heads'} not found; its "
            "modern decoder (rotary, RMSNorm, experts) and other models are not imported"
        )
    vocabulary, dim = state["token_embed.weight"].shape
    return RecipeConfig(
        vocab_size=vocabulary,
        dim=dim,
        layers=1 + max(int(match[1]) for match in heads),
        heads=1 + max(int(match[2]) for match in heads),
        max_context=len(state["position_embed.weight"]),
        ffn_dim=len(state["attn_blocks.0.mlp.hidden.weight"]),
    )


def convert(state: Mapping[str, Tensor], config: RecipeConfig, scale: str, path: Path) -> dict[str, Tensor]:
    """Tensors of ``RecipeDecoder``. scale: ``head`` or ``width``, by what the file's attention divided its scores.

    Raises TrainError for an unknown scale, or a tensor that is missing, superfluous or of another shape.
    """
    if scale not in SCALES:
        raise TrainError(f"--attention-scale is {scale!r}, expected one of {', '.join(SCALES)}")
    left = dict(state)
    converted: dict[str, Tensor] = {}
    for ours, shape in _shapes(config).items():
        theirs = _sources(ours, config.heads)
        absent = [name for name in theirs if name not in left]
        if absent:
            raise TrainError(f"{path}: tensor {absent[0]} is missing")
        tensor = torch.cat([left.pop(name) for name in theirs])
        if tensor.shape != shape:
            raise TrainError(f"{path}: {theirs[0]} makes {list(tensor.shape)}, expected {list(shape)}")
        converted[ours] = tensor.double()
    if left:
        raise TrainError(f"{path}: has a tensor {sorted(left)[0]} that the recipe's classic decoder lacks")
    if scale == "width":
        for layer in range(config.layers):
            converted[f"blocks.{layer}.q.weight"] *= 1 / math.sqrt(config.heads)  # sqrt(head width / width)
    _fold(converted, config)
    return {name: tensor.float().contiguous() for name, tensor in converted.items()}


def _fold(tensors: dict[str, Tensor], config: RecipeConfig) -> None:
    """From LayerNorm to RMSNorm, in place."""
    layers = [f"blocks.{layer}" for layer in range(config.layers)]
    for name in ("embedding.weight", "positions.weight"):
        tensors[name] -= tensors[name].mean(dim=1, keepdim=True)  # [V or context, D]
    for name in [f"{layer}.{part}.{end}" for layer in layers for part in ("o", "down") for end in ("weight", "bias")]:
        tensors[name] -= tensors[name].mean(dim=0, keepdim=True)  # [D, K] or [D]
    behind = {"norm": ["head"]}
    for layer in layers:
        behind[f"{layer}.attention_norm"] = [f"{layer}.{part}" for part in ("q", "k", "v")]
        behind[f"{layer}.ffn_norm"] = [f"{layer}.up"]
    for norm, linears in behind.items():
        added = tensors.pop(f"{norm}.bias")
        for linear in linears:
            bias = tensors[f"{linear}.weight"] @ added
            tensors[f"{linear}.bias"] = tensors.get(f"{linear}.bias", 0) + bias


def _shapes(config: RecipeConfig) -> dict[str, tuple[int, ...]]:
    """Under our names, what a file must hold, heads joined."""
    wide, high = config.dim, config.ffn_dim
    found: dict[str, tuple[int, ...]] = {
        "embedding.weight": (config.vocab_size, wide),
        "positions.weight": (config.max_context, wide),
        **{f"norm.{end}": (wide,) for end in ("weight", "bias")},
        "head.weight": (config.vocab_size, wide),
        "head.bias": (config.vocab_size,),
    }
    for layer in range(config.layers):
        norms = {f"{norm}.{end}": (wide,) for norm in ("attention_norm", "ffn_norm") for end in ("weight", "bias")}
        linears = {"q": (wide, wide), "k": (wide, wide), "v": (wide, wide), "o": (wide, wide)}
        linears |= {"up": (high, wide), "down": (wide, high)}
        matrices = {f"{name}.weight": shape for name, shape in linears.items()}
        biases = {f"{name}.bias": linears[name][:1] for name in ("o", "up", "down")}
        found |= {f"blocks.{layer}.{name}": shape for name, shape in (norms | matrices | biases).items()}
    return found


def import_recipe(path: Path, out: Path, scale: str = "head", tokenizer: Path | None = None) -> RecipeConfig:
    """Write a folder with ``model.safetensors`` and ``config.json``. Raises TrainError.

    tokenizer: folder with a tokenizer.json to put beside them; the recipe's r50k_base is GPT-2's.
    """
    state = read_recipe(path)
    config = shape_of(state, path)
    converted = convert(state, config, scale, path)
    if out.exists() and any(out.iterdir()):
        raise TrainError(f"{out}: is not empty; name a new folder")
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        raise TrainError(f"{tokenizer}: holds no tokenizer.json")
    end = None if tokenizer is None else special_ids(tokenizer).get(END)
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file({portable(name): tensor for name, tensor in converted.items()}, fresh / WEIGHTS)
    record = hugging_face_config(config) | ({} if end is None else {"eos_token_id": end})
    (fresh / CONFIG).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES if tokenizer is not None else ():
        if (tokenizer / name).is_file():  # type: ignore[operator]
            shutil.copyfile(tokenizer / name, fresh / name)  # type: ignore[operator]
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)
    return config


def _sources(ours: str, heads: int) -> list[str]:
    """The recipe's tensors that make one of ours, in order."""
    top = {"embedding": "token_embed", "positions": "position_embed", "norm": "layer_norm", "head": "lm_head"}
    stem, _, end = ours.rpartition(".")
    if stem in top:
        return [f"{top[stem]}.{end}"]
    _, layer, part = stem.split(".")
    if part in ("q", "k", "v"):
        name = {"q": "query", "k": "key", "v": "value"}[part]
        return [f"attn_blocks.{layer}.attn.heads.{head}.{name}.weight" for head in range(heads)]
    theirs = next(name for name, own in _BLOCK_NAMES.items() if own == part)
    return [f"attn_blocks.{layer}.{theirs}.{end}"]


def _bare(name: str) -> str:
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def import_recipe_command(
    checkpoint: Annotated[Path, typer.Argument(help="The recipe's .pt file.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    attention_scale: Annotated[
        str, typer.Option(help="What the file's attention divides scores by the root of: head, or width (early files).")
    ] = "head",
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with a tokenizer.json (GPT-2's) to add.")] = None,
) -> None:
    """Convert a checkpoint of FareedKhan-dev/train-llm-from-scratch to a folder with safetensors and a config."""
    config = import_recipe(checkpoint, out, attention_scale, tokenizer)
    size = sum(tensor.numel() for tensor in load_recipe(out).state_dict().values())
    typer.echo(
        f"{out}: {config.layers} blocks of width {config.dim}, {size:,} parameters, context {config.max_context}"
    )
