"""The engine in Chromium, in its worker and in the page: tiny models, a server that fails, a network that goes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import BrowserContext, Page
from safetensors.numpy import save_file

from packer.export import ExportOptions, export
from packer.pack import Pack
from packer.text import ChatText
from shaders.interpreter import ReferenceModel
from shaders.sampling import Sampling
from tests.browser.engine_site import PAGE, EngineSite, running_engine_site
from tests.support.browser import running_browser
from tests.support.checkpoints import tiny_checkpoint
from tests.support.families import BONSAI, FAMILY_CASES, FAMILY_PROMPT, bonsai_tensors
from tests.support.packs import change_manifest, change_program, tiny_pack
from tests.support.transformers_models import greedy, load_model

from examples.train.import_recipe import import_recipe  # isort: skip  (after tests.support, which sets torch up)
from tests.support.recipe import CONTEXT, write_recipe  # isort: skip

SCRIPT = Path(__file__).with_name("engine_page.js").read_text(encoding="utf-8")
CHUNK_BYTES = 4 << 20
MESSAGES = [{"role": "user", "content": "Hi 😀"}]
OPTIONS = {"contextLength": 96, "kvCache": "f16", "prefillChunk": 16}
#: Failures are to be seen soon.
IMPATIENT = {"retry": {"attempts": 2, "delayMs": 10, "corrupt": 1}}
TOKENS = 8
RANDOM = {"temperature": 1.1, "top_k": 80, "top_p": 0.97, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 4242}
NEAR_TIE = 0.02
GENERATE = """async ([prompt, count]) => {
    const [ids, request] = [[], { temperature: 0, max_tokens: count, stopIds: [] }];
    for await (const id of engine.generate(prompt, request)) ids.push(id);
    return ids;
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSite]:
    packs = tmp_path_factory.mktemp("packs")
    options = ExportOptions(name="tiny", activations="a8")
    shutil.move(tiny_pack(tmp_path_factory.mktemp("a"), options=options, seed=4), packs / "tiny")
    # Two chunks in one shard: an embedding of 5.8 MB.
    wide = ExportOptions(name="wide", activations="a8", embedding="f16")
    source = tmp_path_factory.mktemp("b")
    shutil.move(tiny_pack(source, options=wide, num_hidden_layers=1, vocab_size=40000), packs / "wide")
    with running_engine_site(packs) as running:
        yield running


@pytest.fixture(scope="module")
def context() -> Iterator[BrowserContext]:
    with running_browser(webgpu=True) as browser:
        yield browser.new_context()


@pytest.fixture(autouse=True)
def well_again(site: EngineSite) -> Iterator[None]:
    yield
    site.clear()


def open_page(context: BrowserContext, site: EngineSite, kind: str = "client") -> Page:
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(site.address + PAGE)
    page.evaluate(SCRIPT, kind)
    return page


@pytest.fixture(scope="module")
def page(context: BrowserContext, site: EngineSite) -> Page:
    """The tiny model, loaded in the worker."""
    page = open_page(context, site)
    loaded = page.evaluate("options => load('/packs/tiny/', options)", OPTIONS)
    assert "error" not in loaded, loaded
    return page


def stream(page: Page, request: dict[str, Any]) -> dict[str, Any]:
    answer = page.evaluate("request => stream(request)", request)
    assert "error" not in answer, answer
    return answer["value"]


def reference_text(site: EngineSite, options: Sampling, messages: list[dict[str, str]] = MESSAGES) -> tuple[str, bool]:
    """Text of the reference's answer, up to the first near tie; and whether it ended by itself."""
    pack = Pack(site.packs / "tiny")
    text = ChatText(pack)
    model = ReferenceModel(pack.program, pack.tensors(), capacity=96, kv="f16")
    ids = []
    for token, logits in model.generate(text.encode_messages(messages), options, TOKENS, pack.eos_ids):
        second, first = np.sort(logits)[-2:]
        if options.greedy and first - second < NEAR_TIE:
            break
        ids.append(token)
    assert len(ids) >= 4, "the test's model decides too closely: take another seed"
    return text.decode(ids), len(ids) == TOKENS or ids[-1] in pack.eos_ids


def test_load_tells_its_phases_and_facts(page: Page, site: EngineSite) -> None:
    events = page.evaluate("events")
    for phase in ("plan", "download", "expand", "compile", "check", "ready"):
        of_phase = [event for event in events if event["phase"] == phase]
        assert of_phase and of_phase[-1]["loaded"] == of_phase[-1]["total"] > 0, phase
        assert all(a["loaded"] <= b["loaded"] for a, b in zip(of_phase, of_phase[1:], strict=False)), phase
    pack = Pack(site.packs / "tiny")
    download = [event for event in events if event["phase"] == "download"]
    assert download[-1]["total"] == pack.total_bytes and download[-1]["stored"] == 0
    info = page.evaluate("engine.info")
    assert info["url"] == f"{site.address}/packs/tiny/" and info["contextLength"] == 96
    assert info["weightsBytes"] == pack.manifest["resident_bytes"]
    assert info["eosIds"] == sorted(pack.eos_ids) and "attention" in info["kernels"]


def test_greedy_and_random_answers_are_those_of_the_reference(page: Page, site: EngineSite) -> None:
    for request, options in (({"temperature": 0}, Sampling()), (RANDOM, Sampling(**RANDOM))):
        expected, whole = reference_text(site, options)
        answer = stream(page, {"messages": MESSAGES, "max_tokens": TOKENS, **request})
        shown = answer["text"]
        assert len(shown) >= 1 and shown.startswith(expected.rstrip("\ufffd"))
        # Half a character at the end is not shown; Python's decoder shows one replacement character.
        assert not whole or expected in (shown, shown + "\ufffd")
        assert answer["role"] == "assistant"
    again = stream(page, {"messages": MESSAGES, "max_tokens": TOKENS, **RANDOM})
    assert again["text"] == answer["text"] and again["tercet"]["seed"] == 4242


def test_usage_and_reuse_of_the_cache(page: Page, site: EngineSite) -> None:
    tokens = len(ChatText(Pack(site.packs / "tiny")).encode_messages(MESSAGES))
    assert page.evaluate("messages => engine.countTokens(messages)", MESSAGES) == tokens
    page.evaluate("messages => stream({messages, max_tokens: 1})", [{"role": "user", "content": "other"}])
    request = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0}
    first, second = stream(page, request), stream(page, request)
    assert first["usage"]["prompt_tokens"] == tokens
    assert first["usage"]["cached_tokens"] < tokens - 1 == second["usage"]["cached_tokens"]
    assert first["text"] == second["text"] and first["finish"] in ("length", "stop")
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "time_to_first_token"):
        assert first["usage"][name] > 0
    whole = page.evaluate("request => attempt(() => engine.chat.completions.create(request))", request)["value"]
    assert whole["choices"][0]["message"]["content"] == first["text"]


def test_abort_leave_and_busy(page: Page) -> None:
    request = {"messages": MESSAGES, "temperature": 1, "seed": 3, "max_tokens": 60}
    aborted = page.evaluate(
        """async (request) => {
            const control = new AbortController();
            const after = (chunks) => { if (chunks.length === 3) control.abort(); };
            return stream({ ...request, signal: control.signal }, after);
        }""",
        request,
    )["value"]
    assert aborted["finish"] == "abort" and aborted["usage"]["completion_tokens"] < 60
    before = page.evaluate(
        """async (request) => {
            const control = new AbortController();
            control.abort();
            return stream({ ...request, signal: control.signal });
        }""",
        request,
    )["value"]
    assert (before["finish"], before["text"]) == ("abort", "")
    busy = page.evaluate(
        """async (request) => {
            let refused;
            await stream(request, async () => { refused = await stream(request); return 'leave'; });
            return refused;
        }""",
        request,
    )
    assert busy["error"]["code"] == "busy" and busy["error"]["typed"]
    assert stream(page, {**request, "max_tokens": 2})["usage"]["completion_tokens"] <= 2


def test_requests_that_cannot_be_answered(page: Page) -> None:
    long = [{"role": "user", "content": "x" * 200}]
    cases = [
        ({"messages": long}, "context-too-long"),
        ({"messages": MESSAGES, "temperature": -1}, "bad-request"),
        ({"messages": []}, "bad-request"),
    ]
    for request, code in cases:
        error = page.evaluate("request => stream(request)", request)["error"]
        assert error["code"] == code and error["typed"] and error["action"]
    too_long = page.evaluate("request => stream(request)", {"messages": long})["error"]["detail"]
    assert too_long["needed"] > too_long["available"] == 96


def test_a_context_that_fills_up_ends_the_answer(page: Page) -> None:
    near = [{"role": "user", "content": "x" * 50}]
    answer = stream(page, {"messages": near, "temperature": 1, "seed": 8, "stop": ["\x00never"]})
    if answer["finish"] == "length":
        assert answer["tercet"]["context_full"] and answer["tercet"]["context_used"] == 97


def test_reload_without_a_network(context: BrowserContext, site: EngineSite, page: Page) -> None:
    """What was loaded once is loaded again with the server gone: pack, program, tokenizer and kernels."""
    expected = stream(page, {"messages": MESSAGES, "max_tokens": 4, "temperature": 0})["text"]
    page.evaluate("engine.dispose()")
    gone = page.evaluate("stream({ messages: [{ role: 'user', content: 'x' }] })")["error"]
    assert gone["code"] == "bad-request"
    site.gone = ("/packs", "/shaders", "/api")
    page.goto(site.address + PAGE)
    page.evaluate(SCRIPT, "client")
    plan = page.evaluate("options => attempt(() => Engine.plan('/packs/tiny/', options))", OPTIONS)["value"]
    assert plan["storedBytes"] == plan["downloadBytes"] > 0
    loaded = page.evaluate("options => load('/packs/tiny/', options)", OPTIONS)
    assert "error" not in loaded, loaded
    download = [event for event in page.evaluate("events") if event["phase"] == "download"]
    assert download[-1]["stored"] == download[-1]["total"]
    assert stream(page, {"messages": MESSAGES, "max_tokens": 4, "temperature": 0})["text"] == expected


def test_plan_without_a_load(context: BrowserContext, site: EngineSite) -> None:
    other = open_page(context, site)
    plan = other.evaluate("attempt(() => Engine.plan('/packs/wide/', { contextLength: 100, kvCache: 'q8' }))")["value"]
    pack = Pack(site.packs / "wide")
    assert plan["name"] == "wide" and plan["downloadBytes"] == pack.total_bytes and plan["storedBytes"] == 0
    assert plan["weightsBytes"] == pack.manifest["resident_bytes"]
    per_token = 2 * 2 * (12 + 4)  # keys and values, two heads of 12 bytes and a scale
    assert (plan["kvBytesPerToken"], plan["kvBytes"]) == (per_token, 100 * per_token)
    assert plan["totalBytes"] == plan["weightsBytes"] + plan["kvBytes"] + plan["workBytes"]
    assert plan["fits"] and plan["problems"] == [] and plan["maxContextLength"] == 256
    assert not [path for path, _ in site.requests if path.endswith(".safetensors")]
    support = other.evaluate("Engine.support()")
    assert support["webgpu"] and support["limits"]["maxBufferSize"] > 0 and support["adapter"]["vendor"]
    other.close()


def shard_requests(site: EngineSite) -> list[str]:
    return [span for path, span in site.requests if path.endswith(".safetensors")]


def test_downloads_that_fail_are_resumed_and_never_poison_the_store(context: BrowserContext, site: EngineSite) -> None:
    """Cancelled, cut in mid-file, corrupt for good, then well: only what is missing is fetched."""
    other = open_page(context, site)
    options = {**OPTIONS, **IMPATIENT}
    size = next((site.packs / "wide").glob("*.safetensors")).stat().st_size
    whole, rest = f"bytes=0-{size - 1}", f"bytes={CHUNK_BYTES}-{size - 1}"

    site.gone = ("/packs",)
    failed = other.evaluate("options => load('/packs/wide/', options)", options)["error"]
    assert failed["code"] == "download-failed" and failed["typed"] and failed["detail"]["file"] == "pack.json"

    site.clear()
    cancelled = other.evaluate(
        """options => attempt(async () => {
            const control = new AbortController();
            const load = Engine.load('/packs/wide/', { ...options, signal: control.signal, onProgress: ({ phase }) => {
                if (phase === 'download') control.abort();
            } });
            await load;
        })""",
        options,
    )["error"]
    assert cancelled["code"] == "aborted"

    site.clear()
    once = {"attempts": 1, "delayMs": 1, "corrupt": 0}
    site.cut_after = CHUNK_BYTES + 100_000
    failed = other.evaluate("options => load('/packs/wide/', options)", {**options, "retry": once})
    assert failed["error"]["code"] == "download-failed" and failed["error"]["detail"]["offset"] == CHUNK_BYTES
    stored = other.evaluate("Engine.stored('/packs/wide/')")
    assert CHUNK_BYTES < stored < CHUNK_BYTES + 100_000
    assert shard_requests(site)[-1] == whole

    site.clear()
    site.flip, site.flips = CHUNK_BYTES + 5, 10
    failed = other.evaluate("options => load('/packs/wide/', options)", options)["error"]
    assert failed["code"] == "chunk-corrupt" and failed["detail"]["chunk"] == 1
    assert shard_requests(site) == [rest, rest]

    site.clear()
    site.flip, site.flips = CHUNK_BYTES + 5, 1
    loaded = other.evaluate("options => load('/packs/wide/', options)", options)
    assert "error" not in loaded, loaded
    assert shard_requests(site) == [rest, rest]
    assert stream(other, {"messages": MESSAGES, "max_tokens": 2, "temperature": 0})["usage"]["completion_tokens"] <= 2
    pack = Pack(site.packs / "wide")
    assert pack.total_bytes < other.evaluate("Engine.stored('/packs/wide/')") < pack.total_bytes + 100_000

    change_manifest(site.packs / "wide", lambda manifest: manifest.update(description="changed"))
    plan = other.evaluate("attempt(() => Engine.plan('/packs/wide/', {}))")["value"]
    assert plan["storedBytes"] == 0, "a changed pack never uses what is kept of the old one"
    other.evaluate("Engine.remove('/packs/wide/')")
    assert other.evaluate("Engine.stored('/packs/wide/')") == 0
    other.close()


def test_in_the_page_without_a_worker(context: BrowserContext, site: EngineSite) -> None:
    """Cache API instead of files; no room, no WebGPU, no adapter, a device that is lost in mid-answer."""
    other = open_page(context, site, "index")
    full = other.evaluate(
        """async (options) => {
            const { estimate } = navigator.storage;
            navigator.storage.estimate = async () => ({ quota: 1000, usage: 0 });
            const result = [await attempt(() => Engine.plan('/packs/tiny/', options))];
            result.push(await load('/packs/tiny/', options));
            navigator.storage.estimate = estimate;
            return result;
        }""",
        OPTIONS,
    )
    assert [problem["code"] for problem in full[0]["value"]["problems"]] == ["storage-full"]
    assert full[1]["error"]["code"] == "storage-full"
    assert full[1]["error"]["detail"]["needed"] > full[1]["error"]["detail"]["available"] == 1000
    missing = other.evaluate(
        """async (options) => {
            const { requestAdapter } = GPU.prototype;
            GPU.prototype.requestAdapter = async () => null;
            const result = [await Engine.support(), await load('/packs/tiny/', options)];
            GPU.prototype.requestAdapter = requestAdapter;
            Object.defineProperty(navigator, 'gpu', { value: undefined, configurable: true });
            result.push(await Engine.support(), await attempt(() => Engine.plan('/packs/tiny/', options)));
            delete navigator.gpu;
            return result;
        }""",
        OPTIONS,
    )
    assert missing[0]["code"] == missing[1]["error"]["code"] == "adapter-missing"
    assert missing[2]["code"] == "webgpu-missing" and not missing[2]["webgpu"]
    assert missing[3]["value"]["problems"][0]["code"] == "webgpu-missing" and not missing[3]["value"]["fits"]

    loaded = other.evaluate("options => load('/packs/tiny/', options)", OPTIONS)
    assert "error" not in loaded, loaded
    total = Pack(site.packs / "tiny").total_bytes
    assert other.evaluate("Engine.stored('/packs/tiny/')") > total
    ids = other.evaluate(
        """async () => {
            const ids = [];
            const options = { temperature: 0, max_tokens: 3, stopIds: [] };
            for await (const id of engine.generate([257, 72, 105], options)) ids.push(id);
            return ids;
        }"""
    )
    pack = Pack(site.packs / "tiny")
    model = ReferenceModel(pack.program, pack.tensors(), capacity=96, kv="f16")
    assert ids == [token for token, _ in model.generate([257, 72, 105], Sampling(), 3)]
    lost = other.evaluate(
        """async (messages) => stream({ messages, temperature: 1, seed: 1, max_tokens: 60 },
            (chunks) => { if (chunks.length === 2) engine.gpu.device.destroy(); })""",
        MESSAGES,
    )
    assert lost["error"]["code"] == "device-lost" and lost["error"]["typed"]
    assert other.evaluate("lost")[0]["code"] == "device-lost"
    refused = other.evaluate("messages => stream({ messages })", MESSAGES)
    assert refused["error"]["code"] == "device-lost"
    other.evaluate("engine.dispose()")
    other.close()


@pytest.fixture(scope="module")
def family_page(context: BrowserContext, site: EngineSite) -> Iterator[Page]:
    """The engine in the page itself, which takes ids; one device for all, so that what they share is compiled once."""
    other = open_page(context, site, "index")
    other.evaluate(
        """async () => {
            const adapter = await navigator.gpu.requestAdapter();
            const { maxStorageBuffersPerShaderStage } = adapter.limits;
            window.device = await adapter.requestDevice({ requiredLimits: { maxStorageBuffersPerShaderStage } });
        }"""
    )
    yield other
    other.close()


@pytest.mark.parametrize("name", [*FAMILY_CASES, "bonsai"])
def test_ids_of_each_family_are_those_of_transformers(
    family_page: Page, site: EngineSite, tmp_path: Path, name: str
) -> None:
    family, changes = FAMILY_CASES.get(name, ("qwen3", BONSAI))
    source = tiny_checkpoint(tmp_path / "checkpoint", family, **changes)
    if name == "bonsai":
        save_file(bonsai_tensors(), source / "model.safetensors")
    export(source, site.packs / name, ExportOptions(embedding="auto" if name == "bonsai" else "f16"))
    loaded = family_page.evaluate("([url, ways]) => load(url, { ...ways, device })", [f"/packs/{name}/", OPTIONS])
    assert "error" not in loaded, loaded
    expected = greedy(load_model(source), FAMILY_PROMPT, TOKENS)
    ids = family_page.evaluate(GENERATE, [FAMILY_PROMPT, TOKENS])
    assert ids[: len(expected)] == expected


def test_learned_positions_and_an_mlp_without_gate(family_page: Page, site: EngineSite, tmp_path: Path) -> None:
    source = write_recipe(tmp_path)
    import_recipe(source / "model.pt", tmp_path / "checkpoint", tokenizer=source / "tokenizer")
    pack = Pack(export(tmp_path / "checkpoint", site.packs / "recipe", ExportOptions(keep=("*=f16",))).path)
    model = ReferenceModel(pack.program, pack.tensors(), capacity=CONTEXT, kv="f16")
    expected = [token for token, _ in model.generate(FAMILY_PROMPT, Sampling(), CONTEXT - len(FAMILY_PROMPT))]
    assert len(set(expected)) > len(expected) // 2
    ways = {**OPTIONS, "contextLength": CONTEXT}
    loaded = family_page.evaluate("([url, ways]) => load(url, { ...ways, device })", ["/packs/recipe/", ways])
    assert "error" not in loaded, loaded
    ids = family_page.evaluate(GENERATE, [FAMILY_PROMPT, CONTEXT - len(FAMILY_PROMPT)])
    assert ids == expected


def test_the_worker_that_does_not_start_is_told(context: BrowserContext, site: EngineSite) -> None:
    site.gone = ("/engine/worker.js",)
    other = open_page(context, site)
    error = other.evaluate("attempt(() => Engine.support())")["error"]
    assert error["code"] == "internal" and error["typed"] and "worker" in error["message"]
    site.gone = ()
    assert other.evaluate("Engine.support()")["webgpu"], "the next call starts another worker"
    other.close()


def test_programs_are_refused_before_a_shard_is_asked_for(context: BrowserContext, site: EngineSite) -> None:
    folder = Path(shutil.copytree(site.packs / "tiny", site.packs / "odd"))
    change_program(folder, lambda program: program["body"][0].update(op="teleport"))
    other = open_page(context, site)
    error = other.evaluate("load('/packs/odd/')")["error"]
    assert error["code"] == "pack-unsupported" and error["detail"]["rule"] == "operation"
    assert "teleport" in error["message"] and shard_requests(site) == []
    other.close()
