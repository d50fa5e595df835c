"""Small models and streams for the tests of examples/train."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints import VOCABULARY, byte_tokenizer, tokenizer_config, write_json
from .transformers_models import torch  # sets PyTorch up: one thread, no compiler

from examples.train.cli import main  # isort: skip  (after PyTorch is set up)
from examples.train.config import ModelConfig, TrainConfig  # isort: skip
from examples.train.distributed import World  # isort: skip
from examples.train.model import Decoder  # isort: skip
from tests.support.cli import CliResult  # isort: skip

ALONE = World(0, 1, torch.device("cpu"))
TINY_MODEL = ModelConfig(
    vocab_size=VOCABULARY,
    dim=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_dim=48,
    sub_norms=True,
    max_context=64,
    precision="ternary",
)
TINY_RUN = TrainConfig(steps=6, batch_tokens=64, sequence=16, lr=3e-3, warmup=2, log_every=1, eval_batches=2)


def model(seed: int = 0, **changes: Any) -> Decoder:
    """A decoder of the tiny shape with changes, its weights from the seed and of ordinary size."""
    torch.manual_seed(seed)
    made = Decoder(replace(TINY_MODEL, **changes))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:  # gains of 1 would hide a norm that is left out
                parameter.uniform_(0.5, 1.5)
            elif "embedding" not in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return made


def tokens(rows: int, count: int, seed: int = 0, vocabulary: int = 256) -> torch.Tensor:
    """int64 ``[rows, count]``."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, vocabulary, (rows, count)))


def write_streams(folder: Path, train: int = 4000, held: int = 500, vocabulary: int = 256) -> Path:
    """A pretraining stream that can be learned (the next token is one, two or three further), and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(3)
    for split, count in (("train", train), ("held", held)):
        steps = random.integers(1, 4, count)
        (np.cumsum(steps) % vocabulary).astype("<i4").tofile(folder / f"pretrain-{split}.bin")
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """tokenizer.json and tokenizer_config.json of one token a byte."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    return folder


def losses(folder: Path) -> list[float]:
    """The losses in a run's ``loss.jsonl``."""
    return [json.loads(line)["loss"] for line in (folder / "loss.jsonl").read_text().splitlines()]


def run_train(*arguments: object) -> CliResult:
    """``python -m examples.train ARGUMENTS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    return CliResult(status, out.getvalue(), err.getvalue())
