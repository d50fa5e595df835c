"""Model families: each file reads one kind of config and gives the shape that writes the program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import bitnet, llama
from .fields import Fields
from .transformer import Matrix, Transformer, Vector

__all__ = ["FAMILIES", "Matrix", "Transformer", "Vector", "build_model"]

FAMILIES: dict[str, Callable[[Fields], Transformer]] = {"bitnet": bitnet.build, "llama": llama.build}


def build_model(config: Mapping[str, Any], path: Path, names: Collection[str]) -> Transformer:
    """The decoder of a checkpoint with these tensor names.

    Raises CheckpointError for an unknown architecture or a bad config. Where the config does not say whether the
    head is tied, the tensors do: class defaults differ between families and versions.
    """
    fields = Fields({"tie_word_embeddings": "lm_head.weight" not in names, **config}, f"{path}: config")
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind.lower() not in FAMILIES:
        raise CheckpointError(
            f"{fields.where}: model_type is {kind!r}, expected one of {', '.join(sorted(FAMILIES))}; "
            "this architecture is not supported"
        )
    return FAMILIES[kind.lower()](fields)
