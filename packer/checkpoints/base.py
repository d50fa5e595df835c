"""What the packer wants from a checkpoint, whatever its file format: a config, tensors by row, a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import CheckpointError
from ..ternarize import Ternary


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises CheckpointError if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class TokenizerFiles:
    """``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template in it, if there is one), as bytes."""

    tokenizer: bytes
    config: bytes


@dataclass(frozen=True)
class CheckpointInfo:
    """Facts about a checkpoint that are not tensors.

    config: in the form of Hugging Face's ``config.json``. generation: ``generation_config.json`` or empty.
    notices: file name -> bytes of licence files, and of the card, to carry over. source: what goes into the pack as
    ``source``. name: the model's, if the source says one.
    """

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: TokenizerFiles
    name: str = ""
    license: str = ""
    notices: Mapping[str, bytes] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)


class Checkpoint(Protocol):
    """An open checkpoint. Tensor names are Hugging Face's, e.g. ``model.layers.0.self_attn.q_proj.weight``."""

    path: Path
    info: CheckpointInfo

    def names(self) -> list[str]:
        """All tensor names, sorted."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored (packed BitNet weights: ``[ceil(out/4), in]``). Raises CheckpointError if missing."""

    def is_packed(self, name: str) -> bool:
        """Whether the tensor holds packed bytes (uint8) rather than numbers."""

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start:stop``: uint8 if packed, else float32. Raises CheckpointError on NaN or infinite values."""

    def ternary(self, name: str) -> Ternary | None:
        """The matrix's own trits and scales, if its format stores such; None if its numbers must be looked at."""


def name_of(checkpoint: Checkpoint) -> str:
    """The checkpoint's name for people, without its folder."""
    whole = checkpoint.path.resolve()
    # A folder's name may well hold a dot: "…-1.58bit".
    return checkpoint.info.name or (whole.stem if whole.is_file() else whole.name)


def require_finite(values: np.ndarray, path: Path, name: str) -> np.ndarray:
    """The values, or CheckpointError naming file and tensor."""
    if not np.isfinite(values).all():
        bad = int(values.size - np.isfinite(values).sum())
        raise CheckpointError(f"{path}: tensor {name} has {bad} NaN or infinite values; the checkpoint is damaged")
    return values
