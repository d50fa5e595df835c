"""Streams as batches: their order, their parts for several processes, and what cannot be read."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.support.training import write_streams

import torch  # isort: skip  (after tests.support.training, which sets it up)

from examples.train.errors import TrainError
from examples.train.streams import (
    IGNORED,
    check_vocabulary,
    held_batches,
    pad,
    pretrain_batches,
    pretrain_tokens,
    row_batches,
    rows,
    sft_batch,
)


@pytest.fixture
def streams(tmp_path: Path) -> Path:
    """Token n of the stream is n, so that a window says where it is from."""
    for split, count in (("train", 1000), ("held", 100)):
        np.arange(count, dtype="<i4").tofile(tmp_path / f"pretrain-{split}.bin")
    return tmp_path


def taken(streams: Path, count: int, **options: int) -> list[torch.Tensor]:
    return [tokens for tokens, _ in islice(pretrain_batches(streams, "train", 4, 16, **options), count)]


def test_windows_are_pieces_of_the_stream(streams: Path) -> None:
    for tokens, targets in islice(pretrain_batches(streams, "train", 4, 16), 40):
        assert tokens.shape == targets.shape == (4, 16) and tokens.dtype == torch.int64
        assert torch.equal(tokens + 1, targets)
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(16)) and targets.max() < 1000


def test_an_epoch_sees_each_token_once_at_most_and_nearly_all(streams: Path) -> None:
    epoch = torch.cat(taken(streams, 15, seed=1))  # 61 windows of 16, of which 60 fill batches
    assert len(epoch.unique()) == epoch.numel() == 15 * 64
    again = torch.cat(taken(streams, 30, seed=1)[15:])
    assert not torch.equal(epoch, again)
    assert set((again[:, 0] % 16).tolist()) != set((epoch[:, 0] % 16).tolist()), "the windows start elsewhere"


def test_order_follows_from_the_seed(streams: Path) -> None:
    one, two, other = taken(streams, 20, seed=1), taken(streams, 20, seed=1), taken(streams, 20, seed=2)
    assert all(map(torch.equal, one, two)) and not any(map(torch.equal, one, other))


def test_a_run_goes_on_where_it_stopped(streams: Path) -> None:
    whole = taken(streams, 40)
    assert all(map(torch.equal, whole[23:], taken(streams, 17, start_step=23)))


@pytest.mark.parametrize("start", [0, 5])
def test_two_processes_see_what_one_sees_in_two_micro_batches(streams: Path, start: int) -> None:
    whole = taken(streams, 20, start_step=2 * start)
    parts = [taken(streams, 10, start_step=start, rank=rank, world=2) for rank in (0, 1)]
    assert all(map(torch.equal, whole[0::2], parts[0])) and all(map(torch.equal, whole[1::2], parts[1]))
    ids = list(islice(row_batches(50, 4, seed=3, start_step=2 * start), 40))
    shares = [list(islice(row_batches(50, 4, 3, start, rank, 2), 20)) for rank in (0, 1)]
    assert ids[0::2] == shares[0] and ids[1::2] == shares[1]


def test_held_batches_are_always_the_same(streams: Path) -> None:
    batches = held_batches(streams, batch=2, sequence=16, most=8)
    assert [tokens.shape for tokens, _ in batches] == [(2, 16)] * 3, "whole batches, at most those that there are"
    assert torch.cat([tokens for tokens, _ in batches]).flatten().tolist() == list(range(96))
    assert len(held_batches(streams, batch=2, sequence=16, most=2)) == 2
    assert held_batches(streams, batch=50, sequence=16, most=2)[0][0].shape == (6, 16)


def test_missing_empty_and_short_streams_are_named(streams: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="pretrain-train.bin: missing; make the streams with .*prepare"):
        pretrain_batches(tmp_path / "nowhere", "train", 4, 16)
    with pytest.raises(TrainError, match="1000 tokens are too few for a batch of 4 rows of 300"):
        pretrain_batches(streams, "train", 4, 300)
    with pytest.raises(TrainError, match="100 tokens are too few for a row of 100"):
        held_batches(streams, 1, 100, 1)
    for data in (b"", b"12345"):
        (streams / "pretrain-held.bin").write_bytes(data)
        with pytest.raises(TrainError, match=f"pretrain-held.bin: {len(data)} bytes, expected int32 tokens"):
            pretrain_tokens(streams, "held")


def test_tokens_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    tokens = pretrain_tokens(write_streams(tmp_path), "train")
    check_vocabulary(tokens, 256, tmp_path)
    with pytest.raises(TrainError, match="token 255 is outside the model's vocabulary of 255"):
        check_vocabulary(tokens, 255, tmp_path)
    with pytest.raises(TrainError, match="token -1 is outside"):
        check_vocabulary(np.array([3, -1]), 255, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), ("{}\n{\n", "line 2: no JSON"), ("{}\n3\n", "line 2: expected an object, found int")],
)
def test_rows_that_are_none_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "sft-train.jsonl").write_text(text)
    with pytest.raises(TrainError, match=f"sft-train.jsonl.*{message}"):
        rows(tmp_path, "sft", "train")
    with pytest.raises(TrainError, match="sft-held.jsonl: missing"):
        rows(tmp_path, "sft", "held")


def test_row_batches_take_each_row_once_in_an_epoch() -> None:
    epoch = [number for batch in islice(row_batches(12, 3), 4) for number in batch]
    assert sorted(epoch) == list(range(12)) and epoch != list(range(12))
    assert sorted(next(row_batches(2, 5))) == [0, 0, 0, 1, 1] or sorted(next(row_batches(2, 5))) == [0, 0, 1, 1, 1]


def test_padding() -> None:
    assert pad([[1, 2], [3]]).tolist() == [[1, 2], [3, 0]]
    assert pad([[1, 2], [3]], length=3, value=9, left=True).tolist() == [[9, 1, 2], [9, 9, 3]]
    with pytest.raises(TrainError, match="a row of 2 tokens is longer than 1"):
        pad([[1, 2]], length=1)


def test_targets_are_the_tokens_that_the_mask_names() -> None:
    """Zero loss on prompts and padding: their targets are left out."""
    chosen = [{"tokens": [5, 6, 7, 8, 9], "mask": [0, 0, 1, 1, 0]}, {"tokens": [1, 2, 3], "mask": [0, 1, 1]}]
    tokens, targets = sft_batch(chosen, sequence=16)
    assert tokens.tolist() == [[5, 6, 7, 8], [1, 2, 3, 0]]
    assert targets.tolist() == [[IGNORED, 7, 8, IGNORED], [2, 3, IGNORED, IGNORED]]
    tokens, targets = sft_batch(chosen, sequence=2)
    assert tokens.tolist() == [[5, 6], [1, 2]] and targets.tolist() == [[IGNORED, 7], [2, 3]]
