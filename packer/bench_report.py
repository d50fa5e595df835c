"""The report of a benchmark, the same from every backend: its keys with their units, tables, JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shaders.native_tuning import words

from .bench_peers import PEER_COLUMNS, check_peers, missing_rows, peer_rows
from .errors import PackerError

#: Key -> keys inside, of an object or of each object of a list; () for plain values. The twin in JavaScript is
#: ``MeasureReport`` in web/engine/measure.js.
KEYS: Mapping[str, tuple[str, ...]] = {
    "date": (),  # ISO 8601
    "backend": (),  # native, node or browser
    "adapter": ("vendor", "architecture", "device", "description", "software"),
    "model": ("name", "parameters", "contextLength", "kvCache", "activations"),
    # The best of several timings, and their median.
    "bandwidth": ("bytesPerSecond", "medianBytesPerSecond", "bufferBytes"),
    # One token; bytes: weights with scales; share: of the bandwidth; dependentSeconds: where each product waits for
    # the one before; batch*: a product with many tokens, null for the head, which runs for one.
    "linears": (
        "name",
        "rows",
        "columns",
        "encoding",
        "bytes",
        "seconds",
        "share",
        "dependentSeconds",
        "batchTokens",
        "batchSeconds",
    ),
    # context: tokens in the cache at the start; spread: (most - least) / median of several runs.
    "decode": ("context", "tokensPerSecond", "spread"),
    "prefill": ("tokens", "tokensPerSecond"),  # from the prompt to the first token
    # A greedy step with so many tokens, each with logits, at the first context: time on the GPU, many steps in flight.
    # More than one token only where drafts are verified.
    "verify": ("tokens", "seconds"),
    "firstTokenSeconds": (),  # of the shortest of these prompts
    "loadSeconds": (),
    "dispatchesPerToken": (),
    "dispatchesPerLayer": (),
    "cpuMsPerToken": (),  # recording and submitting alone
    "limit": ("bytesPerToken", "tokensPerSecond", "ratio"),  # at the first context
    "kernels": (),  # constants in force of the kernels of a decode step that may be timed, by kind of operation
    "peers": (),  # other engines in the same run: bench_peers.PEER_KEYS
}
#: What stands for keys that files from before them lack.
LATER: Mapping[str, Any] = {"kernels": {}, "verify": []}


@dataclass(frozen=True)
class Rows:
    """A table: title, columns, rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Write the report as JSON, whole or not at all. Raises PackerError."""
    write_text(json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a file, whole or not at all. Raises PackerError."""
    check_writable(path)
    part = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PackerError(f"{path}: cannot be written ({error.strerror})") from None


def check_writable(path: Path) -> None:
    """Raise PackerError if a file could not be written there: best known before minutes of measuring."""
    if path.is_dir():
        raise PackerError(f"{path}: is a folder, expected the name of a file to write")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise PackerError(f"{path}: cannot be written, {path.parent} is no folder that can be written to")


def read_report(path: Path) -> dict[str, Any]:
    """A report from its file. Raises PackerError if it is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PackerError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise PackerError(f"{path}: not valid JSON ({error})") from None
    return check_report({**LATER, **report} if isinstance(report, dict) else report, str(path))


def check_report(report: Any, where: str) -> dict[str, Any]:
    """The report, if every key is there and every figure a number. Raises PackerError that names what is not."""
    if not isinstance(report, dict):
        raise PackerError(f"{where}: expected a report of bench, found {type(report).__name__}")
    for key, inside in KEYS.items():
        if key not in report:
            raise PackerError(f"{where}: no report of bench: {key!r} is missing")
        value = report[key]
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            name = f"{key}[{index}]" if isinstance(value, list) else key
            missing = [name for name in inside if not isinstance(one, dict) or name not in one]
            if missing and not (key == "adapter" and one is None):
                raise PackerError(f"{where}: no report of bench: {name} has no {missing[0]!r}")
            _check_numbers(one if inside and isinstance(one, dict) else {}, f"{where}: {name}")
    for key in ("linears", "decode", "prefill"):
        if not isinstance(report[key], list) or not report[key]:
            raise PackerError(f"{where}: no report of bench: {key!r} is no list with figures")
    check_peers(report["peers"], where)
    return report


def _check_numbers(figures: Mapping[str, Any], where: str) -> None:
    texts = {*KEYS["adapter"], "name", "encoding", "kvCache", "activations"}
    for name, value in figures.items():
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in texts and not plain and not (name.startswith("batch") and value is None):
            raise PackerError(f"{where}: {name} is {value!r}, expected a number")


def report_tables(report: Mapping[str, Any]) -> list[Rows]:
    """The report for people."""
    limit, model, peak = report["limit"], report["model"], report["bandwidth"]["bytesPerSecond"]
    adapter = report["adapter"] or {}
    facts = [
        ("model", f"{model['name']}, {model['activations']}, {model['kvCache']} cache of {model['contextLength']:,}"),
        ("device", f"{adapter.get('description') or adapter.get('device') or 'unknown'} ({report['backend']})"),
        ("date", report["date"]),
        ("read bandwidth", f"{_rate(peak)} over {report['bandwidth']['bufferBytes'] / 2**20:,.0f} MiB"),
        ("a token must read", f"{limit['bytesPerToken'] / 1e6:,.1f} MB"),
        ("limit", f"{limit['tokensPerSecond']:,.0f} tok/s, of which {100 * limit['ratio']:.0f} % are reached"),
        ("load", f"{report['loadSeconds']:.2f} s"),
        ("first token", f"{1000 * report['firstTokenSeconds']:.1f} ms"),
        ("dispatches", f"{report['dispatchesPerToken']} a token, {report['dispatchesPerLayer']:.2f} a layer"),
        ("processor", f"{report['cpuMsPerToken']:.3f} ms a token"),
    ]
    decode = [
        (f"{one['context']:,}", f"{one['tokensPerSecond']:,.1f}", f"{100 * one['spread']:.1f} %")
        for one in report["decode"]
    ]
    prefill = [(f"{one['tokens']:,}", f"{one['tokensPerSecond']:,.0f}") for one in report["prefill"]]
    return [
        Rows("Benchmark", ("", ""), facts),
        *_linear_tables(report["linears"]),
        Rows("Writing", ("after tokens", "tok/s", "spread"), decode),
        *_verify_tables(report["verify"]),
        Rows("Reading a prompt", ("tokens", "tok/s"), prefill),
        *([Rows("Kernels", ("", "constants"), list(words(report["kernels"])))] if report["kernels"] else []),
        *_peer_tables(report["peers"]),
    ]


def _peer_tables(peers: Sequence[Mapping[str, Any]]) -> list[Rows]:
    names = dict.fromkeys(f"{one['name']} {one['version']}" for one in peers)
    tables = [Rows(f"Beside {name}", PEER_COLUMNS, peer_rows(peers, name)) for name in names]
    tables.append(Rows("Peers that were not run", ("", ""), missing_rows(peers)))
    return [rows for rows in tables if rows.rows]


def _linear_tables(linears: Sequence[Mapping[str, Any]]) -> list[Rows]:
    """Products of one token, and of many: two tables, for one of all columns is wider than a terminal."""
    single = [
        (
            one["name"],
            f"{one['rows']:,} x {one['columns']:,}",
            one["encoding"],
            f"{1e6 * one['seconds']:.2f}",
            f"{100 * one['share']:.0f} %",
            f"{1e6 * one['dependentSeconds']:.2f}",
        )
        for one in linears
    ]
    batches = [
        (
            one["name"],
            f"{one['batchTokens']:,}",
            f"{1000 * one['batchSeconds']:.3f}",
            f"{one['rows'] * one['columns'] * one['batchTokens'] / one['batchSeconds'] / 1e12:.2f}",
        )
        for one in linears
        if one["batchTokens"] and one["batchSeconds"]
    ]
    tables = [
        Rows("Matrices, one token", ("", "rows x columns", "as", "us", "share", "us chained"), single),
        Rows("Matrices, many tokens", ("", "tokens", "ms", "TMAC/s"), batches),
    ]
    return [rows for rows in tables if rows.rows]


def _verify_tables(steps: Sequence[Mapping[str, Any]]) -> list[Rows]:
    """Steps that verify drafts against one token; none where no drafts are verified."""
    if len(steps) < 2:
        return []
    single = steps[0]["seconds"]
    rows = [
        (f"{one['tokens']}", f"{1000 * one['seconds']:.3f}", f"{one['seconds'] / single:.2f} x")
        for one in sorted(steps, key=lambda one: one["tokens"])
    ]
    return [Rows("Verifying drafts", ("tokens", "ms a step", "of one token"), rows)]


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e12:
        return f"{bytes_per_second / 1e12:.2f} TB/s"
    return f"{bytes_per_second / 1e9:.1f} GB/s"
