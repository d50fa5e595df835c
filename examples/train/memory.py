"""Where the memory of a training step goes, and what to do when there is not enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import TrainConfig
from .distributed import World

MIB = 2.0**20


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on one device. activations: what the backward pass of one micro-batch needs; None if not measured."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None

    def text(self) -> str:
        """One line."""
        kept = "not measured" if self.activations is None else f"{self.activations / MIB:,.1f} MiB"
        return (
            f"memory: parameters {self.parameters / MIB:,.1f} MiB, gradients {self.gradients / MIB:,.1f} MiB, "
            f"optimizer {self.optimizer / MIB:,.1f} MiB, activations of a micro-batch {kept}"
        )


class MemoryMeter:
    """Measures the first micro-batch: on a GPU by the allocator's peak, elsewhere by what autograd keeps."""

    def __init__(self, model: nn.Module, here: World) -> None:
        self.model, self.here = model, here
        self.kept = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch."""
        if self.here.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            try:
                yield
            finally:
                self.kept = torch.cuda.max_memory_allocated() - before
            return
        seen: set[int] = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.kept += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def report(self) -> MemoryReport:
        """What was measured, and what the rest will need: f32 gradients and AdamW's two moments."""
        size = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        trained = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        return MemoryReport(size, trained, 2 * trained, self.kept or None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch says that a GPU or the machine has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "not enough memory" in str(error)
    )


def out_of_memory(config: TrainConfig, report: MemoryReport, here: World) -> str:
    """The message: what a micro-batch is, where the memory goes, which flags make it smaller."""
    rows = config.micro_batch(here.size)
    flags = []
    if rows % 2 == 0:
        flags.append(f"--grad-accum {2 * config.grad_accum} (micro-batches of {rows // 2} rows instead of {rows})")
    if not config.grad_checkpointing:
        flags.append("--grad-checkpointing (keeps the blocks' inputs only, for a third more time)")
    if not config.amp and here.device.type == "cuda":
        flags.append("--amp (activations in bf16)")
    flags.append(f"a smaller --batch-tokens (now {config.batch_tokens})")
    room = ""
    if here.device.type == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(here.device)
        room = f" {here.device} has {total / MIB:,.0f} MiB, {free / MIB:,.0f} free."
    return (
        f"out of memory in a micro-batch of {rows} rows of {config.sequence} tokens.{room} {report.text()}. "
        f"What helps: {'; '.join(flags)}. Then --resume goes on from the last checkpoint."
    )
