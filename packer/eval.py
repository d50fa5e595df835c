"""The quality report: a pack held against its source, on text and on small sums."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .errors import PackerError
from .eval_measures import Positions, log_softmax
from .eval_run import Runner, best_backend, device_name, running
from .eval_source import Subject, require_same_vocabulary, subject_of_pack
from .eval_tasks import Answers, Tasks
from .eval_tensors import CAPTURED_TOKENS, compare_tensors
from .pack import Pack
from .quality import final_grade, grade_of, read_report
from .text import ChatText

#: Called with what is being done, the tokens done so far and those in all.
Progress = Callable[[str, float, float], None]

WINDOW = 512
#: Tokens at the start of a window that are not scored: a model knows too little there.
UNSCORED = 32
FEWEST_TOKENS = 16
_ROWS = 64


@dataclass(frozen=True)
class EvalOptions:
    """text: file to score, the packer's own if None. kv: cache of the pack; the source always has f32.

    tokens: most that are scored. sums: arithmetic questions for each operation and number of digits. prompts: greedy
    answers compared. run_tokens: scored for each row of the activations and cache table, 0 for no table.
    """

    text: Path | None = None
    kv: str = "f16"
    backend: str | None = None
    tokens: int | None = None
    sums: int = 5
    prompts: int = 4
    run_tokens: int = 480


@dataclass(frozen=True)
class Text:
    """A text to score. name: for people, without its folder."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """Of its UTF-8 bytes."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True)
class Window:
    """Tokens that are run together; those from ``first`` on are scored."""

    ids: list[int]
    first: int

    @property
    def rows(self) -> int:
        """Tokens scored."""
        return len(self.ids) - self.first

    @property
    def targets(self) -> np.ndarray:
        """The tokens scored, int ``[rows]``."""
        return np.asarray(self.ids[self.first :], dtype=np.int64)


def read_text(path: Path | None) -> Text:
    """The text of a file, or the packer's own. Raises PackerError if it is empty or no UTF-8."""
    if path is None:
        return Text("Tercet's own text", files("packer").joinpath("eval_text.txt").read_text(encoding="utf-8"))
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PackerError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise PackerError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from None
    if not content.strip():
        raise PackerError(f"{path}: the text is empty; give some pages of plain text")
    return Text(path.name, content)


def cut_windows(ids: Sequence[int], length: int, prefix: Sequence[int], most: int | None) -> list[Window]:
    """Windows of at most ``length`` tokens, each begun with ``prefix``; at most ``most`` tokens are scored.

    The first 32 tokens of a window, or the first quarter of a short one, are context only.
    """
    found: list[Window] = []
    step, left = length - len(prefix), most
    for start in range(0, len(ids), step):
        own = [*prefix, *ids[start : start + step]]
        first = max(1, len(prefix), min(UNSCORED, len(own) // 4))
        if left is not None:
            own = own[: first + left]
        if len(own) <= first or (found and len(own) < FEWEST_TOKENS):
            break
        found.append(Window(own, first))
        if left is not None:
            left -= found[-1].rows
    return found


def evaluate(pack: Pack, source: Subject, options: EvalOptions, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """``report.json`` with its ``quality`` and its tensors completed; nothing is written. Raises PackerError."""
    return _Evaluation(pack, source, options, progress).run()


class _Evaluation:
    """One evaluation: the source runs first, and its probabilities wait on the disk for those of the pack."""

    def __init__(self, pack: Pack, source: Subject, options: EvalOptions, progress: Progress):
        self.pack, self.source, self.options, self._progress = subject_of_pack(pack), source, options, progress
        self.manifest, self.report = pack.manifest, read_report(pack.path)
        self.text = read_text(options.text)
        self.calibration = calibration_hash(self.report)
        _require_other_text(self.text, self.calibration, pack.path)
        ids = require_same_vocabulary(source, self.pack, self.text.content)
        if len(ids) < FEWEST_TOKENS:
            raise PackerError(
                f"{self.text.name}: {len(ids)} tokens, expected at least {FEWEST_TOKENS}; give a longer text"
            )
        context = min(source.context, self.pack.context)
        chat = ChatText(pack)
        bos = self.manifest["bos_id"]
        prefix = [bos] if bos is not None and chat.encode_raw("a")[:1] == [bos] else []
        self.windows = cut_windows(ids, min(WINDOW, context), prefix, options.tokens)
        self.scored = sum(window.rows for window in self.windows)
        self.tasks = Tasks(chat, options.sums, options.prompts, self.manifest["eos_ids"], context)
        self.capacity = max(self.tasks.longest, max(len(window.ids) for window in self.windows))
        if options.backend is None:
            self.backend, self.device = best_backend()
        else:
            self.backend, self.device = options.backend, device_name(options.backend)
        self.runs = _runs(self.pack.activations, options.kv, self._has_ternary()) if options.run_tokens else []
        self._label, self._done = "", 0.0
        self._total = self._plan()

    def run(self) -> dict[str, Any]:
        size = 4 * self.scored * self.pack.vocabulary
        with tempfile.TemporaryDirectory(prefix="tercet-eval-", ignore_cleanup_errors=True) as folder:
            free = shutil.disk_usage(folder).free
            if free < size:
                raise PackerError(
                    f"{folder}: {free / 1e6:.0f} MB free, the source's probabilities need {size / 1e6:.0f} MB; "
                    "score fewer --tokens, or let TMPDIR name a larger disk"
                )
            shape = (self.scored, self.pack.vocabulary)
            kept = np.memmap(Path(folder) / "source", dtype=np.float32, mode="w+", shape=shape)
            try:
                return self._measure(kept)
            finally:
                del kept

    def _measure(self, kept: np.ndarray) -> dict[str, Any]:
        self._say(f"source: {self.source.name}")
        with running(self.source, self.backend, self.capacity, "f32") as model:
            for row, targets, found in self._probabilities(model, self.windows, self.source):
                kept[row : row + len(targets)] = found
            theirs = self.tasks.ask(model, self._advance)
        twice = [("source, activations f32, cache f32", "f32", "f32")]
        rows = self._other_runs(kept, self.source, twice[: self._asks_twice()])
        self._say(f"pack: {self.pack.name}")
        positions, ours = self._run_pack(kept)
        for label, activations, kv in self.runs:
            if (activations, kv) == (self.pack.activations, self.options.kv):
                few = positions.first(sum(window.rows for window in self._few()))
                rows.append(_run_row(label, activations, kv, few))
            else:
                rows += self._other_runs(kept, self.pack, [(label, activations, kv)])
        self._say("tensors")
        captured = self.windows[0].ids[:CAPTURED_TOKENS]
        share = CAPTURED_TOKENS / sum(prod(entry["shape"]) for entry in self.manifest["tensors"].values())
        tensors = compare_tensors(self.source, self.pack, captured, lambda weights: self._advance(share * weights))
        return self._report(positions, theirs, ours, rows, tensors)

    def _run_pack(self, kept: np.ndarray) -> tuple[Positions, Answers]:
        positions = Positions()
        with running(self.pack, self.backend, self.capacity, self.options.kv) as model:
            for row, targets, found in self._probabilities(model, self.windows, self.pack):
                positions.add(kept[row : row + len(targets)].astype(np.float64), found, targets)
            return positions, self.tasks.ask(model, self._advance)

    def _other_runs(
        self, kept: np.ndarray, subject: Subject, runs: Sequence[tuple[str, str, str]]
    ) -> list[dict[str, Any]]:
        """The first few windows with other activations or another cache, against the source."""
        rows = []
        for label, activations, kv in runs:
            self._say(label)
            positions = Positions()
            with running(subject, self.backend, self.capacity, kv, activations) as model:
                for row, targets, found in self._probabilities(model, self._few(), subject):
                    positions.add(kept[row : row + len(targets)].astype(np.float64), found, targets)
            rows.append(_run_row(label, activations, kv, positions))
        return rows

    def _probabilities(self, model: Runner, windows: Sequence[Window], subject: Subject):
        """(first row, tokens that came int ``[r]``, log-probabilities f64 ``[r, V]``), some rows at a time."""
        row = 0
        for window in windows:
            model.truncate(0)
            logits = model.step(window.ids[:-1], window.rows)
            if not np.isfinite(logits).all():
                raise PackerError(
                    f"{subject.where}: logits are NaN or infinite near token {row}; its weights are damaged"
                    + (", or this GPU computes wrongly: try --backend numpy" if self.backend == "native" else "")
                )
            for first in range(0, window.rows, _ROWS):
                targets = window.targets[first : first + _ROWS]
                # Of both models to float32, as the disk keeps them, so that equal models have a KL of exactly 0.
                found = log_softmax(logits[first : first + _ROWS]).astype(np.float32)
                yield row + first, targets, found.astype(np.float64)
            row += window.rows
            self._advance(len(window.ids))

    def _few(self) -> list[Window]:
        """Whole windows up to ``run_tokens``, one at least."""
        found: list[Window] = []
        for window in self.windows:
            if found and sum(one.rows for one in found) + window.rows > self.options.run_tokens:
                break
            found.append(window)
        return found

    def _asks_twice(self) -> int:
        """1 if the source rounds its activations itself, and float ones are worth a row; else 0."""
        return int(bool(self.options.run_tokens) and self.source.activations != "f32" and self._has_ternary())

    def _has_ternary(self) -> bool:
        return any(entry["encoding"] == "ternary" for entry in self.manifest["tensors"].values())

    def _plan(self) -> int:
        whole = sum(len(window.ids) for window in self.windows) + self.tasks.tokens
        others = sum(run[1:] != (self.pack.activations, self.options.kv) for run in self.runs) + self._asks_twice()
        return 2 * whole + others * sum(len(window.ids) for window in self._few()) + CAPTURED_TOKENS

    def _say(self, label: str) -> None:
        self._label = label
        self._advance(0)

    def _advance(self, tokens: float) -> None:
        self._done += tokens
        self._progress(self._label, self._done, self._total)

    def _report(
        self,
        positions: Positions,
        theirs: Answers,
        ours: Answers,
        rows: list[dict[str, Any]],
        tensors: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Any]:
        summary = positions.summary()
        mean = summary["kl"]["mean"]
        listed = _tensor_table(self.report.get("tensors"), self.manifest, tensors)
        exact = bool(listed) and all(entry.get("exact") is True for entry in listed)
        quality = {
            "grade": final_grade(mean, exact=exact),
            "kl_grade": grade_of(mean),
            "against": {"name": self.source.name, "kind": self.source.kind, "activations": self.source.activations},
            "text": {
                "name": self.text.name,
                "sha256": self.text.sha256,
                "tokens": sum(len(window.ids) for window in self.windows),
                "window": max(len(window.ids) for window in self.windows),
            },
            "calibration_sha256": self.calibration,
            "backend": self.backend,
            "device": self.device,
            "activations": self.pack.activations,
            "kv": self.options.kv,
            **summary,
            "arithmetic": self.tasks.arithmetic(theirs, ours),
            "greedy": self.tasks.greedy(theirs, ours),
            "runs": rows,
            "bits_per_weight": self.manifest["bits_per_weight"],
        }
        return {**self.report, "tensors": listed, "quality": quality}


def _run_row(label: str, activations: str, kv: str, positions: Positions) -> dict[str, Any]:
    return {"label": label, "activations": activations, "kv": kv, **positions.brief()}


def _runs(activations: str, kv: str, has_ternary: bool) -> list[tuple[str, str, str]]:
    """(label, activations, cache): each kind of activations with the chosen cache, each cache with the pack's own."""
    kinds = ("a8", "a16", "f32") if has_ternary else (activations,)
    pairs = [(kind, kv) for kind in kinds] + [(activations, cache) for cache in ("f32", "f16", "q8")]
    return [(f"activations {kind}, cache {cache}", kind, cache) for kind, cache in dict.fromkeys(pairs)]


def calibration_hash(report: Mapping[str, Any]) -> str | None:
    """SHA-256 of the text that the pack was calibrated with: ``calibration.sha256`` of ``report.json``."""
    calibration = report.get("calibration")
    found = calibration.get("sha256") if isinstance(calibration, dict) else None
    return found if isinstance(found, str) else None


def _require_other_text(text: Text, calibration: str | None, where: Path) -> None:
    if calibration == text.sha256:
        raise PackerError(
            f"{text.name}: {where} was calibrated with this very text, so its errors there say nothing; "
            "give another with --text"
        )


def _tensor_table(
    listed: Any, manifest: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The exporter's entries in order, completed by what was measured; packs without entries get new ones."""
    known = {entry["name"]: entry for entry in listed or [] if isinstance(entry, dict) and "name" in entry}
    table = []
    for name in [*[name for name in known if name in measured], *[name for name in measured if name not in known]]:
        tensor, shape = manifest["tensors"][name], manifest["tensors"][name]["shape"]
        entry = {"name": name, "encoding": tensor["encoding"], "weights": prod(shape), **known.get(name, {})}
        if isinstance(entry.get("bytes"), int):
            entry["bits_per_weight"] = round(8 * entry["bytes"] / entry["weights"], 4)
        found = {key: value for key, value in measured[name].items() if value is not None}
        # A pack is not exact because it equals another pack: its exporter must have said so of the checkpoint.
        exact = found.pop("exact", False) and entry.get("exact") is True
        table.append({**entry, **found, "exact": exact})
    return table
