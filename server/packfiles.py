"""/packs/ID/FILE: the files of the packs, with Range and ETag."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

import anyio.to_thread
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

from server.packs import PACK_JSON, PackFile, PackLibrary

# Every other file is named by its hash in pack.json, so a browser never needs to ask twice.
IMMUTABLE = "public, max-age=31536000, immutable"
REVALIDATE = "no-cache"
MEDIA_TYPES = {".json": "application/json", ".safetensors": "application/octet-stream"}


class _PackResponse(FileResponse):
    chunk_size = 2**20  # weights are read in long runs: 16 times fewer hops than starlette's default


class PackFiles(StaticFiles):
    """ASGI application for the files that a usable pack lists, and pack.json itself.

    A request only ever picks a name out of that list, so no path can lead elsewhere.
    """

    def __init__(self, library: PackLibrary) -> None:
        super().__init__()
        self.library = library

    async def get_response(self, path: str, scope: Scope) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(405, headers={"Allow": "GET, HEAD"})
        pack_id, _, name = path.replace(os.sep, "/").partition("/")
        file, stat_result = await anyio.to_thread.run_sync(self._find, pack_id, name)
        headers = {
            "etag": file.etag,
            "cache-control": REVALIDATE if name == PACK_JSON else IMMUTABLE,
        }
        return self._respond(file, stat_result, headers, Headers(scope=scope))

    def _find(self, pack_id: str, name: str) -> tuple[PackFile, os.stat_result]:
        pack = self.library.packs().get(pack_id)
        file = pack.files.get(name) if pack else None
        if file is None:
            raise HTTPException(404, "No such file in a pack of this server.")
        try:
            stat_result = file.path.lstat()
        except OSError:
            raise HTTPException(404, f"{pack_id}/{name} has gone since the server read the pack.") from None
        if not stat.S_ISREG(stat_result.st_mode) or stat_result.st_size != file.bytes:
            raise HTTPException(
                500,
                f"{pack_id}/{name} has changed since pack.json was written: expected {file.bytes} bytes, "
                f"found {stat_result.st_size}. Export the pack again.",
            )
        return file, stat_result

    def _respond(
        self, file: PackFile, stat_result: os.stat_result, headers: Mapping[str, str], request: Headers
    ) -> Response:
        media_type = MEDIA_TYPES.get(file.path.suffix, "text/plain")
        response = _PackResponse(file.path, headers=headers, media_type=media_type, stat_result=stat_result)
        if self.is_not_modified(response.headers, request):
            return NotModifiedResponse(response.headers)
        return response
