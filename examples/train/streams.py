"""What ``prepare`` has written, as batches: flat tokens for pretraining, rows of JSON for the stages after it.

The order of batches depends on a seed and nothing else: micro-batch n is the same whichever process takes it, so two
processes see in one step what one process sees in two accumulated micro-batches, and a run goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import TrainError

SPLITS = ("train", "held")
#: What a loss leaves out.
IGNORED = -100
_PREPARE = "make the streams with `python -m examples.train prepare`"


def pretrain_tokens(folder: Path, split: str) -> np.ndarray:
    """``pretrain-SPLIT.bin``, little-endian int32, mapped from the disk. Raises TrainError if missing or empty."""
    path = folder / f"pretrain-{split}.bin"
    if not path.is_file():
        raise TrainError(f"{path}: missing; {_PREPARE}")
    size = path.stat().st_size
    if size == 0 or size % 4:
        raise TrainError(f"{path}: {size} bytes, expected int32 tokens (a multiple of 4, and not none); {_PREPARE}")
    return np.memmap(path, dtype="<i4", mode="r")


def check_vocabulary(tokens: np.ndarray, vocab_size: int, where: Path) -> None:
    """Raises TrainError for a token that a model of this vocabulary has no row for."""
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocab_size:
        raise TrainError(
            f"{where}: token {most if most >= vocab_size else least} is outside the model's vocabulary of "
            f"{vocab_size}: the streams are of another tokenizer; prepare them for this model, or name another preset"
        )


def pretrain_batches(
    folder: Path,
    split: str,
    batch: int,
    sequence: int,
    seed: int = 0,
    start_step: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches without end: tokens and targets, int64 ``[batch, sequence]`` on the CPU.

    Windows of the stream in a new random order, and at a new offset, in each epoch. start_step: micro-batches of this
    process to leave out at the start (steps done times accumulation). Micro-batch i of process r is number
    ``(start_step + i) * world + r`` of the run. Raises TrainError if the stream is shorter than a micro-batch.
    """
    tokens = pretrain_tokens(folder, split)
    windows = (len(tokens) - 1) // sequence - 1  # one is given up for the offset
    per_epoch = windows // batch
    if per_epoch < 1:
        raise TrainError(
            f"{folder / f'pretrain-{split}.bin'}: {len(tokens)} tokens are too few for a batch of {batch} rows of "
            f"{sequence} tokens; prepare more text, or make --batch-tokens or --sequence smaller"
        )
    return _windows(tokens, batch, sequence, seed, start_step * world + rank, world, windows, per_epoch)


def _windows(
    tokens: np.ndarray, batch: int, sequence: int, seed: int, first: int, stride: int, windows: int, per_epoch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    number, shuffled_for, order, offset = first, -1, np.zeros(0, dtype=np.int64), 0
    while True:
        epoch, index = divmod(number, per_epoch)
        if epoch != shuffled_for:
            random = np.random.default_rng((seed, epoch))
            order, offset, shuffled_for = random.permutation(windows), int(random.integers(sequence)), epoch
        rows = [int(row) * sequence + offset for row in order[index * batch : (index + 1) * batch]]
        both = torch.from_numpy(np.stack([tokens[row : row + sequence + 1] for row in rows]).astype(np.int64))
        yield both[:, :-1].contiguous(), both[:, 1:].contiguous()
        number += stride


def held_batches(folder: Path, batch: int, sequence: int, most: int) -> list[tuple[Tensor, Tensor]]:
    """At most ``most`` batches from the start of ``pretrain-held.bin``, always the same. Raises TrainError.

    All have ``batch`` rows, unless the stream has less than that: another shape would be compiled anew.
    """
    tokens = pretrain_tokens(folder, "held")
    windows = (len(tokens) - 1) // sequence
    if windows < 1:
        raise TrainError(
            f"{folder / 'pretrain-held.bin'}: {len(tokens)} tokens are too few for a row of {sequence}; prepare more "
            "text, or make --sequence smaller"
        )
    rows = min(windows, batch) * min(max(windows // batch, 1), most)
    both = np.stack([tokens[row * sequence : (row + 1) * sequence + 1] for row in range(rows)]).astype(np.int64)
    whole = torch.from_numpy(both)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in whole.split(batch)]


def rows(folder: Path, name: str, split: str) -> list[dict[str, Any]]:
    """``NAME-SPLIT.jsonl``; name: ``sft``, ``preferences``, ``prompts``. Raises TrainError if missing or empty."""
    path = folder / f"{name}-{split}.jsonl"
    if not path.is_file():
        raise TrainError(f"{path}: missing; {_PREPARE}")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TrainError(f"{path}, line {number}: no JSON ({error}); {_PREPARE}") from None
        if not isinstance(row, dict):
            raise TrainError(f"{path}, line {number}: expected an object, found {type(row).__name__}; {_PREPARE}")
        found.append(row)
    if not found:
        raise TrainError(f"{path}: empty; {_PREPARE}")
    return found


def row_batches(
    count: int, batch: int, seed: int = 0, start_step: int = 0, rank: int = 0, world: int = 1
) -> Iterator[list[int]]:
    """Micro-batches of row numbers without end, shuffled in each epoch; numbering as in ``pretrain_batches``.

    An epoch's last rows that fill no micro-batch are left for the next; fewer rows than a micro-batch repeat in it.
    """
    number = start_step * world + rank
    per_epoch = max(count // batch, 1)
    while True:
        epoch, index = divmod(number, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(count)
        yield [int(order[i % count]) for i in range(index * batch, (index + 1) * batch)]
        number += world


def pad(sequences: Sequence[Sequence[int]], length: int | None = None, value: int = 0, left: bool = False) -> Tensor:
    """Rows of unequal length as int64 ``[B, length]``, filled with ``value``; length: default the longest's.

    Raises TrainError for a row that is longer.
    """
    longest = max(map(len, sequences))
    if length is None:
        length = longest
    if longest > length:
        raise TrainError(f"a row of {longest} tokens is longer than {length}; shorten it, or raise the limit")
    found = torch.full((len(sequences), length), value, dtype=torch.long)
    for row, sequence in zip(found, sequences, strict=True):
        start = length - len(sequence) if left else 0
        row[start : start + len(sequence)] = torch.tensor(sequence, dtype=torch.long)
    return found


def sft_batch(chosen: Sequence[Mapping[str, Any]], sequence: int) -> tuple[Tensor, Tensor]:
    """Rows with ``tokens`` and ``mask`` as tokens and targets ``[B, T]``, T at most ``sequence``.

    Longer rows are cut. Targets are ``IGNORED`` where the mask of the token to come is 0, and in the padding.
    """
    tokens = [list(row["tokens"])[: sequence + 1] for row in chosen]
    masks = [list(row["mask"])[: sequence + 1] for row in chosen]
    padded, kept = pad(tokens), pad(masks)
    return padded[:, :-1].contiguous(), padded[:, 1:].masked_fill(kept[:, 1:] == 0, IGNORED).contiguous()
