"""Checkpoint to pack: reads each tensor, encodes it, writes it, and describes what was done."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shaders.weights import WeightTensor

from . import __version__, encodings
from .checkpoints import Checkpoint, open_checkpoint
from .checkpoints.huggingface import json_bytes
from .errors import CheckpointError, PackerError
from .linears import BitNetScheme, bitnet_scheme, read_rows, read_ternary
from .manifest import TensorEntry, data_layout
from .models import Matrix, Vector, build_model
from .ternarize import Ternary
from .tokens import special_ids
from .writer import PackWriter

#: Rows are encoded in pieces of about this many bytes of float32, so that large tensors need little memory.
PIECE_BYTES = 16 << 20

#: Called before each tensor with its name, its number and the count of tensors.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``export``; see ``python -m packer export --help``."""

    name: str | None = None
    description: str = ""
    activations: str | None = None
    embedding: str = "q8"
    linears: str | None = None
    shard_mib: int = 32
    force: bool = False
    tokenizer: Path | None = None


@dataclass
class TensorReport:
    """What happened to one tensor. error: relative RMS error of the stored values; exact: no value changed."""

    name: str
    encoding: str
    weights: int
    bytes: int
    exact: bool
    error: float
    zeros: float | None = None


@dataclass
class ExportResult:
    """Summary of an export. bytes: all files of the pack."""

    path: Path
    manifest: dict[str, Any]
    tensors: list[TensorReport] = field(default_factory=list)
    seconds: float = 0.0
    bytes: int = 0


def export(
    source: Path, target: Path, options: ExportOptions, progress: Progress = lambda *_: None
) -> ExportResult:
    """Write a pack from a checkpoint. Raises PackerError (also CheckpointError); then the target is as before."""
    started = time.monotonic()
    checkpoint = open_checkpoint(source, options.tokenizer)
    _check_space(target)
    writer = PackWriter(target, options.shard_mib << 20, force=options.force)
    try:
        result = _Exporter(checkpoint, writer, options).run(progress)
    except BaseException:
        writer.abandon()
        raise
    result.seconds = time.monotonic() - started
    result.bytes = sum(file.stat().st_size for file in target.iterdir())
    return result


def _check_space(target: Path) -> None:
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < 64 << 20:
        raise PackerError(
            f"{parent}: {free >> 20} MiB free, expected at least 64 MiB; make room or choose another --out"
        )


class _Exporter:
    """One export: the model's tensors go through one after another."""

    def __init__(self, checkpoint: Checkpoint, writer: PackWriter, options: ExportOptions):
        config = checkpoint.info.config
        self.checkpoint, self.writer, self.options = checkpoint, writer, options
        self.model = build_model(config, checkpoint.path, checkpoint.names())
        self.scheme: BitNetScheme | None = bitnet_scheme(config, f"{checkpoint.path}: config")
        self.reports: list[TensorReport] = []

    def run(self, progress: Progress) -> ExportResult:
        special = special_ids(self.checkpoint.info, self.model.vocabulary, self.checkpoint.path)
        tensors = self.model.tensors()
        for index, tensor in enumerate(tensors):
            progress(tensor.name, index, len(tensors))
            if isinstance(tensor, Vector):
                self._vector(tensor)
            else:
                self._matrix(tensor)
        progress("", len(tensors), len(tensors))
        self.writer.flush()
        encodings_used = {name: entry.encoding for name, entry in self.writer.entries.items()}
        activations = self._activations(encodings_used)
        program = self.model.program(encodings_used, activations)
        manifest = self._manifest(activations, special)
        self.writer.finish(manifest, program, self._files(manifest))
        return ExportResult(self.writer.target, manifest, self.reports)

    def _activations(self, encodings_used: Mapping[str, str]) -> str:
        if "ternary" not in encodings_used.values():
            if self.options.activations in ("a8", "a16"):
                raise PackerError(
                    f"--activations {self.options.activations} is for ternary products, and this pack has none; "
                    "leave it out or use f32"
                )
            return "f32"
        return self.options.activations or ("a8" if self.scheme is not None else "a16")

    def _vector(self, vector: Vector) -> None:
        values = np.concatenate(
            [read_rows(self.checkpoint, name, (length,), 0, length) for name, length in vector.sources]
        )
        self.writer.add(f"{vector.name}.data.0", values)
        entry = TensorEntry(vector.name, "f32", (vector.length,), None, (), 0, (1,))
        self.writer.entries[vector.name] = entry
        self.reports.append(TensorReport(vector.name, "f32", vector.length, values.nbytes, True, 0.0))

    def _matrix(self, matrix: Matrix) -> None:
        if matrix.is_embedding:
            self._float_matrix(matrix, self.options.embedding)
            return
        parts = []
        for name, rows in matrix.sources:
            part = read_ternary(self.checkpoint, name, (rows, matrix.columns), self.scheme)
            if part is None and self.options.linears is None:
                raise CheckpointError(_not_ternary(self.checkpoint.path, name))
            parts.append(part)
        ternary = [part for part in parts if part is not None]
        if len(ternary) == len(parts):
            self._ternary_matrix(matrix, ternary)
        else:
            self._float_matrix(matrix, str(self.options.linears))

    def _ternary_matrix(self, matrix: Matrix, parts: list[Ternary]) -> None:
        kind, group, scales = _merge_scales(matrix, parts)
        slices = self._slices(matrix, "ternary")
        entry = TensorEntry(
            matrix.name,
            "ternary",
            (matrix.rows, matrix.columns),
            kind,
            tuple(rows for _, rows in matrix.sources) if kind == "parts" else (),
            group,
            slices,
        )
        trits = np.concatenate([part.trits for part in parts])
        size = scales.nbytes
        for index, (start, stop) in enumerate(_spans(slices)):
            packed = encodings.encode_trits(trits[start:stop])
            size += packed.nbytes
            self.writer.add(f"{matrix.name}.data.{index}", packed)
            if kind != "parts":
                self.writer.add(f"{matrix.name}.scale.{index}", scales[start:stop])
        if kind == "parts":
            self.writer.add(f"{matrix.name}.scale", scales)
        self.writer.entries[matrix.name] = entry
        zeros = float((trits == 0).mean())
        self.reports.append(TensorReport(matrix.name, "ternary", trits.size, size, True, 0.0, zeros))

    def _float_matrix(self, matrix: Matrix, encoding: str) -> None:
        slices = self._slices(matrix, encoding)
        group = encodings.GROUP if encoding in ("q8", "q4") else 0
        shape = (matrix.rows, matrix.columns)
        self.writer.entries[matrix.name] = TensorEntry(matrix.name, encoding, shape, None, (), group, slices)
        size, squares, errors = 0, 0.0, 0.0
        for index, (start, stop) in enumerate(_spans(slices)):
            data, scales, square, error = self._encode_rows(matrix, encoding, start, stop)
            self.writer.add(f"{matrix.name}.data.{index}", data)
            if scales is not None:
                self.writer.add(f"{matrix.name}.scale.{index}", scales)
            size += data.nbytes + (0 if scales is None else scales.nbytes)
            squares, errors = squares + square, errors + error
        relative = float(np.sqrt(errors / squares)) if squares else 0.0
        weights = matrix.rows * matrix.columns
        self.reports.append(TensorReport(matrix.name, encoding, weights, size, errors == 0, relative))

    def _encode_rows(self, matrix: Matrix, encoding: str, start: int, stop: int):
        """Encoded rows, their scales, and sums of squares of the values and of the errors."""
        data, scales, square, error = [], [], 0.0, 0.0
        for values in self._float_rows(matrix, start, stop):
            encoded, scale = _encode(values, encoding, self.checkpoint.path, matrix.name)
            data.append(encoded)
            scales.append(scale)
            square += float(np.square(values, dtype=np.float64).sum())
            error += float(
                np.square(values - _decoded(encoded, scale, encoding, values.shape), dtype=np.float64).sum()
            )
        return np.concatenate(data), None if scales[0] is None else np.concatenate(scales), square, error

    def _float_rows(self, matrix: Matrix, start: int, stop: int) -> Iterator[np.ndarray]:
        """Float rows ``start:stop`` of the stacked sources in pieces; ternary sources are multiplied out."""
        step = max(1, PIECE_BYTES // (4 * matrix.columns))
        base = 0
        for name, rows in matrix.sources:
            for first in range(max(start, base), min(stop, base + rows), step):
                last = min(first + step, stop, base + rows)
                yield self._rows_of(name, rows, matrix.columns, first - base, last - base)
            base += rows

    def _rows_of(self, name: str, rows: int, columns: int, start: int, stop: int) -> np.ndarray:
        if self.checkpoint.is_packed(name) or (
            self.scheme is not None and self.scheme.online and ".layers." in name
        ):
            part = read_ternary(self.checkpoint, name, (rows, columns), self.scheme)
            assert part is not None
            return part.trits[start:stop].astype(np.float32) * part.scales
        return read_rows(self.checkpoint, name, (rows, columns), start, stop)

    def _slices(self, matrix: Matrix, encoding: str) -> tuple[int, ...]:
        """Rows of each slice: as many as a shard holds, in multiples of 64."""
        dtype, width = data_layout(encoding, matrix.columns)
        row_bytes = (
            width * {"U8": 1, "I8": 1, "F16": 2, "F32": 4}[dtype] + 2 * matrix.columns // encodings.GROUP + 4
        )
        most = max(64, (self.options.shard_mib << 20) // row_bytes // 64 * 64)
        full, rest = divmod(matrix.rows, most)
        return (most,) * full + ((rest,) if rest else ())

    def _manifest(self, activations: str, special: Mapping[str, Any]) -> dict[str, Any]:
        model, info = self.model, self.checkpoint.info
        weights = sum(report.weights for report in self.reports)
        ternary = [report for report in self.reports if report.encoding == "ternary"]
        lossless = all(report.exact for report in self.reports)
        return {
            "name": self.options.name or self.checkpoint.path.stem,
            "description": self.options.description,
            "license": info.license,
            "family": model.family,
            "source": dict(info.source),
            "activations": activations,
            "parameters": weights,
            "vocab_size": model.vocabulary,
            "context_length": model.context,
            "bits_per_weight": round(self.writer.shard_total * 8 / weights, 4),
            "ternary_bits_per_weight": _bits(ternary) if ternary else None,
            "resident_bytes": sum(_resident_bytes(entry) for entry in self.writer.entries.values()),
            "kv": {"layers": model.layers, "kv_heads": model.kv_heads, "head_dim": model.head_dim},
            **special,
            "grade": "lossless" if lossless else None,
        }

    def _files(self, manifest: Mapping[str, Any]) -> dict[str, bytes]:
        info = self.checkpoint.info
        report = {
            "tercet": __version__,
            "options": {
                "activations": manifest["activations"],
                "embedding": self.options.embedding,
                "linears": self.options.linears,
            },
            "tensors": [vars(item) for item in self.reports],
        }
        return {
            "tokenizer.json": info.tokenizer.tokenizer,
            "tokenizer_config.json": info.tokenizer.config,
            "report.json": json_bytes(json.loads(json.dumps(report))),
            **info.notices,
        }


def _bits(reports: list[TensorReport]) -> float:
    return round(8 * sum(item.bytes for item in reports) / sum(item.weights for item in reports), 4)


def _resident_bytes(entry: TensorEntry) -> int:
    """GPU bytes of a tensor: only the shape of its scales matters, so a stand-in does for the data."""
    scales = None if entry.scale is None and not entry.group else np.empty(0)
    stand_in = WeightTensor(
        entry.name, entry.encoding, entry.shape, np.empty(0), scales, entry.scale, entry.parts, entry.group
    )
    return stand_in.resident_bytes


def _spans(slices: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    start = 0
    for rows in slices:
        yield start, start + rows
        start += rows


def _merge_scales(matrix: Matrix, parts: list[Ternary]) -> tuple[str, int, np.ndarray]:
    """(scale kind, group, scales) of stacked parts; parts of different kinds fall back to one scale a row."""
    kinds = {(part.scale_kind, part.group) for part in parts}
    if len(kinds) == 1:
        kind, group = kinds.pop()
        return kind, group, np.concatenate([part.scales for part in parts])
    if any(part.scale_kind == "group" for part in parts):
        raise CheckpointError(
            f"tensor {matrix.name}: its parts have scales of different kinds {sorted(kinds)}; not supported"
        )
    rows = [np.broadcast_to(part.scales, (len(part.trits),)) for part in parts]
    return "row", 0, np.concatenate(rows)


def _encode(values: np.ndarray, encoding: str, path: Path, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    try:
        if encoding == "q8":
            return encodings.encode_q8(values)
        if encoding == "q4":
            return encodings.encode_q4(values)
        return (encodings.encode_f16 if encoding == "f16" else encodings.encode_f32)(values), None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: tensor {name}: {error}") from None


def _decoded(
    data: np.ndarray, scales: np.ndarray | None, encoding: str, shape: tuple[int, ...]
) -> np.ndarray:
    from shaders.reference import dequantize

    group = encodings.GROUP if scales is not None else 0
    return dequantize(WeightTensor("", encoding, shape, data, scales, None, (), group))


def _not_ternary(path: Path, name: str) -> str:
    return (
        f"{path}: tensor {name} is not ternary. Rounding a model that was not trained ternary to -1, 0, +1 destroys it "
        "(SmolLM2-135M: perplexity from 10.0 to 3.5 million). Use --linears q8 (8.5 bits a weight, nearly lossless) or "
        "--linears q4 (4.5 bits), or train the model ternary"
    )
