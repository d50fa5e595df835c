"""``inspect`` and ``verify``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from .card import CARD, read_card
from .errors import PackerError
from .manifest import DTYPE_BYTES, TensorEntry
from .pack import Pack

PackArgument = Annotated[Path, typer.Argument(help="Folder that holds pack.json.", metavar="PACK")]


def inspect_command(
    path: PackArgument, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show what a pack holds."""
    pack = Pack(path)
    facts = _facts(pack)
    if as_json:
        typer.echo(json.dumps(facts, indent=1, ensure_ascii=False))
        return
    table = Table(show_header=False, title=escape(facts["name"]), title_justify="left")
    for field in (
        "family",
        "license",
        "activations",
        "parameters",
        "context_length",
        "bytes",
        "resident_bytes",
        "bits_per_weight",
        "ternary_bits_per_weight",
        "grade",
        "eos_ids",
        "shards",
        "encodings",
        "linears",
        "operations",
        "trained_on",
        "tokens",
        "notes",
    ):
        if field in facts:
            table.add_row(field.replace("_", " "), escape(_readable(field, facts)))
    Console().print(table)


def _facts(pack: Pack) -> dict[str, Any]:
    """The manifest without hashes, counts of encodings and operations, and the bits that a weight of each takes."""
    manifest = pack.manifest
    plain = {key: value for key, value in manifest.items() if key not in ("shards", "files", "tensors", "chunk_bytes")}
    operations = Counter(op["op"] for op in pack.program["body"] + pack.program["logits"])
    return {
        **plain,
        "bytes": pack.total_bytes,
        "shards": len(manifest["shards"]),
        "encodings": dict(Counter(entry.encoding for entry in pack.entries.values())),
        "encoding_bits": _encoding_bits(pack.entries.values()),
        "operations": dict(operations),
        **_card(pack),
        "tensors": {name: entry.to_json() for name, entry in pack.entries.items()},
    }


def _card(pack: Pack) -> dict[str, Any]:
    """What the pack's card says; no reader depends on it, so a broken one hides nothing else."""
    if CARD not in pack.manifest["files"]:
        return {}
    try:
        return read_card(pack.path / CARD)
    except PackerError as error:
        return {"notes": f"the card cannot be read: {error}"}


def _encoding_bits(entries: Iterable[TensorEntry]) -> dict[str, float]:
    """Bits that a weight takes in each encoding, over its tensors, scales and padding included."""
    n_bytes: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for entry in entries:
        layouts = entry.keys().values()
        n_bytes[entry.encoding] += sum(prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in layouts)
        weights[entry.encoding] += prod(entry.shape)
    return {encoding: round(8 * n_bytes[encoding] / weights[encoding], 4) for encoding in weights}


def _readable(field: str, facts: Mapping[str, Any]) -> str:
    value = facts[field]
    if field == "encodings":
        bits = facts["encoding_bits"]
        return ", ".join(f"{count} {name} of {bits[name]:.2f} bits" for name, count in value.items())
    if field == "linears" and isinstance(value, dict) and {"total", "exact"} <= value.keys():
        return f"{value['exact']} of {value['total']} exactly the source's ternary weights"
    if value is None:
        return "not measured" if field == "grade" else "none"
    if field.endswith("bytes"):
        return f"{value / 1e6:.1f} MB"
    if field == "tokens":
        return f"{value:,}"
    if field == "parameters":
        return f"{value / 1e6:.1f} M"
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def verify_command(path: PackArgument) -> None:
    """Check every hash and every rule of FORMAT.md."""
    pack = Pack(path)
    with Progress(
        TextColumn("checking"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=pack.total_bytes)
        pack.verify(lambda done, total: bar.update(task, completed=done, total=total))
    count = len(pack.manifest["shards"]) + len(pack.manifest["files"])
    Console().print(
        f"{path}: sound; {count} files, {len(pack.entries)} tensors, {pack.total_bytes / 1e6:.1f} MB",
        highlight=False,
        markup=False,
    )
