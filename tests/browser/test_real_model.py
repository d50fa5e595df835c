"""The real model in Chromium: golden ids in the engine, and the page as a person uses it, with and without network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.engine_site import PAGE, EngineSite, running_engine_site
from tests.browser.page_harness import answers, button, say
from tests.support.browser import running_browser
from tests.support.real import golden, real_pack

SCRIPT = Path(__file__).with_name("engine_page.js").read_text(encoding="utf-8")
#: A model on the processor, beside other tests: words come slowly.
PATIENCE_MS = 240_000
SETTINGS = {"temperature": 0, "topP": 1, "repetitionPenalty": 1, "contextLength": 512, "maxTokens": 9}
ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs")
    for embedding in ("f16", "q8"):
        shutil.copytree(real_pack(embedding), folder / f"smollm2-{embedding}")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser(webgpu=True) as chromium:
        yield chromium


def engine_page(browser: Browser, site: EngineSite, pack: str) -> Page:
    """A bare page with a pack loaded in it."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(site.address + PAGE)
    page.evaluate(SCRIPT, "index")
    loaded = page.evaluate("url => load(url, { contextLength: 128, kvCache: 'f32' })", f"/packs/{pack}/")
    assert "error" not in loaded, loaded
    return page


def test_golden_ids(browser: Browser, packs: Path) -> None:
    """Up to the first near-tie of each answer, in the order of the file, so prefixes come from the cache."""
    generate = """async ([ids, count]) => {
        const found = [];
        for await (const id of engine.generate(ids, { temperature: 0, max_tokens: count, stopIds: [] })) found.push(id);
        return found;
    }"""
    compared = 0
    with running_engine_site(packs) as site:
        page = engine_page(browser, site, "smollm2-f16")
        for answer in golden():
            if answer["sure"]:
                found = page.evaluate(generate, [answer["prompt_ids"], answer["sure"]])
                assert found == answer["greedy_ids"][: answer["sure"]], answer["prompt"]
                compared += answer["sure"]
        page.close()
    assert compared == 64


def test_a_conversation_goes_on_without_network(browser: Browser, packs: Path) -> None:
    """Load, ask, read the answer, stop another one; then the server is gone, the tab reloads, and a new chat works.

    The three questions are those whose answers the checkpoint's README gives.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    hosts: set[str] = set()
    context.on("request", lambda request: hosts.add(request.url.split("/")[2] if "//" in request.url else ""))
    page = context.new_page()
    with ExitStack() as server:
        site = server.enter_context(running_engine_site(packs / "smollm2-q8"))
        settings = "settings => localStorage.setItem('tercet.settings', JSON.stringify(settings))"
        page.goto(site.address + PAGE)
        page.evaluate(settings, SETTINGS)
        page.goto(site.address)
        button(page, "Download and load").click()
        button(page, "What is the capital of France?").wait_for()
        say(page, "What is the capital of France?")
        expect(answers(page).last).to_contain_text("Paris", timeout=PATIENCE_MS)
        expect(button(page, "Regenerate")).to_be_visible(timeout=PATIENCE_MS)
        expect(page.locator("body")).to_contain_text("tok/s")
        ARTIFACTS.mkdir(exist_ok=True)
        page.screenshot(path=ARTIFACTS / "chat.png")

        say(page, "What is photosynthesis?")
        expect(answers(page).last).to_contain_text("Photosynthesis", timeout=PATIENCE_MS)
        page.keyboard.press("Escape")
        expect(button(page, "Regenerate")).to_be_visible(timeout=PATIENCE_MS)
        page.wait_for_function("navigator.serviceWorker.controller !== null")

    page.reload()
    expect(answers(page).first).to_contain_text("Paris", timeout=PATIENCE_MS)
    button(page, "New chat").click()
    page.get_by_role("textbox", name="Message").fill("What is 2+2?")
    expect(button(page, "Send", exact=True)).to_be_enabled(timeout=PATIENCE_MS)
    button(page, "Send", exact=True).click()
    expect(answers(page).last).to_contain_text("2 + 2 = 4", timeout=PATIENCE_MS)
    page.screenshot(path=ARTIFACTS / "chat-without-network.png")
    assert hosts == {site.address.removeprefix("http://")}
    context.close()
