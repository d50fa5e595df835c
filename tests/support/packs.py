"""Tiny packs, and packs changed by hand with their hashes made right again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from packer.export import ExportOptions, export
from packer.manifest import CHUNK_BYTES

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
