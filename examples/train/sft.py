"""``sft``: learning to answer, from conversations; only what the assistant says is learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from .config import TrainConfig
from .distributed import world
from .options import Data, From, Out, TrainOptions, training_command
from .pretrain import next_token_loss
from .stage import StagePreset, begin, check_ids, finish, fitting, stage_run
from .streams import sft_batch
from .tokenizer import ChatTokenizer
from .trainer import Run, train

Row = Mapping[str, Sequence[int]]


def packed(found: Sequence[Row], sequence: int, order: Sequence[int], between: int) -> list[dict[str, list[int]]]:
    """Conversations one behind the other, ``between`` after each, in rows of at most ``sequence + 1`` tokens.

    A row of the stream is never cut. Later conversations see earlier ones of their row, as documents of the pretraining
    stream do; what ends a document tells them apart.
    """
    result: list[dict[str, list[int]]] = []
    for index in order:
        tokens, mask = found[index]["tokens"], found[index]["mask"]
        if not result or len(result[-1]["tokens"]) + len(tokens) + 1 > sequence + 1:
            result.append({"tokens": [], "mask": []})
        result[-1]["tokens"] += [*tokens, between]
        result[-1]["mask"] += [*mask, 0]
    return result


def sft_batches(
    found: Sequence[Row], batch: int, sequence: int, between: int, seed: int, start: int, rank: int, world: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches without end: tokens and targets int64 ``[batch, sequence]``, packed anew in each epoch.

    start: micro-batches of this process to leave out; numbering as in ``pretrain_batches``.
    """
    first, epoch, number = 0, 0, start * world + rank
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(len(found)).tolist()
        whole = packed(found, sequence, order, between)
        count = max(len(whole) // batch, 1)
        while number < first + count:
            place = (number - first) * batch
            rows = [whole[(place + i) % len(whole)] for i in range(batch)]
            yield sft_batch([_filled(row, sequence, between) for row in rows], sequence)
            number += world
        first, epoch = first + count, epoch + 1


def _filled(row: Row, sequence: int, value: int) -> dict[str, list[int]]:
    """One shape for all micro-batches, so that a compiled model is compiled once."""
    missing = sequence + 1 - len(row["tokens"])
    return {"tokens": [*row["tokens"], *[value] * missing], "mask": [*row["mask"], *[0] * missing]}


def sft(init: Path, data: Path, config: TrainConfig, run: Run) -> dict[str, float]:
    """Fine-tune the checkpoint in ``init`` on the conversations in ``data``; returns what ``train`` does.

    Raises TrainError.
    """
    here = run.world
    model, found, run = begin(init, data, config, run)
    between = ChatTokenizer(data).end_of_text
    learned = fitting(data, "sft", "train", lambda row: len(row["tokens"]), config.sequence, here)
    held = fitting(data, "sft", "held", lambda row: len(row["tokens"]), config.sequence, here)
    for row in learned:
        check_ids(row["tokens"], found.model.vocab_size, data / "sft-train.jsonl")
    rows = config.micro_batch(here.size)
    looked = packed(held, config.sequence, range(len(held)), between)[: rows * config.eval_batches]
    return train(
        model,
        found.model,
        lambda start: sft_batches(learned, rows, config.sequence, between, config.seed, start, here.rank, here.size),
        next_token_loss,
        config,
        run,
        [sft_batch(looked[i : i + rows], config.sequence) for i in range(0, len(looked), rows)],
    )


@training_command
def sft_command(data: Data, init: From, out: Out, options: TrainOptions, preset: StagePreset = None) -> None:
    """Fine-tune a model on conversations: it learns what the assistant says, and when to stop."""
    with world(options.device) as here:
        _, config, run = stage_run("sft", init, out, preset, options, here)
        finish(out, here, sft(init, data, config, run))
