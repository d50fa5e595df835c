"""Checkpoint to pack: reads each tensor, encodes it, writes it, and describes what was done."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shaders.weights import WeightTensor

from . import __version__
from .checkpoints import Checkpoint, name_of, open_checkpoint
from .checkpoints.huggingface import json_bytes
from .errors import CheckpointError, PackerError
from .linears import BitNetScheme, bitnet_scheme, read_ternary
from .manifest import TensorEntry
from .models import Matrix, Vector, build_model
from .tensors import TensorEncoder, TensorReport, require_sources, row_bytes
from .tokens import special_ids
from .writer import PackWriter, check_target

#: Called before each tensor with its name, its number and the count of tensors.
Progress = Callable[[str, int, int], None]
#: Called with what is evaluated, the tokens done so far and those in all.
EvalProgress = Callable[[str, float, float], None]


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``export``; see ``python -m packer export --help``.

    evaluate: hold the pack against its source if linears are approximations, and grade it. accept_damage: write it even
    if it is BROKEN.
    """

    name: str | None = None
    description: str = ""
    activations: str | None = None
    embedding: str = "q8"
    linears: str | None = None
    shard_mib: int = 32
    force: bool = False
    tokenizer: Path | None = None
    evaluate: bool = False
    accept_damage: bool = False


@dataclass
class ExportResult:
    """Summary of an export. weight_bytes: the shards. bytes: all files of the pack."""

    path: Path
    manifest: dict[str, Any]
    tensors: list[TensorReport] = field(default_factory=list)
    weight_bytes: int = 0
    seconds: float = 0.0
    bytes: int = 0
    quality: dict[str, Any] | None = None


def export(
    source: Path,
    target: Path,
    options: ExportOptions,
    progress: Progress = lambda *_: None,
    eval_progress: EvalProgress = lambda *_: None,
) -> ExportResult:
    """Write a pack from a checkpoint. Raises PackerError (also CheckpointError); then the target is as before."""
    started = time.monotonic()
    check_target(target, force=options.force)  # before the source is read, which may take long
    checkpoint = open_checkpoint(source, options.tokenizer)
    writer = PackWriter(target, options.shard_mib << 20, force=options.force)
    try:
        result = _Exporter(checkpoint, writer, options).run(progress, eval_progress)
    except BaseException:
        writer.abandon()
        raise
    result.seconds = time.monotonic() - started
    result.bytes = sum(file.stat().st_size for file in result.path.iterdir())
    return result


class _Exporter:
    """One export: the model's tensors go through one after another."""

    def __init__(self, checkpoint: Checkpoint, writer: PackWriter, options: ExportOptions):
        config = checkpoint.info.config
        self.checkpoint, self.writer, self.options = checkpoint, writer, options
        self.model = build_model(config, checkpoint.path, checkpoint.names())
        self.scheme: BitNetScheme | None = bitnet_scheme(config, f"{checkpoint.path}: config")
        self.encoder = TensorEncoder(checkpoint, writer)

    def run(self, progress: Progress, eval_progress: EvalProgress) -> ExportResult:
        self._check_names()
        self._check_space()
        special = special_ids(self.checkpoint.info, self.model.vocabulary, self.checkpoint.path)
        tensors = self.model.tensors()
        for index, tensor in enumerate(tensors):
            progress(tensor.name, index, len(tensors))
            if isinstance(tensor, Vector):
                self.encoder.vector(tensor)
            else:
                self._matrix(tensor)
        progress("", len(tensors), len(tensors))
        self.writer.flush()
        encodings_used = {name: entry.encoding for name, entry in self.writer.entries.items()}
        activations = self._activations(encodings_used)
        program = self.model.program(encodings_used, activations)
        manifest = self._manifest(activations, special)
        result = ExportResult(self.writer.target, manifest, self.encoder.reports, self.writer.shard_total)
        self.writer.finish(
            manifest, program, self._files(manifest), lambda folder: self._evaluate(folder, result, eval_progress)
        )
        return result

    def _evaluate(self, folder: Path, result: ExportResult, progress: EvalProgress) -> None:
        """Grade a pack whose linears are approximations, before it is moved into place. Raises PackerError."""
        exact = all(report.exact for report in self.encoder.reports if report.linears)
        if exact or not self.options.evaluate:
            return
        from .export_gate import grade_new_pack  # late: it needs both models to run

        result.quality = grade_new_pack(
            folder, self.writer.target, self.checkpoint, accept_damage=self.options.accept_damage, progress=progress
        )
        result.manifest["grade"] = result.quality["grade"]

    def _activations(self, encodings_used: Mapping[str, str]) -> str:
        if "ternary" not in encodings_used.values():
            if self.options.activations in ("a8", "a16"):
                raise PackerError(
                    f"--activations {self.options.activations} is for ternary products, and this pack has none; "
                    "leave it out or use f32"
                )
            return "f32"
        return self.options.activations or ("a8" if self.scheme is not None else "a16")

    def _matrix(self, matrix: Matrix) -> None:
        if matrix.is_embedding:
            self.encoder.floats(matrix, self.options.embedding, [None] * len(matrix.sources))
            return
        parts = []
        for name, rows in matrix.sources:
            part = read_ternary(self.checkpoint, name, (rows, matrix.columns), self.scheme)
            if part is None and self.options.linears is None:
                raise CheckpointError(_not_ternary(self.checkpoint.path, name))
            parts.append(part)
        ternary = [part for part in parts if part is not None]
        if len(ternary) == len(parts):
            self.encoder.ternary(matrix, ternary)
        else:
            self.encoder.floats(matrix, str(self.options.linears), parts)

    def _check_names(self) -> None:
        """Every tensor of the model must be there, and every tensor that is there must have its place in the model."""
        path, present = self.checkpoint.path, set(self.checkpoint.names())
        wanted = require_sources(self.checkpoint, self.model.tensors())
        scales = {f"{name}_scale" for name in wanted if self.checkpoint.is_packed(name)}
        tied = {"lm_head.weight"} if self.model.tied else set()
        extra = sorted(name for name in present - wanted - scales - tied if not name.endswith(".rotary_emb.inv_freq"))
        if extra:
            raise CheckpointError(
                f"{path}: tensor {extra[0]} has no place in a {self.model.family} model of this config "
                f"({len(extra)} such); packing without it would give a model that computes something else"
            )

    def _check_space(self) -> None:
        """Refuse at once if not even the smallest pack fits the disk."""
        needed = 0
        for tensor in self.model.tensors():
            if isinstance(tensor, Matrix):
                encoding = self.options.embedding if tensor.is_embedding else "ternary"
                needed += tensor.rows * row_bytes(encoding, tensor.columns)
        folder = self.writer.target.parent
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise PackerError(
                f"{folder}: {free / 1e6:.1f} MB free, expected at least {needed / 1e6:.1f} MB for the pack; "
                "make room or choose another --out"
            )

    def _manifest(self, activations: str, special: Mapping[str, Any]) -> dict[str, Any]:
        model, info = self.model, self.checkpoint.info
        weights = sum(report.weights for report in self.encoder.reports)
        ternary = [report for report in self.encoder.reports if report.encoding == "ternary"]
        lossless = all(report.exact for report in self.encoder.reports)
        linears = [report for report in self.encoder.reports for _ in report.linears]
        return {
            "name": _printable(self.options.name or name_of(self.checkpoint)),
            "description": _printable(self.options.description),
            "license": info.license,
            "family": model.family,
            "source": dict(info.source),
            "activations": activations,
            "parameters": weights,
            "vocab_size": model.vocabulary,
            "context_length": model.context,
            "linears": {
                "total": len(linears),
                "exact": sum(report.exact and report.encoding == "ternary" for report in linears),
            },
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
            "tensors": [vars(item) for item in self.encoder.reports],
        }
        return {
            "tokenizer.json": info.tokenizer.tokenizer,
            "tokenizer_config.json": info.tokenizer.config,
            "report.json": json_bytes(report),
            **info.notices,
        }


def _printable(text: str) -> str:
    """Arguments and file names that are no UTF-8 come with halves of surrogate pairs; packs hold none."""
    return text.encode(errors="replace").decode()


def _bits(reports: list[TensorReport]) -> float:
    return round(8 * sum(item.bytes for item in reports) / sum(item.weights for item in reports), 4)


def _resident_bytes(entry: TensorEntry) -> int:
    """GPU bytes of a tensor: only the shape of its scales matters, so a stand-in does for the data."""
    scales = None if entry.scale is None and not entry.group else np.empty(0)
    stand_in = WeightTensor(
        entry.name, entry.encoding, entry.shape, np.empty(0), scales, entry.scale, entry.parts, entry.group
    )
    return stand_in.resident_bytes


def _not_ternary(path: Path, name: str) -> str:
    return (
        f"{path}: tensor {name} is not ternary. Rounding a model that was not trained ternary to -1, 0, +1 destroys it "
        "(SmolLM2-135M: perplexity from 10.0 to 3.5 million). Use --linears q8 (8.5 bits a weight, nearly lossless) or "
        "--linears q4 (4.5 bits), or train the model ternary"
    )
