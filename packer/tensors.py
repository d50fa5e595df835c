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
from .compensate import compensated_planes
from .errors import CheckpointError
from .linears import piece_spans, read_rows
from .manifest import DTYPE_BYTES, TensorEntry, data_layout
from .models import Matrix, Vector, plane_name
from .planes import GROUP as PLANE_GROUP
from .planes import Planes, fit_planes
from .ternarize import Ternary
from .writer import HEADER_BYTES_A_KEY, PackWriter


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
    """Puts tensors into a writer, one after another. reports: one for each, in order."""

    def __init__(self, checkpoint: Checkpoint, writer: PackWriter):
        self.checkpoint, self.writer = checkpoint, writer
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
        for index, (start, stop) in enumerate(_spans(entry.slices)):
            packed = []
            for part, first, last in self._pieces(matrix, start, stop):
                trits = parts[part].trits[first:last]
                zeros += trits.size - int(np.count_nonzero(trits))
                packed.append(encodings.encode_trits(trits))
                own = slice(part, part + 1) if kind == "parts" else slice(starts[part] + first, starts[part] + last)
                piece = WeightTensor(
                    matrix.name, "ternary", trits.shape, packed[-1], scales[own], kind, (len(trits),), group
                )
                self._prove(matrix, part, parts[part], (first, last), piece)
            data = np.concatenate(packed)
            size += data.nbytes
            self.writer.add(f"{matrix.name}.data.{index}", data)
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
        for index, (start, stop) in enumerate(_spans(entry.slices)):
            data, scales = [], []
            for part, first, last in self._pieces(matrix, start, stop):
                values = self._values(matrix, part, parts[part], first, last)
                encoded, scale = self._encode(matrix, values, encoding, tensor_scale)
                error = values - _decoded(encoded, scale, encoding, values.shape, tensor_scale)
                squares += float(np.square(values, dtype=np.float64).sum())
                errors += float(np.square(error, dtype=np.float64).sum())
                data.append(encoded)
                scales += [] if scale is None else [scale]
            arrays = {"data": data, "scale": scales} if scales else {"data": data}
            for kind, pieces in arrays.items():
                array = np.concatenate(pieces)
                size += array.nbytes
                self.writer.add(f"{matrix.name}.{kind}.{index}", array)
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
        for index, (start, stop) in enumerate(_spans(entries[0].slices)):
            pieces = []
            for part, first, last in self._pieces(matrix, start, stop):
                values = self._values(matrix, part, parts[part], first, last)
                pieces.append(self._fit_planes(matrix, values, count, factor))
                squares += float(np.square(values, dtype=np.float64).sum())
                errors += float(np.square(values - pieces[-1].values(), dtype=np.float64).sum())
            for plane, one in enumerate(named):
                trits = np.concatenate([piece.trits[plane] for piece in pieces])
                data, scales = encodings.encode_trits(trits), np.concatenate([piece.scales[plane] for piece in pieces])
                zeros[plane] += trits.size - int(np.count_nonzero(trits))
                sizes[plane] += data.nbytes + scales.nbytes
                self.writer.add(f"{one.name}.data.{index}", data)
                self.writer.add(f"{one.name}.scale.{index}", scales)
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
        slices = _slices(matrix, encoding, self.writer.shard_bytes - 2 * HEADER_BYTES_A_KEY)
        entry = TensorEntry(matrix.name, encoding, (matrix.rows, matrix.columns), kind, parts, group, slices)
        self.writer.entries[matrix.name] = entry
        return entry

    @staticmethod
    def _pieces(matrix: Matrix, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Rows ``start:stop`` of the stacked sources as (source, its first row, its last), in pieces."""
        base = 0
        for part, (_, rows) in enumerate(matrix.sources):
            first, last = max(start, base), min(stop, base + rows)
            for span in piece_spans(first - base, last - base, matrix.columns):
                yield part, *span
            base += rows

    def _values(self, matrix: Matrix, index: int, part: Ternary | None, start: int, stop: int) -> np.ndarray:
        if part is not None:
            return part.values(start, stop)
        name, rows = matrix.sources[index]
        return read_rows(self.checkpoint, name, (rows, matrix.columns), start, stop)

    def _tensor_scale(self, matrix: Matrix, parts: Sequence[Ternary | None]) -> np.float32:
        """The scale of an nvfp4 tensor, for which all of it is read once more."""
        pieces = self._pieces(matrix, 0, matrix.rows)
        greatest = (np.abs(self._values(matrix, part, parts[part], first, last)).max() for part, first, last in pieces)
        return encodings.nvfp4_tensor_scale(float(max(greatest)))

    def _encode(
        self, matrix: Matrix, values: np.ndarray, encoding: str, tensor_scale: np.float32 | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        try:
            if tensor_scale is not None:
                return encodings.encode_nvfp4(values, tensor_scale)
            return encodings.encode(values, encoding)
        except CheckpointError as error:
            raise CheckpointError(f"{self.checkpoint.path}: tensor {matrix.name}: {error}") from None


def _slices(matrix: Matrix, encoding: str, shard_bytes: int) -> tuple[int, ...]:
    """Rows of each slice: as many as a shard holds, in multiples of 64."""
    most = max(64, shard_bytes // row_bytes(encoding, matrix.columns) // 64 * 64)
    full, rest = divmod(matrix.rows, most)
    return (most,) * full + ((rest,) if rest else ())


def row_bytes(encoding: str, columns: int) -> int:
    """Most bytes that a row takes in a pack, its scales included."""
    dtype, width = data_layout(encoding, columns)
    scales = (4 if encoding == "q4a" else 2) * quotient_up(columns, encodings.GROUP) + 4
    return width * DTYPE_BYTES[dtype] + scales


def _linear_names(matrix: Matrix) -> list[str]:
    """The checkpoint's linears of the layers in a matrix."""
    return [] if matrix.is_embedding else [name for name, _ in matrix.sources]


def _relative(errors: float, squares: float) -> float:
    """Relative RMS error, rounded, since the last digits of a long sum depend on the machine."""
    return float(f"{np.sqrt(errors / squares):.4g}") if squares else 0.0


def _spans(slices: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    start = 0
    for rows in slices:
        yield start, start + rows
        start += rows


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
