"""Rows that a net writes until a time is over or a number of them is reached."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from .conversations import HELD_OUT_RECIPE, Recipe, Script, sampling, write
from .decode import Decoder
from .kit import Kit
from .loop import Log
from .nets import BF16
from .prompts import Prompts

HELD_OUT_SEED, HELD_OUT_ROWS = 20_260, 256


def sample(
    decoder: Decoder, kit: Kit, prompts: Prompts, recipe: Recipe, seed: int, batches: int, seconds: float, log: Log,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """At most ``batches`` batches of ``decoder.rows`` rows; none is begun that would not end within ``seconds``.

    Returns tokens int32 ``[N, decoder.length]`` and, if ``keep``, the net's normed states bf16 ``[N, length, D]``.
    """
    rows, length, device = decoder.rows, decoder.length, kit.device
    tokens = torch.zeros(batches * rows, length, dtype=torch.int32, device=device)
    shape = (batches * rows, length, decoder.net.config.dim)
    hidden = torch.empty(shape, dtype=BF16, device=device) if keep else None
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    begin, done = time.monotonic(), 0
    while done < batches:
        here = slice(done * rows, (done + 1) * rows)
        script = Script(rows, length, recipe, prompts, kit.phrases, rng, device)
        pick = sampling(decoder.net.head, recipe, rows, rng)
        write(decoder, script.forced, pick, tokens[here], None if hidden is None else hidden[here], script.advance)
        if device.type == "cuda":
            torch.cuda.synchronize()
        done += 1
        used = time.monotonic() - begin
        log("sampled", batches=done, tokens=done * rows * length, tokens_per_s=round(done * rows * length / used))
        if used * (done + 1) / done > seconds:
            break
    return tokens[: done * rows], None if hidden is None else hidden[: done * rows]


def held_out(decoder: Decoder, kit: Kit, log: Log) -> Tensor:
    """The fixed held-out conversations, int32 ``[256, length]`` (or as many as the decoder has rows): by the recipe of
    the first model's, begun with prompts that training never sees."""
    tokens, _ = sample(decoder, kit, kit.prompts("held"), HELD_OUT_RECIPE, HELD_OUT_SEED, 1, 0.0, log)
    return tokens[:HELD_OUT_ROWS].clone()
