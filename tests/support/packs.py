"""Tiny packs, and packs changed by hand with their hashes made right again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from packer import encodings
from packer.export import ExportOptions, export
from packer.manifest import CHUNK_BYTES
from packer.pack import Pack
from shaders.reference import dequantize

from .checkpoints import tiny_checkpoint


def tiny_pack(
    folder: Path,
    family: str = "bitnet",
    *,
    options: ExportOptions | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A pack of a tiny model in ``folder/pack``; ``changes`` are fields of the model's config."""
    source = tiny_checkpoint(folder / "checkpoint", family, seed=seed, **changes)
    export(source, folder / "pack", options or ExportOptions(name="tiny"))
    return folder / "pack"


def change_manifest(pack: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit ``pack.json`` in place; nothing else is made to agree."""
    manifest = json.loads((pack / "pack.json").read_bytes())
    change(manifest)
    (pack / "pack.json").write_text(json.dumps(manifest), encoding="utf-8")


def change_program(pack: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit ``program.json`` in place and list its new hash."""
    program = json.loads((pack / "program.json").read_bytes())
    change(program)
    (pack / "program.json").write_text(json.dumps(program), encoding="utf-8")
    relist(pack)


def change_shard(pack: Path, change: Callable[[dict[str, np.ndarray]], None], index: int = 0) -> None:
    """Edit the arrays of a shard in place and list its new hash."""
    path = sorted(pack.glob("*.safetensors"))[index]
    arrays = {key: array.copy() for key, array in load_file(path).items()}
    change(arrays)
    save_file(arrays, path)
    relist(pack)


def change_bytes(pack: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Edit a file's bytes and list its new hash."""
    (pack / name).write_bytes(change((pack / name).read_bytes()))
    relist(pack)


def recode(pack: Path, name: str, encoding: str) -> None:
    """Store a matrix, as it is decoded, in another encoding than ternary; shard, manifest and hashes agree."""
    values = dequantize(Pack(pack).tensor(name))
    if encoding == "nvfp4":
        own = encodings.nvfp4_tensor_scale(float(np.abs(values).max()))
        data, scales = encodings.encode_nvfp4(values, own)
        added = {"data.0": data, "scale.0": scales, "tensor_scale": own.reshape(1)}
    else:
        data, found = encodings.encode(values, encoding)
        added = {"data.0": data} | ({} if found is None else {"scale.0": found})
    parts = re.compile(re.escape(name) + r"\.(data\.\d+|scale(\.\d+)?|tensor_scale)")

    def replace(arrays: dict[str, np.ndarray]) -> None:
        for key in [key for key in arrays if parts.fullmatch(key)]:
            del arrays[key]
        arrays.update({f"{name}.{part}": array for part, array in added.items()})

    change_shard(pack, replace)
    entry = {"encoding": encoding, "shape": list(values.shape), "slices": [len(values)]}
    change_manifest(pack, lambda manifest: manifest["tensors"].update({name: entry}))


def relist(pack: Path) -> None:
    """Make lengths and hashes in ``pack.json`` those of the files."""

    def hashes(data: bytes, size: int) -> list[str]:
        return [hashlib.sha256(data[at : at + size]).hexdigest() for at in range(0, len(data), size)]

    def change(manifest: dict[str, Any]) -> None:
        for shard in manifest["shards"]:
            data = (pack / shard["file"]).read_bytes()
            shard |= {"bytes": len(data), "chunks": hashes(data, CHUNK_BYTES)}
        for name in manifest["files"]:
            data = (pack / name).read_bytes()
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    change_manifest(pack, change)
