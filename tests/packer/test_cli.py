"""The command line: inspect, verify, generate and chat, on a tiny pack with the NumPy reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import packer
from packer.export import ExportOptions
from packer.pack import Pack
from packer.text import ChatText
from shaders.interpreter import ReferenceModel
from shaders.sampling import Sampling, sample
from tests.support.checkpoints import IM_END, change_json
from tests.support.cli import ROOT, CliResult, one_error, run_cli, start_cli
from tests.support.packs import change_manifest, change_shard, recode, relist, tiny_pack
from tests.support.real import real_pack

REFERENCE = ("--backend", "reference")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pack(tmp_path_factory.mktemp("cli"), options=ExportOptions(name="Tiny [bold] model"))


def generate(pack: Path, *arguments: object) -> CliResult:
    return run_cli("generate", pack, *REFERENCE, *arguments)


def generated(pack: Path, *arguments: object) -> dict[str, Any]:
    result = generate(pack, "--json", *arguments)
    assert result.status == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


# --- the command itself -----------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert run_cli("--version").out.strip() == f"tercet {packer.__version__}"
    shown = run_cli("--help")
    for command in ("export", "inspect", "verify", "generate", "chat", "serve"):
        assert command in shown.out
        assert run_cli(command, "--help").status == 0


def test_as_a_module() -> None:
    process = start_cli("inspect", "nowhere")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == ""
    assert err.startswith("error: nowhere: no such folder") and err.count("\n") == 1


def test_the_packer_needs_no_torch(pack: Path) -> None:
    """Nor transformers, nor a GPU, nor the server: what a person exports with is small."""
    script = (
        "import sys; from packer.cli import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n"
        "    print([name for name in ('torch', 'transformers', 'wgpu', 'fastapi', 'gguf') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "verify", pack], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


# --- inspect and verify -----------------------------------------------------------------------------------------------


def test_inspect_shows_the_manifest(pack: Path) -> None:
    text = " ".join(run_cli("inspect", pack).out.split())
    for words in ("Tiny [bold] model", "bitnet", "a16", "0.1 MB", str(IM_END), "8 ternary", "1 q8", "not measured"):
        assert words in text


def test_inspect_gives_json(pack: Path) -> None:
    facts = json.loads(run_cli("inspect", pack, "--json").out)
    manifest = json.loads((pack / "pack.json").read_bytes())
    for field in ("name", "family", "parameters", "eos_ids", "bits_per_weight", "kv"):
        assert facts[field] == manifest[field]
    assert facts["bytes"] + (pack / "pack.json").stat().st_size == sum(file.stat().st_size for file in pack.iterdir())
    assert facts["encodings"] == {"q8": 1, "f32": 9, "ternary": 8}
    # 72 and 100 columns: 16 and 20 bytes a row, and a scale of 4 bytes a linear; 3 groups of 34 bytes a row of q8.
    data = 2 * (16 * (120 + 72 + 200) + 20 * 72 + 4 * (3 + 1 + 2 + 1))
    weights = 2 * 72 * (120 + 72 + 200 + 100)
    assert facts["encoding_bits"] == {
        "ternary": round(8 * data / weights, 4),
        "q8": round(8 * 3 * 34 / 72, 4),
        "f32": 32,
    }
    assert facts["operations"]["linear"] == 9
    assert facts["tensors"]["layers.0.qkv"]["shape"] == [120, 72]
    assert "chunks" not in json.dumps(facts)


def test_inspect_shows_bits_of_each_encoding_and_what_is_exact(tmp_path: Path) -> None:
    pack = tiny_pack(tmp_path, "llama", options=ExportOptions(activations="f32"), tie_word_embeddings=False)
    for name, encoding in {"embed": "q4a", "lm_head": "nvfp4", "layers.0.qkv": "mxfp4"}.items():
        recode(pack, name, encoding)
    facts = json.loads(run_cli("inspect", pack, "--json").out)
    # Three groups of 32 hold the 72 columns, five of 16 have scales.
    assert {name: facts["encoding_bits"][name] for name in ("q4a", "nvfp4", "mxfp4")} == {
        "q4a": round(8 * 3 * 20 / 72, 4),
        "nvfp4": round(8 * (3 * 16 + 5 + 4 / 272) / 72, 4),
        "mxfp4": round(8 * 3 * 17 / 72, 4),
    }
    text = " ".join(run_cli("inspect", pack).out.split())
    for words in ("1 q4a of 6.67 bits", "1 nvfp4 of 5.89 bits", "1 mxfp4 of 5.67 bits", "14 of 14 exactly"):
        assert words in text
    change_manifest(pack, lambda manifest: manifest.pop("linears"))
    assert "exactly" not in run_cli("inspect", pack).out


def test_names_are_no_markup(tmp_path: Path) -> None:
    """A name such as "[/]" would end a style that was never begun: rich raises an error of its own."""
    pack = tiny_pack(tmp_path / "[red]")
    change_manifest(pack, lambda manifest: manifest.update(name="[/] [link=x]", license="[/bold]", family="[blink]x"))
    shown = run_cli("inspect", pack)
    assert shown.status == 0 and "[/] [link=x]" in shown.out and "[/bold]" in shown.out and "[blink]x" in shown.out
    assert f"{pack}: sound" in run_cli("verify", pack).out.replace("\n", "")
    change_manifest(pack, lambda manifest: manifest.update(version="[/]"))
    assert "'[/]'" in one_error(run_cli("inspect", pack), "[version]")


def test_verify_says_what_was_checked(pack: Path) -> None:
    result = run_cli("verify", pack)
    assert result.status == 0 and "sound" in result.out and "18 tensors" in result.out and result.err.strip() == ""


@pytest.mark.parametrize("command", ["inspect", "verify", "generate", "chat"])
def test_no_pack_is_one_error(command: str, tmp_path: Path) -> None:
    arguments = ["--prompt", "x"] if command == "generate" else []
    one_error(run_cli(command, tmp_path / "nowhere", *arguments), "nowhere", "no such folder")
    one_error(run_cli(command, tmp_path, *arguments), "pack.json", "missing")
    one_error(run_cli(command), "PACK")


# --- generate ---------------------------------------------------------------------------------------------------------


def test_greedy_json_is_the_reference(pack: Path) -> None:
    found = generated(pack, "--prompt", "Hello", "--greedy", "--max-tokens", 6, "--kv", "f32")
    opened = Pack(pack)
    text = ChatText(opened)
    assert found["prompt_ids"] == text.encode_messages([{"role": "user", "content": "Hello"}])
    model = ReferenceModel(opened.program, opened.tensors(), capacity=64)
    ids = found["prompt_ids"]
    for token, step in zip(found["ids"], found["steps"], strict=True):
        logits = model.step(ids)[-1]
        best = np.argsort(-logits, kind="stable")[:5]
        assert token == best[0] and [item[0] for item in step["top5"]] == best.tolist()
        np.testing.assert_allclose([item[1] for item in step["top5"]], logits[best], rtol=1e-5)
        ids = [token]
    assert found["text"] == text.decode(found["ids"])
    assert found["finish_reason"] == ("stop" if found["ids"][-1] == IM_END else "length")


def test_plain_output_is_the_text(pack: Path) -> None:
    arguments = ("--prompt", "Hi", "--greedy", "--max-tokens", 8)
    assert generate(pack, *arguments).out == generated(pack, *arguments)["text"] + "\n"


def test_a_seed_repeats_an_answer(pack: Path) -> None:
    arguments = ("--prompt", "Hi", "--temperature", 1.5, "--max-tokens", 12, "--top-k", 50)
    first = generated(pack, *arguments, "--seed", 5)
    assert generated(pack, *arguments, "--seed", 5) == first
    assert generated(pack, *arguments, "--seed", 6)["ids"] != first["ids"]
    unseeded = generated(pack, *arguments)
    assert generated(pack, *arguments, "--seed", unseeded["seed"]) == unseeded


def test_prompts_of_each_kind(pack: Path, tmp_path: Path) -> None:
    text = ChatText(Pack(pack))
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "é"}]
    (tmp_path / "messages.json").write_text(json.dumps(messages), encoding="utf-8")
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    few = ("--greedy", "--max-tokens", 1)
    assert generated(pack, "--messages", tmp_path / "messages.json", *few)["prompt_ids"] == text.encode_messages(
        messages
    )
    assert generated(pack, "--ids", tmp_path / "ids.json", *few)["prompt_ids"] == [1, 2, 3]
    assert generated(pack, "--prompt", "raw", "--raw", *few)["prompt_ids"] == text.encode_raw("raw")


def test_an_answer_ends_at_an_eos_id(pack: Path, tmp_path: Path) -> None:
    """Make the first token of an answer an EOS id: the answer is that token alone, and not shown as text."""
    arguments = ("--prompt", "Hi", "--greedy", "--max-tokens", 6)
    ids = generated(pack, *arguments)["ids"]
    copy = tmp_path / "pack"
    copy.mkdir()
    for file in pack.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change_json(copy / "pack.json", eos_ids=[IM_END, ids[2]])
    stopped = generated(copy, *arguments)
    assert stopped["ids"] == ids[: ids.index(ids[2]) + 1] and stopped["finish_reason"] == "stop"


def test_an_answer_fills_the_context_and_no_more(pack: Path) -> None:
    prompt = generated(pack, "--prompt", "Hi", "--greedy", "--max-tokens", 1)["prompt_ids"]
    found = generated(pack, "--prompt", "Hi", "--greedy", "--context", len(prompt) + 3)
    assert len(found["ids"]) <= 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("exactly one", "--prompt", "--messages", "--ids")),
        (("--prompt", "a", "--ids", "x.json"), ("exactly one",)),
        (("--prompt", "a", "--messages", "x.json"), ("exactly one",)),
        (("--prompt", "a" * 300), ("tokens", "context", "256")),
        (("--prompt", "aaa", "--context", "4"), ("tokens", "context", "4", "--context")),
        (("--prompt", "a", "--context", "1"), ("--context",)),
        (("--prompt", "a", "--max-tokens", "0"), ("--max-tokens",)),
        (("--prompt", "", "--raw"), ("no tokens",)),
        (("--prompt", "a", "--temperature", "-1"), ("temperature", "-1")),
        (("--prompt", "a", "--temperature", "nan"), ("temperature", "nan")),
        (("--prompt", "a", "--temperature", "1e-30"), ("temperature",)),
        (("--prompt", "a", "--temperature", "warm"), ("--temperature", "number")),
        (("--prompt", "a", "--top-k", "-1"), ("top_k", "-1")),
        (("--prompt", "a", "--top-k", "1.5"), ("--top-k",)),
        (("--prompt", "a", "--top-p", "0"), ("top_p",)),
        (("--prompt", "a", "--top-p", "1.5"), ("top_p", "1.5")),
        (("--prompt", "a", "--min-p", "2"), ("min_p", "2")),
        (("--prompt", "a", "--repetition-penalty", "0"), ("repetition_penalty",)),
        (("--prompt", "a", "--seed", "-1"), ("seed", "-1")),
        (("--prompt", "a", "--seed", str(2**64)), ("seed",)),
        (("--prompt", "a", "--backend", "cuda"), ("--backend", "cuda")),
        (("--prompt", "a", "--kv", "q4"), ("--kv", "q4")),
        (("--prompt", "a", "--speculate", "always"), ("--speculate", "always")),
        (("--prompt", "a", "--speculate", "on"), ("--speculate on", "reference")),
        (
            (
                "--prompt",
                "half \ud83d",
            ),
            ("surrogate",),
        ),
        (("--ids", "nowhere.json"), ("nowhere.json",)),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], words: tuple[str, ...], pack: Path) -> None:
    one_error(generate(pack, *arguments), *words)


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("--ids", "[1, 2", ("JSON",)),
        ("--ids", "{}", ("list of token ids",)),
        ("--ids", '["1"]', ("list of token ids",)),
        ("--ids", "[true]", ("list of token ids",)),
        ("--ids", "[1.0]", ("list of token ids",)),
        ("--ids", "[]", ("no tokens",)),
        ("--ids", "[272]", ("272", "vocabulary")),
        ("--ids", "[1, -1]", ("-1", "vocabulary")),
        ("--ids", "[1" + "0" * 5000 + "]", ("JSON",)),
        ("--ids", "[" * 100_000, ("JSON",)),
        ("--messages", "hello", ("JSON",)),
        ("--messages", '"hello"', ("list of messages",)),
        ("--messages", '[{"role": "user"}]', ("list of messages",)),
        ("--messages", '[{"role": "user", "content": 5}]', ("list of messages",)),
        ("--messages", '["hello"]', ("list of messages",)),
    ],
)
def test_bad_files(option: str, content: str, words: tuple[str, ...], pack: Path, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    one_error(generate(pack, option, tmp_path / "file.json"), *words)


def test_files_that_are_no_text(pack: Path, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(b"\xff\xfe")
    one_error(generate(pack, "--ids", tmp_path / "file.json"), "file.json", "JSON")
    one_error(generate(pack, "--ids", tmp_path), tmp_path.name)


def test_a_pack_without_template_needs_raw_text(tmp_path: Path) -> None:
    pack = tiny_pack(tmp_path)
    change_json(pack / "tokenizer_config.json", chat_template=...)
    relist(pack)
    one_error(generate(pack, "--prompt", "a"), "no chat template", "--raw")
    assert generate(pack, "--prompt", "a", "--raw", "--max-tokens", 1).status == 0


def test_broken_numbers_are_one_error(tmp_path: Path) -> None:
    """Values are only looked at by verify; a pack that was damaged since must not answer nonsense."""
    pack = tiny_pack(tmp_path)
    change_shard(pack, lambda arrays: arrays["final_norm.data.0"].__setitem__(0, np.nan))
    for arguments in (("--greedy",), ("--temperature", 1), ("--greedy", "--json")):
        one_error(generate(pack, "--prompt", "a", *arguments), "NaN", pack)


def test_without_a_gpu_the_reference_is_proposed(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shaders import native
    from shaders.native_errors import DeviceMissing

    def missing(*_: object, **__: object) -> None:
        raise DeviceMissing("no GPU driver", "install one")

    monkeypatch.setattr(native, "NativeModel", missing)
    for command, arguments in (("generate", ("--prompt", "a")), ("chat", ())):
        one_error(run_cli(command, pack, *arguments), "no GPU driver", "--backend reference")


@pytest.mark.parametrize(
    ("arguments", "way"), [((), "auto"), (("--speculate", "on"), "on"), (("--speculate", "off"), "off")]
)
def test_guessing_is_asked_for(
    arguments: tuple[str, ...], way: str, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shaders import native
    from shaders.native_errors import DeviceMissing

    asked = []

    def missing(*_: object, speculate: str, **__: object) -> None:
        asked.append(speculate)
        raise DeviceMissing("no GPU driver", "install one")

    monkeypatch.setattr(native, "NativeModel", missing)
    for command, others in (("generate", ("--prompt", "a")), ("chat", ())):
        assert run_cli(command, pack, *others, *arguments).status == 1
    assert asked == [way, way]


def test_a_gpu_that_fails_in_an_answer_is_one_error(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shaders import native
    from shaders.native_errors import DeviceFailed

    class Failing:
        def __init__(self, *_: object, **__: object) -> None: ...

        def generate(self, *_: object, **__: object) -> Any:
            yield 5, None
            raise DeviceFailed("the device was lost", "try again")

    monkeypatch.setattr(native, "NativeModel", Failing)
    result = run_cli("generate", pack, "--prompt", "a")
    assert result.status == 1 and "Traceback" not in result.err
    assert "the device was lost" in result.err and "try again" in result.err


# --- chat -------------------------------------------------------------------------------------------------------------


def chat(pack: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> CliResult:
    """A chat in which a person types these lines and then Ctrl-D."""
    typed = iter(lines)

    def read(self: Console, *_: object, **__: object) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(Console, "input", read)
    return run_cli("chat", pack, *REFERENCE, *arguments)


def test_turns_continue_the_conversation(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is that of a model that reads the whole conversation anew: the cached prefix changes nothing."""
    prompts: list[tuple[int, list[int]]] = []
    answers: list[list[int]] = []
    original = ReferenceModel.generate

    def watched(self: ReferenceModel, ids: Any, options: Any, count: int, stop: Any = (), history: Any = ()) -> Any:
        prompts.append((self.position, [*history, *ids]))
        answers.append([])
        for token, logits in original(self, ids, options, count, stop, history):
            answers[-1].append(token)
            yield token, logits

    monkeypatch.setattr(ReferenceModel, "generate", watched)
    settings = ("--temperature", 0.8, "--seed", 3, "--max-tokens", 5, "--system", "Be brief.", "--kv", "f32")
    result = chat(pack, ["Hello", "And?", "/new", "Hello", ""], monkeypatch, *settings)
    assert result.status == 0, result.err
    assert len(prompts) == 3
    assert prompts[0][0] == 0 and prompts[1][0] >= len(prompts[0][1])  # the second turn reads only what is new
    assert prompts[2][1] == prompts[0][1] and answers[2] == answers[0]  # /new starts over
    assert prompts[2][0] == len(prompts[0][1]) - 1  # all cached but the last token, whose logits are needed
    monkeypatch.setattr(ReferenceModel, "generate", original)
    opened = Pack(pack)
    options = Sampling(0.8, 0, 0.9, 0.0, 1.15, 3)
    for (_, ids), answer in zip(prompts, answers, strict=True):
        fresh = ReferenceModel(opened.program, opened.tensors(), capacity=256)
        assert [token for token, _ in fresh.generate(ids, options, 5, opened.eos_ids)] == answer


def test_a_full_context_is_said(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["a" * 60, "a" * 60, "/new", "short"]
    result = chat(pack, lines, monkeypatch, "--context", 90, "--max-tokens", 4)
    text = " ".join(result.out.split())
    assert result.status == 0 and text.count("the context of 90 tokens is full; /new starts over") == 1
    assert text.count(" of 90 tokens") == 3  # after the first and the last answer, and in the message


def test_sampling_of_the_chat_is_checked(pack: Path) -> None:
    one_error(run_cli("chat", pack, "--temperature", "-3"), "temperature")


# --- the real model ---------------------------------------------------------------------------------------------------


def test_the_real_model_answers() -> None:
    result = generate(real_pack("q8"), "--prompt", "What is 2+2?", "--greedy", "--max-tokens", 12)
    assert result.out.strip() == "2 + 2 = 4."


def test_sample_is_what_generate_draws(pack: Path) -> None:
    """The seed of --json and the positions of the tokens give the ids again."""
    found = generated(pack, "--prompt", "Hi", "--temperature", 1.0, "--seed", 9, "--max-tokens", 4, "--kv", "f32")
    opened = Pack(pack)
    model = ReferenceModel(opened.program, opened.tensors(), capacity=64)
    ids = found["prompt_ids"]
    for token in found["ids"]:
        logits = model.step(ids)[-1]
        assert sample(logits, Sampling(temperature=1.0, seed=9), model.position) == token
        ids = [token]
