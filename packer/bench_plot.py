"""Reports of ``bench`` as an SVG bar chart: writing against the limit of the memory, and reading prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .bench_report import read_report, write_text
from .errors import PackerError

_WIDTH, _MARGIN, _LABEL, _ROW, _BAR = 760, 24, 132, 26, 16
_SPAN = _WIDTH - 2 * _MARGIN - _LABEL - 150
_TEXT, _FAINT, _LIMIT, _WRITING, _READING = "#1c1f23", "#5d6570", "#d9dee5", "#1f6feb", "#6b7f99"


def plot_files(reports: Sequence[Path], target: Path) -> None:
    """Draw the reports one below the other. Raises PackerError if one is none, or the target cannot be written."""
    if not reports:
        raise PackerError("nothing to draw: give the reports (JSON files of bench) after --plot FILE.svg")
    write_text(draw([read_report(path) for path in reports]), target)


def draw(reports: Sequence[Mapping[str, Any]]) -> str:
    """The chart as SVG text; reports as in ``bench_report.KEYS``."""
    parts: list[str] = []
    top = _MARGIN
    for report in reports:
        top = _block(parts, report, top) + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img">\n'
        f'<rect width="{_WIDTH}" height="{top}" rx="8" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _block(parts: list[str], report: Mapping[str, Any], top: int) -> int:
    """One report from ``top`` on; returns where it ends."""
    adapter, limit = report["adapter"] or {}, report["limit"]["tokensPerSecond"]
    device = adapter.get("description") or adapter.get("device") or "unknown device"
    backend = {"node": "Dawn in Node", "native": "wgpu", "browser": "browser"}.get(report["backend"], report["backend"])
    parts.append(_text(_MARGIN, top + 14, report["model"]["name"], size=16, weight=600))
    parts.append(_text(_MARGIN, top + 34, f"{device}, {backend}, {str(report['date'])[:10]}", fill=_FAINT))
    top += 46
    writing = [(f"after {one['context']:,} tokens", one["tokensPerSecond"]) for one in report["decode"]]
    most = max(limit, *(rate for _, rate in writing))
    top = _section(parts, top, "Writing", writing, _WRITING, most=most, limit=limit)
    reading = [(f"{one['tokens']:,} tokens", one["tokensPerSecond"]) for one in report["prefill"]]
    return _section(parts, top + 8, "Reading a prompt", reading, _READING, most=max(rate for _, rate in reading))


def _section(
    parts: list[str],
    top: int,
    title: str,
    bars: Sequence[tuple[str, float]],
    colour: str,
    *,
    most: float,
    limit: float | None = None,
) -> int:
    parts.append(_text(_MARGIN, top + 14, title, weight=600))
    top += 24
    left = _MARGIN + _LABEL
    for label, rate in bars:
        parts.append(_text(_MARGIN, top + 13, label, fill=_FAINT))
        value = f"{rate:,.0f} tok/s"
        if limit:
            parts.append(_rect(left, top, _SPAN * limit / most, _LIMIT))
            value += f", {100 * rate / limit:.0f} %"
        parts.append(_rect(left, top, max(2.0, _SPAN * rate / most), colour))
        parts.append(_text(left + _SPAN + 10, top + 13, value))
        top += _ROW
    if limit:
        note = f"grey: what the memory allows, {limit:,.0f} tok/s"
        parts.append(_text(left, top + 8, note, fill=_FAINT, size=11))
        top += 16
    return top


def _rect(x: float, y: float, width: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" rx="3" fill="{fill}"/>'


def _text(x: float, y: float, text: str, *, fill: str = _TEXT, size: int = 13, weight: int = 400) -> str:
    return f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
