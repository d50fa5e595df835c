"""Tensors of a checkpoint into a pack: encodes each in pieces of rows, and reports what was done to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shaders.contract import quotient_up
from shaders.reference import dequantize
from shaders.weights import WeightTensor, group_of

from . import encodings
from .checkpoints import Checkpoint
from .compensate import ROWS_TOGETHER, compensated_planes
from .errors import CheckpointError
from .linears import piece_spans, read_rows
from .manifest import TensorEntry
from .models import Matrix, Vector, plane_name
from .planes import GROUP as PLANE_GROUP
from .planes import Planes, fit_planes
from .slices import Rows, cut, spans
from .ternarize import Ternary
from .workers import SERIAL, Workers
from .writer import HEADER_BYTES_A_KEY, PackWriter

#: Source of a matrix, its first row and its last.
Span = tuple[int, int, int]
#: Packed trits of a plane, its scales, and how many of the trits are 0.
_Plane = tuple[np.ndarray, np.ndarray, int]


@dataclass
class TensorReport:
    """What happened to one tensor. error: relative RMS error of the stored values.

    exact: what was written decodes to the checkpoint's own numbers. linears: names of the checkpoint's linears in it.
    choice: what chose the encoding. planes: of how many ternary planes it is one, 0 for all other tensors; their error
    is that of their sum. plane: which of them; all but number 0 hold weights that are counted there.
    """

    name: str
    encoding: str
    weights: int
    bytes: int
    exact: bool
    error: float
    zeros: float | None = None
    linears: list[str] = field(default_factory=list)
    choice: str = ""
    planes: int = 0
    plane: int = 0


def require_sources(checkpoint: Checkpoint, tensors: Sequence[Matrix | Vector]) -> set[str]:
    """Names of all tensors that these are made of. Raises CheckpointError if the checkpoint lacks one."""
    wanted = {name for tensor in tensors for name, _ in tensor.sources}
    missing = sorted(wanted - set(checkpoint.names()))
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {missing[0]} is missing ({len(missing)} of {len(wanted)} are); "
            "the checkpoint is incomplete"
        )
    return wanted


class TensorEncoder:
    """Puts tensors into a writer, one after another. reports: one for each, in order.

    workers: encode pieces of a tensor; how many there are changes nothing of what is written.
    """

    def __init__(self, checkpoint: Checkpoint, writer: PackWriter, workers: Workers = SERIAL):
        self.checkpoint, self.writer, self.workers = checkpoint, writer, workers
        self.reports: list[TensorReport] = []

    def vector(self, vector: Vector) -> None:
        """Store a vector as f32. Raises CheckpointError if a source does not fit."""
        parts = [read_rows(self.checkpoint, name, (length,), 0, length) for name, length in vector.sources]
        values = np.concatenate(parts)
        if vector.offset:  # else even a negative zero stays as it is
            values += np.float32(vector.offset)
        self.writer.add(f"{vector.name}.data.0", values)
        self.writer.entries[vector.name] = TensorEntry(vector.name, "f32", (vector.length,), None, (), 0, (1,))
        self.reports.append(TensorReport(vector.name, "f32", vector.length, values.nbytes, True, 0.0))

    def ternary(self, matrix: Matrix, parts: Sequence[Ternary]) -> None:
        """Store ternary parts, stacked, without loss."""
        kind, group, scales = _merge_scales(matrix, parts)
        counts = tuple(rows for _, rows in matrix.sources) if kind == "parts" else ()
        entry = self._entry(matrix, "ternary", kind, counts, group)
        size, zeros = scales.nbytes, 0
        starts = np.cumsum([0, *(rows for _, rows in matrix.sources)])

        def encode(span: Span) -> tuple[np.ndarray, int]:
            part, first, last = span
            trits = parts[part].trits[first:last]
            packed = encodings.encode_trits(trits)
            own = slice(part, part + 1) if kind == "parts" else slice(starts[part] + first, starts[part] + last)
            piece = WeightTensor(matrix.name, "ternary", trits.shape, packed, scales[own], kind, (len(trits),), group)
            self._prove(matrix, part, parts[part], (first, last), piece)
            return packed, trits.size - int(np.count_nonzero(trits))

        for index, (start, stop) in enumerate(spans(entry.slices)):
            data = Rows(stop - start)
            for packed, nothing in self.workers.map(encode, self._pieces(matrix, start, stop)):
                data.add(packed)
                zeros += nothing
            size += data.array.nbytes
            self.writer.add(f"{matrix.name}.data.{index}", data.array)
            if kind != "parts":
                self.writer.add(f"{matrix.name}.scale.{index}", scales[start:stop])
        if kind == "parts":
            self.writer.add(f"{matrix.name}.scale", scales)
        weights = matrix.rows * matrix.columns
        linears = _linear_names(matrix)
        self.reports.append(TensorReport(matrix.name, "ternary", weights, size, True, 0.0, zeros / weights, linears))

    def _prove(self, matrix: Matrix, index: int, part: Ternary, rows: tuple[int, int], written: WeightTensor) -> None:
        """Decode rows as they were written and compare them with the checkpoint's own numbers, bit for bit.

        Packed bytes, and masters that the model rounds itself, have no numbers to read again: their trits are compared.
        """
        name, count = matrix.sources[index]
        if part.rounded or self.checkpoint.is_packed(name):
            expected = part.values(*rows)
        else:
            expected = read_rows(self.checkpoint, name, (count, matrix.columns), *rows)
        if not np.array_equal(dequantize(written), expected):
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {name}, rows {rows[0]} to {rows[1]}: what was written is not what the "
                "checkpoint holds; this is a fault of the packer or of this machine's memory, so there is no pack"
            )

    def floats(self, matrix: Matrix, encoding: str, parts: Sequence[Ternary | None]) -> None:
        """Store a matrix in any encoding but ternary; parts that are ternary are multiplied out."""
        entry = self._entry(matrix, encoding, None, (), group_of(encoding))
        tensor_scale = self._tensor_scale(matrix, parts) if encoding == "nvfp4" else None
        size, squares, errors = 0, 0.0, 0.0

        def encode(span: Span) -> tuple[dict[str, np.ndarray], float, float]:
            values = self._values(matrix, parts, span)
            encoded, scales = self._encode(matrix, values, encoding, tensor_scale)
            error = values - _decoded(encoded, scales, encoding, values.shape, tensor_scale)
            arrays = {"data": encoded} if scales is None else {"data": encoded, "scale": scales}
            return arrays, _squares(values), _squares(error)

        for index, (start, stop) in enumerate(spans(entry.slices)):
            joined: dict[str, Rows] = {}
            for arrays, square, error in self.workers.map(encode, self._pieces(matrix, start, stop)):
                squares, errors = squares + square, errors + error
                for kind, array in arrays.items():
                    joined.setdefault(kind, Rows(stop - start)).add(array)
            for kind, rows in joined.items():
                size += rows.array.nbytes
                self.writer.add(f"{matrix.name}.{kind}.{index}", rows.array)
        if tensor_scale is not None:
            size += tensor_scale.nbytes
            self.writer.add(f"{matrix.name}.tensor_scale", tensor_scale.reshape(1))
        relative = _relative(errors, squares)
        weights = matrix.rows * matrix.columns
        linears = _linear_names(matrix)
        self.reports.append(TensorReport(matrix.name, encoding, weights, size, errors == 0, relative, None, linears))

    def planes(
        self, matrix: Matrix, parts: Sequence[Ternary | None], count: int, factor: np.ndarray | None = None
    ) -> None:
        """Store a matrix as so many ternary planes: ``NAME``, ``NAME.plane1``, ...

        factor: of the linear's inputs (``inverse_factor``), to compensate rounding errors; None: nearest weights.
        """
        named = [replace(matrix, name=plane_name(matrix.name, plane)) for plane in range(count)]
        entries = [self._entry(one, "ternary", "group", (), PLANE_GROUP) for one in named]
        sizes, zeros, squares, errors = [0] * count, [0] * count, 0.0, 0.0

        def encode(span: Span) -> tuple[list[_Plane], float, float]:
            values = self._values(matrix, parts, span)
            found = self._fit_planes(matrix, values, count, factor)
            encoded = [
                (encodings.encode_trits(trits), scales, trits.size - int(np.count_nonzero(trits)))
                for trits, scales in zip(found.trits, found.scales, strict=True)
            ]
            return encoded, _squares(values), _squares(values - found.values())

        for index, (start, stop) in enumerate(spans(entries[0].slices)):
            data, scales = ([Rows(stop - start) for _ in range(count)] for _ in range(2))
            pieces = self._pieces(matrix, start, stop, 1 if factor is None else ROWS_TOGETHER)
            for encoded, square, error in self.workers.map(encode, pieces):
                squares, errors = squares + square, errors + error
                for plane, (packed, alphas, nothing) in enumerate(encoded):
                    data[plane].add(packed)
                    scales[plane].add(alphas)
                    zeros[plane] += nothing
            for plane, one in enumerate(named):
                sizes[plane] += data[plane].array.nbytes + scales[plane].array.nbytes
                self.writer.add(f"{one.name}.data.{index}", data[plane].array)
                self.writer.add(f"{one.name}.scale.{index}", scales[plane].array)
        weights = matrix.rows * matrix.columns
        for plane, one in enumerate(named):
            linears = [] if plane else [name for name, _ in matrix.sources]
            report = TensorReport(
                one.name, "ternary", weights, sizes[plane], errors == 0, _relative(errors, squares),
                zeros[plane] / weights, linears, planes=count, plane=plane,
            )  # fmt: skip
            self.reports.append(report)

    def _fit_planes(self, matrix: Matrix, values: np.ndarray, count: int, factor: np.ndarray | None) -> Planes:
        try:
            if factor is None:
                return fit_planes(values, count, PLANE_GROUP)
            return compensated_planes(values, factor, count, PLANE_GROUP)
        except CheckpointError as error:
            raise CheckpointError(f"{self.checkpoint.path}: tensor {matrix.name}: {error}") from None

    def _entry(
        self, matrix: Matrix, encoding: str, kind: str | None, parts: tuple[int, ...], group: int
    ) -> TensorEntry:
        slices = cut(matrix, encoding, self.writer.shard_bytes - 2 * HEADER_BYTES_A_KEY)
        entry = TensorEntry(matrix.name, encoding, (matrix.rows, matrix.columns), kind, parts, group, slices)
        self.writer.entries[matrix.name] = entry
        return entry

    @staticmethod
    def _pieces(matrix: Matrix, start: int, stop: int, least: int = 1) -> Iterator[Span]:
        """Rows ``start:stop`` of the stacked sources, in pieces (``piece_spans``)."""
        base = 0
        for part, (_, rows) in enumerate(matrix.sources):
            first, last = max(start, base), min(stop, base + rows)
            for span in piece_spans(first - base, last - base, matrix.columns, least):
                yield part, *span
            base += rows

    def _values(self, matrix: Matrix, parts: Sequence[Ternary | None], span: Span) -> np.ndarray:
        index, start, stop = span
        part = parts[index]
        if part is not None:
            return part.values(start, stop)
        name, rows = matrix.sources[index]
        return read_rows(self.checkpoint, name, (rows, matrix.columns), start, stop)

    def _tensor_scale(self, matrix: Matrix, parts: Sequence[Ternary | None]) -> np.float32:
        """The scale of an nvfp4 tensor, for which all of it is read once more."""

        def greatest(span: Span) -> float:
            return float(np.abs(self._values(matrix, parts, span)).max())

        return encodings.nvfp4_tensor_scale(max(self.workers.map(greatest, self._pieces(matrix, 0, matrix.rows))))

    def _encode(
        self, matrix: Matrix, values: np.ndarray, encoding: str, tensor_scale: np.float32 | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        try:
            if tensor_scale is not None:
                return encodings.encode_nvfp4(values, tensor_scale)
            return encodings.encode(values, encoding)
        except CheckpointError as error:
            raise CheckpointError(f"{self.checkpoint.path}: tensor {matrix.name}: {error}") from None


def _linear_names(matrix: Matrix) -> list[str]:
    """The checkpoint's linears of the layers in a matrix."""
    return [] if matrix.is_embedding else [name for name, _ in matrix.sources]


def _squares(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _relative(errors: float, squares: float) -> float:
    """Relative RMS error, rounded, since the last digits of a long sum depend on the machine."""
    return float(f"{np.sqrt(errors / squares):.4g}") if squares else 0.0


def _merge_scales(matrix: Matrix, parts: Sequence[Ternary]) -> tuple[str, int, np.ndarray]:
    """(scale kind, group, scales) of stacked parts; parts of different kinds take the finest of them."""
    kinds = {(part.scale_kind, part.group) for part in parts}
    if len(kinds) == 1:
        kind, group = kinds.pop()
        return kind, group, np.concatenate([part.scales for part in parts])
    groups = [part.group for part in parts if part.group]
    if groups:
        return "group", min(groups), np.concatenate([_by_group(matrix, part, min(groups)) for part in parts])
    rows = [np.broadcast_to(part.scales, (len(part.trits),)) for part in parts]
    return "row", 0, np.concatenate(rows)


def _by_group(matrix: Matrix, part: Ternary, group: int) -> np.ndarray:
    """The part's scales as f16 ``[N, ceil(K/group)]``. Raises CheckpointError if f16 does not hold one."""
    groups = quotient_up(matrix.columns, group)
    if part.group:
        return np.repeat(part.scales, part.group // group, axis=1)[:, :groups]
    with np.errstate(over="ignore"):
        halves = part.scales.astype(np.float16)
    if not np.array_equal(halves.astype(np.float32), part.scales):
        raise CheckpointError(
            f"tensor {matrix.name}: one of its parts has scales by groups of columns, another a scale that f16 does "
            "not hold; together they are not supported"
        )
    return np.broadcast_to(halves[:, None], (len(part.trits), groups))


def _decoded(
    data: np.ndarray,
    scales: np.ndarray | None,
    encoding: str,
    shape: tuple[int, ...],
    tensor_scale: np.float32 | None,
) -> np.ndarray:
    own = None if tensor_scale is None else float(tensor_scale)
    return dequantize(WeightTensor("", encoding, shape, data, scales, None, (), group_of(encoding), own))
