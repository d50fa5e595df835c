"""Headless Chromium, and an application served to it from a thread of this process."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from playwright.sync_api import Browser, sync_playwright
from starlette.types import ASGIApp

#: The names that tests/system-packages.sh accepts.
NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = [
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WEBGPU = ["--enable-unsafe-webgpu", "--enable-webgpu-developer-features"]


@contextmanager
def running_browser(*, webgpu: bool = False) -> Iterator[Browser]:
    """The system's Chromium; on a machine without a GPU its WebGPU runs on SwiftShader."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program, f"expected one of {', '.join(NAMES)} on PATH; make test installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, headless=True, args=[*QUIET, *(WEBGPU if webgpu else [])]
        )
        yield browser
        browser.close()


@contextmanager
def serving(app: ASGIApp, log_level: str = "warning") -> Iterator[str]:
    """Serve on a free port of localhost; gives the address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level=log_level))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=10)
