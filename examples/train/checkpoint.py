"""Checkpoints: a folder that holds a model, what it is, how far it got, and its tokenizer.

    model.safetensors   masters, f32, under the decoder's own names
    config.json         {"model": ModelConfig, "stage", "step", "tokens", "tokenizer_sha256", ...what the stage adds}
    state.pt            optimizer; only of a run that can go on, read with ``weights_only=True``
    tokenizer.json ...  copied from the folder of the streams

A run's folder has its checkpoint in ``checkpoint/``; every function here takes either folder. A checkpoint is written
beside and renamed, so that a run that is killed leaves the old one or the new one, whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .config import ModelConfig
from .errors import TrainError
from .model import Decoder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS, CONFIG, STATE = "model.safetensors", "config.json", "state.pt"


@dataclass(frozen=True)
class Checkpoint:
    """What ``config.json`` says. path: the folder with the files. model: shape. info: everything else."""

    path: Path
    model: ModelConfig
    info: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.info.get("step", 0))

    @property
    def tokens(self) -> int:
        """Tokens trained on, over all stages."""
        return int(self.info.get("tokens", 0))


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    config: ModelConfig,
    *,
    info: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> Path:
    """Write ``folder/checkpoint``, replacing the one there; returns it.

    info: JSON, with ``stage``, ``step`` and ``tokens``. optimizer: its ``state_dict``. tokenizer: folder (of streams or
    of a checkpoint) whose tokenizer files are copied and whose hash is recorded.
    """
    target = folder / "checkpoint"
    fresh, old = folder / "checkpoint.new", folder / "checkpoint.old"
    for left in (fresh, old):
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir(parents=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, fresh / WEIGHTS)
    if optimizer is not None:
        torch.save(dict(optimizer), fresh / STATE)
    record = {"model": asdict(config), **info}
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, fresh / name)
        record["tokenizer_sha256"] = tokenizer_hash(tokenizer)
    (fresh / CONFIG).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    return target


def find_checkpoint(folder: Path) -> Path:
    """The folder with the files: this one or the ``checkpoint`` in it. Raises TrainError if there is none."""
    for candidate in (folder, folder / "checkpoint", folder / "checkpoint.old"):
        if (candidate / CONFIG).is_file() and (candidate / WEIGHTS).is_file():
            return candidate
    raise TrainError(
        f"{folder}: no checkpoint there (expected {CONFIG} and {WEIGHTS}, in it or in its folder checkpoint/); "
        "name the folder of a run that has saved one"
    )


def read_checkpoint(folder: Path) -> Checkpoint:
    """``config.json`` of a checkpoint. Raises TrainError."""
    path = find_checkpoint(folder)
    try:
        info = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        model = info.pop("model")
        unknown = set(model) - {entry.name for entry in fields(ModelConfig)}
        if unknown:
            raise TrainError(f"{path / CONFIG}: unknown fields of the model: {', '.join(sorted(unknown))}")
        return Checkpoint(path, ModelConfig(**model), info)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise TrainError(f"{path / CONFIG}: not a checkpoint's config ({error!r})") from None


def load_weights(module: nn.Module, folder: Path, *, only: Iterable[str] | None = None) -> None:
    """Fill a module from a checkpoint. only: these names of the module; others stay as they are.

    Raises TrainError, which names the first tensor that is missing, superfluous or of another shape.
    """
    path = find_checkpoint(folder) / WEIGHTS
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise TrainError(f"{path}: cannot be read ({error})") from None
    expected = module.state_dict()
    if only is not None:
        keep = set(only)
        expected, found = ({n: t for n, t in part.items() if n in keep} for part in (expected, found))
    _check_names(path, expected, found)
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(found[name])


def load_model(
    folder: Path, device: torch.device | str = "cpu", *, precision: str | None = None
) -> tuple[Decoder, Checkpoint]:
    """The decoder of a checkpoint. precision: another one for its linears (masters are alike). Raises TrainError."""
    checkpoint = read_checkpoint(folder)
    config = checkpoint.model if precision is None else _with_precision(checkpoint.model, precision)
    model = Decoder(config)
    # ppo's policy has a value head, which nobody else needs; a reward model is no language model, and refused.
    has_value = checkpoint.info.get("head") == "value"
    load_weights(model, checkpoint.path, only=model.state_dict() if has_value else None)
    return model.to(device), checkpoint


def load_optimizer(folder: Path) -> dict[str, Any]:
    """The optimizer's ``state_dict``, on the CPU. Raises TrainError."""
    path = find_checkpoint(folder) / STATE
    if not path.is_file():
        raise TrainError(f"{path}: missing, so this run cannot go on; start a new one from its model instead")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever pickle, zip and tensors raise
        raise TrainError(f"{path}: cannot be read ({error})") from None
    return state


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 of a folder's ``tokenizer.json``. Raises TrainError if there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TrainError(f"{path}: missing; make it with `python -m examples.train prepare`")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Raises TrainError unless the streams in ``folder`` were written with the checkpoint's tokenizer."""
    expected, found = checkpoint.info.get("tokenizer_sha256"), tokenizer_hash(folder)
    if expected is not None and expected != found:
        raise TrainError(
            f"{folder / 'tokenizer.json'} is not the tokenizer of {checkpoint.path} (SHA-256 {found[:12]}…, expected "
            f"{expected[:12]}…): its token ids mean other text; use the streams that this model was trained on, or "
            "train a model on these"
        )


def check_same_model(path: Path, expected: ModelConfig, found: ModelConfig) -> None:
    """Raises TrainError that names the fields in which a checkpoint differs from the model that is asked for."""
    one, other = asdict(expected), asdict(found)
    differ = [f"{name} {other[name]} there, {one[name]} here" for name in one if one[name] != other[name]]
    if differ:
        raise TrainError(
            f"{path}: is of another model ({'; '.join(differ)}); resume with the same preset and options, or train "
            "in another folder"
        )


def _with_precision(config: ModelConfig, precision: str) -> ModelConfig:
    return ModelConfig(**{**asdict(config), "precision": precision, "fp4_options": ()})


def _check_names(path: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        if name not in found:
            raise TrainError(f"{path}: has no tensor {name}; it is of another model")
        if found[name].shape != tensor.shape:
            raise TrainError(
                f"{path}: {name} is {list(found[name].shape)}, expected {list(tensor.shape)}; it is of another shape"
            )
    superfluous = sorted(set(found) - set(expected))
    if superfluous:
        raise TrainError(f"{path}: has a tensor {superfluous[0]} that this model lacks; it is of another model")
