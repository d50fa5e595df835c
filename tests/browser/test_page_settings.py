"""Settings, the theme, and the details for a bug report."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.page_harness import URL, Open, ask, button, calls, load_model

pytest_plugins = ["tests.browser.page_fixtures"]


def test_settings_persist_and_are_used(chat: Open) -> None:
    page = chat()
    button(page, "Settings").click()
    values = {
        "Temperature": "0.3", "Top-p": "0.8", "Min-p": "0.05", "Repetition penalty": "1.3", "Top-k": "40",
        "Longest answer, in tokens": "99", "Seed": "7", "System prompt": "Be brief.",
    }  # fmt: skip
    for label, value in values.items():
        field = page.get_by_role("textbox", name=label, exact=True)
        field.fill(value)
        field.press("Tab")
    page.reload()
    button(page, "Settings").click()
    for label, value in values.items():
        expect(page.get_by_role("textbox", name=label, exact=True)).to_have_value(value)
    expect(page.get_by_role("slider", name="Temperature")).to_have_value("0.3")
    ask(page, "Capital?")
    [request] = calls(page, "create")
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "top_k", "max_tokens", "seed")
    assert [request[name] for name in names] == [0.3, 0.8, 0.05, 1.3, 40, 99, 7]
    button(page, "Set everything back to the defaults").click()
    expect(page.get_by_role("textbox", name="Temperature", exact=True)).to_have_value("0.7")
    expect(page.get_by_role("textbox", name="System prompt")).to_have_value("")


def test_greedy_is_one_click(chat: Open) -> None:
    page = chat()
    button(page, "Settings").click()
    page.get_by_role("checkbox", name="Greedy").check()
    expect(page.get_by_role("textbox", name="Temperature", exact=True)).to_be_disabled()
    ask(page, "Capital?")
    assert calls(page, "create")[0]["temperature"] == 0
    page.get_by_role("checkbox", name="Greedy").uncheck()
    expect(page.get_by_role("textbox", name="Temperature", exact=True)).to_have_value("0.7")


def test_a_value_out_of_bounds_is_refused_in_words(chat: Open) -> None:
    page = chat()
    button(page, "Settings").click()
    for label, value, error in (
        ("Temperature", "hot", "Temperature is a number from 0 to 2."),
        ("Top-k", "1.5", "Top-k is a whole number from 0 to 1000."),
        ("Seed", "-1", "Seed is a whole number from 0 to 4294967295, or empty."),
    ):
        field = page.get_by_role("textbox", name=label, exact=True)
        field.fill(value)
        field.press("Tab")
        expect(page.get_by_text(error)).to_be_visible()
        expect(field).to_have_attribute("aria-invalid", "true")
    ask(page, "Capital?")
    request = calls(page, "create")[0]
    assert (request["temperature"], request["top_k"]) == (0.7, 0)


def test_a_memory_setting_waits_for_a_reload_of_the_model(chat: Open) -> None:
    page = chat()
    button(page, "Settings").click()
    panel = page.get_by_role("complementary")
    panel.get_by_label("Context").select_option("1024")
    panel.get_by_label("KV cache").select_option("f32")
    button(page, "Reload the model now").click()
    expect(page.get_by_text("of 1,024 tokens")).to_be_visible()
    expect(button(page, "Reload the model now")).to_be_hidden()
    assert calls(page, "load")[-1] == {"call": "load", "url": URL, "contextLength": 1024, "kvCache": "f32"}


def test_nonsense_in_the_storage_becomes_the_defaults(open_page: Open) -> None:
    page = open_page()
    page.evaluate("""() => {
        const settings = { temperature: 'hot', topP: 9, theme: 3, contextLength: -1 };
        localStorage.setItem('tercet.settings', JSON.stringify(settings));
        localStorage.setItem('tercet.conversation', '{"messages": [{"role": "system"}, 3, null]}');
        localStorage.setItem('tercet.resume', '[');
    }""")
    page.reload()
    load_model(page)
    ask(page, "Capital?")
    assert calls(page, "create")[0]["temperature"] == 0.7
    assert calls(page, "load")[0]["contextLength"] == 4096


def test_a_browser_that_keeps_nothing_is_said_and_works(open_page: Open) -> None:
    page = open_page()
    page.context.add_init_script(
        "Storage.prototype.setItem = () => { throw new DOMException('no', 'QuotaExceededError'); }"
    )
    page.evaluate("sessionStorage.clear()")
    page.reload()
    button(page, "Settings").click()
    page.get_by_text("Dark", exact=True).click()
    expect(page.get_by_text("This browser does not let the page keep anything")).to_be_visible()


def test_the_theme_follows_the_system_until_one_is_chosen(open_page: Open) -> None:
    page = open_page(color_scheme="dark")
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "dark"
    page.emulate_media(color_scheme="light")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    button(page, "Settings").click()
    page.get_by_text("Dark", exact=True).click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    assert page.evaluate(theme) == "dark"
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


def test_details_can_be_copied_and_never_hold_the_conversation(chat: Open) -> None:
    page = chat({"replies": [{"text": "SECRET-ANSWER"}]}, permissions=["clipboard-read", "clipboard-write"])
    button(page, "Settings").click()
    page.get_by_role("textbox", name="System prompt").fill("SECRET-SYSTEM")
    ask(page, "SECRET-QUESTION")
    page.evaluate("fake.lose('The driver was reset.')")
    button(page.get_by_role("alert"), "Details").click()
    button(page, "Copy the details").click()
    expect(page.locator("#announcer")).to_contain_text("Copied.")
    text = page.evaluate("navigator.clipboard.readText()")
    for part in (
        "version 0",
        "Acme Road 9",
        "maxBufferSize: 1073741824",
        "Chrome/",
        "decode_tokens_per_second",
        "download began after",
        "device-lost",
        "The driver was reset.",
        "13 characters",
    ):
        assert part in text
    assert "SECRET" not in text
