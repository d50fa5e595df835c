"""Opens a checkpoint: a Hugging Face folder of safetensors, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from .base import Checkpoint, CheckpointInfo, TokenizerFiles
from .huggingface import open_folder

__all__ = ["Checkpoint", "CheckpointInfo", "TokenizerFiles", "open_checkpoint"]


def open_checkpoint(source: Path, tokenizer_folder: Path | None = None) -> Checkpoint:
    """Open a checkpoint folder or GGUF file. Raises CheckpointError if it is neither or is damaged."""
    if source.is_dir():
        return open_folder(source, tokenizer_folder)
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or folder; give a checkpoint folder or a GGUF file")
    if source.suffix.lower() == ".gguf":
        from .gguf import open_gguf  # late: the gguf package is slow to import and rarely needed

        return open_gguf(source, tokenizer_folder)
    raise CheckpointError(
        f"{source}: expected a folder with config.json and safetensors, or a .gguf file, found a file of type "
        f"{source.suffix or 'unknown'!r}"
    )
