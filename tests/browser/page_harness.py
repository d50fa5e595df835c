"""The page with a scripted engine: the project's own server, Chromium, test data, and what a person does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    expect,
)
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from server.app import create_app
from tests.support.browser import serving

Open = Callable[..., Page]

FAKE_ENGINE = Path(__file__).resolve().parent / "fake_engine.js"
SMALL: dict[str, Any] = {
    "id": "small",
    "url": "/packs/small/",
    "name": "Small chat model 135M",
    "description": "A small chat model, ternarized by distillation.",
    "family": "bitnet",
    "license": "apache-2.0",
    "parameters": 134515008,
    "bytes": 42100000,
    "resident_bytes": 61400000,
    "kv": {"layers": 30, "kv_heads": 3, "head_dim": 64},
    "context": 8192,
    "activations": "a8",
    "bits_per_weight": 2.504,
    "ternary_bits_per_weight": 1.6,
    "grade": None,
    "about": None,
    "default": True,
}
LARGE: dict[str, Any] = {
    **SMALL,
    "id": "large",
    "url": "/packs/large/",
    "name": "Large 2B",
    "description": "A larger model, for a graphics card of its own.",
    "parameters": 2412820480,
    "bytes": 1187000000,
    "resident_bytes": 1250000000,
    "context": 4096,
    "bits_per_weight": 3.93,
    "grade": "B: 0.04 nats/token",
    "default": False,
}
URL: str = SMALL["url"]
PARIS = "The capital of France is Paris."
TOO_LARGE = {
    "fits": False,
    "downloadBytes": 1187000000,
    "weightsBytes": 1250000000,
    "maxContextLength": 4096,
    "problems": [
        {
            "code": "limit-too-small",
            "message": "It needs a buffer of 328 MB; this GPU allows 134 MB.",
            "needed": 328000000,
            "available": 134000000,
        }
    ],
}

OUT_OF_MEMORY = {
    "code": "out-of-memory",
    "message": "The model needs 165 MB of GPU memory; 140 MB could be had.",
    "action": "Choose a smaller context.",
    "detail": {"needed": 165e6, "available": 140e6},
}


# Tests run beside others on few cores.
expect.set_options(timeout=10_000)


class Site:
    """The project's server, with the fake engine and with test data as the list of models.

    Answered here and not by routes of Playwright, which would take all 50 requests of a page through
    its driver and make each test a second longer.
    """

    def __init__(self, packs: Path) -> None:
        self.app = create_app(packs)
        self.models: list[dict[str, Any]] | int = [SMALL]
        self.address = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # With a query the real client comes: a test compares the two.
        if scope["type"] == "http" and scope["path"] == "/engine/client.js" and not scope["query_string"]:
            await FileResponse(FAKE_ENGINE, media_type="text/javascript")(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/api/models":
            answer = self.models
            response = Response(status_code=answer) if isinstance(answer, int) else JSONResponse(answer)
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)


@contextmanager
def running_site(packs: Path) -> Iterator[Site]:
    """Serve from a thread of this process."""
    site = Site(packs)
    with serving(site) as site.address:
        yield site


class Visit:
    """Opens the page with a script for its engine, and remembers what the page did wrong meanwhile."""

    def __init__(self, browser: Browser, site: Site) -> None:
        self.browser = browser
        self.site = site
        self.contexts: list[BrowserContext] = []
        self.requests: list[str] = []
        self.faults: list[str] = []

    def open(
        self,
        script: dict[str, Any] | None = None,
        models: list[dict[str, Any]] | int | None = None,
        width: int = 1280,
        height: int = 800,
        **context_options: Any,
    ) -> Page:
        """`models` is the answer of /api/models, or the HTTP status of its failure."""
        self.site.models = [SMALL] if models is None else models
        context = self.browser.new_context(viewport={"width": width, "height": height}, **context_options)
        context.set_default_timeout(10_000)
        self.contexts.append(context)
        context.on("request", lambda request: self.requests.append(request.url))
        context.on("weberror", lambda error: self.faults.append(str(error.error)))
        context.on("console", self.note)
        context.add_init_script(f"window.fakeScript = {json.dumps(script or {})};")
        page = context.new_page()
        page.goto(self.site.address)
        return page

    def note(self, message: ConsoleMessage) -> None:
        # A failed request is the state that some tests are about.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def close(self) -> None:
        for context in self.contexts:
            context.close()


def load_model(page: Page) -> None:
    """From the cards to a chat that is ready."""
    button(page, "Download and load").first.click()
    button(page, "What is the capital of France?").wait_for()


def say(page: Page, text: str) -> None:
    box = page.get_by_role("textbox", name="Message")
    box.fill(text)
    box.press("Enter")


def ask(page: Page, text: str) -> None:
    """Send a question and wait for the end of its answer."""
    messages = page.locator(".message")
    before = messages.count()
    say(page, text)
    expect(messages).to_have_count(before + 2)
    wait_for_answer(page)


def wait_for_answer(page: Page) -> None:
    expect(button(page, "Regenerate")).to_be_visible()


def answers(page: Page) -> Locator:
    return page.locator(".message.assistant")


def button(where: Page | Locator, name: str | re.Pattern[str], exact: bool = False) -> Locator:
    return where.get_by_role("button", name=name, exact=exact)


def calls(page: Page, name: str) -> list[dict[str, Any]]:
    """What the page asked the engine for, oldest first."""
    return page.evaluate("name => fake.calls.filter((one) => one.call === name)", name)
