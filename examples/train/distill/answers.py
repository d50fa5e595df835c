"""Greedy answers to fixed questions, and how many of them run in circles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from ..card import NEW_TOKENS
from .conversations import greedy, write
from .decode import Decoder
from .nets import Net
from .prompts import SYSTEM, Phrases
from .student import Student


def loops(answer: str, words: int = 3, times: int = 4) -> bool:
    """Whether some phrase of three words comes four times or more."""
    split = answer.split()
    phrases = Counter(tuple(split[at : at + words]) for at in range(len(split) - words + 1))
    return max(phrases.values(), default=0) >= times


def asked(question: str, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a question under the usual system message, up to where the assistant begins."""
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def answers(net: Net, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer, limit: int = NEW_TOKENS) -> list[str]:
    """Greedy continuations of prompts, at most ``limit`` tokens each, up to the end of the turn."""
    end = Phrases.of(tokenizer).end_of_turn
    longest = max(map(len, prompts)) + limit
    forced = np.full((len(prompts), longest + 1), -1, dtype=np.int64)
    for row, ids in zip(forced, prompts, strict=True):
        row[: len(ids)] = ids
    if isinstance(net, Student):
        net.freeze()
    decoder = Decoder(net, len(prompts), longest, graph=False)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int32, device=net.device)
    write(decoder, torch.from_numpy(forced).to(net.device), greedy(net.head), tokens)
    if isinstance(net, Student):
        net.thaw()
    texts = []
    for ids, row in zip(prompts, tokens.tolist(), strict=True):
        said = row[len(ids) : len(ids) + limit]
        texts.append(tokenizer.decode(said[: said.index(end)] if end in said else said))
    return texts
