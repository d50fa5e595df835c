"""The context: what a person chooses when it is full, and what is done when the chosen one does not fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.page_harness import (
    LARGE,
    SMALL,
    URL,
    Open,
    answers,
    ask,
    button,
    calls,
    load_model,
    say,
    wait_for_answer,
)

pytest_plugins = ["tests.browser.page_fixtures"]

FORGOTTEN = "The model no longer sees the messages above."
SHORTENED = "The model no longer sees the beginning of this answer."


def tiny(length: int, *replies: dict[str, Any]) -> dict[str, Any]:
    """A context this short, of a model that could have more."""
    return {"plans": {URL: {"contextLength": length, "maxContextLength": 8192}}, "replies": list(replies) or None}


def divider(page: Page) -> Locator:
    return page.locator(".divider:visible")


def roll_always(page: Page) -> None:
    button(page, "Settings").click()
    page.get_by_text("Rolling window", exact=True).click()
    button(page, "Close").click()


def test_a_full_context_ends_an_answer_unless_a_rolling_window_is_chosen(chat: Open) -> None:
    page = chat(tiny(64, {"text": "One two three four.", "fullAfter": 2}, {"text": " and five."}))
    say(page, "Count")
    expect(page.get_by_text("Cut off: the context is full")).to_be_visible()
    assert calls(page, "create")[0]["contextFull"] == "stop"
    go_on = button(page.get_by_role("alert"), "Go on with a rolling window")
    expect(go_on).to_be_visible()
    go_on.click()
    expect(answers(page)).to_contain_text("One two and five.")
    wait_for_answer(page)
    expect(answers(page)).to_have_count(1)
    expect(page.get_by_role("alert").filter(has_text="The context is full")).to_be_hidden()
    expect(page.get_by_text("Cut off: the context is full")).to_be_hidden()
    first, second = calls(page, "create")
    assert second["messages"] == [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One two"}]
    assert second["continue_final_message"] is True and "continue_final_message" not in first
    assert (second["contextFull"], second["seed"]) == ("roll", first["seed"])
    expect(button(page, "4 tokens · 38.2 tok/s")).to_be_visible()
    button(page, "Settings").click()
    expect(page.get_by_role("radio", name="Rolling window")).to_be_checked()


def test_going_on_sends_what_fits_and_shows_what_does_not(chat: Open) -> None:
    words = " ".join(f"word{n}" for n in range(40))
    page = chat(tiny(80, {"text": "The first answer of all."}, {"text": words, "fullAfter": 40}, {"text": " end."}))
    ask(page, "An old question")
    say(page, "A new one")
    button(page, "Go on with a rolling window").click()
    expect(answers(page).last).to_contain_text("word39 end.")
    expect(answers(page).last).to_contain_text("word0")
    expect(divider(page)).to_have_text([FORGOTTEN, SHORTENED])
    question, answer = calls(page, "create")[-1]["messages"]
    assert question["content"] == "A new one"
    # At least 40 % of the 80 tokens are free again, of four characters each; no word is cut in two.
    assert len(answer["content"]) / 4 < 0.6 * 80
    assert answer["content"].split()[0] in words.split() and answer["content"].endswith("word39")
    page.reload()
    expect(divider(page)).to_have_text([FORGOTTEN, SHORTENED])


def test_an_answer_rolls_by_itself_and_says_so(chat: Open) -> None:
    words = " ".join(f"word{n}" for n in range(12))
    page = chat(tiny(64, {"text": "An answer of a few words here."}, {"text": words, "fullAfter": 6, "hold": 8}))
    roll_always(page)
    ask(page, "The oldest question of all")
    say(page, "A younger one, and of some more length than that")
    expect(answers(page).last).to_contain_text("the oldest text has left the context")
    expect(divider(page)).to_have_text(FORGOTTEN)
    expect(page.locator("#announcer")).to_contain_text("The oldest text has left the context.")
    expect(page.get_by_role("meter")).to_have_attribute("aria-valuenow", "50")
    page.evaluate("fake.release()")
    wait_for_answer(page)
    expect(answers(page).last).to_contain_text("word11")
    expect(page.get_by_role("alert").filter(has_text="context")).to_have_count(0)
    button(answers(page).last, "tok/s").click()
    expect(answers(page).last.locator("dl")).to_contain_text("Rolling windowmoved on once")
    assert calls(page, "create")[-1]["contextFull"] == "roll"


def test_with_a_rolling_window_a_question_makes_its_own_room(chat: Open) -> None:
    page = chat(tiny(64, {"text": "The capital of France is Paris."}))
    roll_always(page)
    for question in ("The oldest question of all", "A younger one"):
        ask(page, question)
    page.get_by_role("textbox", name="Message").fill("word " * 20)
    warning = page.get_by_role("status").filter(has_text="The context is full")
    expect(warning).to_contain_text("The oldest text will leave it, and the model goes on.")
    expect(button(warning, "Use a rolling window")).to_be_hidden()
    ask(page, "And a third that is long enough to be much too much for what is left of it")
    expect(divider(page)).to_have_text(FORGOTTEN)
    [only] = calls(page, "create")[-1]["messages"]
    assert only["content"].startswith("And a third")


def test_a_rolling_window_is_offered_before_the_context_is_full(chat: Open) -> None:
    page = chat(tiny(200))
    ask(page, "Capital?")
    page.get_by_role("textbox", name="Message").fill("word " * 120)
    warning = page.get_by_role("status").filter(has_text="The context is nearly full")
    button(warning, "Use a rolling window").click()
    expect(warning).to_contain_text("The oldest text will leave it")
    assert len(calls(page, "create")) == 1


def test_a_question_too_long_by_itself_is_not_offered_a_window(chat: Open) -> None:
    page = chat(tiny(32))
    roll_always(page)
    ask(page, "Hi")
    say(page, "much too long " * 20)
    notice = page.get_by_role("alert").filter(has_text="The last question alone has")
    expect(notice).to_be_visible()
    expect(button(notice, "Go on with a rolling window")).to_have_count(0)
    assert len(calls(page, "create")) == 1


def test_an_answer_that_goes_on_is_read_out_from_there(chat: Open) -> None:
    page = chat(tiny(64, {"text": "First sentence. Second", "fullAfter": 3}, {"text": " ends here. Third comes."}))
    say(page, "Tell me")
    go_on = button(page, "Go on with a rolling window")
    expect(go_on).to_be_visible()
    page.evaluate("document.getElementById('announcer').replaceChildren()")
    go_on.click()
    expect(page.locator("#announcer")).to_have_text(re.compile(r"^Second ends here\. ?Third comes\.$"))


def test_guessing_ahead_can_be_switched_off(chat: Open) -> None:
    page = chat()
    ask(page, "Capital?")
    button(page, "Settings").click()
    guess = page.get_by_role("checkbox", name="Guess ahead from the conversation")
    expect(guess).to_be_checked()
    guess.uncheck()
    page.reload()
    expect(button(page, "Regenerate")).to_be_enabled()
    ask(page, "Capital?")
    button(page, "Settings").click()
    expect(guess).not_to_be_checked()
    assert calls(page, "create")[-1]["speculation"] == "off"
    guess.check()
    ask(page, "Capital?")
    assert calls(page, "create")[-1]["speculation"] == "auto"


def test_the_settings_of_an_answer_leave_the_window_and_the_guessing_alone(chat: Open) -> None:
    page = chat()
    ask(page, "Capital?")
    button(page, "Settings").click()
    page.get_by_text("Rolling window", exact=True).click()
    page.get_by_role("checkbox", name="Guess ahead").uncheck()
    button(page, "tok/s").click()
    button(page, "Use these settings").click()
    button(page, "Regenerate").click()
    wait_for_answer(page)
    request = calls(page, "create")[-1]
    assert (request["contextFull"], request["speculation"]) == ("roll", "off")


def test_a_context_that_does_not_fit_is_lowered_to_the_largest_that_does(open_page: Open) -> None:
    page = open_page({"plans": {URL: {"largest": 1900}}})
    card = page.get_by_role("listitem").filter(has_text="Small chat model 135M")
    words = (
        "A context of 4,096 tokens does not fit here: a cache of 4096 tokens (at most 1900 fit) needs more than this "
        "GPU allows. It is 1,900 tokens instead, the largest that fits, with 114 MB of GPU memory in all."
    )
    expect(card).to_contain_text(words)
    expect(card).to_contain_text("with a context of 1,900")
    load_model(page)
    assert calls(page, "load") == [{"call": "load", "url": URL, "contextLength": 1900, "kvCache": "f16"}]
    expect(page.locator(".empty")).to_contain_text(words)
    expect(page.locator("#announcer")).to_contain_text(words)
    expect(page.get_by_text("of 1,900 tokens")).to_be_visible()
    button(page, "Settings").click()
    expect(page.get_by_role("complementary")).to_contain_text(words)
    # What was chosen is kept, and what is loaded is already what it comes to.
    expect(page.get_by_role("complementary").get_by_label("Context")).to_have_value("4096")
    expect(button(page, "Reload the model now")).to_be_hidden()
    page.get_by_role("complementary").get_by_label("Context").select_option("1024")
    expect(page.get_by_role("complementary")).not_to_contain_text("does not fit")
    button(page, "Reload the model now").click()
    expect(page.get_by_text("of 1,024 tokens")).to_be_visible()
    assert calls(page, "load")[-1]["contextLength"] == 1024


def test_a_lowered_context_is_not_offered_to_be_larger(chat: Open) -> None:
    page = chat({"plans": {URL: {"largest": 300}}, "replies": [{"text": "One two.", "fullAfter": 1}]})
    say(page, "Count")
    notice = page.get_by_role("alert").filter(has_text="The context is full")
    expect(notice).to_be_visible()
    expect(button(notice, "Reload with")).to_have_count(0)


def test_a_context_asked_for_in_a_hurry_is_still_one_that_fits(chat: Open) -> None:
    """The button chooses a context and loads at once: nothing has planned that one before."""
    page = chat(tiny(64, {"text": "One two.", "fullAfter": 1}))
    say(page, "Count")
    page.evaluate("url => { fakeScript.plans[url] = { largest: 130 }; }", URL)
    button(page, "Reload with a context of 128").click()
    expect(page.get_by_text("of 128 tokens")).to_be_visible()
    button(page, "Regenerate").click()
    expect(page.get_by_text("Cut off: the context is full")).to_be_visible()
    button(page, "Reload with a context of 256").click()
    expect(page.get_by_text("of 130 tokens")).to_be_visible()
    assert [one["contextLength"] for one in calls(page, "load")][1:] == [128, 130]


@pytest.mark.parametrize("code", ["feature-missing", "limit-too-small"])
def test_a_model_that_no_context_makes_fit_is_refused(open_page: Open, code: str) -> None:
    problem = {"code": code, "message": "It cannot be.", "needed": 2, "available": 1}
    page = open_page({"plans": {LARGE["url"]: {"fits": False, "problems": [problem]}}}, models=[SMALL, LARGE])
    card = page.get_by_role("listitem").filter(has_text="Large 2B")
    expect(card).to_contain_text("This device cannot run it. It cannot be.")
    expect(button(card, "Download and load")).to_be_disabled()


def test_the_address_can_force_kernels(open_page: Open) -> None:
    page = open_page()
    page.goto(f"{page.url}?kernels=linear_ternary:ROWS=4,no-subgroups")
    load_model(page)
    forced = "linear_ternary:ROWS=4,no-subgroups"
    assert calls(page, "load") == [
        {"call": "load", "url": URL, "contextLength": 4096, "kvCache": "f16", "kernels": forced}
    ]
    button(page, "Details").click()
    expect(page.locator("pre")).to_contain_text(f"kernels forced by the address: {forced}")
