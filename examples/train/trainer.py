"""The loop that all stages share: steps of accumulated micro-batches on any number of processes.

A stage gives it a model, batches and a loss; it does the rest: schedules, AdamW, clipping, autocast, checkpoints that a
run can go on from, progress, and stopping where going on makes no sense. Everything random in step n follows from the
seed, n and the process: a run that goes on makes the same numbers as one that was never stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import check_same_model, load_optimizer, load_weights, read_checkpoint, save_checkpoint
from .config import ModelConfig, TrainConfig
from .distributed import World, parallel, to_device
from .errors import NotFinite, TrainError
from .memory import MemoryMeter, is_out_of_memory, out_of_memory
from .progress import Progress
from .schedule import learning_rate, weight_decay

#: What must be the same when a run goes on, or its batches would be others.
_FIXED = ("batch_tokens", "sequence", "seed")


@dataclass(frozen=True)
class Loss:
    """Of a micro-batch.

    total: scalar with a graph, a sum over ``weight`` things (tokens, pairs). metrics: sums over the same things, shown
    as means. The totals of all micro-batches and processes are divided by all weights, so that each thing counts alike.
    """

    total: Tensor
    weight: Tensor | float
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """Where a run stands in the world.

    stage: its name. folder: for checkpoint and curves. tokenizer: folder whose tokenizer goes into the checkpoints.
    resume: go on from the folder's checkpoint, if it has one. report_memory: measure and print the first micro-batch.
    before: tokens the model had seen. info: more for the checkpoint's config.json. keep: whether to write checkpoints.
    """

    stage: str
    folder: Path
    world: World
    tokenizer: Path | None = None
    resume: bool = False
    report_memory: bool = False
    before: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = True


#: start_step, in micro-batches of this process -> micro-batches without end
Batches = Callable[[int], Iterator[Any]]
#: (model, micro-batch on the device) -> Loss
LossFunction = Callable[[Any, Any], Loss]


def train(
    model: nn.Module,
    model_config: ModelConfig,
    batches: Batches,
    loss_function: LossFunction,
    config: TrainConfig,
    run: Run,
    held: Iterable[Any] | None = None,
) -> dict[str, float]:
    """Train to ``config.steps``; the model is on its device. Returns the last ``loss``, ``held_loss`` if held batches
    were given, and ``step``, which is less than ``steps`` if ``minutes`` were over.

    Raises TrainError: no room for the model, a loss that is NaN or infinite, a checkpoint of another model or run.
    """
    trainer = _Trainer(model, model_config, loss_function, config, run, held)
    try:
        return trainer.run_all(batches)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainError(out_of_memory(config, trainer.meter.report(), run.world)) from None


def evaluate_loss(
    model: nn.Module, loss_function: LossFunction, held: Iterable[Any], config: TrainConfig, here: World
) -> float:
    """Mean loss of held-out batches, shared among the processes; without gradients."""
    sums = torch.zeros(2, dtype=torch.float64, device=here.device)
    with torch.no_grad():
        for number, batch in enumerate(held):
            if number % here.size == here.rank:
                with _autocast(config, here):
                    loss = loss_function(model, to_device(batch, here.device))
                sums += torch.stack([loss.total.double(), torch.as_tensor(loss.weight).to(sums)])
    total, weight = here.total(sums).tolist()
    return total / weight if weight else math.nan


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW; only matrices decay, gains do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, fused=device.type == "cuda"
    )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Everything PyTorch draws in this step follows from these three."""
    torch.manual_seed(seed * 1_000_003 + step * 1009 + rank)


def _autocast(config: TrainConfig, here: World) -> AbstractContextManager[Any]:
    return torch.autocast(here.device.type, torch.bfloat16, enabled=config.amp)


class _Trainer:
    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        loss_function: LossFunction,
        config: TrainConfig,
        run: Run,
        held: Iterable[Any] | None,
    ) -> None:
        config.micro_batch(run.world.size)  # refuses what cannot be divided
        self.model, self.model_config, self.loss_function = model, model_config, loss_function
        self.config, self.run, self.here = config, run, run.world
        self.held = None if held is None else list(held)
        self.optimizer = make_optimizer(model, config, self.here.device)
        self.meter = MemoryMeter(model, self.here)
        self.start = self._resume()
        if hasattr(model, "grad_checkpointing"):
            setattr(model, "grad_checkpointing", config.grad_checkpointing)  # noqa: B010  (a Module's type knows none)
        if config.compile and (compile_blocks := getattr(model, "compile_blocks", None)):
            compile_blocks()
        self.net: Any = parallel(model, self.here)
        label = f"{run.stage} {model_config.label}"
        self.progress = Progress(
            run.folder, label, config.steps, self.start, config.batch_tokens, quiet=not self.here.first
        )

    def run_all(self, batches: Batches) -> dict[str, float]:
        config = self.config
        stream = batches(self.start * config.grad_accum)
        began, unseen, numbers = time.monotonic(), [], {}
        done = self.start
        while done < config.steps:
            unseen.append(self._step(done, stream))
            done += 1
            stop = done == config.steps or self._time_is_up(began)
            save = stop or _due(done, config.save_every)
            look = stop or _due(done, config.eval_every)
            if save or look or _due(done, config.log_every):
                numbers = self._numbers(done, unseen)
                unseen = []
                if look and self.held is not None:
                    numbers["held_loss"] = evaluate_loss(self.net, self.loss_function, self.held, config, self.here)
                self.progress.step(done, numbers)
            if save:
                self._save(done, numbers)
            if stop:
                break
        return {**numbers, "step": done}

    def _step(self, step: int, stream: Iterator[Any]) -> dict[str, Tensor]:
        """One optimizer step. Returns sums over its micro-batches and processes: total, weight, metrics."""
        config = self.config
        seed_step(config.seed, step, self.here.rank)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
            group["weight_decay"] = weight_decay(config, step) if group["params"][0].ndim > 1 else 0.0
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        for number in range(config.grad_accum):
            batch = to_device(next(stream), self.here.device)
            first = self.run.report_memory and step == self.start and number == 0
            with self._alone(number), self.meter.measure() if first else nullcontext():
                with _autocast(config, self.here):
                    loss = self.loss_function(self.net, batch)
                loss.total.backward()
            if first:
                self.progress.say(self.meter.report().text())
            for name, value in {"total": loss.total, "weight": loss.weight, **loss.metrics}.items():
                value = torch.as_tensor(value, device=self.here.device).detach().double()
                sums[name] = sums[name] + value if name in sums else value
        if self.here.size > 1:
            stacked = self.here.total(torch.stack(list(sums.values())))
            sums = dict(zip(sums, stacked, strict=True))
        self._scale_gradients(self.here.size / sums["weight"].clamp(min=1e-9))
        sums["norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip).double()
        self.optimizer.step()
        return sums

    def _alone(self, number: int) -> AbstractContextManager[Any]:
        """Processes exchange gradients after the last micro-batch only."""
        last = number == self.config.grad_accum - 1
        return nullcontext() if self.here.size == 1 or last else self.net.no_sync()

    def _scale_gradients(self, factor: Tensor) -> None:
        """From DDP's mean over processes of sums to the mean over all things."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor.float())

    def _numbers(self, done: int, unseen: list[dict[str, Tensor]]) -> dict[str, float]:
        """Means over the steps since the last line. Raises TrainError if a loss is not finite."""
        table = {name: torch.stack([sums[name] for sums in unseen]).tolist() for name in unseen[0]}
        first = done - len(unseen) + 1
        for offset, (total, norm) in enumerate(zip(table["total"], table["norm"], strict=True)):
            if not (math.isfinite(total) and math.isfinite(norm)):
                self._stop_at_nan(first + offset, total, norm)
        weight = sum(table["weight"]) or 1.0  # rows without a target add nothing to either sum
        numbers = {"loss": sum(table["total"]) / weight, "lr": learning_rate(self.config, done - 1)}
        for name in table:
            if name not in ("total", "weight", "norm"):
                numbers[name] = sum(table[name]) / weight
        return numbers

    def _stop_at_nan(self, step: int, total: float, norm: float) -> None:
        try:
            kept = read_checkpoint(self.run.folder)
            where = f"the checkpoint of step {kept.step} in {kept.path} is from before and stays"
        except TrainError:
            where = "no checkpoint had been saved yet (see --save-every)"
        raise NotFinite(
            f"step {step}: the loss is {total} and the gradient's norm {norm}, so training stopped; {where}. A smaller "
            f"--lr (now {self.config.lr:g}), a longer --warmup (now {self.config.warmup}) or another --seed may help"
        )

    def _time_is_up(self, began: float) -> bool:
        if not self.config.minutes:
            return False
        over = torch.tensor(float(time.monotonic() - began > 60 * self.config.minutes), device=self.here.device)
        return bool(self.here.total(over))  # one process's clock decides for all

    def _save(self, done: int, numbers: Mapping[str, float]) -> None:
        if self.here.first and self.run.keep:
            save_checkpoint(
                self.run.folder,
                self.model,
                self.model_config,
                info={
                    "stage": self.run.stage,
                    "step": done,
                    "tokens": self.run.before + done * self.config.batch_tokens,
                    **{name: numbers[name] for name in ("loss", "held_loss") if name in numbers},
                    "train": asdict(self.config),
                    **self.run.info,
                },
                optimizer=self.optimizer.state_dict(),
                tokenizer=self.run.tokenizer,
            )
        self.progress.draw()

    def _resume(self) -> int:
        """Steps already done. Raises TrainError for a checkpoint that is in the way or of something else."""
        try:
            found = read_checkpoint(self.run.folder)
        except TrainError:
            if (self.run.folder / "checkpoint" / "config.json").exists():
                raise
            return 0
        if not self.run.resume:
            raise TrainError(
                f"{self.run.folder} already holds a checkpoint, of step {found.step}: --resume goes on from it, "
                "another --out leaves it alone"
            )
        check_same_model(found.path, self.model_config, found.model)
        if found.info.get("stage") != self.run.stage:
            raise TrainError(
                f"{found.path}: is of {found.info.get('stage')}, not of {self.run.stage}; use another --out"
            )
        before, now = found.info.get("train", {}), asdict(self.config)
        for name in _FIXED:
            if before.get(name) != now[name]:
                raise TrainError(
                    f"{found.path}: was run with {name} {before.get(name)}, not {now[name]}; keep it to resume"
                )
        load_weights(self.model, found.path)
        self.optimizer.load_state_dict(load_optimizer(found.path))
        return found.step


def _due(done: int, every: int) -> bool:
    return bool(every) and done % every == 0
