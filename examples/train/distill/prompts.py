"""What conversations are begun with: questions and openers in pools, and text whose beginnings are continued.

Everything is token ids. A pool is int32 ``[n, longest]`` padded with -1; a ``.npz`` holds pools for training
(``train.NAME``) and other ones held out (``held.NAME``), and documents as flat int32 with their ends.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ..errors import TrainError

LONGEST = 64
#: One prompt in so many is held out.
HELD_OUT = 20
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OTHER_SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant who gives short answers.",
    "You are a teacher who explains things simply.", "You are a knowledgeable expert. Answer precisely.",
    "You are a cheerful companion who likes to chat.", "You are a careful assistant. Answer step by step.",
)  # fmt: skip


def is_held_out(text: str) -> bool:
    """Whether a prompt or document belongs to the held-out part: by its hash, so always the same ones."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % HELD_OUT == 0


@dataclass(frozen=True)
class Phrases:
    """Token ids of a chat's frame. systems: the beginning of a row up to the first user's text, the usual one first.

    user, assistant: what follows the other's end of turn. answer: end of the user's turn and the assistant's header.
    """

    systems: tuple[tuple[int, ...], ...]
    user: tuple[int, ...]
    assistant: tuple[int, ...]
    answer: tuple[int, ...]
    end_of_turn: int
    end_of_text: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Phrases:
        """The ChatML frame of a tokenizer. Raises TrainError if it has not the tokens for it."""

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        end_of_turn, end_of_text = (tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
        if end_of_turn is None or end_of_text is None:
            raise TrainError("the teacher's tokenizer has no <|im_end|> or <|endoftext|>; only ChatML is known here")
        frame = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n"
        return cls(
            tuple(ids(frame.format(system)) for system in (SYSTEM, *OTHER_SYSTEMS)),
            ids("\n<|im_start|>user\n"), ids("\n<|im_start|>assistant\n"),
            ids("<|im_end|>\n<|im_start|>assistant\n"), end_of_turn, end_of_text,
        )  # fmt: skip


def pool(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """Texts as a pool; those of more than ``LONGEST`` tokens are left out."""
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    rows = [encoding.ids for encoding in encoded if 0 < len(encoding.ids) <= LONGEST]
    table = np.full((len(rows), LONGEST), -1, dtype=np.int32)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    return table


def save(
    path: Path, pools: Mapping[str, Sequence[str]], documents: Sequence[str], tokenizer: Tokenizer
) -> dict[str, int]:
    """Write the file; documents go in without those held out. Returns counts by name."""
    arrays = {}
    for name, texts in pools.items():
        unique = list(dict.fromkeys(texts))
        for part, chosen in (("train", False), ("held", True)):
            arrays[f"{part}.{name}"] = pool((text for text in unique if is_held_out(text) == chosen), tokenizer)
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(list(documents), add_special_tokens=False)]
    arrays["documents"] = np.array([token for ids in encoded for token in ids], dtype=np.int32)
    arrays["ends"] = np.cumsum([len(ids) for ids in encoded], dtype=np.int64)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    return {name: len(values) for name, values in arrays.items()}


@dataclass(frozen=True)
class Prompts:
    """pools: by name, int32 ``[n, longest]``. weights: how often a pool is drawn from, the sum is 1. documents: one
    after another in one array, which end at ``ends``."""

    pools: dict[str, np.ndarray]
    weights: dict[str, float]
    documents: np.ndarray
    ends: np.ndarray

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Prompts int32 ``[count, longest]`` of all pools."""
        names = list(self.pools)
        which = rng.choice(len(names), size=count, p=[self.weights[name] for name in names])
        drawn = np.empty((count, LONGEST), dtype=np.int32)
        for index, name in enumerate(names):
            rows = np.flatnonzero(which == index)
            drawn[rows] = self.pools[name][rng.integers(0, len(self.pools[name]), len(rows))]
        return drawn

    def beginning(self, rng: np.random.Generator, least: int = 8, most: int = 48) -> np.ndarray:
        """The first tokens of a document."""
        document = int(rng.integers(0, len(self.ends)))
        start = int(self.ends[document - 1]) if document else 0
        size = min(int(rng.integers(least, most + 1)), int(self.ends[document]) - start)
        return self.documents[start : start + size]


def load(path: Path, part: str, weights: dict[str, float]) -> Prompts:
    """The pools of a part (``train`` or ``held``) that have a weight. Raises TrainError for a damaged or other file."""
    try:
        with np.load(path) as arrays:
            pools = {name: arrays[f"{part}.{name}"] for name in weights}
            documents, ends = arrays["documents"], arrays["ends"]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise TrainError(f"{path}: not the prompts that bundle writes ({error}); run bundle again") from None
    pools = {name: values for name, values in pools.items() if len(values)}
    if not pools:
        raise TrainError(f"{path}: has no prompts for {part}")
    total = sum(weights[name] for name in pools)
    return Prompts(pools, {name: weights[name] / total for name in pools}, documents, ends)
