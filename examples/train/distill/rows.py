"""Rows of tokens on the device, with the teacher's states where they are known, in an order that a seed decides."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import TrainError
from .nets import BF16, Net


class Stream:
    """tokens: int32 ``[N, T]``. hidden: the teacher's normed last states bf16 ``[N, T, D]``, or None. share: of the
    training steps that take their rows here. taken: rows given so far; each epoch has its own order."""

    def __init__(self, name: str, tokens: Tensor, hidden: Tensor | None, share: float, seed: int = 0) -> None:
        if not len(tokens):
            raise TrainError(f"the stream {name} has no rows; sample longer, or give more text")
        self.name, self.tokens, self.hidden, self.share = name, tokens, hidden, share
        self.seed, self.taken = seed, 0
        self._epoch, self._order = -1, torch.empty(0)

    def next(self, count: int) -> tuple[Tensor, Tensor | None]:
        """The next rows: tokens int32 ``[count, T]`` and states."""
        chosen = []
        while count:
            epoch, offset = divmod(self.taken, len(self.tokens))
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                self._order = torch.randperm(len(self.tokens), generator=generator).to(self.tokens.device)
                self._epoch = epoch
            chosen.append(self._order[offset : offset + count])
            self.taken += len(chosen[-1])
            count -= len(chosen[-1])
        rows = torch.cat(chosen)
        return self.tokens[rows], None if self.hidden is None else self.hidden[rows]


@torch.no_grad()
def with_states(net: Net, tokens: Tensor, batch_tokens: int) -> Tensor:
    """Normed last states bf16 ``[N, T, D]`` of a net for rows ``[N, T]``."""
    count, length = tokens.shape
    batch = max(1, batch_tokens // length)
    hidden = torch.empty(count, length, net.config.dim, dtype=BF16, device=tokens.device)
    for first in range(0, count, batch):
        rows = tokens[first : first + batch]
        short = batch - len(rows)
        if short and first:  # keep to one shape: rows that were done already fill up
            rows = torch.cat([rows, tokens[:short]])
        hidden[first : first + batch] = net.hidden(rows)[: count - first]
    return hidden


def cut(tokens: np.ndarray, length: int, device: torch.device) -> Tensor:
    """A flat array as rows int32 ``[N, length]``; what is left over at the end is dropped."""
    count = len(tokens) // length
    return torch.from_numpy(tokens[: count * length].astype(np.int32)).view(count, length).to(device)


def read_array(path: Path, name: str) -> np.ndarray:
    """An array of an ``.npz``. Raises TrainError if it is missing."""
    try:
        with np.load(path) as arrays:
            found: np.ndarray = arrays[name]
            return found
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise TrainError(f"{path}: has no array {name} ({error}); run bundle again") from None


def read_rows(path: Path, device: torch.device) -> Tensor:
    """Rows of an ``.npy`` as int32 ``[N, T]``. Raises TrainError for another shape."""
    return torch.from_numpy(load_rows(path).astype(np.int32)).to(device)


def load_rows(path: Path) -> np.ndarray:
    """The same as it lies there, of any integer type."""
    try:
        rows: np.ndarray = np.load(path)
    except (OSError, ValueError) as error:
        raise TrainError(f"{path}: cannot be read ({error}); run sample first") from None
    if rows.ndim != 2 or not rows.size or rows.dtype.kind not in "ui":
        raise TrainError(f"{path}: expected whole numbers [rows, tokens], found {rows.dtype} {list(rows.shape)}")
    return rows


def save_rows(path: Path, rows: Tensor) -> None:
    """Rows as uint16 ``.npy`` (uint32 for a vocabulary above 65,536), written beside and renamed."""
    beside = path.with_suffix(".tmp")
    values = rows.cpu().numpy()
    with beside.open("wb") as stream:
        np.save(stream, values.astype(np.uint16 if values.max(initial=0) < 1 << 16 else np.uint32))
    beside.replace(path)
