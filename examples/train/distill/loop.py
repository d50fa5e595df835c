"""The training loop: rows from streams, KL to the teacher, AdamW on latents, a rate that falls to zero on time."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainError
from .loss import kl, relation_error, state_error
from .measure import Measures, measure
from .options import Options
from .rows import Stream
from .start import save_compact
from .student import Student
from .teacher import Teacher

STATE = "state.pt"
DEADLINE = "deadline"


class Log:
    """Lines for people on standard output, and JSON lines in a file."""

    def __init__(self, path: Path) -> None:
        self._begin = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a", encoding="utf-8", buffering=1)

    def __call__(self, event: str, **values: Any) -> None:
        """Write one event."""
        at = round(time.monotonic() - self._begin, 1)
        print(f"[{at:7.1f}] {event} " + " ".join(f"{name}={value}" for name, value in values.items()), flush=True)
        self._stream.write(json.dumps({"at": at, "event": event, **values}) + "\n")


class Loop:
    """A run that can be stopped and gone on with.

    held: name -> (rows int ``[N, T]``, the teacher's states). folder: gets ``state.pt`` (all of a run) and
    ``compact/`` (4-bit latents). A file ``deadline`` there with seconds since 1970 moves the end of a run by time.
    """

    def __init__(
        self, teacher: Teacher, student: Student, streams: Sequence[Stream],
        held: Mapping[str, tuple[Tensor, Tensor]], options: Options, folder: Path, log: Log,
    ) -> None:  # fmt: skip
        self.teacher, self.student, self.held = teacher, student, held
        self.streams = list(streams)
        self.options, self.folder, self.log = options, folder, log
        self.step, self.tokens, self._used = 0, 0, 0.0
        groups = [{"params": student.matrices()}, {"params": student.vectors()}]
        fused = student.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(groups, betas=options.betas, eps=1e-10, weight_decay=0.0, fused=fused)
        self._begin = time.time()
        self._marks = {"log": (self._begin, 0), "measure": (self._begin, 0), "save": (self._begin, 0)}

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        if self.options.steps:
            return self.step / self.options.steps
        return (self._used + time.time() - self._begin) / max(self._used + self._end() - self._begin, 1e-6)

    def _end(self) -> float:
        path = self.folder / DEADLINE
        try:
            return float(path.read_text()) if path.exists() else self._begin + self.options.seconds - self._used
        except (OSError, ValueError):  # it is being written
            return self._begin + self.options.seconds - self._used

    def warm_up(self) -> None:
        """Compile what a step needs, for the shape of each stream, and change nothing."""
        for stream in self.streams:
            taken = stream.taken
            self._backward(*stream.next(self._rows(stream)), progress=0.0)
            stream.taken = taken
            self._forget()
        self._begin = time.time()
        self._marks = {name: (self._begin, self.step) for name in self._marks}

    def run(self, until: float = 1.0) -> None:
        """Train until a progress. Raises TrainError when the loss is no number; the last saved state is kept then."""
        progress = self.progress
        while progress < until:
            stream = self._choose()
            tokens, target = stream.next(self._rows(stream))
            value, extra, norm = self.one_step(tokens, target, progress)
            if self.step % self.options.log_every == 0 or self.step in (1, 10):
                self._report(stream, value, extra, norm, progress)
            if time.time() - self._marks["measure"][0] > self.options.measure_every:
                self.measured()
            if time.time() - self._marks["save"][0] > self.options.save_every:
                self.save()
            progress = self.progress

    def one_step(self, tokens: Tensor, target: Tensor | None, progress: float) -> tuple[Tensor, Tensor | None, Tensor]:
        """Train on rows int ``[B, T]`` and the teacher's states. Returns KL, other terms, norm of the gradient."""
        value, extra = self._backward(tokens, target, progress)
        parameters = [*self.student.matrices(), *self.student.vectors()]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.options.clip, foreach=True)
        rate = self.options.rate(self.step, progress)
        matrices, vectors = self._optimizer.param_groups
        matrices["lr"], vectors["lr"] = rate, rate * self.options.vector_lr
        self._optimizer.step()
        self._forget()
        self.step += 1
        self.tokens += tokens.numel()
        return value, extra, norm

    def _rows(self, stream: Stream) -> int:
        return max(1, self.options.batch_tokens // stream.tokens.shape[1])

    def _choose(self) -> Stream:
        """A stream by the shares; which one hangs on seed and step alone."""
        shares = [stream.share for stream in self.streams]
        return random.Random(self.options.seed * 1_000_003 + self.step).choices(self.streams, shares)[0]

    def _backward(self, tokens: Tensor, target: Tensor | None, progress: float) -> tuple[Tensor, Tensor | None]:
        """Gradients of one batch. Returns the mean KL, and the other terms where there are some."""
        options, extra = self.options, None
        fade = max(0.0, 1 - progress / options.extra_until) if options.extra_until > 0 else 0.0
        if fade and (options.state_weight or options.relation_weight):
            theirs: list[Tensor] = []
            ours: list[Tensor] = []
            target = self.teacher.hidden(tokens, theirs)
            hidden = self.student.hidden(tokens, ours, train=True)
            extra = fade * self._extra(ours, theirs)
        else:
            target = self.teacher.hidden(tokens) if target is None else target
            hidden = self.student.hidden(tokens, train=True)
        value, gradient = kl(hidden.detach(), target, self.student.head)
        if extra is None:
            hidden.backward(gradient)
        else:
            torch.autograd.backward([hidden, extra], [gradient, torch.ones_like(extra)])
        return value, None if extra is None else extra.detach()

    def _extra(self, ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
        options, total = self.options, torch.zeros((), device=self.student.device)
        if options.state_weight:
            total = total + options.state_weight * state_error(ours, theirs)
        if options.relation_weight:
            layer = options.relation_layer % self.student.config.layers
            cos, sin = (table[: ours[0].shape[1]] for table in (self.student.cos, self.student.sin))
            pairs = zip(
                self.student.project(ours[layer - 1], cos, sin, *self.student.layers()[layer]),
                self.teacher.project(theirs[layer - 1], cos, sin, *self.teacher.layers()[layer]),
                strict=True,
            )
            total = total + options.relation_weight * sum(relation_error(mine, wanted) for mine, wanted in pairs)
        return total

    def _forget(self) -> None:
        for parameter in (*self.student.matrices(), *self.student.vectors()):
            parameter.grad = None

    def _report(self, stream: Stream, value: Tensor, extra: Tensor | None, norm: Tensor, progress: float) -> None:
        found, rate = float(value), self._optimizer.param_groups[0]["lr"]
        now, (then, step) = time.time(), self._marks["log"]
        speed = (self.step - step) * self.options.batch_tokens / max(now - then, 1e-6)
        self._marks["log"] = now, self.step
        self.log(
            "step", step=self.step, progress=round(progress, 4), stream=stream.name, kl=round(found, 4),
            **({} if extra is None else {"extra": round(float(extra), 4)}), norm=round(float(norm), 4),
            lr=round(rate, 6), tokens_per_s=round(speed), tokens=self.tokens,
        )  # fmt: skip
        if not math.isfinite(found):
            raise TrainError(
                f"training: the loss is {found} at step {self.step}; {self.folder / STATE} is the last good state. "
                "Go on from it with a lower lr"
            )

    def measured(self) -> dict[str, Measures]:
        """Measure on the held-out rows, and log it."""
        found = {}
        for name, (tokens, states) in self.held.items():
            found[name] = measure(self.student, states, tokens, self.options.batch_tokens)
            self.log("measured", rows=name, step=self.step, tokens_seen=self.tokens, **found[name].rounded())
        self._marks["measure"] = time.time(), self.step
        return found

    def save(self) -> None:
        """Write everything that a later ``load`` needs, and the compact latents."""
        used = self._used + time.time() - self._begin
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self.folder / f"{STATE}.tmp"
        torch.save(
            {
                "student": self.student.state(), "optimizer": self._optimizer.state_dict(), "step": self.step,
                "tokens": self.tokens, "used": used, "taken": {s.name: s.taken for s in self.streams},
            },
            beside,
        )  # fmt: skip
        beside.replace(self.folder / STATE)
        save_compact(self.student, self.folder / "compact")
        self._marks["save"] = time.time(), self.step

    def load(self) -> bool:
        """Go on where ``save`` was called last; whether there was something. Raises TrainError if it does not fit."""
        path = self.folder / STATE
        if not path.exists():
            return False
        try:
            saved = torch.load(path, map_location=self.student.device, weights_only=True)
            self.student.load_state(saved["student"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self.step, self.tokens, self._used = saved["step"], saved["tokens"], saved["used"]
        except TrainError:
            raise
        except Exception as error:  # torch.load raises whatever a damaged file makes it raise
            raise TrainError(f"{path}: cannot be gone on with ({error}); delete it to begin anew") from None
        for stream in self.streams:
            stream.taken = saved["taken"].get(stream.name, 0)
        return True
