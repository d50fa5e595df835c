"""The folder that ``bundle`` writes and every other stage reads: all that a machine without a network needs."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ..errors import TrainError
from .nets import set_up
from .prompts import Phrases, Prompts, load
from .rows import cut, read_array
from .teacher import Teacher, load_teacher

#: How often prompts of a pool are drawn, for training and for what is held out.
TRAINING_POOLS = {"everyday": 0.34, "titles": 0.2, "openers": 0.1, "questions": 0.18, "sums": 0.06, "talk": 0.12}
HELD_OUT_POOLS = {"everyday": 0.4, "titles": 0.35, "openers": 0.25}
#: Tokens of a row of plain text, and of a sampled one.
TEXT_LENGTH, LENGTH = 1024, 512


class Kit:
    """teacher.gguf (or a folder ``teacher``), first/ (a ternary checkpoint, if there is one), tokenizer.json,
    prompts.npz, text.npz."""

    def __init__(self, folder: Path, device: torch.device | None = None) -> None:
        self.folder = folder
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        set_up(self.device)
        if not (folder / "tokenizer.json").exists():
            raise TrainError(f"{folder}: has no tokenizer.json; give the folder that bundle wrote")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.phrases = Phrases.of(self.tokenizer)

    @property
    def teacher_path(self) -> Path:
        """Where the teacher lies."""
        whole = self.folder / "teacher.gguf"
        return whole if whole.exists() else self.folder / "teacher"

    @property
    def first(self) -> Path:
        """Where the first ternary model lies."""
        return self.folder / "first"

    def wait(self, start: str, seconds: float) -> None:
        """Until the text and the folder ``start`` are there. Raises TrainError if they do not come."""
        wanted = [self.folder / "text.npz", *([] if start == "teacher" else [Path(start)])]
        end = time.monotonic() + seconds
        while missing := [path for path in wanted if not path.exists()]:
            if time.monotonic() >= end:
                raise TrainError(f"{missing[0]}: no such file or folder")
            time.sleep(0.5)

    def teacher(self) -> Teacher:
        """Read the teacher onto the device."""
        return load_teacher(self.teacher_path, self.device)

    def prompts(self, part: str) -> Prompts:
        """Of ``train`` or ``held``."""
        return load(self.folder / "prompts.npz", part, TRAINING_POOLS if part == "train" else HELD_OUT_POOLS)

    def text(self, name: str, length: int = TEXT_LENGTH) -> Tensor:
        """``encyclopedia`` or ``other`` for training, ``held`` of the encyclopedia; rows int32 ``[N, length]``."""
        rows = cut(read_array(self.folder / "text.npz", name), length, self.device)
        if name != "other" and not len(rows):
            raise TrainError(f"{self.folder / 'text.npz'}: {name} has fewer than {length} tokens; bundle more articles")
        return rows
