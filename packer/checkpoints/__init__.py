"""Opens a checkpoint: a Hugging Face or MLX folder of safetensors, a GGUF file, or a model of a hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..errors import CheckpointError
from .base import Checkpoint, CheckpointInfo, TokenizerFiles, name_of
from .hub import fetch, is_hub
from .huggingface import open_folder
from .mlx import MlxCheckpoint
from .text_part import KINDS, TextPart

__all__ = ["Checkpoint", "CheckpointInfo", "TokenizerFiles", "name_of", "open_checkpoint"]


def open_checkpoint(source: Path, tokenizer_folder: Path | None = None) -> Checkpoint:
    """Open a checkpoint folder, a GGUF file, or ``hf:OWNER/NAME`` of a hub (see ``hub.py``).

    Raises CheckpointError if it is none of them or is damaged.
    """
    if is_hub(source):
        fetched = fetch(str(source))
        checkpoint = open_checkpoint(fetched.path, tokenizer_folder)
        origin = {**checkpoint.info.source, "repository": fetched.repository, "revision": fetched.revision}
        checkpoint.info = dataclasses.replace(checkpoint.info, name=fetched.name, source=origin)
        return checkpoint
    if source.is_dir():
        folder = open_folder(source, tokenizer_folder)
        return _text_of(MlxCheckpoint(folder) if "quantization" in folder.info.config else folder)
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or folder; give a checkpoint folder or a GGUF file")
    if source.suffix.lower() == ".gguf":
        from .gguf import open_gguf  # late: the gguf package is slow to import and rarely needed

        return open_gguf(source, tokenizer_folder)
    if source.suffix.lower() in (".bin", ".pt", ".pth", ".safetensors"):
        return _text_of(open_folder(source.parent, tokenizer_folder, source.name))
    raise CheckpointError(
        f"{source}: expected a folder with config.json and safetensors, or a .gguf file, found a file of type "
        f"{source.suffix or 'unknown'!r}"
    )


def _text_of(checkpoint: Checkpoint) -> Checkpoint:
    """The text model of a checkpoint that has other parts too, else itself."""
    kind = checkpoint.info.config.get("model_type")
    return TextPart(checkpoint) if isinstance(kind, str) and kind.lower() in KINDS else checkpoint
