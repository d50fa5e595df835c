"""Opens and verifies packs: every rule of FORMAT.md that a reader must hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from shaders.contract import ContractError
from shaders.float4 import E2M1_MAX, E4M3_MAX, E4M3_MAX_CODE, E8M0_MAX_CODE, nibbles
from shaders.program import check as check_program
from shaders.program import check_context, logits_columns
from shaders.weights import WeightTensor

from .checkpoints.huggingface import Layout, tensor_layouts
from .errors import PackError
from .manifest import CHUNK_BYTES, MAX_HEADER_BYTES, check_manifest, read_json

#: Called with the bytes done so far and in all.
Progress = Callable[[int, int], None]


class Pack:
    """An open pack. ``Pack(path)`` checks everything but hashes and values; ``verify`` checks those too.

    path: the folder. manifest: ``pack.json``. program: ``program.json``. entries: name -> TensorEntry.
    Raises PackError with the broken rule.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise PackError("missing", f"{path}: no such folder; give the folder that holds pack.json")
        self.manifest = read_json(path / "pack.json")
        self.entries = check_manifest(self.manifest, path / "pack.json")
        self._check_lengths()
        self.program = read_json(path / "program.json")
        self._check_program()
        self._where = self._index_shards()

    @property
    def eos_ids(self) -> set[int]:
        """Ids that end an answer."""
        return set(self.manifest["eos_ids"])

    @property
    def total_bytes(self) -> int:
        """Bytes of all files that ``pack.json`` lists."""
        files = [*self.manifest["shards"], *self.manifest["files"].values()]
        return sum(file["bytes"] for file in files)

    def tensor(self, name: str) -> WeightTensor:
        """One tensor with its bytes, in the disk layout."""
        entry = self.entries[name]
        arrays = {key: self._read(key) for key in entry.keys()}  # noqa: SIM118 (a method of TensorEntry)
        data = np.concatenate([arrays[key] for key in arrays if ".data." in key[len(name) :]])
        scales = [array for key, array in arrays.items() if ".scale" in key[len(name) :]]
        return WeightTensor(
            name,
            entry.encoding,
            entry.shape,
            data,
            np.concatenate(scales) if scales else None,
            entry.scale,
            entry.parts,
            entry.group,
            float(arrays[f"{name}.tensor_scale"][0]) if entry.encoding == "nvfp4" else None,
        )

    def tensors(self) -> dict[str, WeightTensor]:
        """All tensors."""
        return {name: self.tensor(name) for name in self.entries}

    def verify(self, progress: Progress = lambda done, total: None) -> None:
        """Check every hash and every value. Raises PackError with the broken rule."""
        done = 0
        for shard in self.manifest["shards"]:
            done = self._verify_file(shard["file"], shard["chunks"], CHUNK_BYTES, done, progress)
        for name, file in self.manifest["files"].items():
            done = self._verify_file(name, [file["sha256"]], max(file["bytes"], 1), done, progress)
        for name in self.entries:
            self._verify_values(name)

    def _check_lengths(self) -> None:
        files = {shard["file"]: shard["bytes"] for shard in self.manifest["shards"]}
        files |= {name: file["bytes"] for name, file in self.manifest["files"].items()}
        for name, expected in files.items():
            path = self.path / name
            if not path.is_file():
                raise PackError("missing", f"{path}: missing; export or download the pack again")
            if path.stat().st_size != expected:
                raise PackError(
                    "length",
                    f"{path}: {path.stat().st_size} bytes, expected {expected}; export or download it again",
                )

    def _check_program(self) -> None:
        tensors = {name: (entry.encoding, entry.shape) for name, entry in self.entries.items()}
        try:
            check_program(self.program, tensors)
            check_context(self.program, lambda name: tensors[name][1][0], self.manifest["context_length"])
        except ContractError as error:
            raise PackError(error.rule, f"{self.path}: {error}") from None
        found, expected = logits_columns(self.program), self.manifest["vocab_size"]
        if found != expected:
            raise PackError(
                "program-shape", f"{self.path}: program.json gives {found} logits, vocab_size is {expected}"
            )

    def _index_shards(self) -> dict[str, Path]:
        expected = {key: (entry, layout) for entry in self.entries.values() for key, layout in entry.keys().items()}
        where: dict[str, Path] = {}
        for shard in self.manifest["shards"]:
            path = self.path / shard["file"]
            for key, found in shard_layout(path).items():
                if key not in expected:
                    raise PackError("extra", f"{path}: key {key!r} belongs to no tensor of pack.json")
                entry, layout = expected[key]
                if found != layout or key in where:
                    raise PackError(
                        "tensor",
                        f"{path}: tensor {entry.name!r}, key {key!r}: found {found}, expected {layout} once",
                    )
                where[key] = path
        for key, (entry, _) in expected.items():
            if key not in where:
                raise PackError("tensor", f"{self.path}: tensor {entry.name!r}: key {key!r} is in no shard")
        return where

    def _read(self, key: str) -> np.ndarray:
        with safe_open(self._where[key], framework="np") as shard:
            array: np.ndarray = shard.get_tensor(key)
        return array

    def _verify_file(self, name: str, hashes: list[str], size: int, done: int, progress: Progress) -> int:
        total = self.total_bytes
        with (self.path / name).open("rb") as stream:
            for index, expected in enumerate(hashes):
                block = stream.read(size)
                if hashlib.sha256(block).hexdigest() != expected:
                    raise PackError(
                        "hash",
                        f"{self.path / name}: bytes from {index * size} do not have the listed SHA-256; "
                        "export or download it again",
                    )
                done += len(block)
                progress(done, total)
        return done

    def _verify_values(self, name: str) -> None:
        tensor = self.tensor(name)
        if tensor.encoding == "ternary":
            _check_trits(tensor, self.path)
        elif tensor.group:
            _check_padding(tensor, self.path)
        else:
            _check_finite(tensor, tensor.data, self.path)
            if len(tensor.shape) == 2 and tensor.data[:, tensor.columns :].any():
                raise PackError(
                    "padding", f"{self.path}: tensor {name!r}: columns beyond {tensor.columns} are not zero"
                )
        if tensor.scales is not None:
            _check_scales(tensor, tensor.scales, self.path)


def shard_layout(path: Path) -> dict[str, Layout]:
    """key -> (dtype, shape) of a safetensors shard. Raises PackError (``header``, ``header-size``)."""
    with path.open("rb") as stream:
        head = stream.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > MAX_HEADER_BYTES:
        raise PackError(
            "header-size",
            f"{path}: safetensors header of {length} bytes, expected at most {MAX_HEADER_BYTES}",
        )
    if length % 8:
        raise PackError("header", f"{path}: its data begin at byte {8 + length}, expected a multiple of 8")
    try:
        with safe_open(path, framework="np") as shard:
            return tensor_layouts(shard)
    except SafetensorError as error:
        raise PackError(
            "header", f"{path}: not a valid safetensors file ({error}); export or download it again"
        ) from None


def _check_trits(tensor: WeightTensor, path: Path) -> None:
    valid = np.zeros(256, dtype=bool)
    valid[(np.arange(243) * 256 + 242) // 243] = True
    if not valid[tensor.data].all():
        raise PackError("trits", f"{path}: tensor {tensor.name!r}: a byte encodes no five trits")
    used = -(-tensor.columns // 5) * 5
    padding_digits = used - tensor.columns
    last = tensor.data[:, used // 5 - 1].astype(np.uint32)
    for digit in range(5 - padding_digits, 5):
        if ((((last * 3**digit) & 255) * 3) >> 8 != 1).any():
            raise PackError(
                "padding", f"{path}: tensor {tensor.name!r}: trits beyond column {tensor.columns} are not 0"
            )
    if (tensor.data[:, used // 5 :] != (121 * 256 + 242) // 243).any():
        raise PackError("padding", f"{path}: tensor {tensor.name!r}: trits beyond column {tensor.columns} are not 0")


def _check_padding(tensor: WeightTensor, path: Path) -> None:
    data = tensor.data if tensor.encoding == "q8" else nibbles(tensor.data)
    if (data[:, tensor.columns :] != (8 if tensor.encoding == "q4" else 0)).any():
        raise PackError("padding", f"{path}: tensor {tensor.name!r}: columns beyond {tensor.columns} are not zero")


def _check_scales(tensor: WeightTensor, scales: np.ndarray, path: Path) -> None:
    """No scale that is no number, or whose products are none."""
    most = {"nvfp4": E4M3_MAX_CODE, "mxfp4": E8M0_MAX_CODE}.get(tensor.encoding)
    if most is None:
        _check_finite(tensor, scales, path)
    elif (scales > most).any():
        raise PackError(
            "finite",
            f"{path}: tensor {tensor.name!r}: a scale has the code {scales.max()}, expected at most {most}",
        )
    if tensor.tensor_scale is not None:
        with np.errstate(over="ignore"):
            _check_finite(tensor, np.float32(tensor.tensor_scale) * np.float32(E2M1_MAX * E4M3_MAX), path)


def _check_finite(tensor: WeightTensor, values: np.ndarray | np.floating, path: Path) -> None:
    if not np.isfinite(values).all():
        raise PackError("finite", f"{path}: tensor {tensor.name!r}: infinite or NaN values")
