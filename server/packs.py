"""The packs of one folder: which of them can be served, and every file that may be."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packer.errors import PackError
from packer.manifest import check_manifest, read_json
from server.errors import StartupError

log = logging.getLogger("tercet.server")

PACK_JSON = "pack.json"
PACK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class UnservablePack(Exception):
    """A pack whose files, links or name keep it from being served; the message says which and why."""


@dataclass(frozen=True)
class PackFile:
    """A file that may be served. `etag` is a strong one, made from the content's hash."""

    path: Path
    bytes: int
    etag: str


@dataclass(frozen=True)
class Pack:
    """A usable pack: its checked pack.json, and by name that file and every one it lists."""

    id: str
    manifest: dict[str, Any]
    files: dict[str, PackFile]

    @property
    def url(self) -> str:
        """Where the engine finds the pack on this server."""
        return f"/packs/{self.id}/"

    @property
    def bytes(self) -> int:
        """Size of all files together: the download."""
        return sum(file.bytes for file in self.files.values())


class PackLibrary:
    """The packs in `folder`: its subfolders, or the folder itself if it is a pack.

    Reads the folder again when a pack.json has come, gone or changed. A pack that cannot be served
    is left out, and the reason goes to the log.
    """

    def __init__(self, folder: Path) -> None:
        """Raises StartupError if `folder` is missing."""
        if not folder.is_dir():
            found = "a file" if folder.exists() else "nothing"
            raise StartupError(f"packs folder {folder}: expected a folder, found {found}; name another with --packs")
        self.folder = folder.resolve()
        self._seen: list[tuple[str, int, int]] = []
        self._packs: dict[str, Pack] = {}

    def packs(self) -> dict[str, Pack]:
        """Usable packs by id, sorted."""
        candidates = self._candidates()
        seen = [_signature(folder) for folder in candidates]
        if seen != self._seen:
            self._packs = dict(pack for folder in candidates if (pack := self._read(folder)))
            self._seen = seen
        return self._packs

    def require_packs(self) -> dict[str, Pack]:
        """`packs()`. Raises StartupError if there is none."""
        packs = self.packs()
        if not packs:
            left_out = f"{len(self._candidates())} left out" if self._candidates() else "it has no subfolder"
            raise StartupError(
                f"packs folder {self.folder}: no usable pack ({left_out}); "
                "make one with `tercet export SOURCE --out FOLDER/NAME`"
            )
        return packs

    def _candidates(self) -> list[Path]:
        if (self.folder / PACK_JSON).is_file():
            return [self.folder]
        if not self.folder.is_dir():
            return []
        visible = (path for path in self.folder.iterdir() if not path.name.startswith("."))
        return sorted(path for path in visible if path.is_dir())

    def _read(self, folder: Path) -> tuple[str, Pack] | None:
        try:
            return folder.name, read_pack(folder)
        except (PackError, UnservablePack, OSError) as error:
            log.warning("pack %r left out: %s", folder.name, error)
            return None


def read_pack(folder: Path) -> Pack:
    """Read pack.json in `folder` and look that each file it lists is there with the listed size.

    Contents are not hashed: the engine does that for each chunk, and `tercet verify` for all.
    Raises PackError, UnservablePack or OSError with the reason why the pack cannot be served.
    """
    if not PACK_ID.fullmatch(folder.name):
        raise UnservablePack("its folder's name may only have letters, digits, '.', '_' and '-'")
    if folder.is_symlink():
        raise UnservablePack("it is a symbolic link; start the server with --packs on the folder it leads to")
    path = folder / PACK_JSON
    manifest = read_json(path)
    check_manifest(manifest, path)
    _check_sendable(manifest, path)
    content = path.read_bytes()
    files = {PACK_JSON: _listed_file(path, len(content), _etag(content))}
    for shard in manifest["shards"]:
        etag = _etag("".join(shard["chunks"]).encode("ascii"))
        files[shard["file"]] = _listed_file(folder / shard["file"], shard["bytes"], etag)
    for name, entry in manifest["files"].items():
        files[name] = _listed_file(folder / name, entry["bytes"], f'"{entry["sha256"]}"')
    return Pack(folder.name, manifest, files)


def _etag(content: bytes) -> str:
    """A strong ETag. That of a shard is made from its chunks' hashes: it differs when a byte does."""
    return f'"{hashlib.sha256(content).hexdigest()}"'


def _check_sendable(manifest: dict[str, Any], path: Path) -> None:
    # One such field would make /api/models fail, for all packs.
    try:
        json.dumps(manifest, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise UnservablePack(f"{path}: has NaN, an infinity or half a character ({error})") from None


def _listed_file(path: Path, expected: int, etag: str) -> PackFile:
    if path.is_symlink():
        raise UnservablePack(f"{path}: expected a file, found a symbolic link; copy the file there")
    if not path.is_file():
        raise UnservablePack(f"{path}: missing; export or download the pack again")
    found = path.stat().st_size
    if found != expected:
        raise UnservablePack(f"{path}: expected {expected} bytes, found {found}; export the pack again")
    return PackFile(path, expected, etag)


def _signature(folder: Path) -> tuple[str, int, int]:
    try:
        stat = (folder / PACK_JSON).stat()
    except OSError:
        return folder.name, 0, 0
    return folder.name, stat.st_mtime_ns, stat.st_size
