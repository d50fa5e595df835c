"""Ranks packs by their damage: measured ones first, by mean KL and arithmetic; size and speed only stand beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import PackerError
from .pack import Pack
from .quality import read_report


def compare_packs(paths: Sequence[Path], benches: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """One entry a pack, best first; packs without a report come last. Raises PackerError."""
    speeds = read_speeds(benches)
    rows = [_row(Pack(path), speeds) for path in paths]
    against = {row["against"] for row in rows if row["against"]}
    texts = {row["text_sha256"] for row in rows if row["text_sha256"]}
    for row in rows:
        row["same_measure"] = len(against) <= 1 and len(texts) <= 1
    ranked = sorted(rows, key=_order)
    for place, row in enumerate(ranked, 1):
        row["rank"] = place if row["kl"] is not None else None
    return ranked


def read_speeds(benches: Sequence[Path]) -> dict[str, float]:
    """Model name -> tokens a second of writing after the shortest context, of ``bench`` reports. Raises PackerError."""
    from .bench_report import read_report as read_bench  # late: it needs the GPU's tables

    found = {}
    for path in benches:
        report = read_bench(path)
        try:
            first = min(report["decode"], key=lambda one: one["context"])
            found[str(report["model"]["name"])] = float(first["tokensPerSecond"])
        except (KeyError, TypeError, ValueError):
            raise PackerError(f"{path}: no report of bench with decode speeds; make one with bench --json") from None
    return found


def _row(pack: Pack, speeds: Mapping[str, float]) -> dict[str, Any]:
    manifest, quality = pack.manifest, read_report(pack.path).get("quality")
    measured = _measured(quality, pack.path) if quality is not None else {}
    return {
        "pack": str(pack.path),
        "name": manifest["name"],
        "grade": manifest["grade"],
        "kl": measured.get("kl"),
        "kl_error": measured.get("kl_error"),
        "perplexity_ratio": measured.get("perplexity_ratio"),
        "same_top": measured.get("same_top"),
        "arithmetic": measured.get("arithmetic"),
        "arithmetic_source": measured.get("arithmetic_source"),
        "against": measured.get("against"),
        "text_sha256": measured.get("text_sha256"),
        "bytes": pack.total_bytes,
        "bits_per_weight": manifest["bits_per_weight"],
        "tokens_per_second": speeds.get(manifest["name"]),
    }


def _measured(quality: Any, path: Path) -> dict[str, Any]:
    """The numbers that rank a pack. Raises PackerError if the report does not hold them."""
    try:
        share = quality["arithmetic"]["share"]
        found = {
            "kl": float(quality["kl"]["mean"]),
            "kl_error": float(quality["kl"]["error"]),
            "perplexity_ratio": float(quality["perplexity"]["ratio"]["value"]),
            "same_top": float(quality["same_top"]["mean"]),
            "arithmetic": None if share["pack"] is None else float(share["pack"]),
            "arithmetic_source": None if share["source"] is None else float(share["source"]),
            "against": str(quality["against"]["name"]),
            "text_sha256": str(quality["text"]["sha256"]),
        }
        json.dumps(found, allow_nan=False)
    except (KeyError, TypeError, ValueError):
        raise PackerError(f"{path / 'report.json'}: its quality cannot be read; run eval on the pack again") from None
    return found


def _order(row: Mapping[str, Any]) -> tuple:
    """Measured before not measured; then least KL, most sums right, smallest."""
    if row["kl"] is None:
        return (1, 0.0, 0.0, row["bytes"], row["pack"])
    return (0, row["kl"], -(row["arithmetic"] or 0.0), row["bytes"], row["pack"])
