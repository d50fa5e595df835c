"""Everything that a run computes, once, with random weights of the right shape: compiles it, and says how fast it is.

What is compiled stays in torch's cache on disk, so that a run that follows on the same machine starts at once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from ..config import ModelConfig
from .decode import Decoder
from .loop import Log, Loop
from .measure import measure
from .nets import set_up
from .options import Options
from .rows import Stream, with_states
from .run import Plan
from .start import from_teacher
from .teacher import Teacher, random_teacher

#: SmolLM2-135M.
SHAPE = ModelConfig(
    vocab_size=49_152, dim=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn_dim=1536, rope_theta=100_000.0,
    max_context=8192,
)  # fmt: skip


def warm(config: ModelConfig, plan: Plan, options: Options, folder: Path, steps: int = 48) -> dict[str, Any]:
    """Try all parts for the shapes of a plan. Returns speeds in tokens a second, by part."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    set_up(device)
    log = Log(folder / "warm.jsonl")
    teacher = random_teacher(config, device)
    speeds: dict[str, Any] = {}
    speeds["teacher writes"] = _decoding(Decoder(teacher, plan.rows, plan.length), steps)
    log("warm", **speeds)
    tokens = {
        length: torch.randint(3, config.vocab_size, (2 * options.batch_tokens // length, length), device=device).int()
        for length in (plan.length, plan.text_length)
    }
    student = from_teacher(teacher, tokens[plan.text_length][:16])
    streams = [Stream(str(length), rows, with_states(teacher, rows, options.batch_tokens), 1.0)
               for length, rows in tokens.items()]  # fmt: skip
    loop = Loop(teacher, student, streams, {}, options, folder, log)
    loop.warm_up()
    for stream in streams:
        speeds[f"training, rows of {stream.name}"] = _training(loop, stream, options)
        speeds[f"teacher reads, rows of {stream.name}"] = _reading(teacher, stream, options)
        measure(student, with_states(teacher, stream.tokens, options.batch_tokens), stream.tokens, options.batch_tokens)
        log("warm", **speeds)
    if device.type == "cuda":
        _profile(loop, streams[0], folder)
        torch.cuda.empty_cache()
    if plan.student_batches:
        student.freeze()
        speeds["student writes"] = _decoding(Decoder(student, max(1, plan.rows // 2), plan.length), steps)
    memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    log("warm done", **speeds, memory_gb=round(memory, 1))
    return speeds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _decoding(decoder: Decoder, steps: int) -> int:
    """Tokens a second in the middle of a row."""
    tokens = torch.full((decoder.rows,), 5, device=decoder.net.device)
    first = decoder.length // 2
    decoder.step(tokens, first)
    _wait(decoder.net.device)
    begin = time.monotonic()
    steps = min(steps, decoder.length - first)
    for position in range(first, first + steps):
        decoder.step(tokens, position)
    _wait(decoder.net.device)
    return round(steps * decoder.rows / (time.monotonic() - begin))


def _training(loop: Loop, stream: Stream, options: Options, steps: int = 6) -> int:
    rows = max(1, options.batch_tokens // stream.tokens.shape[1])
    _wait(loop.student.device)
    begin = time.monotonic()
    for _ in range(steps):
        loop.one_step(*stream.next(rows), progress=0.999)
    _wait(loop.student.device)
    return round(steps * rows * stream.tokens.shape[1] / (time.monotonic() - begin))


def _reading(teacher: Teacher, stream: Stream, options: Options) -> int:
    _wait(teacher.device)
    begin = time.monotonic()
    with_states(teacher, stream.tokens, options.batch_tokens)
    _wait(teacher.device)
    return round(stream.tokens.numel() / (time.monotonic() - begin))


def _profile(loop: Loop, stream: Stream, folder: Path) -> None:
    """The kernels of one training step by their time, in ``profile.txt``."""
    from torch.profiler import ProfilerActivity, profile

    rows = max(1, loop.options.batch_tokens // stream.tokens.shape[1])
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        loop.one_step(*stream.next(rows), progress=0.999)
        torch.cuda.synchronize()
    table = profiled.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90)
    (folder / "profile.txt").write_text(table, encoding="utf-8")
