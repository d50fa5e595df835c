"""Processes that ``torchrun`` starts: who this one is, and sums over all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .errors import TrainError


@dataclass(frozen=True)
class World:
    """rank: of this process, of ``size``. device: where it computes."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value


class Parallel(DistributedDataParallel):
    """DDP that lets one reach what the model itself has (``config``, ``head``…)."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@contextmanager
def world(device: str | None = None) -> Iterator[World]:
    """This process's World for the time of a command; alone unless ``torchrun`` set WORLD_SIZE.

    device: ``cpu``, ``cuda`` or ``cuda:N``; default: a GPU if there is one. Raises TrainError.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise TrainError(f"device {device}: this PyTorch sees no GPU; use cpu, or a build of PyTorch for your GPU")
        local = int(os.environ.get("LOCAL_RANK", "0")) if size > 1 else (chosen.index or 0)
        if local >= torch.cuda.device_count():
            raise TrainError(
                f"process {rank} wants GPU {local}, but there are {torch.cuda.device_count()}: start fewer processes "
                "(torchrun --nproc-per-node)"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(0, 1, chosen)
        return
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(rank, size, chosen)
    finally:
        dist.destroy_process_group()


def parallel(model: nn.Module, here: World) -> nn.Module:
    """The model whose gradients are averaged over all processes after ``backward``; itself if there is one process."""
    if here.size == 1:
        return model
    return Parallel(model, device_ids=[here.device] if here.device.type == "cuda" else None, broadcast_buffers=False)


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and dicts moved to a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(part, device) for part in batch)
    if isinstance(batch, dict):
        return {name: to_device(part, device) for name, part in batch.items()}
    return batch
