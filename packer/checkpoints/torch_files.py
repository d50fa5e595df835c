"""PyTorch checkpoints, ``pytorch_model.bin`` or ``.pt``: only as plain tensors, so that no file can run code."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .huggingface import FolderCheckpoint, Layout

_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
          "float8_e5m2": "F8_E5M2", "uint8": "U8"}  # fmt: skip


class TorchCheckpoint(FolderCheckpoint):
    """An open folder of PyTorch files; see ``base.Checkpoint``. A file is mapped while its tensors are read."""

    def _file_layouts(self, path: Path) -> dict[str, Layout]:
        return {name: _layout(tensor) for name, tensor in load(path).items()}

    def _read(self, name: str, start: int, stop: int | None) -> np.ndarray:
        dtype, shape = self._layout(name)
        tensor = load(self.path / self.where[name])[name].detach()
        part = tensor[start:stop] if shape else tensor
        kept = part if dtype in ("F64", "U8") else part.float()  # NumPy has no bfloat16 of its own
        return np.array(kept.numpy())


def tensor_names(path: Path) -> list[str]:
    """Names in a file. Raises CheckpointError if it cannot be read."""
    return list(load(path))


def load(path: Path) -> Mapping[str, Any]:
    """Name -> tensor, mapped where the file allows it. Raises CheckpointError if the file holds anything else."""
    try:
        import torch  # late, and only here: most checkpoints do without it
    except ImportError:
        raise CheckpointError(
            f"{path}: reading PyTorch files needs torch, which is not installed: pip install 'tercet[torch]', or "
            "convert the checkpoint to safetensors"
        ) from None
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            found = torch.load(path, map_location="cpu", weights_only=True)  # files of PyTorch before 1.6
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the shard is missing; download the checkpoint again") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors ({_first_line(error)}), and loading that could run code of its maker; "
            "convert it to safetensors where you trust it"
        ) from None
    except Exception as error:  # whatever a damaged archive makes of the reader
        raise CheckpointError(f"{path}: not a whole PyTorch file ({_first_line(error)}); download it again") from None
    is_plain = isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        for name, tensor in found.items()
    )
    if not is_plain or not found:
        raise CheckpointError(
            f"{path}: expected a dictionary of names and dense tensors, found {type(found).__name__} with something "
            "else in it; save model.state_dict() alone"
        )
    tensors: Mapping[str, Any] = found
    return tensors


def _layout(tensor: Any) -> Layout:
    name = str(tensor.dtype).removeprefix("torch.")
    return _NAMES.get(name, name), tuple(tensor.shape)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
