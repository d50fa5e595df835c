"""``export``: a progress bar while it works, a summary table at the end."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .checkpoints.hub import is_hub
from .cli_eval import eval_progress, print_quality
from .export import ExportOptions, ExportResult, export
from .planes import MOST_PLANES
from .tensors import TensorReport
from .workers import default_workers


class Activations(StrEnum):
    """Precision of activations in ternary products."""

    a8 = "a8"
    a16 = "a16"
    f32 = "f32"


class Embedding(StrEnum):
    """Encoding of the embedding and the output head."""

    auto = "auto"
    q8 = "q8"
    q4 = "q4"
    f16 = "f16"


class PolicyName(StrEnum):
    """What becomes of a model that was not trained ternary."""

    ternary = "ternary"
    q4km = "q4km"
    q8 = "q8"
    all_fp4 = "all-fp4"


def export_command(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder, GGUF file, or hf:OWNER/NAME@REVISION of a hub.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to create.")],
    name: Annotated[str | None, typer.Option(help="Name shown to people; the source's name if left out.")] = None,
    description: Annotated[str, typer.Option(help="One sentence shown with the name.")] = "",
    activations: Annotated[
        Activations | None,
        typer.Option(help="Activations of ternary products: a8 as BitNet trains, a16 near float, f32 float."),
    ] = None,
    embedding: Annotated[
        Embedding,
        typer.Option(help="Encoding of the embedding and the output head; auto: ternary if exactly so, else q8."),
    ] = Embedding.auto,
    policy: Annotated[
        PolicyName | None,
        typer.Option(help="Accept linears that are not ternary: as ternary planes, 4 bits (some 8), 8 bits, NVFP4."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Encoding of the matrices of this name, such as 'layers.[01].*=q8'; the last one counts."),
    ] = None,
    ternary_planes: Annotated[
        int | None, typer.Option(help="Ternary planes that add up to a linear; 1 if left out.", min=1, max=MOST_PLANES)
    ] = None,
    compensate: Annotated[
        bool, typer.Option("--compensate", help="Let planes make good each other's rounding errors (GPTQ).")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="Text that --compensate runs the source on; Tercet's own if left out.")
    ] = None,
    shard_size: Annotated[int, typer.Option(help="Largest shard in MiB.", min=1, max=63)] = 32,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder with tokenizer.json, if the source has none.")] = None,
    card: Annotated[
        Path | None, typer.Option(help="JSON about the model for the page (FORMAT.md); the source's own if left out.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Threads; as many as there are processors if left out. They change nothing.", min=1),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the pack in --out.")] = False,
    no_eval: Annotated[
        bool, typer.Option("--no-eval", help="Do not measure what linears that are approximations have lost.")
    ] = False,
    accept_damage: Annotated[
        bool, typer.Option("--accept-damage", help="Write a pack even if it is BROKEN; it is stamped so.")
    ] = False,
) -> None:
    """Turn a checkpoint into a pack."""
    options = ExportOptions(
        name=name,
        description=description,
        activations=activations.value if activations else None,
        embedding=embedding.value,
        policy=policy.value if policy else None,
        keep=tuple(keep or ()),
        ternary_planes=ternary_planes,
        compensate=compensate,
        calibration=calibration,
        shard_mib=shard_size,
        force=force,
        tokenizer=tokenizer,
        card=card,
        evaluate=not no_eval,
        accept_damage=accept_damage,
        workers=workers or default_workers(),
    )
    try:
        result = _export(source, out, options)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; nothing half-written was left behind")
        raise typer.Exit(130) from None
    _summary(result)


class _Rate(ProgressColumn):
    """Weights a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed / 1e6:,.1f} M weights/s," if task.speed else "")


def _export(source: Path, out: Path, options: ExportOptions) -> ExportResult:
    bar = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TaskProgressColumn(),
        _Rate(),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("reading", total=None)

    def show(tensor: str, done: int, total: int) -> None:
        bar.start()
        bar.update(task, description=tensor or "finishing", completed=done, total=total)

    if not is_hub(source):  # downloads have bars of their own; ours comes after them
        bar.start()
    try:
        with eval_progress(bar.stop) as show_eval:
            return export(source, out, options, show, show_eval)
    finally:
        bar.stop()


def _summary(result: ExportResult) -> None:
    table = Table(title=escape(f"{result.manifest['name']}: {result.path}"), title_justify="left")
    for column in ("part", "encoding"):
        table.add_column(column)
    for column in ("tensors", "weights", "MB", "bits a weight", "weight error"):
        table.add_column(column, justify="right")
    for part, reports in _by_part(result).items():
        table.add_row(*_row(part, reports))
    console = Console()
    console.print(table)
    console.print(_proof(result), highlight=False)
    if "left_out" in result.manifest["source"]:
        console.print(escape(f"left out: {result.manifest['source']['left_out']}"), highlight=False)
    if result.quality is not None:
        print_quality(result.quality, result.manifest["name"])
    console.print(
        f"all weights: {result.weight_bytes / 1e6:.1f} MB, {result.manifest['bits_per_weight']:.2f} bits a weight over "
        f"{result.manifest['parameters'] / 1e6:.1f} M parameters, embedding included; ternary part: "
        f"{_bits_text(result.manifest['ternary_bits_per_weight'])}\n"
        f"whole pack: {result.bytes / 1e6:.1f} MB with tokenizer and program; {result.seconds:.1f} s",
        highlight=False,
    )


def _proof(result: ExportResult) -> str:
    """In words: how many linears are the checkpoint's own ternary weights, and what else is only near the original."""
    total, exact = (result.manifest["linears"][key] for key in ("total", "exact"))
    words = [f"{exact} of {total} linears are exactly the checkpoint's ternary weights"]
    for part, reports in _by_part(result).items():
        kind, encoding = part.split("|")
        near = [report for report in reports if not report.exact]
        count = sum(len(report.linears) for report in near)
        if near:
            words.append(f"{f'{count} of them in' if count else kind} {encoding}: an approximation")
    return "; ".join(words)


def _bits_text(bits: float | None) -> str:
    return "none" if bits is None else f"{bits:.2f} bits a weight"


#: What people call tensors that are no linears, norms or biases.
_KINDS = {"embed": "embedding", "positions": "positions", "lm_head": "output head"}


def _by_part(result: ExportResult) -> dict[str, list[TensorReport]]:
    parts: dict[str, list[TensorReport]] = {}
    for report in result.tensors:
        kind = _KINDS.get(report.name, "norms and biases" if report.encoding == "f32" else "linears")
        parts.setdefault(f"{kind}|{report.encoding}", []).append(report)
    return parts


def _row(part: str, reports: list[TensorReport]) -> tuple[str, ...]:
    weights, size = sum(r.weights for r in reports if r.plane == 0), sum(r.bytes for r in reports)
    error = max(report.error for report in reports)
    lossless = all(report.exact for report in reports)
    kind, encoding = part.split("|")
    return (
        kind,
        encoding,
        str(sum(r.plane == 0 for r in reports)),
        f"{weights / 1e6:.2f} M",
        f"{size / 1e6:.2f}",
        f"{8 * size / weights:.2f}",
        "exact" if lossless else f"{100 * error:.2f} %",
    )
