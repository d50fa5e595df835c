"""How fast is my GPU: measuring, what is shown of it, and what keeps it from being measured."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.page_checks import DOUBLE_IDS, TOO_WIDE, UNNAMED
from tests.browser.page_harness import Open, answers, button, calls, load_model, say, wait_for_answer

pytest_plugins = ["tests.browser.page_fixtures"]

SENTENCE = "This GPU reads 312 GB/s. The model could reach 180 tok/s here and reaches 96 tok/s, 53 %."


def panel(page: Page) -> Page:
    button(page, "Speed").click()
    expect(page.get_by_role("heading", name="How fast is my GPU?")).to_be_focused()
    return page


def test_the_result_is_a_sentence_bars_and_a_table(chat: Open) -> None:
    page = panel(chat())
    button(page, "Measure").click()
    expect(page.get_by_role("complementary").get_by_text(SENTENCE)).to_be_visible()
    expect(page.locator("#announcer")).to_contain_text(SENTENCE)
    expect(page.get_by_role("list", name="Writing").get_by_role("listitem")).to_have_text(
        ["after 128 tokens96 tok/s, 53 %", "after 1,024 tokens88.2 tok/s, 49 %", "after 4,096 tokens61.7 tok/s, 34 %"]
    )
    expect(page.get_by_role("list", name="Reading a prompt").get_by_role("listitem")).to_have_text(
        ["128 tokens1,200 tok/s, 6.7 times the limit", "512 tokens4,810 tok/s, 27 times the limit"]
    )
    widths = page.locator(".bar-fill").evaluate_all("bars => bars.map((bar) => bar.style.width)")
    assert [round(float(width.rstrip("%"))) for width in widths] == [53, 49, 34, 25, 100]
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="gate_up"))
    expect(row.get_by_role("cell")).to_have_text(["4.25 µs", "191 GB/s", "61 %"])
    expect(row).to_contain_text("3,072 × 576, ternary")
    for fact in ("41 ms", "1.93 s", "83.1 µs", "304, 10 a layer", "4,096 tokens, KV cache f16"):
        expect(page.get_by_role("complementary").get_by_text(fact)).to_be_visible()
    assert calls(page, "measure") == [{"call": "measure", "quick": False}]


def test_the_result_can_be_copied_and_is_in_the_details(chat: Open) -> None:
    page = panel(chat(permissions=["clipboard-read", "clipboard-write"]))
    expect(button(page, "Copy as JSON")).to_be_hidden()
    button(page, "Measure").click()
    button(page, "Copy as JSON").click()
    expect(page.locator("#announcer")).to_contain_text("Copied.")
    report = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert report["bandwidth"]["bytesPerSecond"] == 312.4e9
    assert report["decode"][0]["spread"] == 0.02 and report["peers"] == []
    button(page, "Details").click()
    expect(page.locator("pre")).to_contain_text(SENTENCE)


def test_progress_is_shown_and_cancel_stops_it(chat: Open) -> None:
    page = panel(chat({"measure": {"hold": 2}}))
    start = button(page, "Measure")
    start.focus()
    page.keyboard.press("Enter")
    bar = page.get_by_role("progressbar", name="Measuring")
    expect(bar).to_have_attribute("aria-valuetext", "Writing after 128 tokens 3 of 4")
    assert bar.evaluate("bar => bar.value") == 0.5
    expect(page.locator("#announcer")).to_contain_text("Measuring.")
    # The keyboard stays where it was, on the button that took the place of the first one.
    expect(button(page, "Cancel")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Stopped before its end: there is no result.")).to_be_visible()
    expect(start).to_be_focused()
    expect(bar).to_be_hidden()
    page.evaluate("delete fakeScript.measure")
    page.keyboard.press("Enter")
    expect(page.get_by_role("complementary").get_by_text(SENTENCE)).to_be_visible()
    expect(page.get_by_text("Stopped before its end")).to_be_hidden()


def test_escape_stops_measuring_before_it_closes_the_panel(chat: Open) -> None:
    page = panel(chat({"measure": {"hold": 1}}))
    button(page, "Measure").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_text("Stopped before its end")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="How fast is my GPU?")).to_be_hidden()


def test_nothing_is_asked_while_measuring(chat: Open) -> None:
    page = chat({"measure": {"hold": 1}, "replies": [{"text": "One."}]})
    panel(page)
    button(page, "Measure").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    box = page.get_by_role("textbox", name="Message")
    expect(box).to_have_attribute("placeholder", "Write while this device is measured")
    say(page, "Wait for it")
    expect(button(page, "Send", exact=True)).to_be_disabled()
    button(page, "What is the capital of France?").click()
    assert calls(page, "create") == []
    expect(box).to_have_value("Wait for it")
    page.evaluate("fake.release()")
    expect(button(page, "Measure again")).to_be_visible()
    button(page, "Send", exact=True).click()
    expect(answers(page)).to_contain_text("One.")


def test_an_answer_that_is_being_written_is_a_reason_not_to_measure(chat: Open) -> None:
    page = chat({"replies": [{"text": "One two three.", "hold": 1}]})
    say(page, "Count")
    panel(page)
    start = button(page, "Measure")
    expect(start).to_be_disabled()
    expect(start).to_have_accessible_description("An answer is being written. Stop it, or wait for its end.")
    page.evaluate("fake.release()")
    wait_for_answer(page)
    expect(start).to_be_enabled()
    assert calls(page, "measure") == []


def test_without_a_model_there_is_nothing_to_measure(open_page: Open) -> None:
    page = open_page()
    expect(button(page, "Download and load")).to_be_enabled()
    expect(button(page, "Speed")).to_be_hidden()
    button(page, "Settings").click()
    button(page, "How fast is my GPU?").click()
    expect(button(page, "Measure")).to_be_disabled()
    expect(page.get_by_text("Load a model first")).to_be_visible()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            {"code": "feature-missing", "message": "This GPU has no clock.", "action": "Use another browser."},
            "This GPU lacks something that the model needs. This GPU has no clock. Use another browser.",
        ),
        ({"code": "unheard-of", "message": "What nobody thought of."}, "Something went wrong. What nobody thought of."),
    ],
)
def test_a_failure_is_said_in_words(chat: Open, error: dict[str, str], said: str) -> None:
    page = panel(chat({"measure": {"error": {"at": 1, **error}}}))
    button(page, "Measure").click()
    expect(page.get_by_role("status").filter(has_text=said)).to_be_visible()
    expect(button(page, "Measure")).to_be_enabled()
    expect(button(page, "Copy as JSON")).to_be_hidden()
    expect(button(page, "Send", exact=True)).to_be_visible()


def test_a_device_that_is_lost_meanwhile_ends_it(chat: Open) -> None:
    page = panel(chat({"measure": {"hold": 1}}))
    button(page, "Measure").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.evaluate("fake.lose('The driver was reset.')")
    expect(page.get_by_role("status").filter(has_text="The connection to the GPU was lost")).to_be_visible()
    expect(page.get_by_role("progressbar")).to_be_hidden()
    expect(button(page, "Measure")).to_be_disabled()
    button(page.get_by_role("alert"), "Reload the model").click()
    expect(button(page, "Measure")).to_be_enabled()


def test_loading_another_context_ends_it(chat: Open) -> None:
    page = panel(chat({"measure": {"hold": 1}}))
    button(page, "Measure").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    button(page, "Settings").click()
    page.get_by_role("complementary").get_by_label("Context").select_option("1024")
    button(page, "Reload the model now").click()
    expect(page.get_by_text("of 1,024 tokens")).to_be_visible()
    button(page, "Speed").click()
    expect(button(page, "Measure")).to_be_enabled()


def test_a_processor_is_measured_quickly_and_named_so(chat: Open) -> None:
    software = {"vendor": "acme", "architecture": "", "device": "", "description": "Soft", "software": True}
    page = panel(chat({"support": {"adapter": software}, "measure": {"report": {"adapter": software}}}))
    expect(page.get_by_text("Takes a minute or two without a GPU.")).to_be_visible()
    button(page, "Measure").click()
    expect(page.get_by_role("complementary").get_by_text(re.compile("^This processor reads"))).to_be_visible()
    assert calls(page, "measure") == [{"call": "measure", "quick": True}]


def test_a_report_with_gaps_shows_what_it_has(chat: Open) -> None:
    gaps: dict[str, Any] = {"decode": [], "prefill": [], "linears": [], "loadSeconds": None, "cpuMsPerToken": None}
    page = panel(chat({"measure": {"report": gaps}}))
    button(page, "Measure").click()
    expect(page.locator(".result")).to_have_text("This GPU reads 312 GB/s.")
    expect(page.locator(".report")).not_to_contain_text(re.compile("NaN|null|undefined|Infinity"))
    expect(page.locator(".bars, .linears")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_panel_fits_320_pixels_and_is_reached_from_the_settings(open_page: Open, scheme: str) -> None:
    page = open_page(width=320, height=640, color_scheme=scheme)
    load_model(page)
    expect(button(page, "Speed")).to_be_hidden()
    button(page, "Settings").click()
    button(page, "How fast is my GPU?").click()
    button(page, "Measure").click()
    expect(button(page, "Copy as JSON")).to_be_visible()
    assert [page.evaluate(check) for check in (TOO_WIDE, UNNAMED, DOUBLE_IDS)] == [[], [], []]
    button(page, "Close").click()
    expect(button(page, "Settings")).to_be_focused()
