"""The page for everyone: keyboard, screen reader, narrow screens, motion, contrast."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.page_checks import DOUBLE_IDS, TOO_WIDE, UNNAMED, contrast
from tests.browser.page_harness import (
    LARGE,
    OUT_OF_MEMORY,
    SMALL,
    TOO_LARGE,
    URL,
    Open,
    answers,
    ask,
    button,
    calls,
    say,
    wait_for_answer,
)

pytest_plugins = ["tests.browser.page_fixtures"]


def test_the_whole_way_with_the_keyboard_alone(open_page: Open) -> None:
    page = open_page({"replies": [{"text": "One two three four.", "hold": 2}]})
    expect(button(page, "Download and load")).to_be_enabled()

    def tab_to(name: str) -> None:
        for _ in range(30):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "(e => [e.getAttribute('aria-label') || e.innerText || '', getComputedStyle(e).outlineStyle,"
                " e.closest('.composer') ? getComputedStyle(e.closest('.composer')).outlineStyle : ''])"
                "(document.activeElement)"
            )
            if page.evaluate("document.activeElement === document.body"):
                continue  # Past the last control, before the first.
            assert "solid" in focused[1:], f"no visible focus on {focused[0]}"
            if focused[0].startswith(name):
                return
        raise AssertionError(f"the keyboard does not reach {name}")

    tab_to("Download and load")
    page.keyboard.press("Enter")
    expect(button(page, "What is the capital of France?")).to_be_visible()
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    page.keyboard.type("First line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    assert calls(page, "create") == []
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("One two")
    page.keyboard.press("Escape")
    expect(answers(page)).to_contain_text("Stopped")
    assert calls(page, "create")[0]["messages"][0]["content"] == "First line\nsecond line"
    page.keyboard.press("Shift+Tab")
    tab_to("Settings")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Settings")).to_be_focused()
    page.keyboard.press("Escape")
    expect(button(page, "Settings")).to_be_focused()


def test_a_composition_is_not_sent(chat: Open) -> None:
    page = chat()
    page.get_by_role("textbox", name="Message").fill("にほん")
    page.get_by_role("textbox", name="Message").dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    assert calls(page, "create") == []


def test_an_answer_is_announced_by_sentence_and_politely(chat: Open) -> None:
    three = "First sentence here. Second one follows! Is this the third?"
    page = chat({"replies": [{"text": f"**{three}**\n\n```\ncode\n```\n\nAfter `it`.", "everyMs": 30}]})
    region = page.locator("#announcer")
    expect(region).to_have_attribute("aria-live", "polite")
    page.evaluate("""() => {
        window.heard = [];
        new MutationObserver((changes) => {
            for (const { addedNodes } of changes) for (const node of addedNodes) heard.push(node.textContent);
        }).observe(document.getElementById('announcer'), { childList: true });
    }""")
    ask(page, "Three sentences")
    heard = page.evaluate("heard")
    # A busy browser draws two sentences at once: they are then said at once, each still whole and only once.
    assert " ".join(heard) == f"{three} Code. After it."
    assert len(heard) > 1 and all(said[-1] in ".!?" for said in heard)
    assert page.locator(".messages[aria-live], .messages[role=log], .messages [aria-live]").count() == 0


WIDE = "x" * 200
STATES: dict[str, dict[str, Any]] = {
    "choosing": {"plans": {LARGE["url"]: TOO_LARGE}, "stored": {URL: 21e6}},
    "no WebGPU": {"support": {"webgpu": False, "code": "webgpu-missing", "message": "No.", "adapter": None}},
    "loading": {"load": {"hold": "compile"}},
    "failed": {"load": {"error": {"at": "expand", **OUT_OF_MEMORY}}},
    "answered": {"replies": [{"text": f"`{WIDE}` {WIDE}\n\n```\n{WIDE}\n```\n\n|a|b|\n|-|-|\n|{WIDE}|2|"}]},
}


def bring_into(page: Page, state: str) -> None:
    if state == "choosing":
        expect(page.get_by_text("This device can run it.")).to_be_visible()
    elif state == "no WebGPU":
        expect(page.get_by_text("Browsers that have it")).to_be_visible()
    else:
        button(page, re.compile("Download and load.*Small")).click()
    if state == "loading":
        expect(page.get_by_text("kernels")).to_be_visible()
    elif state == "failed":
        expect(page.get_by_role("alert")).to_contain_text("memory")
    elif state == "answered":
        expect(button(page, "What is the capital of France?")).to_be_visible()
        ask(page, "w" * 300)
        button(page, "tok/s").click()


@pytest.mark.parametrize("state", STATES)
def test_each_state_fits_320_pixels_and_names_its_controls(open_page: Open, state: str) -> None:
    page = open_page(STATES[state], models=[SMALL, LARGE], width=320, height=640)
    bring_into(page, state)
    for panel in (None, "Settings", "Details"):
        if panel:
            button(page, panel).first.click()
            expect(page.get_by_role("heading", name=panel)).to_be_visible()
        assert page.evaluate(TOO_WIDE) == []
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(DOUBLE_IDS) == []
        if panel:
            assert page.evaluate("document.getElementById('main').inert")
            page.keyboard.press("Escape")
            expect(page.get_by_role("heading", name=panel)).to_be_hidden()
            expect(button(page, panel).first).to_be_focused()


def test_scrolling_follows_only_at_the_bottom(chat: Open) -> None:
    lines = "\n\n".join(f"Line {n} of the answer." for n in range(60))
    page = chat({"replies": [{"text": lines, "hold": 200, "everyMs": 0}]}, height=500)
    say(page, "Many lines")
    expect(answers(page)).to_contain_text("Line 39")
    distance = "(s => s.scrollHeight - s.clientHeight - s.scrollTop)(document.getElementById('scroller'))"
    page.wait_for_function(f"{distance} < 2")
    page.mouse.move(600, 250)
    page.mouse.wheel(0, -300)
    newest = button(page, "Jump to the newest text")
    expect(newest).to_be_visible()
    top = page.evaluate("document.getElementById('scroller').scrollTop")
    page.evaluate("fake.release()")
    wait_for_answer(page)
    assert page.evaluate("document.getElementById('scroller').scrollTop") == top
    newest.click()
    page.wait_for_function(f"{distance} < 2")
    expect(newest).to_be_hidden()


def test_nothing_moves_with_reduced_motion(open_page: Open) -> None:
    page = open_page({"load": {"hold": "download"}}, reduced_motion="reduce")
    button(page, "Download and load").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    moving = """() => [...document.querySelectorAll('*')].filter((e) => {
        const { animationName, transitionDuration, scrollBehavior } = getComputedStyle(e);
        return animationName !== 'none' || transitionDuration !== '0s' || scrollBehavior === 'smooth';
    }).map((e) => e.outerHTML)"""
    assert page.evaluate(moving) == []


GROUNDS = ("ground", "surface", "raised")
TEXT_PAIRS = [
    *((text, ground) for text in ("text", "muted", "accent", "bad") for ground in GROUNDS),
    ("on-accent", "accent"),
    ("accent", "accent-soft"),
    ("text", "accent-soft"),
    ("warn", "warn-soft"),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_palette_has_aa_contrast(open_page: Open, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    names = {name for pair in TEXT_PAIRS for name in pair} | {"field-line"}
    colours = page.evaluate(
        "names => Object.fromEntries(names.map((name) => "
        "[name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`)]))",
        sorted(names),
    )
    for text, ground in TEXT_PAIRS:
        ratio = contrast(colours[text], colours[ground])
        assert ratio >= 4.5, f"{text} on {ground} in {scheme}: {ratio:.2f}"
    for ground in ("ground", "surface"):
        for line in ("field-line", "accent"):
            assert contrast(colours[line], colours[ground]) >= 3, f"{line} on {ground} in {scheme}"
