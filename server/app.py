"""The application: which URL is answered by what."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.templating import Jinja2Templates

from packer import __version__
from server.assets import SERVED, Assets, asset_folders, asset_urls, check_assets
from server.headers import SECURITY_HEADERS, SecurityHeaders
from server.hosts import HostCheck
from server.models import ModelCard, model_cards
from server.packfiles import PackFiles
from server.packs import PackLibrary

READ = ["GET", "HEAD"]
NO_CACHE = {"cache-control": "no-cache"}


def create_app(
    packs: Path | PackLibrary, allow_hosts: Iterable[str] = (), folders: dict[str, Path] | None = None
) -> FastAPI:
    """Make the application that serves the page and the packs in `packs`.

    `allow_hosts` are Host names to answer to besides localhost, 127.0.0.1 and [::1]. `folders` are
    other places for the page's files than `asset_folders()`. Raises StartupError if the packs
    folder or a file of the page is missing.
    """
    library = packs if isinstance(packs, PackLibrary) else PackLibrary(packs)
    folders = folders or asset_folders()
    check_assets(folders)

    # No docs pages: they load scripts from another host. No redirects: they would answer with the
    # Host of the request.
    app = FastAPI(
        title="Tercet",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    add_pages(app, library, Jinja2Templates(directory=folders["/app"]))
    add_offline(app, folders)
    for url, suffixes in SERVED.items():
        app.mount(url, Assets(folders[url], suffixes))
    app.mount("/packs", PackFiles(library))

    # The last one added is the first to see a request.
    app.add_middleware(HostCheck, allowed=allow_hosts)
    app.add_middleware(SecurityHeaders)

    @app.exception_handler(Exception)
    def unexpected(request: Request, error: Exception) -> Response:
        # Made outside all middleware, so it brings the headers itself.
        return JSONResponse({"detail": "Internal Server Error"}, 500, headers=SECURITY_HEADERS)

    return app


def add_pages(app: FastAPI, library: PackLibrary, templates: Jinja2Templates) -> None:
    """Add the URLs whose answer is made for each request: the page, /api/models, /health."""

    @app.api_route("/", methods=READ)
    def page(request: Request) -> Response:
        return templates.TemplateResponse(request, "index.html", {"version": app.version}, headers=NO_CACHE)

    @app.api_route("/api/models", methods=READ)
    def models(response: Response) -> list[ModelCard]:
        response.headers.update(NO_CACHE)
        return model_cards(library.packs().values())

    @app.api_route("/health", methods=READ)
    def health(response: Response) -> dict[str, str]:
        response.headers.update(NO_CACHE)
        return {"status": "ok", "version": app.version}


def add_offline(app: FastAPI, folders: dict[str, Path]) -> None:
    """Add what the page needs to be kept for a visit without network."""

    @app.api_route("/api/assets", methods=READ)
    def assets(response: Response) -> list[str]:
        response.headers.update(NO_CACHE)
        return asset_urls(folders)

    # At the root, since a service worker only sees requests below its own URL.
    @app.api_route("/sw.js", methods=READ)
    def service_worker() -> Response:
        path = folders["/app"] / "service_worker.js"
        return FileResponse(path, media_type="text/javascript", headers=NO_CACHE)
