"""Fixtures of the page's tests; a test file takes them with `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.page_harness import Open, Site, Visit, load_model, running_site
from tests.support.browser import running_browser


@pytest.fixture(scope="module")
def page_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_site(tmp_path_factory.mktemp("packs")) as site:
        yield site


@pytest.fixture(scope="module")
def page_browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def open_page(page_browser: Browser, page_site: Site) -> Iterator[Open]:
    """Opens the page; afterwards no script has failed and no other host was asked for anything."""
    visit = Visit(page_browser, page_site)
    yield visit.open
    visit.close()
    assert visit.faults == []
    assert [url for url in visit.requests if not url.startswith(f"{page_site.address}/")] == []


@pytest.fixture
def chat(open_page: Open) -> Open:
    """Opens a page whose model is ready."""

    def open_chat(script: dict[str, Any] | None = None, **options: Any) -> Page:
        page = open_page(script, **options)
        load_model(page)
        return page

    return open_chat


@pytest.fixture(scope="module")
def modules(page_browser: Browser, page_site: Site) -> Iterator[Page]:
    """A page from which modules can be imported."""
    visit = Visit(page_browser, page_site)
    yield visit.open()
    visit.close()
