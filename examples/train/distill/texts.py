"""Sampled rows as JSON lines, from which ``prepare --text`` makes streams for a model of another vocabulary."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ..errors import TrainError
from .answers import loops

_START, _END, _TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_CHUNK = 1024


def read_texts(rows: np.ndarray, tokenizer: Tokenizer) -> Iterator[dict[str, object]]:
    """``{"messages"}`` or ``{"text"}`` of rows of token ids ``[N, T]``, as far as they are worth reading.

    Conversations are without the system's message, end with the last whole answer, and before one that runs in circles.
    """
    for first in range(0, len(rows), _CHUNK):
        chunk = rows[first : first + _CHUNK].tolist()
        for text in tokenizer.decode_batch(chunk, skip_special_tokens=False):
            if text.startswith(_TEXT):
                plain = text.removeprefix(_TEXT).split(_TEXT)[0].strip()
                if plain and not loops(plain):
                    yield {"text": plain}
            elif messages := _messages(text):
                yield {"messages": messages}


def _messages(text: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    whole = 0
    for part in text.split(_TEXT)[0].split(_START)[1:]:
        said, ended, _ = part.partition(_END)
        role, _, content = said.partition("\n")
        if not ended or not content.strip() or role not in ("system", "user", "assistant") or loops(content):
            break
        if role != "system":
            found.append({"role": role, "content": content.strip()})
        if role == "assistant":
            whole = len(found)
    return found[:whole]


def write_texts(lines: Iterable[dict[str, object]], out: Path) -> int:
    """Write JSON lines, gzip if the name ends so; returns how many. Raises TrainError if there are none."""
    beside, count = out.with_name(f"{out.name}.new"), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with gzip.open(beside, "wt", encoding="utf-8") if out.suffix == ".gz" else beside.open("w") as stream:
            for line in lines:
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
        if not count:
            raise TrainError(f"{out}: none of the rows holds a whole answer or a text; sample longer rows")
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)
    return count
