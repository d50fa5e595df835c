"""``eval`` and ``compare``."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .bench_report import check_writable, write_report
from .cli_generate import CacheKind
from .cli_inspect import PackArgument
from .compare import compare_packs
from .eval import EvalOptions, evaluate
from .eval_html import number, page
from .eval_source import open_source
from .pack import Pack
from .quality import replace, stamp


class EvalBackend(StrEnum):
    """Where the models run."""

    native = "native"
    numpy = "numpy"


def eval_command(
    path: PackArgument,
    against: Annotated[Path, typer.Option(help="The source: a checkpoint, hf:OWNER/NAME, or another pack.")],
    text: Annotated[Path | None, typer.Option(help="Text to score; Tercet's own few pages if left out.")] = None,
    kv: Annotated[CacheKind, typer.Option(help="KV cache of the pack; the source has f32.")] = CacheKind.f16,
    backend: Annotated[
        EvalBackend | None, typer.Option(help="GPU through wgpu, or NumPy; the GPU if there is a real one.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Most tokens to score; all of the text if left out.", min=1)
    ] = None,
    sums: Annotated[int, typer.Option(help="Questions for each operation and number of digits.", min=0, max=50)] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the report to this file.")] = None,
) -> None:
    """Measure what a pack has lost against its source; the report and the grade go into the pack."""
    if json_file is not None:
        check_writable(json_file)
    pack = Pack(path)
    options = EvalOptions(text, kv.value, backend.value if backend else None, tokens, sums)
    try:
        with eval_progress() as show:
            report = evaluate(pack, open_source(against), options, show)
        quality = report["quality"]
        html = page(report, {**pack.manifest, "grade": quality["grade"]})
        replace(path, lambda folder: stamp(folder, report, quality["grade"], html))
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; the pack is as it was")
        raise typer.Exit(130) from None
    if json_file is not None:
        write_report(report, json_file)
    print_quality(quality, pack.manifest["name"])
    Console().print(f"{path / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


class _Rate(ProgressColumn):
    """Tokens a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} tok/s" if task.speed else "")


class eval_progress:
    """A bar with rate and time left on standard error; gives the progress callback of ``evaluate``.

    before: called once before the bar is shown, to end another one.
    """

    def __init__(self, before: Callable[[], None] = lambda: None):
        self._before = before

    def __enter__(self) -> Callable[[str, float, float], None]:
        self._bar = Progress(
            TextColumn("{task.description:<30.30}"),
            BarColumn(20),
            TaskProgressColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(stderr=True),
            transient=True,
        )
        task = self._bar.add_task("reading", total=None)
        started = False

        def show(label: str, done: float, total: float) -> None:
            nonlocal started
            if not started:  # downloads have bars of their own; ours comes after them
                self._before()
                self._bar.start()
                started = True
            self._bar.update(task, description=escape(label), completed=done, total=total)

        return show

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def print_quality(quality: dict[str, Any], name: str) -> None:
    """The report in a few lines."""
    console, kl, ppl = Console(), quality["kl"], quality["perplexity"]
    colour = {"degraded": "yellow", "BROKEN": "bold red"}.get(quality["grade"], "green")
    console.print(f"{escape(name)}: [{colour}]{quality['grade']}[/], against {escape(quality['against']['name'])}")
    table = Table(show_header=False, box=box.SIMPLE, pad_edge=False)
    shares, sums = quality["arithmetic"]["share"], quality["arithmetic"]["asked"]
    greedy = [answer["first_difference"] for answer in quality["greedy"]]
    rows = [
        ("KL, nats a token", f"{number(kl['mean'])} ± {number(kl['error'])}"),
        ("99 %, 99.9 %, most", f"{number(kl['p99'])}, {number(kl['p999'])}, {number(kl['max'])}"),
        (
            "perplexity",
            f"{number(ppl['source']['value'])} -> {number(ppl['pack']['value'])} ± {number(ppl['pack']['error'])}, "
            f"{ppl['ratio']['value']:.4g} times",
        ),
        ("same top token", f"{100 * quality['same_top']['mean']:.1f} %"),
        ("change of probability", f"{100 * quality['rms_probability_change']:.2g} % RMS"),
        ("small sums", f"{100 * shares['source']:.0f} % -> {100 * shares['pack']:.0f} % of {sums}" if sums else "none"),
        ("greedy answers differ", ", ".join("no" if one is None else f"at {one + 1}" for one in greedy) or "not asked"),
        ("bits a weight", f"{quality['bits_per_weight']:.2f}"),
        ("tokens scored", f"{quality['scored_tokens']:,} of {escape(quality['text']['name'])}"),
        *(
            (run["label"], f"KL {number(run['kl']['mean'])}, top {100 * run['same_top']:.1f} %")
            for run in quality["runs"]
        ),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def compare_command(
    paths: Annotated[list[Path], typer.Argument(help="Folders that hold pack.json.", metavar="PACK...")],
    bench: Annotated[list[Path] | None, typer.Option(help="Reports of bench --json, for the speed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rank packs by what they have lost; size and speed stand beside it."""
    rows = compare_packs(paths, bench or [])
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("pack", overflow="fold", ratio=1, min_width=10)
    for column in ("grade", "KL", "sums", "MB", "bits", "tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, _cells(row)))
    console = Console()
    console.print(table)
    if not all(row["same_measure"] for row in rows):
        console.print("[yellow]These were not measured against the same source with the same text.[/]")
    if any(row["kl"] is None for row in rows):
        console.print("Packs that were not measured have no rank: run eval on them.")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    sums, speed = row["arithmetic"], row["tokens_per_second"]
    return (
        str(row["rank"] or "-"),
        row["name"],
        row["grade"] or "",
        number(row["kl"]),
        f"{100 * sums:.0f} %" if sums is not None else "",
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['bits_per_weight']:.2f}",
        f"{speed:,.0f}" if speed else "",
    )
