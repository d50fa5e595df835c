"""Start the server: look that everything is there, take the port, say where the page is."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Iterable
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from packer import __version__
from server.app import create_app
from server.errors import StartupError
from server.hosts import LOCAL_HOSTS, bracketed, check_host_name
from server.packs import Pack, PackLibrary

EXIT_CANNOT_START = 2
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def serve(
    packs: Path | None,
    host: str = "127.0.0.1",
    port: int = 8000,
    open_browser: bool = False,
    allow_hosts: Iterable[str] = (),
) -> int:
    """Serve until Ctrl-C and return the exit status: 0, or 2 if the server could not start.

    `packs` is a folder of packs or one pack; None takes examples/packs of a checkout. Port 0 takes
    a free one. What is wrong goes to stderr in one line.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        library = PackLibrary(packs or default_packs())
        models = library.require_packs()
        app = create_app(library, allow_hosts=[host, *map(check_host_name, allow_hosts)])
        listener = take_port(host, port)
    except StartupError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_CANNOT_START

    url = page_url(host, listener.getsockname()[1])
    print_banner(Console(), url, models, host)
    if open_browser:
        open_page(url)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=3,  # a browser in mid-download must not hold up Ctrl-C
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def default_packs() -> Path:
    """examples/packs of a checkout. Raises StartupError where there is none, as in a wheel."""
    folder = Path(__file__).resolve().parent.parent / "examples" / "packs"
    if not folder.is_dir():
        raise StartupError("no packs folder given: name one with --packs DIR")
    return folder


def take_port(host: str, port: int) -> socket.socket:
    """Bind and listen before anything is announced. Raises StartupError if that cannot be done."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"--host {host}: not an address of this machine ({error.strerror})") from None
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere this option would let two servers share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise StartupError(_why_not(error, host, port)) from None
    return listener


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken by another program; choose another one with --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has: choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def page_url(host: str, port: int) -> str:
    """The URL that a browser on this machine opens."""
    return f"http://{bracketed(ANY_ADDRESS.get(host, host))}:{port}/"


def print_banner(console: Console, url: str, models: dict[str, Pack], host: str) -> None:
    """Say where the page is and which models it offers."""
    console.print(f"[bold]Tercet[/bold] {__version__} is ready at [bold]{url}[/bold]", highlight=False)
    table = Table.grid(padding=(0, 2))
    for pack in models.values():
        # A name could carry the terminal's control codes.
        name = "".join(char if char.isprintable() else "?" for char in pack.manifest["name"])
        table.add_row("", escape(name), f"{decimal(pack.bytes)} to download", f"[dim]{pack.id}[/dim]")
    console.print(table)
    if bracketed(host) not in LOCAL_HOSTS:
        console.print(
            "Other machines reach it too, but browsers offer WebGPU only to pages from https or localhost.",
            highlight=False,
        )
    console.print("[dim]Ctrl-C stops it.[/dim]")


def open_page(url: str) -> None:
    """Open the page in the person's browser, where there is a screen to show it on."""
    has_screen = sys.platform in ("win32", "darwin") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if has_screen:
        # In a thread: some browsers keep the caller waiting until they are closed.
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
