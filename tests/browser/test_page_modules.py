"""Modules of the page by themselves, and the contract with the engine."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

pytest_plugins = ["tests.browser.page_fixtures"]


@pytest.mark.parametrize(
    ("agent", "secure", "said"),
    [
        ("Mozilla/5.0 (X11; Linux x86_64; rv:150.0) Gecko Firefox/150.0", True, "dom.webgpu.enabled"),
        ("Mozilla/5.0 (Windows NT 10.0) Chrome/112.0 Safari/537.36", True, "chrome://flags"),
        ("Mozilla/5.0 (Macintosh) Version/18.0 Safari/605.1.15", True, "Safari 26"),
        ("Lynx", True, "one of the browsers below"),
        ("Mozilla/5.0 (X11) Chrome/150.0 Safari/537.36", False, "https"),
    ],
)
def test_each_browser_has_its_own_steps_to_webgpu(modules: Page, agent: str, secure: bool, said: str) -> None:
    steps = modules.evaluate(
        "async (given) => (await import('/app/platform.js')).howToGetWebGpu('webgpu-missing', ...given)",
        [agent, secure],
    )
    assert said in " ".join(f"{step['text']} {step.get('code', '')}" for step in steps)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("formatBytes(312)", "312 B"),
        ("formatBytes(21437000)", "21.4 MB"),
        ("formatBytes(999600)", "1 MB"),
        ("formatBytes(1187000000)", "1.19 GB"),
        ("formatBytesOf(21437000, 42100000)", "21.4 of 42.1 MB"),
        ("formatRate(38.24)", "38.2 tok/s"),
        ("formatRate(412.3)", "412 tok/s"),
        ("formatRate(24312.3)", "24,300 tok/s"),
        ("formatDuration(0.00000425)", "4.25 µs"),
        ("formatDuration(0.0123)", "12.3 ms"),
        ("formatDuration(1.5)", "1.5 s"),
        ("formatPercent(0.5327)", "53 %"),
        ("formatPercent(0.0042)", "0.4 %"),
        ("formatPercent(0)", "0 %"),
        ("formatLeft(0.2)", "less than 1 s left"),
        ("formatLeft(11.6)", "12 s left"),
        ("formatLeft(200)", "3 min left"),
        ("formatSeconds(0.004)", "4 ms"),
        ("formatSeconds(0.214)", "0.21 s"),
        ("formatParameters(2412820480)", "2.41 billion"),
        ("plural(1, 'token')", "1 token"),
        ("plural(1234, 'token')", "1,234 tokens"),
    ],
)
def test_numbers_read_as_people_read_them(modules: Page, call: str, expected: str) -> None:
    # No eval: the page's policy forbids it, as it should.
    name, arguments = call.rstrip(")").split("(")
    values = [float(a) if a[0].isdigit() else a.strip("'") for a in arguments.split(", ")]
    found = modules.evaluate(
        "async ([name, values]) => (await import('/app/format.js'))[name](...values)", [name, values]
    )
    assert found == expected


def test_what_is_sent_has_roles_that_take_turns(modules: Page) -> None:
    messages = [
        {"id": "1", "role": "user", "content": "Dropped", "dropped": True},
        {"id": "2", "role": "assistant", "content": "Dropped too", "dropped": True},
        {"id": "3", "role": "user", "content": "Never answered"},
        {"id": "4", "role": "assistant", "content": ""},
        {"id": "5", "role": "user", "content": "Asked again"},
    ]
    prompt = modules.evaluate(
        "async (messages) => (await import('/app/conversation.js')).toPrompt(messages, 'Be brief.')", messages
    )
    assert prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Never answered\n\nAsked again"},
    ]


@pytest.mark.parametrize(
    ("code", "detail", "length", "expected"),
    [
        ("out-of-memory", {"needed": 165e6, "available": 140e6}, 4096, 2048),
        ("out-of-memory", {"needed": 165e6, "available": 90e6}, 4096, 512),
        ("out-of-memory", {}, 4096, 2048),
        ("out-of-memory", {}, 300, None),
        ("device-lost", {}, 4096, None),
    ],
)
def test_a_smaller_context_is_proposed_where_memory_was_the_cause(
    modules: Page, code: str, detail: dict[str, float], length: int, expected: int | None
) -> None:
    """With 23,040 bytes a token, as 30 layers of 3 heads of 64 in 16 bits."""
    found = modules.evaluate(
        "async (given) => (await import('/app/problems.js')).smallerContext(...given)",
        [{"code": code, "message": "", "action": "", "detail": detail}, length, 23040],
    )
    assert found == expected


def test_the_bar_never_falls_and_names_the_first_unfinished_phase(modules: Page) -> None:
    """Pipelines compile while the weights arrive: events of two phases come mixed."""
    events = [
        ("plan", 1, 1), ("compile", 0, 10), ("download", 0, 100), ("compile", 10, 10), ("download", 60, 100),
        ("download", 40, 100), ("expand", 1, 5), ("download", 100, 100), ("expand", 5, 5), ("check", 2, 4),
        ("check", 4, 4), ("ready", 1, 1),
    ]  # fmt: skip
    steps = modules.evaluate(
        """async (events) => {
            const { NO_PROGRESS, advance } = await import('/app/progress.js');
            let progress = NO_PROGRESS;
            return events.map(([phase, loaded, total], i) => {
                progress = advance(progress, { phase, loaded, total, unit: 'bytes' }, i);
                return [progress.current, progress.fraction];
            });
        }""",
        events,
    )
    fractions = [fraction for _, fraction in steps]
    assert fractions == sorted(fractions) and fractions[-1] == 1
    assert [phase for phase, _ in steps] == [
        "plan", "compile", "download", "download", "download", "download", "download", "expand", "expand",
        "check", "check", "ready",
    ]  # fmt: skip


def test_every_error_of_the_engine_has_a_title(modules: Page) -> None:
    untold = modules.evaluate("""async () => {
        const { ERROR_CODES } = await import('/engine/errors.js');
        const { titleOf } = await import('/app/problems.js');
        const title = (code) => titleOf({ code, message: '', action: '', detail: {} });
        return ERROR_CODES.filter((code) => code !== 'internal' && title(code) === title('internal'));
    }""")
    assert untold == ["aborted"]


def test_the_real_client_offers_what_the_fake_one_does(modules: Page) -> None:
    # With the question mark the site serves the real one.
    names = modules.evaluate("""async () => {
        const { EngineClient: fake } = await import('/engine/client.js');
        const { EngineClient: real } = await import('/engine/client.js?real');
        const own = Object.getOwnPropertyNames(fake).filter((name) => typeof fake[name] === 'function');
        const missing = own.filter((name) => typeof real[name] !== 'function');
        const used = ['countTokens', 'measure', 'dispose'];
        for (const { prototype } of [fake, real]) {
            missing.push(...used.filter((name) => typeof prototype[name] !== 'function'));
        }
        return { same: fake === real, missing };
    }""")
    assert names == {"same": False, "missing": []}
