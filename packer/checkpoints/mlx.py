"""MLX packs: safetensors whose matrices are codes in u32 words, with a scale and a bias for each group of columns.

Layout (mlx ``quantize``, mode affine): value = code x scale + bias; a word has 32 / bits codes, the lowest first.
A 2-bit matrix is ternary where each bias is minus its scale and no code is 3: the codes 0, 1, 2 are -1, 0, +1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..models.refused import refuse_rotated
from ..ternarize import Ternary, from_groups
from .base import require_finite
from .huggingface import FolderCheckpoint

BITS = (2, 4, 8)
_BESIDE = ("scales", "biases")
_FIELDS = ("quantization", "quantization_config")  # mlx-lm writes both, the same


@dataclass(frozen=True)
class _Affine:
    bits: int
    group: int


class MlxCheckpoint(FolderCheckpoint):
    """An open folder with matrices that MLX quantized, beside others that it did not; see ``base.Checkpoint``."""

    def __init__(self, folder: FolderCheckpoint):
        info = dataclasses.replace(
            folder.info,
            config={name: value for name, value in folder.info.config.items() if name not in _FIELDS},
            source={**folder.info.source, "format": "mlx"},
        )
        refuse_rotated(folder.info.config, f"{folder.path}: config")
        super().__init__(folder.path, info, folder.where)
        stored = set(folder.names())
        self._affine: dict[str, _Affine] = {}
        for name in sorted(stored):
            module, _, kind = name.rpartition(".")
            if kind == "weight" and f"{module}.scales" in stored:
                self._affine[name] = _affine(folder, folder.info.config["quantization"], module)

    def names(self) -> list[str]:
        """All tensor names, sorted, without those of scales and biases."""
        own = {_beside(name, kind) for name in self._affine for kind in _BESIDE}
        return [name for name in super().names() if name not in own]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the numbers. Raises CheckpointError if the tensor is missing or its scales do not fit."""
        stored = super().shape(name)
        affine = self._affine.get(name)
        if affine is None:
            return stored
        columns = stored[-1] * 32 // affine.bits
        for kind in _BESIDE:
            found, expected = super().shape(_beside(name, kind)), (stored[0], columns // affine.group)
            if len(stored) != 2 or columns % affine.group or found != expected:
                raise CheckpointError(
                    f"{self.path}: tensor {_beside(name, kind)} has shape {list(found)}, expected {list(expected)} for "
                    f"{stored} words of {affine.bits} bits in groups of {affine.group}"
                )
        return stored[0], columns

    def is_packed(self, name: str) -> bool:
        """Whether the tensor holds packed bytes of another kind than MLX's, which are decoded here."""
        return name not in self._affine and super().is_packed(name)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows as float32; see ``FolderCheckpoint.rows``."""
        affine = self._affine.get(name)
        if affine is None:
            return super().rows(name, start, stop)
        codes, scales, biases = self._stored(name, affine, start, stop)
        wide = (np.repeat(each, affine.group, axis=1) for each in (scales, biases))
        with np.errstate(over="ignore"):
            return require_finite(codes * next(wide) + next(wide), self.path, name)

    def ternary(self, name: str) -> Ternary | None:
        """Trits and scales of a 2-bit matrix whose biases are minus its scales and that has no code of 3, else None."""
        affine = self._affine.get(name)
        if affine is None or affine.bits != 2:
            return None
        rows, columns = self.shape(name)
        trits = np.empty((rows, columns), dtype=np.int8)
        scales = np.empty((rows, columns // affine.group), dtype=np.float32)
        step = max(1, (1 << 22) // columns)
        for start in range(0, rows, step):
            codes, some, biases = self._stored(name, affine, start, min(start + step, rows))
            if codes.max() > 2 or not np.array_equal(biases, -some):
                return None
            trits[start : start + step], scales[start : start + step] = codes - np.int8(1), some
        return from_groups(trits, scales, affine.group)

    def _stored(
        self, name: str, affine: _Affine, start: int, stop: int | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes int8 or uint8 ``[rows, K]``, scales and biases f32 ``[rows, K / group]``."""
        self.shape(name)  # checks it
        words = self._read(name, start, stop)
        if words.dtype != np.uint32:
            raise CheckpointError(f"{self.path}: tensor {name} has type {words.dtype}, expected packed uint32")
        shifts = np.arange(0, 32, affine.bits, dtype=np.uint32)
        codes = ((words[:, :, None] >> shifts) & np.uint32(2**affine.bits - 1)).astype(np.uint8)
        codes = codes.reshape(len(words), -1)
        scales, biases = (super(MlxCheckpoint, self).rows(_beside(name, kind), start, stop) for kind in _BESIDE)
        return codes.view(np.int8) if affine.bits < 8 else codes, scales, biases


def _beside(name: str, kind: str) -> str:
    return f"{name.removesuffix('weight')}{kind}"


def _affine(folder: FolderCheckpoint, quantization: Any, module: str) -> _Affine:
    """How a module is quantized: its own entry, or what holds for all. Raises CheckpointError if it is not known."""
    where = f"{folder.path}: config: field 'quantization'"
    own = quantization.get(module) if isinstance(quantization, Mapping) else None
    found = {**quantization, **own} if isinstance(own, Mapping) else quantization
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where} is {found!r}, expected an object with bits and group_size")
    bits, group, mode = found.get("bits"), found.get("group_size"), found.get("mode", "affine")
    if bits not in BITS or isinstance(group, bool) or not isinstance(group, int) or group <= 0 or mode != "affine":
        raise CheckpointError(
            f"{where}: module {module} has bits {bits!r}, group_size {group!r}, mode {mode!r}; expected 2, 4 or 8 "
            "bits, a positive group size and mode 'affine'"
        )
    return _Affine(bits, group)
