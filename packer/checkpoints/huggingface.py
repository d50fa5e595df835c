"""Reads Hugging Face checkpoint folders: ``config.json``, safetensors (sharded or not), tokenizer files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # it also teaches NumPy, and so safetensors, bfloat16
import numpy as np
from safetensors import SafetensorError, safe_open

from ..card import CARD, read_card
from ..errors import CheckpointError
from ..ternarize import Ternary
from ..workers import Workers, default_workers
from .base import CheckpointInfo, TokenizerFiles, file_sha256, require_finite

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_SINGLE = "pytorch_model.bin"
NOTICES = ("LICENSE", "NOTICE")
#: dtype as safetensors names it, and shape.
Layout = tuple[str, tuple[int, ...]]

#: As safetensors names them. Scales that go with some float8 tensors are tensors without a place in the model, and so
#: refused.
_DTYPES: dict[str, Any] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2, "BOOL": "?", "I8": "i1", "U8": "u1", "I16": "<i2", "U16": "<u2", "I32": "<i4",
    "U32": "<u4", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


class FolderCheckpoint:
    """An open folder; see ``base.Checkpoint``. where: tensor name -> file that has it.

    Rows are read, not mapped, so that memory stays small. Several threads may do so at once.
    """

    def __init__(self, path: Path, info: CheckpointInfo, where: Mapping[str, str]):
        self.path, self.info, self.where = path, info, where
        self._layouts: dict[str, dict[str, Layout]] = {}
        self._offsets: dict[str, dict[str, int]] = {}

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self.where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored. Raises CheckpointError if the tensor is missing."""
        return self._layout(name)[1]

    def is_packed(self, name: str) -> bool:
        """Whether the tensor holds packed bytes."""
        return self._layout(name)[0] == "U8"

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows as uint8 (packed) or float32; scalars and vectors of scales come as they are shaped."""
        dtype, file = self._layout(name)[0], self.path / self.where[name]
        if dtype != "U8" and dtype not in _FLOATS:
            raise CheckpointError(f"{file}: tensor {name} has type {dtype}, expected a float type or packed U8")
        values = self._read(name, start, stop)
        with np.errstate(over="ignore"):  # what float32 does not hold becomes infinite, and is refused
            return values if dtype == "U8" else require_finite(values.astype(np.float32), file, name)

    def _read(self, name: str, start: int, stop: int | None) -> np.ndarray:
        """Rows in the type in which they are stored."""
        dtype, shape = self._layout(name)
        file = self.path / self.where[name]
        if dtype not in _DTYPES:
            raise CheckpointError(f"{file}: tensor {name} has type {dtype}, which is not known here")
        first, last, _ = slice(start, stop).indices(shape[0] if shape else 1)
        size, count = math.prod(shape[1:]), max(last - first, 0)
        kind = np.dtype(_DTYPES[dtype])
        try:
            if file.name not in self._offsets:
                self._offsets[file.name] = _offsets(file)
            with file.open("rb") as stream:
                stream.seek(self._offsets[file.name][name] + first * size * kind.itemsize)
                values = np.fromfile(stream, dtype=np.uint8, count=count * size * kind.itemsize)
        except OSError as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error.strerror}") from None
        if values.size != count * size * kind.itemsize:
            raise CheckpointError(f"{file}: tensor {name} ends early; the file was cut short while it was read")
        rows: np.ndarray = values.view(kind).reshape((count, *shape[1:]) if shape else ())
        return rows

    def ternary(self, name: str) -> Ternary | None:
        """Always None: no tensor of such a file has scales of its own."""
        self._layout(name)
        return None

    def _file_layouts(self, path: Path) -> dict[str, Layout]:
        with open_safetensors(path) as opened:
            return tensor_layouts(opened)

    def _layout(self, name: str) -> Layout:
        if name not in self.where:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; the checkpoint is incomplete")
        file = self.where[name]
        if file not in self._layouts:
            self._layouts[file] = self._file_layouts(self.path / file)
        if name not in self._layouts[file]:
            raise CheckpointError(f"{self.path / file}: tensor {name} is not in it, though the index says so")
        return self._layouts[file][name]


def tensor_layouts(opened: Any) -> dict[str, Layout]:
    """key -> (dtype, shape) of an open safetensors file."""
    slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
    return {key: (view.get_dtype(), tuple(view.get_shape())) for key, view in slices.items()}


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor begins in a file whose head safetensors has checked already."""
    with path.open("rb") as stream:
        head_bytes = int.from_bytes(stream.read(8), "little")
        head = json.loads(stream.read(head_bytes))
    return {name: 8 + head_bytes + entry["data_offsets"][0] for name, entry in head.items() if name != "__metadata__"}


def open_safetensors(path: Path) -> Any:
    """An open safetensors file. Raises CheckpointError if it is missing, truncated or corrupt."""
    try:
        return safe_open(path, framework="np")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the shard is missing; download the checkpoint again") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}); download it again") from None


def open_folder(path: Path, tokenizer_folder: Path | None = None, single: str | None = None) -> FolderCheckpoint:
    """Open a checkpoint folder. single: the one file of weights to read, whatever else is there.

    Raises CheckpointError naming what is missing or damaged.
    """
    config = read_json(path / "config.json", "a Hugging Face checkpoint folder has one")
    where = dict.fromkeys(_names_of(path / single), single) if single else _tensor_files(path)
    is_torch = not next(iter(where.values())).endswith(".safetensors") if where else False
    generation_file = path / "generation_config.json"
    info = CheckpointInfo(
        config=config,
        generation=read_json(generation_file, "") if generation_file.exists() else {},
        tokenizer=read_tokenizer(tokenizer_folder or path),
        license=_license(path),
        notices=_notices(path),
        source={"format": "pytorch" if is_torch else "safetensors", "files": _hashes(path, where)},
    )
    if is_torch:
        from .torch_files import TorchCheckpoint  # late: it is built on this module

        return TorchCheckpoint(path, info, where)
    return FolderCheckpoint(path, info, where)


def _notices(path: Path) -> dict[str, bytes]:
    """Licence files as they are, and the card as far as it is known."""
    found = {name: (path / name).read_bytes() for name in NOTICES if (path / name).is_file()}
    if (path / CARD).is_file():
        found[CARD] = json_bytes(read_card(path / CARD))
    return found


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


def _names_of(path: Path) -> list[str]:
    """Names of the tensors in a file. Raises CheckpointError if it is missing or damaged."""
    if path.suffix == ".safetensors":
        with open_safetensors(path) as opened:
            return list(opened.keys())
    from .torch_files import tensor_names  # late: it is built on this module

    return tensor_names(path)


def _tensor_files(path: Path) -> dict[str, str]:
    for index, single in ((INDEX, SINGLE), (TORCH_INDEX, TORCH_SINGLE)):
        if (path / index).exists():
            return _indexed(path, path / index)
        if (path / single).is_file():
            return dict.fromkeys(_names_of(path / single), single)
    raise CheckpointError(f"{path}: expected {SINGLE} or {INDEX} (or {TORCH_SINGLE} with its index), found none")


def _indexed(path: Path, index: Path) -> dict[str, str]:
    where = read_json(index, "").get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{index}: field weight_map is missing or empty")
    for name, file in where.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise CheckpointError(f"{index}: field weight_map: {name}: {file!r} is no name of a file in the folder")
    seen: dict[str, str] = {}
    for file in sorted(set(where.values())):
        if not (path / file).is_file():
            raise CheckpointError(f"{path / file}: the shard that the index names is missing; download it again")
        for name in _names_of(path / file):
            if name in seen:
                raise CheckpointError(
                    f"{path}: tensor {name} is both in {seen[name]} and in {file}; which one counts cannot be told, so "
                    "remove the wrong shard or download the checkpoint again"
                )
            seen[name] = file
    return where


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
    """SHA-256 of each file, as many at a time as there are processors."""
    files = sorted(set(where.values()))

    with Workers(min(default_workers(), len(files))) as workers:
        return dict(zip(files, workers.map(lambda file: file_sha256(path / file), files), strict=True))
