"""Model families: each file reads one kind of config and gives the shape that writes the program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import bitnet, gemma3, llama, mistral, qwen2, qwen3, recipe
from .fields import Fields
from .transformer import Matrix, Transformer, Vector, plane_name, plane_names

__all__ = ["FAMILIES", "Matrix", "Transformer", "Vector", "build_model", "plane_name", "plane_names"]

#: ``model_type`` -> what builds such a decoder.
FAMILIES: dict[str, Callable[[Fields], Transformer]] = {
    "bitnet": bitnet.build,
    "gemma3_text": gemma3.build,
    "llama": llama.build,
    "mistral": mistral.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
    "recipe_gpt": recipe.build,
}


def build_model(config: Mapping[str, Any], path: Path, names: Collection[str]) -> Transformer:
    """The decoder of a checkpoint with these tensor names.

    Raises CheckpointError for an unknown architecture or a bad config. Where the config does not say whether the
    head is tied, the tensors do: class defaults differ between families and versions.
    """
    fields = Fields({"tie_word_embeddings": "lm_head.weight" not in names, **config}, f"{path}: config")
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind.lower() not in FAMILIES:
        raise CheckpointError(
            f"{fields.where}: model_type is {kind!r}, expected one of {', '.join(sorted([*FAMILIES, 'gemma3']))}; "
            "this architecture is not supported"
        )
    if kind.lower() in ("llama", "bitnet") and bitnet.is_1bitllm(names):
        return bitnet.build_1bitllm(fields)
    return FAMILIES[kind.lower()](fields)
