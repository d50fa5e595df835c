"""``python -m packer.bench_run``: the benchmark with the standard library's command line and plain text.

For machines that have NumPy, safetensors and a GPU binding, but neither typer nor rich. Options as of ``bench``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .bench import BACKENDS, BenchOptions, run_bench
from .bench_report import Rows, check_writable, report_tables, write_report
from .errors import PackerError
from .plan import KV_KINDS
from .shapes import SHAPES


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the tables and write the report; the exit status."""
    given = _parser().parse_args(arguments)
    options = BenchOptions(**{name: value for name, value in vars(given).items() if name != "json"})
    try:
        if given.json:
            check_writable(given.json)
        report = run_bench(options, _Teller())
        for rows in report_tables(report):
            print(plain(rows), flush=True)
        if given.json:
            write_report(report, given.json)
    except PackerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m packer.bench_run", description="Measure a pack on this GPU.")
    parser.add_argument("pack", nargs="?", type=Path, help="folder that holds pack.json")
    parser.add_argument("--shape", help=f"instead of a pack: {', '.join(SHAPES)}")
    parser.add_argument("--backend", choices=BACKENDS, default="native")
    parser.add_argument("--context", type=int)
    parser.add_argument("--kv", choices=KV_KINDS, default="f16")
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument("--cache", type=Path, help="folder for synthesized packs")
    parser.add_argument("--peers", type=Path, help="folder node_modules that holds onnxruntime-web")
    parser.add_argument("--peers-seconds", type=int, help="that peers are given")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--kernels", help="force kernels: norm_linear.ROWS=32,linear_ternary=off; default: time nothing"
    )
    return parser


class _Teller:
    """Prints what is measured, each thing once, with the time."""

    def __init__(self) -> None:
        self._began, self._told = time.monotonic(), set[str]()

    def __call__(self, done: int, total: int, label: str) -> None:
        if label not in self._told:
            print(f"{time.monotonic() - self._began:7.1f} s  {label}", file=sys.stderr, flush=True)
        self._told.add(label)


def plain(rows: Rows) -> str:
    """A table as lines of text."""
    cells: list[tuple[str, ...]] = [rows.columns, *rows.rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(rows.columns))]
    lines, heads = [], any(rows.columns)
    for row in cells if heads else rows.rows:
        first, others = row[0].ljust(widths[0]), zip(row[1:], widths[1:], strict=True)
        # Without heads the others are sentences.
        lines.append("  ".join([first, *(cell.rjust(width) if heads else cell for cell, width in others)]))
    return "\n".join([rows.title, *(f"  {line.rstrip()}" for line in lines), ""])


if __name__ == "__main__":
    sys.exit(main())
