"""What goes into each linear of the source on a calibration text: the source runs in float32, one operation a time."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from shaders import reference
from shaders.interpreter import ReferenceModel

from .compensate import inverse_factor
from .errors import PackerError
from .eval import read_text
from .eval_source import Subject

#: Tokens that are run together.
WINDOW = 512
FEWEST_TOKENS = 64


def calibration_text(path: Path | None) -> str:
    """The text of a file, or the packer's own. Raises PackerError if it is empty or no UTF-8."""
    if path is None:
        return files("packer").joinpath("calibration_text.txt").read_text(encoding="utf-8")
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PackerError(f"--calibration: {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise PackerError(f"--calibration: {path}: not UTF-8 text (byte {error.start}); convert it first") from None
    if text_hash(content) == read_text(None).sha256:
        raise PackerError(f"--calibration: {path}: packs are measured with this very text; give another")
    return content


def text_hash(text: str) -> str:
    """SHA-256 of the text's UTF-8, as ``report.json`` names it and ``eval`` refuses it."""
    return hashlib.sha256(text.encode()).hexdigest()


class Calibration:
    """Runs the source over a text as far as it is asked to, so that only one linear's inputs are held at once.

    where: names the text in messages. Raises PackerError if the text has too few tokens, or the source gives numbers
    that are not finite.
    """

    def __init__(self, source: Subject, text: str, where: str = "the text"):
        self.source = source
        ids = list(source.tokenizer.encode(text, add_special_tokens=False).ids)
        if len(ids) < FEWEST_TOKENS:
            raise PackerError(
                f"--calibration: {where} has {len(ids)} tokens, expected at least {FEWEST_TOKENS}; give a longer one"
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


class _Run:
    """One window of tokens on its way through the program. It shares decoded matrices with the others."""

    def __init__(self, model: _Unkept, ids: list[int]):
        self.model = copy.copy(model)
        self.model._caches = {name: np.zeros_like(cache) for name, cache in model._caches.items()}
        self.values: dict[str, Any] = {"@ids": np.asarray(ids, dtype=np.int64)}

    def step(self, op: Mapping[str, Any]) -> None:
        self.model._run(op, self.values, 1)
