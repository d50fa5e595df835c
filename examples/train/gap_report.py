"""Results of ``fp4-gap``: kept as JSON, as a table, as a plot."""

from __future__ import annotations

import datetime
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from .errors import TrainError

BASELINE = "bf16"
JSON = "fp4-gap.json"


@dataclass(frozen=True)
class Gap:
    """Of an arm at a horizon. mean, spread: percent, over seeds; spread None for one seed. seeds: how many."""

    arm: str
    label: str
    horizon: float
    loss: float
    mean: float
    spread: float | None
    seeds: int

    def text(self) -> str:
        """``1.23 ± 0.05``."""
        return f"{self.mean:+.2f}" + (f" ± {self.spread:.2f}" if self.spread is not None else "")


class Results:
    """Runs of one setting, in ``fp4-gap.json`` of a folder."""

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path, self.record = path, record

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any], device: str) -> Results:
        """What the folder has, or nothing yet. Raises TrainError if it has results of other settings."""
        path = folder / JSON
        if not path.is_file():
            head = {
                "what": "4-bit formats are EMULATED: numbers rounded as the format does, products in bf16",
                "date": datetime.date.today().isoformat(),
                "device": device,
                "torch": torch.__version__,
            }
            return cls(path, {**head, **settings, "runs": []})
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            runs = record["runs"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise TrainError(f"{path}: no results of fp4-gap ({error!r}); name another --out") from None
        differ = [
            f"{name} {record.get(name)}, not {value}" for name, value in settings.items() if record.get(name) != value
        ]
        if differ and runs:
            raise TrainError(f"{path}: has runs of other settings ({'; '.join(differ)}); name another --out")
        return cls(path, record)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All runs so far."""
        found: list[dict[str, Any]] = self.record["runs"]
        return found

    def find(self, arm: str, seed: int, horizon: float) -> dict[str, Any] | None:
        """A run that was done."""
        wanted = (arm, seed, horizon)
        return next((r for r in self.runs if (r["arm"], r["seed"], r["tokens_per_parameter"]) == wanted), None)

    def add(self, run: dict[str, Any], write: bool = True) -> None:
        """Keep a run, and the gaps that follow, at once on the disk."""
        self.runs.append(run)
        self.record["gaps"] = [
            {
                "arm": gap.arm,
                "label": gap.label,
                "tokens_per_parameter": gap.horizon,
                "held_loss": gap.loss,
                "gap_percent": gap.mean,
                "spread_percent": gap.spread,
                "seeds": gap.seeds,
            }
            for gap in self.gaps()
        ]
        if write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
            fresh.replace(self.path)

    def seconds_for(self, arm: str, tokens: int) -> float:
        """What a run may take, by the slowest run of its arm, or of all; 0 if none was done."""
        own = [run for run in self.runs if run["arm"] == arm] or self.runs
        return max((run["seconds"] / run["tokens"] for run in own), default=0.0) * tokens

    def gaps(self) -> list[Gap]:
        """Of every arm and horizon that BF16 runs of the same seeds exist for, in the order of the runs."""
        found = []
        for arm, horizon in dict.fromkeys((run["arm"], run["tokens_per_parameter"]) for run in self.runs):
            pairs = [
                (run, base)
                for run in self.runs
                if (run["arm"], run["tokens_per_parameter"]) == (arm, horizon)
                and (base := self.find(BASELINE, run["seed"], horizon))
            ]
            if not pairs:
                continue
            if any(run["held_loss"] is None for pair in pairs for run in pair):
                continue  # diverged: there is no mean
            gaps = [100 * (run["held_loss"] - base["held_loss"]) / base["held_loss"] for run, base in pairs]
            loss = statistics.fmean(run["held_loss"] for run, _ in pairs)
            spread = statistics.stdev(gaps) if len(gaps) > 1 else None
            found.append(Gap(arm, pairs[0][0]["label"], horizon, loss, statistics.fmean(gaps), spread, len(gaps)))
        return found

    def baseline_spread(self, horizon: float) -> float | None:
        """Standard deviation of BF16's own held-out loss over seeds, in percent of it: the noise of one run."""
        own = [run for run in self.runs if (run["arm"], run["tokens_per_parameter"]) == (BASELINE, horizon)]
        losses = [run["held_loss"] for run in own if run["held_loss"] is not None]
        return 100 * statistics.stdev(losses) / statistics.fmean(losses) if len(losses) > 1 else None

    def draw(self, path: Path) -> bool:
        """Bars of the gaps with their spread; False without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            Console(stderr=True).print(f"no {path.name}: matplotlib is not installed", highlight=False)
            return False
        gaps = [gap for gap in self.gaps() if gap.arm != BASELINE]
        arms, horizons = list(dict.fromkeys(g.arm for g in gaps)), sorted({g.horizon for g in gaps})
        figure = Figure(figsize=(8, 1.2 + 0.5 * max(len(arms), 1)), layout="constrained")
        axes = figure.subplots()
        height = 0.8 / max(len(horizons), 1)
        for number, horizon in enumerate(horizons):
            own = [gap for gap in gaps if gap.horizon == horizon]
            axes.barh(
                [arms.index(gap.arm) + (number - (len(horizons) - 1) / 2) * height for gap in own],
                [gap.mean for gap in own],
                height,
                xerr=[gap.spread or 0.0 for gap in own],
                label=f"{horizon:g} tokens a parameter",
            )
        axes.set_yticks(range(len(arms)), arms)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        record = self.record
        axes.set(
            xlabel="held-out loss above BF16's, %",
            title=f"{record['parameters'] / 1e6:.1f}M parameters; 4-bit EMULATED; {record['device']}, {record['date']}",
        )
        if gaps:
            axes.legend()
        figure.savefig(path, dpi=120)
        return True


def print_table(results: Results) -> None:
    """Gaps, and what they are measured against."""
    record = results.record
    horizons = sorted({gap.horizon for gap in results.gaps()})
    spreads = [f"{own:.2f} % at {h:g}" for h in horizons if (own := results.baseline_spread(h)) is not None]
    noise = f" BF16's loss itself varies over seeds by {', '.join(spreads)}." if spreads else ""
    table = Table(
        title=f"{record['preset']}, {record['parameters'] / 1e6:.1f}M parameters, {record['device']}, {record['date']}",
        caption=f"4-bit formats are EMULATED. {record['distinct_tokens'] / 1e6:.1f} M distinct training tokens.{noise}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("arm", "tokens/param.", "held-out loss", "gap, %", "seeds"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=name != "arm")
    for gap in sorted(results.gaps(), key=lambda gap: gap.horizon):
        shown = gap.text() if gap.arm != BASELINE else "0"
        emulated = " EMULATED" if "EMULATED" in gap.label else ""
        table.add_row(f"{gap.arm}{emulated}", f"{gap.horizon:g}", f"{gap.loss:.4f}", shown, str(gap.seeds))
    Console().print(table)


def verdict(results: Results, arm: str, horizon: float, bound: float) -> tuple[bool, str]:
    """Whether the arm's gap is within the bound, and in words; a gap that was not measured is not."""
    gaps = [gap for gap in results.gaps() if gap.horizon == horizon]
    found = next((gap for gap in gaps if gap.arm == arm), None)
    if found is None:
        failed = [run["failed"] for run in results.runs if run["arm"] in (arm, BASELINE) and "failed" in run]
        why = f" ({failed[0]})" if failed else ""
        return False, f"{arm} at {horizon:g} tokens a parameter has no gap to compare{why}"
    below = [f"{g.arm} ({g.horizon:g})" for g in results.gaps() if g.arm not in (arm, BASELINE) and g.mean <= bound]
    others = f"; within it, by tokens a parameter: {', '.join(below)}" if below else ""
    fine = math.isfinite(found.mean) and found.mean <= bound
    what = "within" if fine else "ABOVE"
    text = f"{found.label} at {horizon:g} tokens a parameter: {found.text()} %, {what} the bound of {bound:g} %{others}"
    return fine, text
