"""The text model of a checkpoint that has a vision part as well, such as Gemma 3 from 4B on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..ternarize import Ternary
from .base import Checkpoint

#: ``model_type`` of such a checkpoint -> that of its text model.
KINDS = {"gemma3": "gemma3_text"}
#: How names of text tensors begin, as transformers 4 and 5 write them -> in a text model.
_TEXT = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
#: Modules of the vision part, which are left out.
_VISION = ("vision_tower.", "multi_modal_projector.")
#: Fields that the outer config has for both.
_SHARED = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config")


class TextPart:
    """The text tensors of an open checkpoint under the names of a text model; see ``base.Checkpoint``.

    ``info.source`` says in ``left_out`` which modules are not there. Raises CheckpointError for a config without text.
    """

    def __init__(self, whole: Checkpoint):
        self.path, self._whole = whole.path, whole
        stored = whole.names()
        vision = [name for name in stored if name.removeprefix("model.").startswith(_VISION)]
        self._stored: dict[str, str] = {}
        for name in sorted(set(stored) - set(vision)):
            ours = _renamed(name)
            if ours in self._stored:
                other = self._stored[ours]
                raise CheckpointError(f"{self.path}: tensors {other} and {name} are both {ours} of the text model")
            self._stored[ours] = name
        source = dict(whole.info.source)
        if vision:
            modules = sorted({name.removeprefix("model.").split(".")[0] for name in vision})
            source["left_out"] = f"{', '.join(modules)} ({len(vision)} tensors): only text is packed"
        self.info = dataclasses.replace(whole.info, config=_text_config(whole), source=source)

    def names(self) -> list[str]:
        """All tensor names of the text model, sorted."""
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored. Raises CheckpointError if the tensor is missing."""
        return self._whole.shape(self._stored.get(name, name))

    def is_packed(self, name: str) -> bool:
        """Whether the tensor holds packed bytes."""
        return self._whole.is_packed(self._stored.get(name, name))

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start:stop`` as the whole checkpoint gives them."""
        return self._whole.rows(self._stored.get(name, name), start, stop)

    def ternary(self, name: str) -> Ternary | None:
        """The matrix's own trits and scales, if its format stores such."""
        return self._whole.ternary(self._stored.get(name, name))


def _renamed(name: str) -> str:
    for before, after in _TEXT.items():
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


def _text_config(whole: Checkpoint) -> dict[str, Any]:
    config = whole.info.config
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(
            f"{whole.path}: config: field 'text_config' is {text!r}, expected the config of the text model"
        )
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    own = {name: value for name, value in text.items() if value is not None or name not in shared}
    return {"model_type": KINDS[str(config["model_type"]).lower()], **shared, **own}
