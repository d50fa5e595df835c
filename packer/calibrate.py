"""What goes into each linear of the source on a calibration text: the source runs in float32, one operation a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from shaders import reference
from shaders.interpreter import ReferenceModel

from .compensate import inverse_factor
from .errors import PackerError
from .eval import Text, read_text
from .eval_source import Subject

#: Tokens that are run together.
WINDOW = 512
FEWEST_TOKENS = 64


def calibration_text(path: Path | None) -> Text:
    """The text of a file, or the packer's own. Raises PackerError if it is empty, no UTF-8, or the one of ``eval``."""
    if path is None:
        return Text("the text", files("packer").joinpath("calibration_text.txt").read_text(encoding="utf-8"))
    try:
        text = read_text(path)
    except PackerError as error:
        raise PackerError(f"--calibration: {error}") from None
    if text.sha256 == read_text(None).sha256:
        raise PackerError(f"--calibration: {path}: packs are measured with this very text; give another")
    return text


class Calibration:
    """Runs the source over a text as far as it is asked to, so that only one linear's inputs are held at once.

    Raises PackerError if the text has too few tokens, or the source gives numbers that are not finite.
    """

    def __init__(self, source: Subject, text: Text):
        self.source = source
        ids = list(source.tokenizer.encode(text.content, add_special_tokens=False).ids)
        if len(ids) < FEWEST_TOKENS:
            raise PackerError(
                f"--calibration: {text.name} has {len(ids)} tokens, expected at least {FEWEST_TOKENS}; "
                "give a longer one"
            )
        if max(ids) >= source.vocabulary:
            raise PackerError(f"{source.where}: the tokenizer gives id {max(ids)}, the vocabulary {source.vocabulary}")
        window = min(WINDOW, source.context)
        self.tokens = len(ids)
        model = _Unkept(source.program, source.tensors, capacity=window, kv="f32")
        self._runs = [_Run(model, ids[start : start + window]) for start in range(0, len(ids), window)]
        self._body, self._next = list(source.program["body"]), 0
        self._factor: tuple[str, np.ndarray] | None = None

    def factor(self, name: str) -> np.ndarray:
        """U f32 ``[K, K]`` of the inputs of linear ``name`` (``inverse_factor``). Ask in the program's order."""
        if self._factor is not None and self._factor[0] == name:
            return self._factor[1]
        while self._next < len(self._body):
            op = self._body[self._next]
            if op["op"] == "linear" and op["w"] == name:
                self._factor = name, inverse_factor(self._gram(op["x"]))
                return self._factor[1]
            for run in self._runs:
                run.step(op)
            self._runs[0].model.forget()
            self._next += 1
        raise PackerError(f"{self.source.where}: linear {name} is not in the program, or was asked for too late")

    def _gram(self, value: str) -> np.ndarray:
        total: Any = 0.0
        for run in self._runs:
            found = run.values[value]
            x = found.q * found.scale[:, None] if isinstance(found, reference.Quantized) else found
            total = total + (x.T @ x).astype(np.float64)
        if not np.isfinite(total).all():
            raise PackerError(f"{self.source.where}: activations are NaN or infinite; its weights are damaged")
        gram: np.ndarray = total
        return gram


class _Unkept(ReferenceModel):
    """Decodes a matrix for the operation that needs it, and forgets it then: each is used once."""

    def forget(self) -> None:
        self._dense.clear()

    def with_own_cache(self) -> _Unkept:
        """The same model with the same decoded matrices, and an empty cache of its own."""
        other = copy.copy(self)
        other._caches = {name: np.zeros_like(cache) for name, cache in self._caches.items()}
        return other

    def run_one(self, op: Mapping[str, Any], values: dict[str, Any]) -> None:
        """Run one operation of the program on these values."""
        self._run(op, values, 1)


class _Run:
    """One window of tokens on its way through the program. It shares decoded matrices with the others."""

    def __init__(self, model: _Unkept, ids: list[int]):
        self.model = model.with_own_cache()
        self.values: dict[str, Any] = {"@ids": np.asarray(ids, dtype=np.int64)}

    def step(self, op: Mapping[str, Any]) -> None:
        self.model.run_one(op, self.values)
