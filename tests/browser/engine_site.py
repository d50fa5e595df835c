"""The project's server with packs that a test can damage on the way, and a bare page for the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.responses import HTMLResponse
from starlette.types import Message, Receive, Scope, Send

from server.app import create_app
from server.headers import SECURITY_HEADERS
from tests.support.browser import serving

PAGE = "/engine-test"


class EngineSite:
    """Answers as the server does, unless told otherwise.

    gone: URL prefixes whose connections are cut. cut_after: body bytes after which the connection of a shard is
    cut. flip: byte of a shard's file that is changed on the way, `flips` times. requests: (path, Range) of all
    requests since `clear`.
    """

    def __init__(self, packs: Path) -> None:
        self.packs = packs
        self.app = create_app(packs)
        self.address = ""
        self.clear()

    def clear(self) -> None:
        self.gone: tuple[str, ...] = ()
        self.cut_after: int | None = None
        self.flip = 0
        self.flips = 0
        self.requests: list[tuple[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((path, headers.get("range", "")))
        if path == PAGE:
            page = HTMLResponse("<!doctype html><title>engine</title>", headers=SECURITY_HEADERS)
            await page(scope, receive, send)
        elif path.startswith(self.gone):
            await cut(scope)
        elif path.endswith(".safetensors"):
            await self.app(scope, receive, Damaged(self, scope, send))
        else:
            await self.app(scope, receive, send)


class Damaged:
    """Passes a shard's answer on, with the site's damage."""

    def __init__(self, site: EngineSite, scope: Scope, send: Send) -> None:
        self.site, self.scope, self.send = site, scope, send
        self.at = self.sent = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self.at = int(headers.get(b"content-range", b"bytes 0-").split()[1].split(b"-")[0])
        elif body := message.get("body"):
            flip = self.site.flip - self.at
            if self.site.flips > 0 and 0 <= flip < len(body):
                self.site.flips -= 1
                body = body[:flip] + bytes([body[flip] ^ 1]) + body[flip + 1 :]
            limit = self.site.cut_after
            if limit is not None and self.sent + len(body) > limit:
                await self.send({**message, "body": body[: limit - self.sent], "more_body": True})
                await asyncio.sleep(0.5)  # a browser drops what it has not read when a connection breaks
                await cut(self.scope)
            message = {**message, "body": body}
            self.at += len(body)
            self.sent += len(body)
        await self.send(message)


async def cut(scope: Scope) -> None:
    """End the connection without an answer."""
    raise ConnectionError(f"the test cuts {scope['path']}")


@contextmanager
def running_engine_site(packs: Path) -> Iterator[EngineSite]:
    """Serve from a thread of this process."""
    site = EngineSite(packs)
    with serving(site, log_level="critical") as site.address:
        yield site
