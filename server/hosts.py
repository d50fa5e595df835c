"""Host check against DNS rebinding.

A web site can let its own name resolve to 127.0.0.1 and then read this server as if it were its
own. The browser still sends the site's name as Host, so only known names are answered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import StartupError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
HOST_HEADER = re.compile(r"(?P<host>\[[^\[\]]+\]|[^:\[\]]+)(:[0-9]+)?")
HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def bracketed(host: str) -> str:
    """`host` as it stands in a URL: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def check_host_name(name: str) -> str:
    """Return `name` if it is a host name or an IP address. Raises StartupError if it is not."""
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        if not HOST_NAME.fullmatch(name):
            raise StartupError(
                f"--allow-host {name}: expected a host name or an address, without scheme and port"
            ) from None
    return name


def without_port(header: str) -> str:
    """Host header -> host in lower case: `[::1]:8000` -> `[::1]`; empty if it is malformed."""
    match = HOST_HEADER.fullmatch(header)
    return match["host"].lower() if match else ""


class HostCheck:
    """ASGI middleware that answers 421 unless the one Host header is in LOCAL_HOSTS or `allowed`."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str] = ()) -> None:
        self.app = app
        self.allowed = {*LOCAL_HOSTS, *(bracketed(host).lower() for host in allowed)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        hosts = Headers(scope=scope).getlist("host")
        if len(hosts) == 1 and without_port(hosts[0]) in self.allowed:
            await self.app(scope, receive, send)
            return
        response = PlainTextResponse(
            f"This server does not answer to the host {', '.join(hosts) or '(none)'}. "
            "To allow a name, start it with --allow-host NAME.\n",
            status_code=421,
        )
        await response(scope, receive, send)
