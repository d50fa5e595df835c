"""The choice of constants by timing: what is tried changes no bit, and what is chosen is followed and remembered."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaders import contract, native_timing
from shaders.case_kit import Case
from shaders.cases import all_cases
from shaders.contract import Kernel, kernels
from shaders.forced import Forced, parse_forced
from shaders.native import NativeModel, shared_device
from shaders.native_cases import run_case
from shaders.native_errors import DeviceUnsupported
from shaders.native_tuning import Choices, Memory, Setting, cache_folder, open_memory, settings_of
from shaders.sampling import Sampling
from tests.shaders.tiny_programs import tiny_model

TIMED = [kernel for kernel in kernels() if kernel.timed]
PROMPT = [5, 300, 0, 77, 12]


def cases_of(kernel: Kernel) -> list[Case]:
    """The tallest of a kernel's cases, with scales by row and, of those for one token, by group."""
    found: dict[str, Case] = {}
    for case in all_cases():
        if case.kernel == kernel.name and (kernel.overrides.get("TOKENS", 1) == 1 or not found):
            best = found.setdefault(case.symbols["scale"], case)
            if case.symbols["N"] > best.symbols["N"]:
                found[case.symbols["scale"]] = case
    return list(found.values())


@pytest.mark.parametrize("kernel", TIMED, ids=lambda kernel: kernel.name)
def test_timed_constants_change_no_bit(kernel: Kernel) -> None:
    device = shared_device()
    chosen = cases_of(kernel)
    assert chosen
    for case in chosen:
        bits = set()
        for setting in settings_of(kernel):
            outputs = run_case(device, dataclasses.replace(case, symbols=case.symbols | dict(setting.tuned)))
            bits.add(tuple(outputs[name].tobytes() for name in sorted(outputs)))
        assert len(bits) == 1, case.name


def test_what_may_be_timed_is_tuned() -> None:
    entries = contract.document()["kernels"]
    assert sum("timed" in entry for entry in entries) >= 6
    for kernel in TIMED:
        assert all(len(kernel.tuned[name]) > 1 for name in kernel.timed), kernel.name
        settings = settings_of(kernel)
        assert 1 < len(settings) <= 4 and len({str(setting) for setting in settings}) == len(settings)
        assert settings[0].tuned == {name: kernel.tuned[name][0] for name in kernel.timed}


LINEAR = {"T": 1, "encoding": "ternary", "scale": "row", "activation": "a8", "few": 0, "software": 0, "K_REST": 0}
SHAPED = LINEAR | {"ROW_WORDS": 4, "OUT_N": 8, "K": 64, "Q_BYTES": 68, "last_rows": 0}


def test_rivals_and_forced_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = next(kernel for kernel in kernels() if kernel.name == "linear_ternary")
    plain = dataclasses.replace(plain, rival=False)
    rival = dataclasses.replace(plain, name="fast", rival=True, needs=("subgroups",))
    other = dataclasses.replace(rival, name="other", when={**plain.when, "activation": ["a16"]})
    unmarked = dataclasses.replace(plain, name="unmarked")
    monkeypatch.setattr(contract, "kernels", lambda: (plain, rival, other, unmarked))
    able = frozenset({"subgroups"})

    def names(choices: Choices) -> list[str]:
        return list(dict.fromkeys(setting.kernel for setting in choices.settings("linear", SHAPED)))

    assert names(Choices(features=able)) == ["linear_ternary", "fast"]
    assert names(Choices()) == ["linear_ternary"]
    assert names(Choices(Forced(off=frozenset({"fast"})), able)) == ["linear_ternary"]
    assert names(Choices(Forced(tuned={"linear_ternary": {"ROWS": 8}}), able)) == []
    assert names(Choices(Forced(defaults=True), able)) == []

    key, setting = "linear_ternary 8x64", Setting("fast", {"ROWS": 32})
    assert Choices(features=able, chosen={key: setting}).choose("linear", SHAPED) == (rival, {"ROWS": 32})
    assert Choices(chosen={key: setting}).choose("linear", SHAPED) == (plain, {}), "the device lost what it needs"
    assert Choices(features=able, chosen={"linear_ternary 9x64": setting}).choose("linear", SHAPED) == (plain, {})
    forced = Forced(tuned={"linear_ternary": {"ROWS": 8}})
    assert Choices(forced, able, {key: setting}).choose("linear", SHAPED) == (plain, {"ROWS": 8})
    assert Choices(Forced(off=frozenset({"linear_ternary"})), able).first("linear", SHAPED) == rival


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERCET_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for platform, folder in (
        ("linux", ".cache/tercet"),
        ("darwin", "Library/Caches/tercet"),
        ("win32", "AppData/Local/tercet"),
    ):
        monkeypatch.setattr("sys.platform", platform)
        assert cache_folder() == Path.home() / folder
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert cache_folder() == Path("/local/tercet")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/tercet")
    monkeypatch.setenv("TERCET_CACHE", "/own")
    assert cache_folder() == Path("/own")
    monkeypatch.setenv("TERCET_CACHE", "off")
    assert cache_folder() is None and open_memory({}, "pack") is None


KINDS = {"k 1x2": [Setting("k", {"ROWS": 8}), Setting("k", {"ROWS": 16})], "other": [Setting("other", {"ROWS": 8})]}
CHOSEN = {"k 1x2": KINDS["k 1x2"][1], "other": KINDS["other"][0]}


def test_what_is_remembered_is_recalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path / "new" / "folder"))
    memory = open_memory({"vendor": "a"}, "pack")
    assert memory and memory.recall(KINDS) == {}
    memory.remember(CHOSEN)
    assert memory.recall(KINDS) == CHOSEN
    assert memory.recall({"k 1x2": KINDS["k 1x2"][:1]}) == {}, "what may not be chosen any more"
    assert [path.name for path in memory.file.parent.iterdir()] == [memory.file.name]
    for adapter, pack in (({"vendor": "b"}, "pack"), ({"vendor": "a"}, "other")):
        other = open_memory(adapter, pack)
        assert other and other.file != memory.file
    assert dataclasses.replace(memory, version="of newer kernels").recall(KINDS) == {}


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "[" * 100_000, '{"format": 1}', "\x00\xff", '{"format": 1, "version": "v", "choices": 5}'],
)
def test_a_broken_file_is_written_over(text: str, tmp_path: Path) -> None:
    memory = Memory(tmp_path / "choices.json", "v")
    memory.file.write_text(text, encoding="latin-1")
    assert memory.recall(KINDS) == {}
    memory.remember(CHOSEN)
    assert memory.recall(KINDS) == CHOSEN


def test_odd_choices_are_ignored(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "choices.json", "v")
    for odd in (None, 5, {"kernel": "k"}, {"kernel": "k", "tuned": {"ROWS": 5}}, {"kernel": "x", "tuned": {"ROWS": 8}}):
        memory.file.write_text(json.dumps({"format": 1, "version": "v", "choices": {"k 1x2": odd}}))
        assert memory.recall(KINDS) == {}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = Memory(tmp_path / "file" / "kernels" / "choices.json", "v")
    memory.remember(CHOSEN)
    assert memory.recall(KINDS) == {}


# --- a model ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """The driver passes for a GPU, on which 32 rows are the fastest; gives the constants that were timed."""
    device, timed = shared_device(), []
    monkeypatch.setattr(device, "software", False)
    monkeypatch.setattr(device, "features", frozenset())
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path))
    run = native_timing._time

    def time(device: Any, program: Any, dispatches: Any, rounds: float, now: Any) -> float:
        run(device, program, dispatches, min(rounds, 1), now)
        found = dispatches[0][0].constants()
        timed.append(found)
        return 0.1 + abs(found.get("ROWS", 32) - 32) / 100

    monkeypatch.setattr(native_timing, "_time", time)
    # The clock of the budget stands still: how fast this driver is does not matter.
    tune = native_timing.tune
    monkeypatch.setattr("shaders.native.tune", lambda *args: tune(*args, now=lambda: 0.0))
    yield timed


def ids_of(model: NativeModel) -> list[int]:
    return [token for token, _ in model.generate(PROMPT, Sampling(temperature=0.0), 6)]


def test_a_model_takes_and_remembers_what_is_faster(gpu: list[dict[str, Any]]) -> None:
    description, tensors = tiny_model()
    with NativeModel(description, tensors, capacity=40) as plain:
        assert not gpu, "without an identity nothing is timed"
        expected, defaults = ids_of(plain), plain.kernel_constants()
    rows = {kind for kind, tuned in defaults.items() if "ROWS" in tuned}
    assert len(rows) >= 3
    with NativeModel(description, tensors, capacity=40, identity="pack") as model:
        assert model.tuning.timed == len(defaults) and model.tuning.remembered == 0
        chosen = model.kernel_constants()
        assert {kind: chosen[kind] for kind in rows} == {kind: {"ROWS": 32} for kind in rows}
        assert {kind: chosen[kind] for kind in set(chosen) - rows} == {
            kind: defaults[kind] for kind in set(defaults) - rows
        }
        assert model.position == 0 and ids_of(model) == expected
    gpu.clear()
    with NativeModel(description, tensors, capacity=40, identity="pack") as again:
        assert (again.tuning.timed, again.tuning.remembered, gpu) == (0, len(defaults), [])
        assert again.kernel_constants() == chosen and ids_of(again) == expected
    with NativeModel(description, tensors, capacity=40, identity="pack", forced=Forced(defaults=True)) as default:
        assert default.kernel_constants() == defaults and not gpu


def test_what_changes_a_bit_is_dropped(gpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = NativeModel._first_logits
    calls: list[int] = []

    def other(model: NativeModel) -> np.ndarray:
        calls.append(1)
        return logits(model) + np.float32(len(calls))

    monkeypatch.setattr(NativeModel, "_first_logits", other)
    description, tensors = tiny_model()
    with NativeModel(description, tensors, capacity=40, identity="pack") as model:
        assert gpu and len(calls) == 2
        assert all(tuned.get("ROWS") != 32 for tuned in model.kernel_constants().values())


def test_forced_kernels_are_followed_and_not_timed(gpu: list[dict[str, Any]]) -> None:
    description, tensors = tiny_model()
    forced = parse_forced("norm_linear.ROWS=16,glu_linear=off")
    with NativeModel(description, tensors, capacity=40, identity="pack", forced=forced) as model:
        constants = model.kernel_constants()
        assert {"ROWS": 16} in [tuned for kind, tuned in constants.items() if kind.startswith("norm_linear ")]
        assert not any(kind.startswith("glu_linear") for kind in constants)
        assert gpu
    everything = Forced(off=frozenset(kernel.name for kernel in kernels() if kernel.op == "embed"))
    with pytest.raises(DeviceUnsupported, match="no kernel for operation 'embed'.*leave out fewer"):
        NativeModel(description, tensors, capacity=40, forced=everything)


def test_nothing_is_timed_on_a_cpu_renderer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path))
    monkeypatch.setattr(shared_device(), "software", True)
    description, tensors = tiny_model()
    with NativeModel(description, tensors, capacity=16, identity="pack") as model:
        assert model.tuning.timed == 0 and not list(tmp_path.iterdir())
        assert all(tuned.get("ROWS", 4) <= 8 for tuned in model.kernel_constants().values())
