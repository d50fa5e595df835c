"""Reads Hugging Face checkpoint folders: ``config.json``, safetensors (sharded or not), tokenizer files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy, and so safetensors, bfloat16)
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .base import CheckpointInfo, TokenizerFiles, require_finite

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NOTICES = ("LICENSE", "NOTICE")
#: dtype as safetensors names it, and shape.
Layout = tuple[str, tuple[int, ...]]

_FLOATS = {"F64", "F32", "F16", "BF16"}  # not float8, whose tensors mean nothing without scales of their own


class FolderCheckpoint:
    """An open folder; see ``base.Checkpoint``. A file is mapped only while it is read, so that memory stays small."""

    def __init__(self, path: Path, info: CheckpointInfo, where: Mapping[str, str]):
        self.path, self.info, self._where = path, info, where
        self._layouts: dict[str, dict[str, Layout]] = {}

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored. Raises CheckpointError if the tensor is missing."""
        return self._layout(name)[1]

    def is_packed(self, name: str) -> bool:
        """Whether the tensor holds packed bytes."""
        return self._layout(name)[0] == "U8"

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows as uint8 (packed) or float32; scalars and vectors of scales come as they are shaped."""
        dtype, shape = self._layout(name)
        file = self.path / self._where[name]
        if dtype != "U8" and dtype not in _FLOATS:
            raise CheckpointError(f"{file}: tensor {name} has type {dtype}, expected a float type or packed U8")
        try:
            with open_safetensors(file) as opened:
                values: np.ndarray = opened.get_slice(name)[start:stop] if shape else opened.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: tensor {name} of shape {list(shape)} cannot be read: {error}") from None
        with np.errstate(over="ignore"):  # what float32 does not hold becomes infinite, and is refused
            return values if dtype == "U8" else require_finite(values.astype(np.float32), file, name)

    def _layout(self, name: str) -> Layout:
        if name not in self._where:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; the checkpoint is incomplete")
        file = self._where[name]
        if file not in self._layouts:
            with open_safetensors(self.path / file) as opened:
                self._layouts[file] = tensor_layouts(opened)
        if name not in self._layouts[file]:
            raise CheckpointError(f"{self.path / file}: tensor {name} is not in it, though the index says so")
        return self._layouts[file][name]


def tensor_layouts(opened: Any) -> dict[str, Layout]:
    """key -> (dtype, shape) of an open safetensors file."""
    slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
    return {key: (view.get_dtype(), tuple(view.get_shape())) for key, view in slices.items()}


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
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Tokenizer files of a folder; ``chat_template.jinja`` is put into the config where the config has no template."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise CheckpointError(f"{tokenizer}: missing; put the model's tokenizer.json there or give --tokenizer FOLDER")
    read_json(tokenizer, "")
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file, "") if config_file.exists() else {}
    template = folder / "chat_template.jinja"
    if template.is_file():
        try:
            config["chat_template"] = template.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{template}: not UTF-8 text ({error})") from None
    return TokenizerFiles(tokenizer.read_bytes(), json_bytes(config))


def json_bytes(value: Any) -> bytes:
    """JSON with sorted keys and a final newline: the same value gives the same bytes."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # half a surrogate pair becomes \udxxx, as JSON escapes it


def _tensor_files(path: Path) -> dict[str, str]:
    index = path / INDEX
    if index.exists():
        where = read_json(index, "").get("weight_map")
        if not isinstance(where, dict) or not where:
            raise CheckpointError(f"{index}: field weight_map is missing or empty")
        for name, file in where.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
                raise CheckpointError(f"{index}: field weight_map: {name}: {file!r} is no name of a file in the folder")
        for file in sorted(set(where.values())):
            if not (path / file).is_file():
                raise CheckpointError(f"{path / file}: the shard that the index names is missing; download it again")
        return where
    if not (path / SINGLE).is_file():
        raise CheckpointError(f"{path}: expected {SINGLE} or {INDEX}, found neither")
    with open_safetensors(path / SINGLE) as opened:
        return dict.fromkeys(opened.keys(), SINGLE)


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
