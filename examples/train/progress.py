"""What a run tells: lines while it goes, ``loss.jsonl``, and ``loss.png`` where matplotlib is installed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

JSONL, PNG = "loss.jsonl", "loss.png"


class Progress:
    """Of one run, for the first process; others are silent. tokens: a step's."""

    def __init__(self, folder: Path, label: str, steps: int, start: int, tokens: int, quiet: bool) -> None:
        self.folder, self.label, self.steps, self.tokens, self.quiet = folder, label, steps, tokens, quiet
        self.console = Console(stderr=True, soft_wrap=True, quiet=quiet)
        self.started, self.since, self.last = time.monotonic(), time.monotonic(), start
        if not quiet:
            folder.mkdir(parents=True, exist_ok=True)
            kept = [row for row in read_rows(folder) if row["step"] <= start]  # what a killed run wrote after its save
            (folder / JSONL).write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def say(self, text: str) -> None:
        """A line on stderr."""
        self.console.print(text, markup=False, highlight=False)

    def step(self, done: int, numbers: Mapping[str, float]) -> None:
        """Steps ``done`` so far: a line, and a row of ``loss.jsonl``."""
        now = time.monotonic()
        rate = (done - self.last) * self.tokens / max(now - self.since, 1e-9)
        left = (self.steps - done) * self.tokens / rate
        self.since, self.last = now, done
        row = {"step": done, "tokens": done * self.tokens, **numbers, "tokens_per_second": round(rate)}
        if self.quiet:
            return
        with (self.folder / JSONL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self.say(f"{self.label}  step {done}/{self.steps}  {shown}  {rate:,.0f} tokens/s  {_clock(left)} left")

    def draw(self) -> None:
        """``loss.png``; without matplotlib one line says that there is none."""
        if not self.quiet and not draw_losses(read_rows(self.folder), self.folder / PNG, self.label):
            self.say("no loss.png: matplotlib is not installed; the losses are in loss.jsonl")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of a run's ``loss.jsonl``, a line that was cut short left out; none if there is no file."""
    path = folder / JSONL
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def draw_losses(rows: list[dict[str, Any]], path: Path, title: str) -> bool:
    """Loss and held-out loss by tokens, as PNG; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name in ("loss", "held_loss"):
        points = [(row["tokens"] / 1e6, row[name]) for row in rows if name in row]
        if points:
            axes.plot(
                *zip(*points, strict=True), label=name.replace("_", " "), marker="." if len(points) < 40 else None
            )
    axes.set(xlabel="million tokens", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    if rows:
        axes.legend()
    figure.savefig(path, dpi=120)
    return True


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
