"""Grades of packs, the gate that keeps broken ones from being written, and how a report gets into a pack."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .checkpoints.huggingface import json_bytes
from .errors import PackerError
from .writer import file_entry, partial_folder, put_in_place

#: Greatest mean KL in nats a token of each grade; above the last one a pack is BROKEN.
GRADE_LIMITS = (("good", 0.005), ("usable", 0.07), ("degraded", 0.2))
BROKEN, LOSSLESS = "BROKEN", "lossless"


def grade_of(kl: float) -> str:
    """The grade of a mean KL divergence to the source, in nats a token; NaN is BROKEN."""
    return next((grade for grade, limit in GRADE_LIMITS if kl <= limit), BROKEN)


def final_grade(kl: float, *, exact: bool) -> str:
    """The grade that a pack is stamped with.

    A pack whose every tensor is exact stays ``lossless``, unless its activations or cache alone do the damage of the
    two lowest grades.
    """
    grade = grade_of(kl)
    return LOSSLESS if exact and grade in ("good", "usable") else grade


def require_acceptable(grade: str, kl: float, where: Path, *, accept_damage: bool) -> None:
    """Raise PackerError if a pack is BROKEN and nobody said that this is wanted."""
    if grade == BROKEN and not accept_damage:
        raise PackerError(
            f"{where}: the pack would be BROKEN: mean KL divergence to the source {kl:.3g} nats a token, expected at "
            f"most {GRADE_LIMITS[-1][1]}. Nothing was written. Keep more bits (--policy q8), or write it all the same "
            "with --accept-damage; it is stamped BROKEN then"
        )


def read_report(folder: Path) -> dict[str, Any]:
    """``report.json`` of a pack. Raises PackerError if it is no JSON object."""
    path = folder / "report.json"
    try:
        report = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise PackerError(f"{path}: not valid JSON ({error}); export the pack again") from None
    if not isinstance(report, dict):
        raise PackerError(f"{path}: expected a JSON object, found {type(report).__name__}; export the pack again")
    return report


def stamp(folder: Path, report: Mapping[str, Any], grade: str, page: str) -> dict[str, Any]:
    """Write report and grade into a pack that nobody reads meanwhile; returns the new ``pack.json``.

    page: ``report.html``, which no reader needs and ``pack.json`` does not list.
    """
    data = json_bytes(report)
    (folder / "report.json").write_bytes(data)
    (folder / "report.html").write_text(page, encoding="utf-8")
    manifest: dict[str, Any] = json.loads((folder / "pack.json").read_bytes())
    manifest["grade"] = grade
    manifest["files"]["report.json"] = file_entry(data)
    (folder / "pack.json").write_bytes(json_bytes(manifest))
    return manifest


def replace(folder: Path, change: Callable[[Path], Any]) -> None:
    """Change a pack through a copy that takes its place when it is whole; weights are linked, not copied.

    Whatever goes wrong on the way, the pack stays as it was. Raises PackerError if the disk does not allow it.
    """
    folder = Path(os.path.realpath(folder))
    fresh = partial_folder(folder)
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(folder, fresh, symlinks=True, copy_function=_link)
        for name in ("report.json", "report.html", "pack.json"):  # a link would change the old pack too
            (fresh / name).unlink(missing_ok=True)
            if name != "report.html":
                shutil.copyfile(folder / name, fresh / name)
        change(fresh)
        put_in_place(fresh, folder)
    except OSError as error:
        raise PackerError(f"{folder}: cannot write the report there ({error.strerror or error})") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another kind of disk, or one without links
        shutil.copy2(source, target, follow_symlinks=False)
