"""The page's own files: where they lie, and which of them are served."""

from __future__ import annotations

import os
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope

from server.errors import StartupError

MEDIA_TYPES = {
    # Fixed here: Python would ask the system, and a wrong answer stops the page (nosniff).
    ".css": "text/css",
    ".ico": "image/vnd.microsoft.icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".webmanifest": "application/manifest+json",
    ".wgsl": "text/wgsl",
    ".woff2": "font/woff2",
}
SERVED = {
    "/app": (".js", ".css", ".svg", ".png", ".ico", ".webmanifest", ".woff2"),
    "/engine": (".js",),
    "/vendor": (".js", ".txt"),
    "/shaders": (".wgsl", ".json"),
}
NEEDED = (
    "/app/index.html",
    "/engine/index.js",
    "/shaders/kernels.json",
    "/vendor/jinja.js",
    "/vendor/tokenizers.js",
)


def asset_folders() -> dict[str, Path]:
    """URL prefix -> folder. A wheel has web/ inside server/, a checkout beside it."""
    here = Path(__file__).resolve().parent
    web = here / "_web" if (here / "_web").is_dir() else here.parent / "web"
    return {
        "/app": web / "app",
        "/engine": web / "engine",
        "/vendor": web / "vendor",
        "/shaders": here.parent / "shaders",
    }


def check_assets(folders: dict[str, Path]) -> None:
    """Raises StartupError unless every file is there without which the page cannot start."""
    for url in NEEDED:
        _, mount, name = url.split("/")
        path = folders[f"/{mount}"] / name
        if not path.is_file():
            raise StartupError(
                f"the page is not complete: {path} is missing; install Tercet again "
                "(in a checkout: `pip install --editable .`, which fetches web/vendor)"
            )


def asset_urls(folders: dict[str, Path]) -> list[str]:
    """Every URL that the page is made of, sorted: what a browser keeps for a visit without network."""
    files = {
        f"{mount}/{path.relative_to(folders[mount]).as_posix()}"
        for mount, suffixes in SERVED.items()
        for path in folders[mount].rglob("*")
        if path.is_file() and path.name.endswith(suffixes) and not path.name.startswith(".")
    }
    return ["/", "/api/models", *sorted(files)]


class Assets(StaticFiles):
    """The files of one folder with one of `suffixes`; a browser keeps them but asks each time."""

    def __init__(self, folder: Path, suffixes: tuple[str, ...]) -> None:
        super().__init__(directory=folder)
        self.suffixes = suffixes

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        hidden = any(part.startswith(".") for part in Path(path).parts)
        if hidden or not path.endswith(self.suffixes):
            return "", None
        return super().lookup_path(path)

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = FileResponse(
            full_path,
            status_code=status_code,
            headers={"cache-control": "no-cache"},
            media_type=MEDIA_TYPES[Path(full_path).suffix],
            stat_result=stat_result,
        )
        if self.is_not_modified(response.headers, Headers(scope=scope)):
            return NotModifiedResponse(response.headers)
        return response
