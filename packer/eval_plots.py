"""Plots of the quality report as inline SVG; colours come from the page's style sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 340, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 16, 42
_INNER, _TALL = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_KINDS = 6


def layer_plot(tensors: Sequence[Mapping[str, Any]]) -> str:
    """Output error of each kind of linear over the layers; empty where nothing was measured."""
    lines = _by_kind(tensors)
    if not lines:
        return ""
    most = max(value for points in lines.values() for _, value in points) or 1e-6
    last = max(layer for points in lines.values() for layer, _ in points)
    parts = [*_grid(most, percent), _label(_LEFT + _INNER / 2, HEIGHT - 6, "layer", "middle")]
    for layer in sorted({0, last // 2, last}):
        parts.append(_label(_across(layer, last), HEIGHT - _BOTTOM + 16, str(layer), "middle"))
    for index, (kind, points) in enumerate(lines.items()):
        where = [(_across(layer, last), _down(value, most)) for layer, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
        parts.append(f'<polyline class="line k{index % _KINDS}" points="{path}"/>')
        for (x, y), (layer, value) in zip(where, points, strict=True):
            title = f"<title>{escape(f'{kind}, layer {layer}: {percent(value)}')}</title>"
            parts.append(f'<circle class="dot k{index % _KINDS}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">{title}</circle>')
    legend = "".join(
        f'<span><i class="k{index % _KINDS}"></i>{escape(kind)}</span>' for index, kind in enumerate(lines)
    )
    return _svg(parts, "Output error of each linear by layer") + f'<p class="legend">{legend}</p>'


def kl_plot(histogram: Mapping[str, Any]) -> str:
    """Share of positions by the size of their KL divergence."""
    counts, edges = histogram["counts"], histogram["edges"]
    total, most = sum(counts) or 1, max(counts) or 1
    parts = _grid(most / total, percent)
    step = _INNER / len(counts)
    for index, count in enumerate(counts):
        tall = _TALL * count / most
        words = f"{_between(index, edges)}: {count} positions"
        parts.append(_bar(_LEFT + index * step + 2, tall, step - 4, "k0", words))
    for index, edge in list(enumerate(edges))[1::2]:  # all would not fit
        parts.append(_label(_LEFT + (index + 1) * step, HEIGHT - _BOTTOM + 16, f"{edge:g}", "middle"))
    parts.append(_label(_LEFT + _INNER / 2, HEIGHT - 6, "KL divergence, nats a token", "middle"))
    return _svg(parts, "Histogram of the KL divergence")


def arithmetic_plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Share of right answers by digits, source beside pack; empty where nothing was asked."""
    digits = sorted({row["digits"] for row in rows if row["asked"]})
    if not digits:
        return ""
    parts, step = _grid(1.0, percent), _INNER / len(digits)
    for index, digit in enumerate(digits):
        own = [row for row in rows if row["digits"] == digit]
        asked = sum(row["asked"] for row in own)
        for place, kind in enumerate(("source", "pack")):
            right = sum(row[kind] for row in own)
            x = _LEFT + index * step + step * (0.18 + 0.33 * place)
            parts.append(_bar(x, _TALL * right / asked, step * 0.3, f"k{place}", f"{kind}: {right} of {asked}"))
            parts.append(_label(x + step * 0.15, _TOP + _TALL * (1 - right / asked) - 4, f"{right}/{asked}", "middle"))
        word = f"{digit} digit{'s' if digit > 1 else ''}"
        parts.append(_label(_LEFT + (index + 0.5) * step, HEIGHT - _BOTTOM + 16, word, "middle"))
    legend = '<p class="legend"><span><i class="k0"></i>source</span><span><i class="k1"></i>pack</span></p>'
    return _svg(parts, "Right answers to small sums by digits") + legend


def percent(value: float) -> str:
    """A share as people read it."""
    return f"{100 * value:.0f} %" if value >= 0.1 or value == 0 else f"{100 * value:.2g} %"


def _by_kind(tensors: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for tensor in tensors:
        parts = str(tensor["name"]).split(".")
        error = tensor.get("output_error")
        if len(parts) == 3 and parts[0] == "layers" and parts[1].isdigit() and isinstance(error, int | float):
            lines.setdefault(parts[2], []).append((int(parts[1]), float(error)))
    return {kind: sorted(points) for kind, points in lines.items()}


def _between(index: int, edges: Sequence[float]) -> str:
    if index == 0:
        return f"below {edges[0]:g}"
    return f"above {edges[-1]:g}" if index == len(edges) else f"{edges[index - 1]:g} to {edges[index]:g}"


def _across(layer: int, last: int) -> float:
    return _LEFT + 8 + (_INNER - 16) * (layer / last if last else 0.5)


def _down(value: float, most: float) -> float:
    return _TOP + _TALL * (1 - value / most)


def _grid(most: float, words: Any) -> list[str]:
    """Lines at none, half and all of the greatest value."""
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _TOP + _TALL * (1 - share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_label(_LEFT - 6, y + 4, words(share * most), "end"))
    return parts


def _bar(x: float, tall: float, width: float, kind: str, title: str) -> str:
    y = _TOP + _TALL - tall
    return (
        f'<rect class="bar {kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{tall:.1f}" rx="2">'
        f"<title>{escape(title)}</title></rect>"
    )


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
