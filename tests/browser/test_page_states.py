"""The page without a conversation: choosing a model, loading it, and what can go wrong with the GPU."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.page_checks import TOO_WIDE, UNNAMED
from tests.browser.page_harness import (
    LARGE,
    OUT_OF_MEMORY,
    SMALL,
    TOO_LARGE,
    URL,
    Open,
    Site,
    answers,
    button,
    calls,
    load_model,
    say,
)

pytest_plugins = ["tests.browser.page_fixtures"]


def test_cards_say_what_each_model_is_and_whether_it_runs_here(open_page: Open) -> None:
    page = open_page({"plans": {LARGE["url"]: TOO_LARGE}, "stored": {URL: 21e6}}, models=[LARGE, SMALL])
    small, large = page.get_by_role("listitem").filter(has=page.locator("dl")).all()
    for fact in (
        "Small chat model 135M",
        "135 million",
        "42.1 MB",
        "21 MB stored here",
        "165 MB",
        "with a context of 4,096",
    ):
        expect(small).to_contain_text(fact)
    for fact in ("2.5 bits a weight", "embedding included", "not measured", "apache-2.0"):
        expect(small).to_contain_text(fact)
    expect(small).to_contain_text("This device can run it.")
    expect(large).to_contain_text("2.41 billion")
    expect(large).to_contain_text("B: 0.04 nats/token")
    expect(large).to_contain_text("cannot run it. It needs a buffer of 328 MB; this GPU allows 134 MB.")
    expect(button(large, "Download and load")).to_be_disabled()
    expect(button(small, "Continue the download")).to_be_enabled()


ABOUT = {
    "trained_on": "Conversations that a larger model wrote, and 10,033 encyclopedia summaries.",
    "tokens": 262144000,
    "held_out": [{"text": "held-out conversations", "loss": 2.3456, "tokens": 100000}],
    "samples": [{"prompt": "Hello!", "answer": "<b>Hi</b>\n" + "w" * 200}],
    "sampling": "Greedy, at most 64 tokens.",
    "notes": "Its facts are wrong more often than not.",
}


@pytest.mark.parametrize("width", [1280, 320])
def test_a_card_says_where_the_model_comes_from(open_page: Open, width: int) -> None:
    page = open_page(models=[{**SMALL, "about": ABOUT}, LARGE], width=width)
    about = page.locator("details")
    expect(about).to_have_count(1)  # of two: the other pack says nothing
    expect(about.get_by_text("262 million tokens")).to_be_hidden()
    about.get_by_text("Where it comes from").click()
    for words in (
        "Conversations that a larger model wrote",
        "262 million tokens",
        "2.35 nats a token",
        "held-out conversations, 100,000 tokens",
        "Its facts are wrong",
        "1 answer",
        "Greedy, at most 64 tokens.",
        "<b>Hi</b>",
    ):
        expect(about.get_by_text(words)).to_be_visible()
    assert page.evaluate(TOO_WIDE) == [] and page.evaluate(UNNAMED) == []


@pytest.mark.parametrize("width", [1280, 320])
def test_a_broken_pack_is_stamped_before_the_first_message(open_page: Open, width: int) -> None:
    page = open_page({"grade": "BROKEN"}, models=[{**SMALL, "grade": "BROKEN"}, LARGE], width=width)
    stamps = page.get_by_role("note").filter(has_text="BROKEN")
    expect(stamps).to_have_count(1)  # of the two cards
    expect(page.get_by_role("listitem").filter(has=stamps)).to_contain_text("Small chat model 135M")
    load_model(page)
    expect(stamps).to_be_visible()
    expect(stamps).to_contain_text("Do not judge the model by it.")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_sound_pack_has_no_stamp(open_page: Open) -> None:
    page = open_page({"grade": "good"}, models=[{**SMALL, "grade": "good"}])
    expect(page.get_by_role("listitem").filter(has_text="Small chat model")).to_contain_text("good: cannot be told")
    load_model(page)
    expect(page.get_by_text("Quality: good: cannot be told")).to_be_visible()
    expect(page.get_by_role("note")).to_have_count(0)


def test_the_context_chosen_decides_the_memory_shown_and_loaded(open_page: Open) -> None:
    page = open_page()
    card = page.get_by_role("listitem").filter(has_text="Small chat model 135M")
    expect(card).to_contain_text("165 MB")
    page.get_by_role("combobox", name="Context").select_option(label="1,024 tokens")
    expect(card).to_contain_text("94.2 MB")
    page.get_by_role("combobox", name="KV cache").select_option("q8")
    expect(card).to_contain_text("83.1 MB")
    load_model(page)
    assert calls(page, "load") == [{"call": "load", "url": URL, "contextLength": 1024, "kvCache": "q8"}]


def test_a_stored_model_is_removed_only_after_asking(open_page: Open) -> None:
    page = open_page({"stored": {URL: 42.1e6}})
    expect(page.get_by_text("stored in this browser")).to_be_visible()
    button(page, "Remove Small chat model 135M").click()
    expect(page.get_by_text("Remove 42.1 MB?")).to_be_visible()
    button(page, "Keep").click()
    assert calls(page, "remove") == []
    button(page, "Remove Small chat model 135M").click()
    button(page, "Remove", exact=True).click()
    expect(button(page, "Download and load")).to_be_visible()
    assert calls(page, "remove") == [{"call": "remove", "url": URL}]


def test_without_webgpu_the_page_says_so_and_stays_readable(open_page: Open) -> None:
    message = "This browser does not offer WebGPU."
    page = open_page({"support": {"webgpu": False, "code": "webgpu-missing", "message": message, "adapter": None}})
    notice = page.get_by_role("alert")
    expect(notice).to_contain_text("This browser has no WebGPU")
    expect(notice).to_contain_text(message)
    expect(notice).to_contain_text("from 141 on Windows")
    expect(notice).to_contain_text("--enable-unsafe-webgpu")
    expect(page.get_by_text("135 million")).to_be_visible()
    expect(button(page, "Download and load")).to_be_disabled()
    expect(page.get_by_text("This browser cannot run it: WebGPU is missing.")).to_be_visible()


def test_the_list_of_models_can_be_asked_for_again(open_page: Open, page_site: Site) -> None:
    page = open_page(models=503)
    expect(page.get_by_role("alert")).to_contain_text("The list of models did not come")
    expect(page.get_by_role("alert")).to_contain_text("503")
    page_site.models = [SMALL]
    button(page, "Try again").click()
    expect(button(page, "Download and load")).to_be_enabled()


def test_a_server_without_models_says_how_to_make_one(open_page: Open) -> None:
    expect(open_page(models=[]).get_by_text("python -m packer export")).to_be_visible()


def test_loading_shows_one_bar_with_phases_and_can_be_cancelled(open_page: Open) -> None:
    page = open_page({"load": {"hold": "download"}})
    button(page, "Download and load").click()
    bar = page.get_by_role("progressbar", name="Loading Small chat model 135M")
    expect(bar).to_have_attribute("aria-valuetext", "Downloading, 21.1 of 42.1 MB, 12.3 MB/s, 2 s left")
    expect(page.get_by_text("21.1 of 42.1 MB · 12.3 MB/s · 2 s left")).to_be_visible()
    expect(page.get_by_role("list", name="Steps").get_by_role("listitem")).to_have_text(
        ["Plan", "Download", "Unpack", "Compile", "Self-check"]
    )
    expect(page.locator("[aria-current=step]")).to_have_text("Download")
    share = bar.evaluate("bar => bar.value")
    assert 0.3 < share < 0.5
    button(page, "Cancel").click()
    expect(button(page, "Continue the download")).to_be_visible()


def test_a_load_goes_on_after_the_tab_is_reloaded(open_page: Open) -> None:
    page = open_page({"load": {"hold": "download"}})
    button(page, "Download and load").click()
    expect(page.get_by_text("12.3 MB/s")).to_be_visible()
    page.reload()
    expect(page.get_by_role("progressbar")).to_be_visible()
    expect(page.get_by_text("Reading from this browser’s storage")).to_be_visible()
    button(page, "Cancel").click()
    page.reload()
    expect(button(page, "Continue the download")).to_be_visible()
    expect(page.get_by_role("progressbar")).to_be_hidden()


def test_a_load_that_twice_took_the_tab_with_it_is_not_begun_again(open_page: Open) -> None:
    page = open_page({"load": {"hold": "expand"}})
    button(page, "Download and load").click()
    expect(page.get_by_text("105 of 210 tensors")).to_be_visible()
    page.reload()
    expect(page.get_by_text("105 of 210 tensors")).to_be_visible()
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("The last two loads did not finish")
    assert calls(page, "load") == []
    button(page, "Reload with a context of 2,048").click()
    expect(page.get_by_text("105 of 210 tensors")).to_be_visible()
    assert calls(page, "load")[0]["contextLength"] == 2048


@pytest.mark.parametrize(
    ("error", "title", "way"),
    [
        (
            {"at": "download", "code": "download-failed", "message": "The server went away after 21.1 MB."},
            "The download stopped",
            "Try again",
        ),
        (
            {"at": "download", "code": "chunk-corrupt", "message": "Chunk 3 of weights.1 is damaged."},
            "arrived damaged",
            "Try again",
        ),
        (
            {"at": "download", "code": "storage-full", "message": "There is room for 3 MB of 42.1 MB."},
            "storage is full",
            "Choose another model",
        ),
        (
            {
                "at": "check",
                "code": "self-check-failed",
                "message": "The kernel linear_ternary_dot4 gives 17, not 12.",
            },
            "This device computes wrongly, so the model is not run",
            "Choose another model",
        ),
        (
            {"at": "plan", "code": "something-new", "message": "What nobody thought of."},
            "Something went wrong",
            "Try again",
        ),
    ],
)
def test_a_failed_load_says_what_happened_and_what_to_do(
    open_page: Open, error: dict[str, str], title: str, way: str
) -> None:
    page = open_page({"load": {"error": {**error, "action": "Do the next thing."}}})
    button(page, "Download and load").click()
    notice = page.get_by_role("alert")
    for text in (title, error["message"], "Do the next thing."):
        expect(notice).to_contain_text(text)
    expect(button(page, "Send", exact=True)).to_be_disabled()
    button(notice, way).click()
    if way == "Try again":
        expect(notice).to_contain_text(title)
        assert len(calls(page, "load")) == 2
    else:
        expect(page.get_by_role("heading", name="Choose a model")).to_be_visible()


def test_out_of_memory_proposes_a_context_that_fits(open_page: Open) -> None:
    page = open_page({"load": {"error": {"at": "expand", **OUT_OF_MEMORY}}})
    button(page, "Download and load").click()
    expect(page.get_by_role("alert")).to_contain_text("There is not enough GPU memory")
    page.evaluate("delete fakeScript.load.error")
    button(page, "Reload with a context of 2,048").click()
    expect(button(page, "What is the capital of France?")).to_be_visible()
    assert [one["contextLength"] for one in calls(page, "load")] == [4096, 2048]


def test_a_lost_device_keeps_the_conversation_and_goes_on(chat: Open) -> None:
    page = chat({"replies": [{"text": "Half an answer is here.", "hold": 2}, {"text": "Whole."}]})
    say(page, "Tell me")
    expect(answers(page)).to_contain_text("Half an")
    page.evaluate("fake.lose('The driver was reset.')")
    notice = page.get_by_role("alert").filter(has_text="The connection to the GPU was lost")
    expect(notice).to_contain_text("The driver was reset.")
    expect(notice).to_contain_text("The conversation is kept.")
    expect(answers(page)).to_contain_text("Cut off before its end")
    expect(button(page, "Send", exact=True)).to_be_disabled()
    button(notice, "Reload the model").click()
    expect(notice).to_be_hidden()
    button(page, "Regenerate").click()
    expect(answers(page)).to_contain_text("Whole.")


def test_out_of_memory_during_an_answer_proposes_a_smaller_context(chat: Open) -> None:
    page = chat({"replies": [{"text": "Some words here.", "error": {"after": 2, **OUT_OF_MEMORY}}]})
    say(page, "Tell me")
    notice = page.get_by_role("alert").filter(has_text="There is not enough GPU memory")
    expect(notice).to_contain_text("The conversation is kept.")
    button(notice, "Reload with a context of 2,048").click()
    expect(button(page, "Regenerate")).to_be_enabled()
    assert calls(page, "load")[-1]["contextLength"] == 2048


def test_an_answer_that_fails_can_be_tried_again(chat: Open) -> None:
    refusal = {"code": "busy", "message": "Another answer is being written.", "action": "Wait for it."}
    page = chat({"replies": [{"text": "", "refuse": refusal}, {"text": "Now it works."}]})
    say(page, "Tell me")
    expect(page.get_by_role("alert").filter(has_text="Another answer is being written.")).to_be_visible()
    expect(answers(page)).to_have_count(0)
    button(page, "Try again").click()
    expect(answers(page)).to_contain_text("Now it works.")
