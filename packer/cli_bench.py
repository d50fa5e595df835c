"""``plan`` and ``bench``."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .bench import BenchOptions, run_bench
from .bench_plot import plot_files
from .bench_report import Rows, check_writable, report_tables, write_report
from .cli_generate import CacheKind, Kernels
from .errors import PackerError
from .plan import make_plan, memory_of, plan_lines
from .shapes import SHAPES

PackOption = Annotated[Path | None, typer.Argument(help="Folder that holds pack.json.", metavar="[PACK]")]
ShapeOption = Annotated[str | None, typer.Option(help=f"Instead of a pack: {', '.join(SHAPES)}.", metavar="NAME")]
Kv = Annotated[CacheKind, typer.Option(help="KV cache precision.")]


class Backend(StrEnum):
    """Which engine is measured."""

    native = "native"
    node = "node"


def plan_command(
    path: PackOption = None,
    shape: ShapeOption = None,
    kv_gib: Annotated[float | None, typer.Option(help="Size of the whole KV cache in GiB.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the whole KV cache.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of one request; the model's context if left out.")] = None,
    kv: Kv = CacheKind.f16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the memory that a model needs, and the tokens and parallel requests that fit a KV cache.

    Without a model, --kv-gib and --tokens give the bytes a token.
    """
    plan = make_plan(memory_of(path, shape), kv=kv.value, kv_gib=kv_gib, tokens=tokens, context=context)
    if as_json:
        typer.echo(json.dumps(plan.to_json(), indent=1, ensure_ascii=False))
        return
    table = Table(show_header=False)
    for what, how_much in plan_lines(plan):
        table.add_row(escape(what), escape(how_much))
    Console().print(table)


def bench_command(
    path: PackOption = None,
    shape: ShapeOption = None,
    backend: Annotated[Backend, typer.Option(help="wgpu here, or the page's engine in Node.")] = Backend.native,
    context: Annotated[int | None, typer.Option(help="Tokens of the KV cache; default: what the runs need.")] = None,
    kv: Kv = CacheKind.f16,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there.", metavar="FILE")] = None,
    peers: Annotated[
        Path | None, typer.Option(help="Measure other engines, too: the node_modules that holds them.", metavar="DIR")
    ] = None,
    peers_seconds: Annotated[int | None, typer.Option(help="Time for the other engines.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter runs.")] = False,
    kernels: Kernels = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the reports given instead of PACK as SVG, and measure nothing.")
    ] = None,
    reports: Annotated[list[Path] | None, typer.Argument(help="Reports for --plot.", metavar="[JSON]...")] = None,
) -> None:
    """Measure how fast this GPU runs a model, against what its memory allows."""
    if plot is not None:
        plot_files([*([path] if path else []), *(reports or [])], plot)
        typer.echo(f"{plot}: drawn")
        return
    if reports:
        raise PackerError(f"one pack at a time, found {len(reports) + 1}; reports are for --plot")
    if json_file is not None:
        check_writable(json_file)
    options = BenchOptions(path, shape, backend.value, context, kv.value, quick, None, peers, peers_seconds, kernels)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("getting ready", total=None)
        report = run_bench(
            options, lambda done, total, label: bar.update(task, completed=done, total=total, description=escape(label))
        )
    console = Console()
    for rows in report_tables(report):
        console.print(_table(rows))
    if json_file is not None:
        write_report(report, json_file)


def _table(rows: Rows) -> Table:
    # As narrow as it gets, to be read in a terminal of 80 columns; a title is no reason for another line.
    table = Table(
        title=escape(rows.title),
        title_justify="left",
        min_width=len(rows.title),
        show_header=any(rows.columns),
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    heads = any(rows.columns)  # without, the last column has sentences
    for index, column in enumerate(rows.columns):
        # Names may take another line, figures are never cut.
        figures = bool(index and heads)
        table.add_column(escape(column), justify="right" if figures else "left", no_wrap=figures)
    for row in rows.rows:
        table.add_row(*map(escape, row))
    return table
