"""What goes into each linear of the source on a calibration text: the source runs in float32, one operation a time."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from shaders import reference
from shaders.interpreter import ReferenceModel
from shaders.weights import WeightTensor

from .compensate import inverse_factor
from .errors import PackerError
from .eval import Text, read_text
from .eval_source import Subject
from .workers import SERIAL, Workers

#: Tokens that are run together.
WINDOW = 512
FEWEST_TOKENS = 64
#: Of inputs of linears that are held at once.
MOST_BYTES = 5 << 28
_ROWS_AT_ONCE = 1024


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

    workers: run windows of the text at the same time. Raises PackerError if the text has too few tokens or so many that
    they take too much memory, or the source gives numbers that are not finite.
    """

    def __init__(self, source: Subject, text: Text, workers: Workers = SERIAL):
        self.source, self.workers = source, workers
        ids = list(source.tokenizer.encode(text.content, add_special_tokens=False).ids)
        if len(ids) < FEWEST_TOKENS:
            raise PackerError(
                f"--calibration: {text.name} has {len(ids)} tokens, expected at least {FEWEST_TOKENS}; "
                "give a longer one"
            )
        if max(ids) >= source.vocabulary:
            raise PackerError(f"{source.where}: the tokenizer gives id {max(ids)}, the vocabulary {source.vocabulary}")
        token_bytes = 4 * _held(source.program)
        if len(ids) * token_bytes > MOST_BYTES:
            raise PackerError(
                f"--calibration: {text.name} has {len(ids)} tokens, for each of which {token_bytes / 1024:.0f} KiB are "
                f"held; give a text of at most {MOST_BYTES // token_bytes} tokens"
            )
        window = min(WINDOW, source.context)
        self.tokens = len(ids)
        model = _Unkept(source.program, _Kept(source.tensors), capacity=window, kv="f32")
        self._runs = [_Run(model, ids[start : start + window]) for start in range(0, len(ids), window)]
        self._body, self._next = list(source.program["body"]), 0
        self._factor: tuple[str, np.ndarray] | None = None

    def factor(self, name: str) -> np.ndarray:
        """U f32 ``[K, K]`` of the inputs of linear ``name`` (``inverse_factor``). Ask in the program's order."""
        if self._factor is not None and self._factor[0] == name:
            return self._factor[1]
        self._factor = None  # it may be large, and is not needed beside the next one
        while self._next < len(self._body):
            op = self._body[self._next]
            if op["op"] == "linear" and op["w"] == name:
                self._factor = name, inverse_factor(self._gram(op["x"]), overwrite=True)
                return self._factor[1]
            self._advance()
        raise PackerError(f"{self.source.where}: linear {name} is not in the program, or was asked for too late")

    def _advance(self) -> None:
        """One operation and all that follow it up to the next linear, window by window.

        So what is between two linears is not held for all windows, and the weights of one linear at most.
        """
        end = self._next + 1
        while end < len(self._body) and self._body[end]["op"] != "linear":
            end += 1
        ops, later = self._body[self._next : end], _read_first(self._body[end:])
        first, *others = self._runs
        first.steps(ops, later)  # alone, for it reads the weights
        for _ in self.workers.map(lambda run: run.steps(ops, later), others):
            pass
        first.model.forget()
        self._next = end

    def _gram(self, value: str) -> np.ndarray:
        """X^T X f64 ``[K, K]`` of all windows; its upper triangle at least."""
        found = [run.values[value] for run in self._runs]
        inputs = [x.q * x.scale[:, None] if isinstance(x, reference.Quantized) else x for x in found]
        columns = inputs[0].shape[1]
        gram = np.zeros((columns, columns))
        for start in range(0, columns, _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            for x in inputs:
                gram[some, start:] += x[:, some].T @ x[:, start:]
        if not np.isfinite(gram.diagonal()).all():  # then so are all, since |a b| is at most (a^2 + b^2) / 2
            raise PackerError(f"{self.source.where}: activations are NaN or infinite; its weights are damaged")
        return gram


class _Kept(Mapping[str, WeightTensor]):
    """Weights that are read once and kept until they are forgotten, for all windows want the same ones."""

    def __init__(self, tensors: Mapping[str, WeightTensor]):
        self._tensors = tensors
        self._kept: dict[str, WeightTensor] = {}

    def __getitem__(self, name: str) -> WeightTensor:
        if name not in self._kept:
            self._kept[name] = self._tensors[name]
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def forget(self) -> None:
        self._kept.clear()


class _Unkept(ReferenceModel):
    """Reads and decodes a matrix for the operation that needs it, and forgets it then: each is used once.

    So are the keys and values of a layer, which are there from the operation that writes them to the one that reads.
    """

    def __init__(self, program: Mapping[str, Any], tensors: _Kept, *, capacity: int, kv: str):
        super().__init__({**program, "caches": {}}, tensors, capacity=capacity, kv=kv)
        self._shapes, self._read = program["caches"], tensors

    def forget(self) -> None:
        self._dense.clear()
        self._read.forget()

    def with_own_cache(self) -> _Unkept:
        """The same model with the same decoded matrices, and an empty cache of its own."""
        other = copy.copy(self)
        other._caches = {}
        return other

    def run_one(self, op: Mapping[str, Any], values: dict[str, Any]) -> None:
        """Run one operation of the program on these values."""
        if op["op"] == "rope_append":
            for name in (op["k"], op["v"]):
                shape = self._shapes[name]
                self._caches[name] = np.zeros((self.capacity, shape["heads"], shape["head_dim"]), dtype=np.float32)
        self._run(op, values, 1)
        if op["op"] == "attention":
            del self._caches[op["k"]], self._caches[op["v"]]


class _Run:
    """One window of tokens on its way through the program. It shares decoded matrices with the others."""

    def __init__(self, model: _Unkept, ids: list[int]):
        self.model = model.with_own_cache()
        self.values: dict[str, Any] = {"@ids": np.asarray(ids, dtype=np.int64)}

    def steps(self, ops: Sequence[Mapping[str, Any]], later: Collection[str]) -> None:
        """Run operations one after another, and forget what no ``later`` one reads."""
        for op in ops:
            self.model.run_one(op, self.values)
        self.values = {name: value for name, value in self.values.items() if name in later}


def _reads(op: Mapping[str, Any]) -> set[str]:
    """Values that an operation may read: whatever it names, and what it adds to."""
    names = {value for field, value in op.items() if field != "out" and isinstance(value, str)}
    return names | ({op["out"]} if op.get("accumulate") else set())


def _read_first(ops: Sequence[Mapping[str, Any]]) -> set[str]:
    """Values that these operations read before they write them."""
    found: set[str] = set()
    for op in reversed(ops):
        found = (found - {op["out"]}) | _reads(op)
    return found


def _held(program: Mapping[str, Any]) -> int:
    """Numbers that are held of a token while the widest linear's inputs are looked at: those, and the hidden state."""
    values = program["values"]
    linears = [op for op in program["body"] if op["op"] == "linear"]
    hidden: int = values[program["body"][0]["out"]]["shape"][1]
    widest: int = max(values[op["x"]]["shape"][1] for op in linears)
    return hidden + widest
