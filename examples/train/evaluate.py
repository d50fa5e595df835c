"""``evaluate``: what a checkpoint has learned, as JSON: held-out loss, sums by their digits, rewards of its answers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from .checkpoint import check_tokenizer, load_model, read_checkpoint
from .distributed import world
from .errors import TrainError
from .generate import GREEDY, generate
from .model import Decoder
from .options import Data
from .pretrain import next_token_loss
from .rewards import FORMAT, RIGHT, has_format, verifier_reward
from .streams import check_vocabulary, held_batches, pretrain_tokens, rows, sft_batch
from .tokenizer import ChatTokenizer
from .trainer import to_device

_MOST_BATCHES = 1 << 20


@dataclass(frozen=True)
class Measures:
    """What is measured. sequence: tokens of a row. tokens: at most so many held-out ones. prompts: at most so many of
    each kind. new_tokens: the longest answer. batch: rows at a time."""

    sequence: int = 256
    tokens: int = 500_000
    prompts: int = 100
    new_tokens: int = 64
    batch: int = 32


@torch.no_grad()
def mean_loss(model: Decoder, batches: Sequence[Any], device: torch.device) -> tuple[float, int]:
    """Mean cross-entropy in nats over all targets of the batches, and how many there are."""
    total, count = 0.0, 0
    for batch in batches:
        loss = next_token_loss(model, to_device(batch, device))
        total, count = total + float(loss.total), count + int(loss.weight)
    return (total / count if count else math.nan), count


def text_loss(model: Decoder, data: Path, measures: Measures, device: torch.device) -> dict[str, Any]:
    """Loss, perplexity and number of tokens on the held-out flat stream."""
    tokens = pretrain_tokens(data, "held")
    check_vocabulary(tokens, model.config.vocab_size, data / "pretrain-held.bin")
    most = max(measures.tokens // (measures.sequence * measures.batch), 1)
    loss, count = mean_loss(model, held_batches(data, measures.batch, measures.sequence, most), device)
    return {"loss": round(loss, 5), "perplexity": round(math.exp(min(loss, 700.0)), 3), "tokens": count}


def chat_loss(model: Decoder, data: Path, measures: Measures, device: torch.device) -> dict[str, Any]:
    """The same of the assistant's tokens in held-out conversations."""
    found = [row for row in rows(data, "sft", "held") if len(row["tokens"]) <= measures.sequence + 1]
    parts = [found[i : i + measures.batch] for i in range(0, len(found), measures.batch)]
    loss, count = mean_loss(model, [sft_batch(part, measures.sequence) for part in parts], device)
    if not count:
        return {"loss": None, "perplexity": None, "tokens": 0}
    return {"loss": round(loss, 5), "perplexity": round(math.exp(min(loss, 700.0)), 3), "tokens": count}


def kind_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Task, and for arithmetic ``sum 2`` and the like."""
    if row.get("task") == "arithmetic":
        return "arithmetic", f"{row.get('operation')} {row.get('digits')}"
    return str(row.get("task")), ""


def prompt_rewards(
    model: Decoder, tokenizer: ChatTokenizer, found: Sequence[Mapping[str, Any]], measures: Measures
) -> list[tuple[str, float]]:
    """Greedy answer and verifier's reward for each prompt. Prompts of like length are asked together."""
    order = sorted(range(len(found)), key=lambda i: len(found[i]["prompt"]))
    result: list[tuple[str, float]] = [("", 0.0)] * len(found)
    batches = [order[i : i + measures.batch] for i in range(0, len(order), measures.batch)]
    console = Console(stderr=True)
    for batch in track(batches, "answers", console=console, transient=True, disable=not console.is_terminal):
        replies = generate(model, [found[i]["prompt"] for i in batch], measures.new_tokens, GREEDY, tokenizer.ends)
        for i, reply in zip(batch, replies, strict=True):
            text = tokenizer.decode(reply)
            result[i] = text, verifier_reward(text, found[i]["gold"])
    return result


def choose_prompts(data: Path, measures: Measures, context: int) -> list[dict[str, Any]]:
    """The first ``measures.prompts`` held-out prompts of each kind that leave room for an answer."""
    taken: Counter[tuple[str, str]] = Counter()
    chosen = []
    for row in rows(data, "prompts", "held"):
        kind = kind_of(row)
        if taken[kind] < measures.prompts and len(row["prompt"]) + measures.new_tokens <= context:
            taken[kind] += 1
            chosen.append(row)
    return chosen


def report(found: Sequence[Mapping[str, Any]], answers: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Rewards by task, and arithmetic's share of right numbers by operation and digits."""
    tasks: dict[str, list[tuple[str, float]]] = {}
    cells: dict[str, list[float]] = {}
    for row, answer in zip(found, answers, strict=True):
        task, cell = kind_of(row)
        tasks.setdefault(task, []).append(answer)
        if cell:
            cells.setdefault(cell, []).append(float(answer[1] >= RIGHT))
    rewards = {}
    for task, own in sorted(tasks.items()):
        counts = Counter(f"{reward:.1f}" for _, reward in own)
        rewards[task] = {
            "asked": len(own),
            "mean": round(sum(reward for _, reward in own) / len(own), 4),
            "right": round(sum(reward >= RIGHT for _, reward in own) / len(own), 4),
            "format": round(sum(has_format(text) for text, _ in own) / len(own), 4),
            "counts": {f"{value:.1f}": counts[f"{value:.1f}"] for value in (0.0, FORMAT, RIGHT, RIGHT + FORMAT)},
        }
    arithmetic = {
        cell: {"asked": len(right), "right": round(sum(right) / len(right), 4)} for cell, right in sorted(cells.items())
    }
    return {"rewards": rewards, "arithmetic": arithmetic}


def evaluate(init: Path, data: Path, measures: Measures, device: torch.device) -> dict[str, Any]:
    """All measures of the checkpoint in ``init`` on the held-out streams in ``data``. Raises TrainError."""
    model, found = load_model(init, device)
    check_tokenizer(found, data)
    if measures.sequence > found.model.max_context:
        raise TrainError(f"--sequence {measures.sequence} is longer than the context of {found.model.max_context}")
    model.eval()
    losses = {name: of(model, data, measures, device) for name, of in (("text", text_loss), ("chat", chat_loss))}
    prompts = choose_prompts(data, measures, found.model.max_context)
    answers = prompt_rewards(model, ChatTokenizer(data), prompts, measures)
    return {
        "checkpoint": {"stage": found.info.get("stage"), "step": found.step, "tokens": found.tokens},
        "precision": found.model.label,
        "parameters": found.model.parameters(),
        **losses,
        **report(prompts, answers),
    }


def evaluate_command(
    data: Data,
    init: Annotated[Path, typer.Option("--from", help="Folder of the run, or the checkpoint, to measure.")],
    out: Annotated[Path | None, typer.Option(help="File for the JSON; default: standard output.")] = None,
    sequence: Annotated[
        int | None, typer.Option(help=f"Tokens of a row; default: {Measures.sequence}, or a shorter context.", min=2)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Held-out tokens at most.", min=1)] = Measures.tokens,
    prompts: Annotated[int, typer.Option(help="Prompts of each kind at most.", min=0)] = Measures.prompts,
    new_tokens: Annotated[int, typer.Option(help="The longest answer.", min=1)] = Measures.new_tokens,
    batch: Annotated[int, typer.Option(help="Rows at a time.", min=1)] = Measures.batch,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU if there is one.")] = None,
) -> None:
    """Measure a checkpoint: held-out loss and perplexity, sums by digits, rewards of its answers; JSON."""
    with world(device) as here:
        length = sequence or min(Measures.sequence, read_checkpoint(init).model.max_context)
        result = evaluate(init, data, Measures(length, tokens, prompts, new_tokens, batch), here.device)
        text = json.dumps(result, indent=1)
        if not here.first:
            return
        if out is None:
            typer.echo(text)
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text + "\n", encoding="utf-8")
