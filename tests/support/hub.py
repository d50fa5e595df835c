"""A small Hugging Face hub on the loopback address: models that are folders, and faults on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """models: OWNER/NAME -> folder. token: what requests must carry. requests: (method, path, Range) as they came.

    answer: start of a path -> status that is given instead. broken: file name -> bytes after which the connection ends.
    ranges: whether parts of files are given; else all of a file is.
    """

    endpoint: str = ""
    models: dict[str, Path] = field(default_factory=dict)
    token: str | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    answer: dict[str, int] = field(default_factory=dict)
    broken: dict[str, int] = field(default_factory=dict)
    ranges: bool = True

    def fetched(self) -> list[str]:
        """Names of the files of which the bytes were asked for."""
        asked = [path for method, path, _ in self.requests if "/resolve/" in path and method == "GET"]
        return sorted({path.rpartition("/")[2] for path in asked})


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub for the time of the block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._handle()

        def do_GET(self) -> None:
            self._handle()

        def _handle(self) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.requests.append((self.command, path, self.headers.get("Range")))
            for start, status in hub.answer.items():
                if path.startswith(start):
                    return self._send(status, b"{}")
            if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._send(401, b"{}", {"X-Error-Message": "Invalid credentials"})
            for name, folder in hub.models.items():
                about = f"/api/models/{name}"
                if path in (about, f"{about}/revision/main", f"{about}/revision/{COMMIT}"):
                    return self._describe(name, folder)
                if path.startswith(f"/api/models/{name}/revision/"):
                    return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                if path.startswith(f"/{name}/resolve/"):
                    return self._file(folder / path.split("/", 5)[5])
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _describe(self, name: str, folder: Path) -> None:
            files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
            self._send(200, json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": files}).encode())

        def _file(self, file: Path) -> None:
            if not file.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            data = file.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()}"'
            headers = {"ETag": tag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            asked = self.headers.get("Range")
            if asked is None or not hub.ranges:
                return self._send(200, data, headers, hub.broken.get(file.name))
            first = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            self._send(206, data[first:], headers, hub.broken.get(file.name))

        def _send(
            self, status: int, data: bytes, headers: dict[str, str] | None = None, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(data if cut is None else data[:cut])
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
