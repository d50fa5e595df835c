"""``pack.json``: its fields, and the rules of FORMAT.md that can be checked without opening a shard."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shaders.contract import quotient_up, short
from shaders.weights import group_of

from .errors import PackError

FORMAT, VERSION = "tercet-pack", 1
CHUNK_BYTES = 4 << 20
MAX_SHARD_BYTES = 64 << 20
MAX_HEADER_BYTES = 1 << 20
MAX_JSON_BYTES = 16 << 20
GRADES = ("lossless", "good", "usable", "degraded", "BROKEN")
ENCODINGS = ("ternary", "q8", "q4", "q4a", "nvfp4", "mxfp4", "f16", "f32")
SCALE_KINDS = ("parts", "row", "group")
#: Bytes of an element of each safetensors dtype that packs have.
DTYPE_BYTES = {"U8": 1, "I8": 1, "F16": 2, "F32": 4}
#: Integers beyond this are not exact in JavaScript, which reads packs too.
_MAX_INTEGER = 2**53 - 1
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _text(value: Any) -> bool:
    """A string that can be printed: JSON can smuggle in half a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _count(value: Any) -> bool:
    return _id(value) and value > 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_INTEGER


def _maybe(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INTEGER


def _hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _kv(value: Any) -> bool:
    return isinstance(value, dict) and all(_count(value.get(name)) for name in ("layers", "kv_heads", "head_dim"))


def _shards(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(shard, dict)
        and _text(shard.get("file"))
        and _count(shard.get("bytes"))
        and isinstance(shard.get("chunks"), list)
        and all(_hash(chunk) for chunk in shard["chunks"])
        for shard in value
    )


def _files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(file, dict) and _id(file.get("bytes")) and _hash(file.get("sha256")) for file in value.values()
    )


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_text, "a string"),
    "description": (_text, "a string"),
    "license": (_text, "a string"),
    "family": (_text, "a string"),
    "source": (lambda value: isinstance(value, dict), "an object"),
    "activations": (lambda value: value in ("a8", "a16", "f32"), "a8, a16 or f32"),
    "parameters": (_count, "a positive integer"),
    "vocab_size": (_count, "a positive integer"),
    "context_length": (_count, "a positive integer"),
    "bits_per_weight": (_number, "a number"),
    "ternary_bits_per_weight": (_maybe(_number), "a number or null"),
    "resident_bytes": (_count, "a positive integer"),
    "kv": (_kv, "positive layers, kv_heads and head_dim"),
    "bos_id": (_maybe(_id), "an integer or null"),
    "eos_ids": (lambda value: isinstance(value, list), "a list of integers"),
    "grade": (lambda value: value is None or value in GRADES, f"null or one of {', '.join(GRADES)}"),
    "chunk_bytes": (lambda value: value == CHUNK_BYTES, str(CHUNK_BYTES)),
    "shards": (_shards, "a list of {file, bytes, chunks}"),
    "files": (_files, "an object of {bytes, sha256}"),
    "tensors": (lambda value: isinstance(value, dict), "an object"),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of ``pack.json``; see FORMAT.md."""

    name: str
    encoding: str
    shape: tuple[int, ...]
    scale: str | None
    parts: tuple[int, ...]
    group: int
    slices: tuple[int, ...]

    def keys(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """safetensors key -> (dtype, shape) that the shards must hold."""
        if len(self.shape) == 1:
            return {f"{self.name}.data.0": ("F32", self.shape)}
        columns = self.shape[1]
        keys: dict[str, tuple[str, tuple[int, ...]]] = {}
        dtype, width = data_layout(self.encoding, columns)
        for index, rows in enumerate(self.slices):
            keys[f"{self.name}.data.{index}"] = (dtype, (rows, width))
            if self.scale == "row":
                keys[f"{self.name}.scale.{index}"] = ("F32", (rows,))
            elif self.group:
                scale_dtype, scale_width = scale_layout(self.encoding, columns, self.group)
                keys[f"{self.name}.scale.{index}"] = (scale_dtype, (rows, scale_width))
        if self.scale == "parts":
            keys[f"{self.name}.scale"] = ("F32", (len(self.parts),))
        if self.encoding == "nvfp4":
            keys[f"{self.name}.tensor_scale"] = ("F32", (1,))
        return keys

    def to_json(self) -> dict[str, Any]:
        """The entry as ``pack.json`` holds it."""
        entry: dict[str, Any] = {
            "encoding": self.encoding,
            "shape": list(self.shape),
            "slices": list(self.slices),
        }
        if self.scale:
            entry["scale"] = self.scale
        if self.scale == "parts":
            entry["parts"] = list(self.parts)
        if self.scale == "group":
            entry["group"] = self.group
        return entry


def data_layout(encoding: str, columns: int) -> tuple[str, int]:
    """(safetensors dtype, elements a row) of an encoding's data."""
    return {
        "ternary": ("U8", 4 * quotient_up(columns, 20)),
        "q8": ("I8", 32 * quotient_up(columns, 32)),
        "q4": ("U8", 16 * quotient_up(columns, 32)),
        "q4a": ("U8", 16 * quotient_up(columns, 32)),
        "nvfp4": ("U8", 16 * quotient_up(columns, 32)),
        "mxfp4": ("U8", 16 * quotient_up(columns, 32)),
        "f16": ("F16", 4 * quotient_up(columns, 4)),
        "f32": ("F32", 4 * quotient_up(columns, 4)),
    }[encoding]


def scale_layout(encoding: str, columns: int, group: int) -> tuple[str, int]:
    """(safetensors dtype, elements a row) of an encoding's scales by group."""
    groups = quotient_up(columns, group)
    return {"q4a": ("F16", 2 * groups), "nvfp4": ("U8", groups), "mxfp4": ("U8", groups)}.get(encoding, ("F16", groups))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a pack. Raises PackError (``missing``, ``json``)."""
    if not path.is_file():
        raise PackError("missing", f"{path}: missing; export or download the pack again")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise PackError("json", f"{path}: {path.stat().st_size} bytes, expected at most {MAX_JSON_BYTES}")
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PackError("json", f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise PackError("json", f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _no_constant(name: str) -> None:
    """NaN and Infinity are Python's additions to JSON; a browser refuses them."""
    raise ValueError(f"{name} is not JSON")


def check_manifest(manifest: Mapping[str, Any], path: Path) -> dict[str, TensorEntry]:
    """Check ``pack.json`` and return its tensors. Raises PackError naming the field."""
    found = (manifest.get("format"), manifest.get("version"))
    if found != (FORMAT, VERSION) or isinstance(manifest["version"], bool):
        raise PackError(
            "version",
            f"{path}: format and version are {short(found)}, expected {(FORMAT, VERSION)}; use a matching Tercet",
        )
    for field, (check, expected) in _FIELDS.items():
        if field not in manifest:
            raise PackError("field", f"{path}: field {field!r} is missing, expected {expected}")
        if not check(manifest[field]):
            raise PackError("field", f"{path}: field {field!r} is {short(manifest[field])}, expected {expected}")
    eos = manifest["eos_ids"]
    if not eos or not all(_id(token) and token < manifest["vocab_size"] for token in eos):
        raise PackError(
            "eos",
            f"{path}: eos_ids is {short(eos)}, expected token ids below {manifest['vocab_size']}, at least one",
        )
    _check_files(manifest, path)
    return {name: _tensor(name, entry, path) for name, entry in manifest["tensors"].items()}


def _check_files(manifest: Mapping[str, Any], path: Path) -> None:
    names = [shard["file"] for shard in manifest["shards"]] + list(manifest["files"])
    for name, count in Counter(names).items():
        if not _FILE_NAME.fullmatch(name) or name == "pack.json" or count > 1:
            raise PackError("path", f"{path}: file name {short(name)} is not allowed or listed twice")
    for name in ("program.json", "tokenizer.json", "tokenizer_config.json", "report.json"):
        if name not in manifest["files"]:
            raise PackError("missing", f"{path}: files does not list {name}")
    for shard in manifest["shards"]:
        if shard["bytes"] > MAX_SHARD_BYTES:
            raise PackError(
                "shard-size",
                f"{path}: shard {shard['file']} has {shard['bytes']} bytes, expected at most {MAX_SHARD_BYTES}",
            )
        expected = quotient_up(shard["bytes"], CHUNK_BYTES)
        if len(shard["chunks"]) != expected:
            raise PackError(
                "field",
                f"{path}: shard {shard['file']} lists {len(shard['chunks'])} chunks, expected {expected}",
            )


def _tensor(name: str, entry: Any, path: Path) -> TensorEntry:
    where = f"{path}: tensor {short(name)}"
    if not isinstance(entry, dict):
        raise PackError("field", f"{where}: expected an object, found {short(entry)}")
    encoding, shape, scale = entry.get("encoding"), entry.get("shape"), entry.get("scale")
    if encoding not in ENCODINGS:
        raise PackError(
            "encoding",
            f"{where}: encoding is {short(encoding)}, expected one of {', '.join(ENCODINGS)}; use a newer Tercet",
        )
    if not isinstance(shape, list) or len(shape) not in (1, 2) or not all(_count(n) and n < 2**31 for n in shape):
        raise PackError("shape", f"{where}: shape is {short(shape)}, expected one or two positive integers below 2^31")
    if len(shape) == 1 and encoding != "f32":
        raise PackError("encoding", f"{where}: a vector is {encoding}, expected f32")
    if (encoding == "ternary") != (scale in SCALE_KINDS) or (scale is not None and scale not in SCALE_KINDS):
        expected = f"one of {', '.join(SCALE_KINDS)}" if encoding == "ternary" else "none"
        raise PackError("encoding", f"{where}: scale is {short(scale)}, expected {expected}")
    parts = _rows(entry.get("parts"), shape[0], "parts", where) if scale == "parts" else ()
    group = group_of(encoding, _group(entry.get("group"), where) if scale == "group" else 0)
    slices = _rows(entry.get("slices"), shape[0] if len(shape) == 2 else 1, "slices", where)
    return TensorEntry(name, encoding, tuple(shape), scale, parts, group, slices)


def _group(value: Any, where: str) -> int:
    if not _count(value) or value % 64:
        raise PackError("shape", f"{where}: group is {short(value)}, expected a multiple of 64")
    return int(value)


def _rows(value: Any, total: int, what: str, where: str) -> tuple[int, ...]:
    good = isinstance(value, list) and all(_count(n) for n in value) and sum(value) == total
    if not good:
        raise PackError(
            "slices",
            f"{where}: {what} is {short(value)}, expected positive row counts that add up to {total}",
        )
    return tuple(value)
