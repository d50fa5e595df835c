"""Writes a pack into a folder of its own and moves it into place when it is whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .checkpoints.huggingface import json_bytes
from .errors import PackerError
from .manifest import CHUNK_BYTES, FORMAT, VERSION, TensorEntry

#: A key's share of a shard's header, at most: name, dtype, shape and offsets.
HEADER_BYTES_A_KEY = 256


class PackWriter:
    """Collects arrays into shards; ``finish`` makes the pack appear, ``abandon`` removes all traces.

    target: folder to create. shard_bytes: greatest size of a shard. force: replace an existing target.
    Raises PackerError if the target exists, cannot be written, or the disk is full.
    """

    def __init__(self, target: Path, shard_bytes: int, *, force: bool):
        target = Path(os.path.abspath(target))  # so that "." has a name and a parent
        check_target(target, force=force)
        self.target, self.shard_bytes = target, shard_bytes
        self.entries: dict[str, TensorEntry] = {}
        self._pending: dict[str, np.ndarray] = {}
        self._pending_bytes = 0
        self._shards: list[dict[str, Any]] = []
        self._folder = partial_folder(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
        except OSError as error:
            raise PackerError(f"{target}: cannot write there ({error.strerror})") from None

    @property
    def shard_total(self) -> int:
        """Bytes of the shards written so far."""
        return sum(shard["bytes"] for shard in self._shards)

    def add(self, key: str, array: np.ndarray) -> None:
        """Add one safetensors key; a full shard goes to disk."""
        size = array.nbytes + HEADER_BYTES_A_KEY
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self.flush()
        self._pending[key] = np.ascontiguousarray(array)
        self._pending_bytes += size

    def flush(self) -> None:
        """Write the shard that is being filled."""
        if not self._pending:
            return
        path = self._folder / f"weights-{len(self._shards) + 1:05d}.safetensors"
        try:
            save_file(self._pending, path)
            path.chmod(0o644)  # safetensors makes files that only the owner can read
        except Exception as error:  # safetensors wraps the operating system's error in its own
            raise PackerError(
                f"{self.target}: cannot write {path.name} ({error}); is the disk full? Nothing was left behind"
            ) from None
        self._shards.append({"file": path.name, "bytes": path.stat().st_size, "chunks": _chunks(path)})
        self._pending, self._pending_bytes = {}, 0

    def finish(
        self,
        manifest: Mapping[str, Any],
        program: Mapping[str, Any],
        files: Mapping[str, bytes],
        inspect: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Write the JSON files, ``pack.json`` last, and rename the folder to the target.

        inspect: called with the whole pack before it is moved; it may change it, and what it raises keeps it away.
        """
        self.flush()
        listed = {"program.json": json_bytes(program), **files}
        for name in sorted(listed):
            self._write(name, listed[name])
        full = {
            **manifest,
            "format": FORMAT,
            "version": VERSION,
            "chunk_bytes": CHUNK_BYTES,
            "shards": self._shards,
            "files": {name: file_entry(data) for name, data in listed.items()},
            "tensors": {name: entry.to_json() for name, entry in self.entries.items()},
        }
        self._write("pack.json", json_bytes(full))
        inspect(self._folder)
        self._move()

    def abandon(self) -> None:
        """Remove what was written; the target stays as it was."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _move(self) -> None:
        """Put the folder in the target's place; if that fails, what was there stays there."""
        try:
            put_in_place(self._folder, self.target)
        except OSError as error:
            raise PackerError(f"{self.target}: cannot put the pack there ({error.strerror})") from None

    def _write(self, name: str, data: bytes) -> None:
        try:
            (self._folder / name).write_bytes(data)
        except OSError as error:
            raise PackerError(
                f"{self.target}: cannot write {name} ({error.strerror}); nothing was left behind"
            ) from None


def check_target(target: Path, *, force: bool) -> None:
    """Raise PackerError if a pack must not be written there."""
    if not os.path.lexists(target):
        return
    if not force:
        raise PackerError(f"{target}: already there; give another --out or --force to replace it")
    if not target.is_dir() or target.is_symlink() or not target.name:
        raise PackerError(f"{target}: no folder of its own that could be replaced; give another --out")
    if not (target / "pack.json").is_file() and any(target.iterdir()):
        raise PackerError(
            f"{target}: holds files but no pack.json; --force replaces packs only, so that nothing else is lost"
        )


def partial_folder(target: Path) -> Path:
    """Where a pack is made that will be ``target``: beside it, so that it can be renamed."""
    return target.with_name(f".{target.name}.partial-{os.getpid()}")


def put_in_place(folder: Path, target: Path) -> None:
    """Rename a folder to ``target``, which it replaces. Raises OSError; what was there stays there then."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    replaces = target.exists()
    if replaces:
        target.rename(old)
    try:
        folder.rename(target)
    except BaseException:
        if replaces:
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def file_entry(data: bytes) -> dict[str, Any]:
    """What ``pack.json`` has under ``files`` for a file with these bytes."""
    return {"bytes": len(data), "sha256": _sha256(data)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _chunks(path: Path) -> list[str]:
    with path.open("rb") as stream:
        return [_sha256(block) for block in iter(lambda: stream.read(CHUNK_BYTES), b"")]
