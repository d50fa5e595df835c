"""Every kernel case in Chromium, through the engine's own executor."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from shaders import contract
from shaders.case_kit import Case, from_base64
from shaders.cases import all_cases
from tests.support.browser import running_browser

#: Cases of one message to the page.
BATCH = 20


class Files(SimpleHTTPRequestHandler):
    """The repository's files on localhost, for WebGPU wants a secure context."""

    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript", ".wgsl": "text/plain"}

    def log_message(self, *_: Any) -> None:
        """No log."""


@pytest.fixture(scope="module")
def page(root: Path) -> Iterator[Page]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with running_browser(webgpu=True) as browser:
        page = browser.new_page()
        # A first compile takes seconds where the GPU is a CPU.
        page.set_default_timeout(300_000)
        page.goto(f"http://127.0.0.1:{server.server_port}/tests/browser/kernels.html")
        page.wait_for_function("globalThis.runCases !== undefined")
        yield page
    server.shutdown()


def problems(page: Page, cases: list[Case]) -> list[str]:
    found = []
    results = page.evaluate("cases => runCases(cases)", [case.as_json() for case in cases])
    for case, result in zip(cases, results, strict=True):
        if "error" in result:
            found.append(f"{case.name}: {result['error']}")
        else:
            outputs = {name: from_base64(result["outputs"][name], data) for name, data in case.expected.items()}
            found += case.problems(outputs)
    return found


@pytest.mark.parametrize("kernel", [kernel.name for kernel in contract.kernels()])
def test_kernel(page: Page, kernel: str) -> None:
    cases = [case for case in all_cases() if case.kernel == kernel]
    found = []
    for start in range(0, len(cases), BATCH):
        found += problems(page, cases[start : start + BATCH])
    assert found == []
