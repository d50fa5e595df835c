"""Reads Hugging Face checkpoint folders: ``config.json``, safetensors (sharded or not), tokenizer files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy, and so safetensors, bfloat16 and float8)
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .base import CheckpointInfo, TokenizerFiles, require_finite

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NOTICES = ("LICENSE", "NOTICE")
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


class FolderCheckpoint:
    """An open folder; see ``base.Checkpoint``."""

    def __init__(self, path: Path, info: CheckpointInfo, where: Mapping[str, str]):
        self.path, self.info, self._where = path, info, where
        self._files: dict[str, Any] = {}

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored. Raises CheckpointError if the tensor is missing."""
        return tuple(self._slice(name).get_shape())

    def is_packed(self, name: str) -> bool:
        """Whether the tensor holds packed bytes."""
        return self._slice(name).get_dtype() == "U8"

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows as uint8 (packed) or float32; scalars and vectors of scales come as they are shaped."""
        view = self._slice(name)
        dtype = view.get_dtype()
        if dtype != "U8" and dtype not in _FLOATS:
            raise CheckpointError(
                f"{self._file_of(name)}: tensor {name} has type {dtype}, expected a float type or packed U8"
            )
        values = view[start:stop] if view.get_shape() else self._open(self._where[name]).get_tensor(name)
        if dtype == "U8":
            return values
        return require_finite(values.astype(np.float32), self._file_of(name), name)

    def _file_of(self, name: str) -> Path:
        return self.path / self._where[name]

    def _slice(self, name: str) -> Any:
        if name not in self._where:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; the checkpoint is incomplete")
        try:
            return self._open(self._where[name]).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self._file_of(name)}: tensor {name}: {error}; the file disagrees with the index"
            ) from None

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = open_safetensors(self.path / file)
        return self._files[file]


def open_safetensors(path: Path) -> Any:
    """An open safetensors file. Raises CheckpointError if it is missing, truncated or corrupt."""
    try:
        return safe_open(path, framework="np")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the shard is missing; download the checkpoint again") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); download it again") from None


def open_folder(path: Path, tokenizer_folder: Path | None = None) -> FolderCheckpoint:
    """Open a checkpoint folder. Raises CheckpointError naming what is missing or damaged."""
    config = read_json(path / "config.json", "a Hugging Face checkpoint folder has one")
    where = _tensor_files(path)
    generation_file = path / "generation_config.json"
    info = CheckpointInfo(
        config=config,
        generation=read_json(generation_file, "") if generation_file.exists() else {},
        tokenizer=read_tokenizer(tokenizer_folder or path),
        license=_license(path),
        notices={name: (path / name).read_bytes() for name in NOTICES if (path / name).is_file()},
        source={"format": "safetensors", "files": _hashes(path, where)},
    )
    return FolderCheckpoint(path, info, where)


def read_json(path: Path, why: str) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError if it is missing or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; {why}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Tokenizer files of a folder; ``chat_template.jinja`` is put into the config where the config has no template."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise CheckpointError(
            f"{tokenizer}: missing; put the model's tokenizer.json there or give --tokenizer FOLDER"
        )
    read_json(tokenizer, "")
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file, "") if config_file.exists() else {}
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return TokenizerFiles(tokenizer.read_bytes(), json_bytes(config))


def json_bytes(value: Any) -> bytes:
    """JSON with sorted keys and a final newline: the same value gives the same bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _tensor_files(path: Path) -> dict[str, str]:
    index = path / INDEX
    if index.exists():
        where = read_json(index, "").get("weight_map")
        if not isinstance(where, dict) or not where:
            raise CheckpointError(f"{index}: field weight_map is missing or empty")
        for file in sorted({str(name) for name in where.values()}):
            if Path(file).name != file:
                raise CheckpointError(f"{index}: shard {file!r} is not a file name in the folder")
            if not (path / file).is_file():
                raise CheckpointError(
                    f"{path / file}: the shard that the index names is missing; download it again"
                )
        return where
    if not (path / SINGLE).is_file():
        raise CheckpointError(f"{path}: expected {SINGLE} or {INDEX}, found neither")
    return dict.fromkeys(open_safetensors(path / SINGLE).keys(), SINGLE)


def _license(path: Path) -> str:
    """The ``license:`` line of the model card's front matter, if there is one."""
    card = path / "README.md"
    if not card.is_file():
        return ""
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return ""
    for line in lines[1:]:
        if line.strip() == "---":
            return ""
        if line.startswith("license:"):
            return line.split(":", 1)[1].strip()
    return ""


def _hashes(path: Path, where: Mapping[str, str]) -> dict[str, str]:
    hashes = {}
    for file in sorted(set(where.values())):
        with (path / file).open("rb") as stream:
            hashes[file] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes
