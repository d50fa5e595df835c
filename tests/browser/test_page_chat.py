"""The conversation: answering, stopping, changing, keeping, and running out of context."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import expect

from tests.browser.page_harness import PARIS, URL, Open, answers, ask, button, calls, say, wait_for_answer

pytest_plugins = ["tests.browser.page_fixtures"]


def test_a_ready_model_says_where_it_runs_and_offers_three_questions(chat: Open) -> None:
    page = chat()
    expect(page.get_by_text("It runs on this machine’s GPU (Acme Road 9).")).to_be_visible()
    expect(page.get_by_text("Nothing you write is sent anywhere.").last).to_be_visible()
    examples = page.get_by_role("list", name="Examples").get_by_role("button")
    expect(examples).to_have_count(3)
    examples.first.click()
    expect(answers(page)).to_contain_text(PARIS)
    [request] = calls(page, "create")
    assert request["messages"] == [{"role": "user", "content": "What is the capital of France?"}]
    assert (request["temperature"], request["top_p"], request["repetition_penalty"]) == (0.7, 0.9, 1.15)
    assert "max_tokens" not in request and isinstance(request["seed"], int)


def test_words_come_as_they_are_made_and_escape_stops(chat: Open) -> None:
    page = chat({"replies": [{"text": "One two three four five six.", "hold": 3}, {"text": "Again."}]})
    say(page, "Count")
    expect(answers(page)).to_contain_text("One two three")
    expect(answers(page)).to_contain_text(re.compile(r"Writing · 3 tokens · [\d.]+ tok/s"))
    expect(button(page, "Send", exact=True)).to_be_hidden()
    expect(button(page, "Stop")).to_be_visible()
    expect(page.get_by_role("meter", name="Context used")).to_have_attribute("aria-valuetext", "9 of 4,096 tokens")
    page.keyboard.press("Escape")
    expect(answers(page)).to_contain_text("Stopped")
    assert "four" not in answers(page).inner_text()
    expect(button(page, "Stop")).to_be_hidden()
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    say(page, "Go on")
    expect(answers(page).last).to_contain_text("Again.")
    assert [one["content"] for one in calls(page, "create")[1]["messages"]] == [
        "Count",
        "One two three",
        "Go on",
    ]


def test_stop_is_a_button_and_the_row_below_an_answer_does_not_jump(chat: Open) -> None:
    page = chat({"replies": [{"text": "One two three four.", "hold": 2}]})
    say(page, "Count")
    expect(answers(page)).to_contain_text("One two")
    row = answers(page).locator(".row")
    before = row.bounding_box()
    button(page, "Stop").click()
    expect(answers(page)).to_contain_text("Stopped")
    after = row.bounding_box()
    assert before and after and (before["y"], before["height"]) == (after["y"], after["height"])
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()


def test_regenerate_replaces_the_answer(chat: Open) -> None:
    page = chat({"replies": [{"text": "The first."}, {"text": "The second."}]})
    ask(page, "Tell me")
    button(page, "Regenerate").click()
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_contain_text("The second.")
    first, second = calls(page, "create")
    assert first["messages"] == second["messages"]
    assert first["seed"] != second["seed"]


def test_a_question_is_edited_and_sent_again(chat: Open) -> None:
    page = chat({"replies": [{"text": "One."}, {"text": "Two."}, {"text": "Three."}]})
    for question in ("First", "Second"):
        ask(page, question)
    button(page, "Edit and send again").first.click()
    field = page.get_by_role("textbox", name="Edit the question")
    expect(field).to_be_focused()
    page.keyboard.press("Escape")
    expect(field).to_be_hidden()
    expect(answers(page)).to_have_count(2)
    button(page, "Edit and send again").first.click()
    field.fill("Changed")
    field.press("Enter")
    expect(answers(page)).to_have_count(1)
    expect(answers(page)).to_contain_text("Three.")
    expect(page.locator(".message.user")).to_contain_text("Changed")
    assert calls(page, "create")[2]["messages"] == [{"role": "user", "content": "Changed"}]


def test_an_answer_can_be_copied_with_its_markdown(chat: Open) -> None:
    text = "**Bold** and:\n\n```js\nlet x = 1;\n```"
    page = chat({"replies": [{"text": text}]}, permissions=["clipboard-read", "clipboard-write"])
    ask(page, "Code")
    button(page, "Copy", exact=True).click()
    expect(page.locator("#announcer")).to_contain_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == text
    button(page, "Copy code").click()
    page.wait_for_function("async () => (await navigator.clipboard.readText()) === 'let x = 1;\\n'")


def test_an_answer_tells_how_it_was_made_and_can_be_made_again(chat: Open) -> None:
    page = chat()
    ask(page, "Capital?")
    seed = calls(page, "create")[0]["seed"]
    button(page, "6 tokens · 38.2 tok/s").click()
    made = answers(page).locator("dl")
    for text in (
        "Small chat model 135M",
        str(seed),
        "0.7",
        "1.15",
        "412 tok/s",
        "0.21 s",
        "no limit",
        "the model’s own",
    ):
        expect(made).to_contain_text(text)
    button(page, "Use these settings").click()
    expect(page.get_by_role("textbox", name="Seed")).to_have_value(str(seed))
    button(page, "Regenerate").click()
    wait_for_answer(page)
    assert calls(page, "create")[1]["seed"] == seed


def test_text_is_never_html(chat: Open) -> None:
    attack = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'
    answer = f"{attack}\n\n![pixel](https://example.com/p.png) [bad](javascript:alert(1)) [good](https://example.com/)"
    page = chat({"replies": [{"text": answer}]})
    ask(page, attack)
    expect(page.locator(".message.user")).to_contain_text(attack)
    expect(answers(page)).to_contain_text(attack)
    expect(answers(page)).to_contain_text("pixel (https://example.com/p.png)")
    assert page.locator(".message :is(img, script, iframe, style, form.x)").count() == 0
    links = answers(page).get_by_role("link")
    assert links.evaluate_all("links => links.map((link) => [link.href, link.rel])") == [
        ["https://example.com/", "noopener noreferrer"]
    ]
    assert page.evaluate("window.hacked") is None


def test_markdown_is_rendered_and_finished_blocks_stay_untouched(chat: Open) -> None:
    text = "# Title\n\nA *first* paragraph.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nThe end is here now."
    page = chat({"replies": [{"text": text, "hold": 16}]})
    say(page, "Go")
    expect(answers(page).get_by_role("cell", name="2")).to_be_visible()
    answers(page).locator("em").evaluate("element => { element.marked = true; }")
    page.evaluate("fake.release()")
    wait_for_answer(page)
    expect(answers(page)).to_contain_text("The end is here now.")
    assert answers(page).locator("em").evaluate("element => element.marked") is True
    expect(answers(page).get_by_role("heading", name="Title", level=3)).to_be_visible()


def test_new_chat_can_be_undone(chat: Open) -> None:
    page = chat()
    ask(page, "Capital?")
    button(page, "New chat").click()
    expect(answers(page)).to_have_count(0)
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    button(page, "Bring back the previous chat").click()
    expect(answers(page)).to_contain_text(PARIS)


def test_the_conversation_and_the_model_come_back_after_a_reload(chat: Open) -> None:
    page = chat({"replies": [{"text": PARIS}, {"text": "Cut off in the middle.", "hold": 2}]})
    ask(page, "Capital?")
    say(page, "More")
    expect(answers(page).last).to_contain_text("Cut off")
    page.get_by_role("textbox", name="Message").fill("Not sent yet")
    page.reload()
    expect(answers(page).first).to_contain_text(PARIS)
    expect(answers(page).last).to_contain_text("Cut off before its end")
    expect(page.get_by_role("textbox", name="Message")).to_have_value("Not sent yet")
    expect(button(page, "Send", exact=True)).to_be_enabled()
    assert [one["url"] for one in calls(page, "load")] == [URL]


def test_two_tabs_share_the_conversation(chat: Open) -> None:
    page = chat()
    other = page.context.new_page()
    other.goto(page.url)
    expect(button(other, "What is the capital of France?")).to_be_visible()
    ask(page, "Capital?")
    expect(answers(other)).to_contain_text(PARIS)
    expect(button(other, "Regenerate")).to_be_visible()


def tiny(length: int) -> dict[str, Any]:
    """A plan with a context this short, of a model that could have more."""
    return {"plans": {URL: {"contextLength": length, "maxContextLength": 8192}}}


def test_a_nearly_full_context_is_said_before(chat: Open) -> None:
    page = chat(tiny(200))
    ask(page, "Capital?")
    page.get_by_role("textbox", name="Message").fill("word " * 120)
    expect(page.get_by_text("The context is nearly full: room for about")).to_be_visible()
    expect(page.get_by_role("meter")).to_have_attribute("data-level", "near")
    page.get_by_role("textbox", name="Message").fill("word " * 160)
    expect(page.get_by_text("The context is full: this would take")).to_be_visible()
    page.get_by_role("textbox", name="Message").fill("")
    expect(page.locator(".warning")).to_be_hidden()


def test_a_full_context_gives_a_choice_and_can_go_on_without_the_oldest(chat: Open) -> None:
    page = chat(tiny(64))
    for question in ("The oldest question of all", "A younger one"):
        ask(page, question)
    say(page, "And a third that is long enough to be much too much for what is left of it")
    notice = page.get_by_role("alert").filter(has_text="The context is full")
    expect(notice).to_contain_text(re.compile(r"The prompt has \d+ tokens, the context holds 64"))
    expect(button(notice, "New chat")).to_be_visible()
    expect(button(notice, "Reload with a context of 128")).to_be_visible()
    button(notice, "Continue without the oldest messages").click()
    expect(answers(page)).to_have_count(3)
    expect(page.locator(".divider:visible")).to_have_text("The model no longer sees the messages above.")
    wait_for_answer(page)
    sent = calls(page, "create")[-1]["messages"]
    # Without the oldest turn alone less than 40 % of the context would be free: the second goes too.
    [only] = sent
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    assert only["content"].startswith("And a third")
    expect(page.get_by_text("The oldest question of all")).to_be_visible()


def test_an_answer_cut_off_by_the_context_says_so(chat: Open) -> None:
    page = chat({**tiny(64), "replies": [{"text": PARIS, "finish": "length", "contextFull": True}]})
    say(page, "Capital?")
    expect(page.get_by_text("Cut off: the context is full")).to_be_visible()
    expect(page.get_by_role("alert").filter(has_text="all 64 tokens of the context are used")).to_be_visible()
    page.evaluate("delete fakeScript.plans")
    button(page, "Reload with a context of 128").click()
    expect(page.get_by_text("of 128 tokens")).to_be_visible()


def test_a_question_that_never_fits_says_so(chat: Open) -> None:
    page = chat(tiny(32))
    ask(page, "Hi")
    say(page, "much too long " * 20)
    button(page, "Continue without the oldest messages").last.click()
    said = re.compile(r"The last question alone has \d+ tokens; the context holds 32")
    expect(page.get_by_text(said)).to_be_visible()
    expect(button(page, "Continue without the oldest messages")).to_have_count(0)
