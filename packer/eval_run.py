"""Runs a subject on NumPy or the native GPU, with other activations or another cache where that is asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np

from shaders.contract import INTEGER_ACTIVATIONS, ExecutionError
from shaders.interpreter import ReferenceModel
from shaders.sampling import Sampling
from shaders.weights import WeightTensor

from .errors import PackerError
from .eval_source import Subject

BACKENDS = ("native", "numpy")
#: Decoded and read weights that NumPy keeps, in bytes; beyond, they are read again at every step.
KEPT_BYTES = 6 << 30


class Runner(Protocol):
    """A model that gives logits of many rows, and greedy answers."""

    def truncate(self, position: int) -> None:
        """Forget all tokens from ``position`` on."""

    def step(self, ids: Sequence[int], rows: int = 1) -> np.ndarray:
        """Append tokens; logits of the last ``rows`` of them, f32 ``[rows, V]``."""

    def generate(
        self,
        ids: Sequence[int],
        options: Sampling,
        max_tokens: int,
        stop: Collection[int] = frozenset(),
        history: Sequence[int] = (),
    ) -> Iterator[tuple[int, np.ndarray | None]]:
        """Append ``ids`` and yield new tokens."""


def best_backend() -> tuple[str, str]:
    """(backend, device) for who named none: the GPU if there is a real one, else NumPy, which beats software GPUs."""
    with suppress(Exception):  # no driver, no device, no wgpu: all mean the same here
        from shaders.native import shared_device

        device = shared_device()
        if not device.software:
            return "native", device.name
    return "numpy", "NumPy"


def device_name(backend: str) -> str:
    """The device of a backend, for the report. Raises PackerError if there is none."""
    if backend == "numpy":
        return "NumPy"
    from shaders.native import NativeError, shared_device

    try:
        return shared_device().name
    except NativeError as error:
        raise PackerError(f"--backend native: {error}; or use --backend numpy") from None


@contextmanager
def running(subject: Subject, backend: str, capacity: int, kv: str, activations: str | None = None) -> Iterator[Runner]:
    """The subject, ready to run, and gone from the device afterwards. Raises PackerError."""
    program = subject.program
    if activations not in (None, subject.activations):
        program = with_activations(program, subject.activations, str(activations), ternary_names(subject))
    if backend == "numpy":
        try:
            yield StreamedReference(program, subject.tensors, capacity=capacity, kv=kv)
        except ExecutionError as error:
            raise PackerError(f"{subject.where}: {error}") from None
        return
    from shaders.native import NativeError, NativeModel

    try:
        with NativeModel(program, subject.tensors, capacity=capacity, kv=kv) as model:
            yield model
    except (NativeError, ExecutionError) as error:
        raise PackerError(f"{subject.where}: {error}; or use --backend numpy") from None


class StreamedReference(ReferenceModel):
    """The NumPy reference with bounded memory: weights beyond ``KEPT_BYTES`` are read again when they are needed."""

    def __init__(self, program: Mapping[str, Any], tensors: Mapping[str, WeightTensor], *, capacity: int, kv: str):
        self._kept = KeptTensors(tensors)
        super().__init__(program, self._kept, capacity=capacity, kv=kv)

    def _matrix(self, name: str, as_trits: bool) -> np.ndarray:
        weight = self.tensors[name]
        if weight.encoding == "f32":
            return weight.data[:, : weight.columns]
        matrix = super()._matrix(name, as_trits)
        if not self._kept.room(("dense", name), matrix.nbytes):
            del self._dense[name, as_trits]
        return matrix


class KeptTensors(Mapping[str, WeightTensor]):
    """Tensors that stay in memory once read, as long as there is room."""

    def __init__(self, tensors: Mapping[str, WeightTensor]):
        self._source = tensors
        self._kept: dict[str, WeightTensor] = {}
        self._sizes: dict[Any, int] = {}

    def room(self, key: Any, size: int) -> bool:
        """Whether so many bytes may stay; a key is counted once."""
        if key not in self._sizes:
            if sum(self._sizes.values()) + size > KEPT_BYTES:
                return False
            self._sizes[key] = size
        return True

    def __getitem__(self, name: str) -> WeightTensor:
        if name in self._kept:
            return self._kept[name]
        weight = self._source[name]
        if self.room(name, weight.data.nbytes):
            self._kept[name] = weight
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


def ternary_names(subject: Subject) -> set[str]:
    """Weights of the linears whose activations may be integers."""
    ops = [op for op in subject.program["body"] if op["op"] == "linear"]
    integers = _integer_values(subject.program)
    if integers:
        return {op["w"] for op in ops if op["x"] in integers}
    return {op["w"] for op in ops if subject.tensors[op["w"]].encoding == "ternary"}


def _integer_values(program: Mapping[str, Any]) -> set[str]:
    return {name for name, value in program["values"].items() if value["dtype"] in INTEGER_ACTIVATIONS}


def with_activations(program: Mapping[str, Any], present: str, wanted: str, ternary: set[str]) -> dict[str, Any]:
    """The program with other activations in its ternary products: ``a8``, ``a16`` or ``f32``."""
    if present != "f32" and wanted != "f32":
        values = {
            name: {**value, "dtype": wanted if value["dtype"] in INTEGER_ACTIVATIONS else value["dtype"]}
            for name, value in program["values"].items()
        }
        return {**program, "values": values}
    return _to_float(program) if wanted == "f32" else _to_integers(program, wanted, ternary)


def _to_float(program: Mapping[str, Any]) -> dict[str, Any]:
    """Integer values become float ones, and ``quantize`` goes: who read its result reads what it read."""
    integers = _integer_values(program)
    values = {name: {**value, "dtype": "f32"} for name, value in program["values"].items()}
    body, alias = [], {}
    for op in program["body"]:
        if op["op"] == "quantize":
            alias[op["out"]] = op["x"]
            continue
        fields = {key: alias.get(value, value) if key == "x" else value for key, value in op.items()}
        if op.get("out") in integers:
            alias.pop(op["out"], None)
        body.append(fields)
    used = {value for op in body for value in op.values() if isinstance(value, str)}
    kept = {name: value for name, value in values.items() if name in used or name not in integers}
    return {**program, "values": kept, "body": body}


def _to_integers(program: Mapping[str, Any], wanted: str, ternary: set[str]) -> dict[str, Any]:
    """Every ternary product reads integers, rounded right before it."""
    values, body = dict(program["values"]), []
    for op in program["body"]:
        if op["op"] == "linear" and op["w"] in ternary:
            rounded = f"{op['x']}.{wanted}"
            values[rounded] = {**values[op["x"]], "dtype": wanted}
            body.append({"op": "quantize", "x": op["x"], "out": rounded})
            op = {**op, "x": rounded}
        body.append(op)
    return {**program, "values": values, "body": body}
