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
from .calibrate import Calibration, calibration_text
from .card import CARD, read_card
from .checkpoints import Checkpoint, name_of, open_checkpoint
from .checkpoints.huggingface import json_bytes
from .errors import CheckpointError, PackerError
from .eval_source import subject_of_checkpoint
from .linears import BitNetScheme, bitnet_scheme, read_ternary
from .manifest import TensorEntry
from .models import Matrix, Vector, build_model
from .policy import Choice, Policy, not_ternary, widest
from .slices import row_bytes
from .tensors import TensorEncoder, TensorReport, require_sources
from .ternarize import Ternary
from .tokens import special_ids
from .workers import Workers, default_workers
from .writer import PackWriter, check_target

#: Called before each tensor with its name, the weights done so far and those in all.
Progress = Callable[[str, int, int], None]
#: Called with what is evaluated, the tokens done so far and those in all.
EvalProgress = Callable[[str, float, float], None]


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``export``; see ``python -m packer export --help``.

    evaluate: hold the pack against its source if linears are approximations, and grade it. accept_damage: write it even
    if it is BROKEN. embedding: of the output head too; ``auto`` is ternary where that is exact, else q8. policy, keep,
    ternary_planes: encodings of what is not ternary, see ``policy.py``. compensate: round planes so that products, not
    weights, are near the original's on the text of the file ``calibration``. card: a file as in ``card.py``, instead of
    the checkpoint's. workers: threads that read and encode; the pack is the same with any number.
    """

    name: str | None = None
    description: str = ""
    activations: str | None = None
    embedding: str = "auto"
    policy: str | None = None
    keep: tuple[str, ...] = ()
    ternary_planes: int | None = None
    compensate: bool = False
    calibration: Path | None = None
    shard_mib: int = 32
    force: bool = False
    tokenizer: Path | None = None
    card: Path | None = None
    evaluate: bool = False
    accept_damage: bool = False
    workers: int = field(default_factory=default_workers)


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
        with Workers(options.workers) as workers:
            result = _Exporter(checkpoint, writer, options, workers).run(progress, eval_progress)
    except BaseException:
        writer.abandon()
        raise
    result.seconds = time.monotonic() - started
    result.bytes = sum(file.stat().st_size for file in result.path.iterdir())
    return result


class _Exporter:
    """One export: the model's tensors go through one after another."""

    def __init__(self, checkpoint: Checkpoint, writer: PackWriter, options: ExportOptions, workers: Workers):
        config = checkpoint.info.config
        self.checkpoint, self.writer, self.options, self.workers = checkpoint, writer, options, workers
        self.model = build_model(config, checkpoint.path, checkpoint.names())
        self.scheme: BitNetScheme | None = bitnet_scheme(config, f"{checkpoint.path}: config")
        self.encoder = TensorEncoder(checkpoint, writer, workers)
        matrices = [one for one in self.model.tensors() if isinstance(one, Matrix) and one.fixed is None]
        self.policy = Policy(options.policy, options.keep, matrices, self.model.layers, self.model.tied)
        self.policy.check_planes(options.ternary_planes, options.compensate, options.calibration)
        self.calibrated: str | None = None
        self._calibration: Calibration | None = None
        self._text = calibration_text(options.calibration) if options.compensate else None
        self._notices = dict(checkpoint.info.notices)
        if options.card is not None:
            self._notices[CARD] = json_bytes(read_card(options.card))

    def run(self, progress: Progress, eval_progress: EvalProgress) -> ExportResult:
        self._check_names()
        self._check_space()
        special = special_ids(self.checkpoint.info, self.model.vocabulary, self.checkpoint.path)
        tensors = self.model.tensors()
        if self._text is not None:
            self._calibration = Calibration(subject_of_checkpoint(self.checkpoint), self._text, self.workers)
        sizes = [tensor.rows * tensor.columns if isinstance(tensor, Matrix) else tensor.length for tensor in tensors]
        for index, tensor in enumerate(tensors):
            progress(tensor.name, sum(sizes[:index]), sum(sizes))
            if isinstance(tensor, Vector):
                self.encoder.vector(tensor)
            else:
                self._matrix(tensor)
        progress("", sum(sizes), sum(sizes))
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
        before = len(self.encoder.reports)
        if matrix.fixed is not None:
            choice = Choice(matrix.fixed, False, "always")
            self.encoder.floats(matrix, matrix.fixed, [None] * len(matrix.sources))
        else:
            choice = self._embedding(matrix) if matrix.is_embedding else self._linears(matrix)
        for report in self.encoder.reports[before:]:
            report.choice = choice.why

    def _embedding(self, matrix: Matrix) -> Choice:
        choice = self.policy.embedding(matrix)
        if self.options.embedding != "auto" and not choice.kept:
            choice = Choice(self.options.embedding, False, "--embedding")
        elif choice.encoding == "ternary" or not choice.kept:
            part = self._ternary_embedding(matrix)
            if part is not None:
                self.encoder.ternary(matrix, [part])
                return Choice("ternary", choice.kept, "exactly ternary")
        if choice.encoding == "ternary":
            raise PackerError(
                f"{choice.why}: {matrix.name} is an embedding or output head, which ternary planes cannot hold; "
                f"add --keep '{matrix.name}=q8', or name the layers alone: 'layers.*=ternary'"
            )
        if choice.encoding is None:
            choice = Choice("q8", False, "default")
        self.encoder.floats(matrix, str(choice.encoding), [None] * len(matrix.sources))
        return choice

    def _ternary_embedding(self, matrix: Matrix) -> Ternary | None:
        """An embedding or head that is exactly ternary; none of BitNet, which does not round the inputs of its head."""
        if self.scheme is not None:
            return None
        ((name, rows),) = matrix.sources
        return read_ternary(self.checkpoint, name, (rows, matrix.columns), None, self.workers)

    def _linears(self, matrix: Matrix) -> Choice:
        """Encode a matrix of the layers: without loss if all of it is ternary, and nobody wants it otherwise."""
        parts, choices = [], self.policy.linears(matrix)
        for index, (name, rows) in enumerate(matrix.sources):
            shape, choice = (rows, matrix.columns), choices[index]
            part = read_ternary(self.checkpoint, name, shape, self.scheme, self.workers)
            if part is None and choice.encoding is None:
                raise CheckpointError(not_ternary(self.checkpoint.path, name))
            parts.append(part)
            if part is not None and not (choice.kept and choice.encoding != "ternary"):
                choices[index] = Choice("ternary", False, "exactly ternary")
        ternary = [part for part in parts if part is not None]
        choice = widest(choices)
        if choice.encoding != "ternary":
            self.encoder.floats(matrix, str(choice.encoding), parts)
        elif len(ternary) == len(parts):
            self.encoder.ternary(matrix, ternary)
        else:
            factor = None
            if self._calibration is not None and self._text is not None:
                factor, self.calibrated = self._calibration.factor(matrix.name), self._text.sha256
            self.encoder.planes(matrix, parts, self.options.ternary_planes or 1, factor)
        return choice

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
                named = tensor.is_embedding and self.options.embedding != "auto"
                encoding = self.options.embedding if named else "ternary"
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
        weights = sum(report.weights for report in self.encoder.reports if report.plane == 0)
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
        tokenizer = self.checkpoint.info.tokenizer
        report: dict[str, Any] = {
            "tercet": __version__,
            "options": {
                "activations": manifest["activations"],
                "embedding": self.options.embedding,
                "policy": self.options.policy,
                "keep": list(self.options.keep),
                "ternary_planes": self.options.ternary_planes,
                "compensate": self.options.compensate,
            },
            "tensors": [vars(item) for item in self.encoder.reports],
        }
        if self.calibrated is not None:
            report["calibration"] = {"sha256": self.calibrated}
        return {
            "tokenizer.json": tokenizer.tokenizer,
            "tokenizer_config.json": tokenizer.config,
            "report.json": json_bytes(report),
            **self._notices,
        }


def _printable(text: str) -> str:
    """Arguments and file names that are no UTF-8 come with halves of surrogate pairs; packs hold none."""
    return text.encode(errors="replace").decode()


def _bits(reports: list[TensorReport]) -> float:
    weights = sum(item.weights for item in reports if item.plane == 0)
    return round(8 * sum(item.bytes for item in reports) / weights, 4)


def _resident_bytes(entry: TensorEntry) -> int:
    """GPU bytes of a tensor: only the shape of its scales matters, so a stand-in does for the data."""
    scales = None if entry.scale is None and not entry.group else np.empty(0)
    stand_in = WeightTensor(
        entry.name, entry.encoding, entry.shape, np.empty(0), scales, entry.scale, entry.parts, entry.group
    )
    return stand_in.resident_bytes
