"""A tiny model through every stage by the command line, and what each stage must and must not do."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from examples.train.chat import Conversation, talk
from examples.train.checkpoint import load_model, read_checkpoint
from examples.train.cli import main
from examples.train.errors import TrainError
from examples.train.generate import Sampling
from examples.train.pretrain import next_token_loss
from examples.train.sft import packed, sft_batches
from examples.train.stage import repeat
from examples.train.streams import IGNORED, rows
from examples.train.tokenizer import ChatTokenizer
from packer.card import CARD, read_card
from tests.support.train_corpus import write_corpus

PRESET = """
[model]
vocab_size = 512
dim = 48
layers = 2
heads = 3
kv_heads = 1
head_dim = 16
ffn_dim = 96
sub_norms = true
max_context = 160
precision = "ternary"

[prepare]
vocabulary = 512
sequence = 96
"""
STAGE = """
[{name}]
steps = {steps}
batch_tokens = 768
sequence = 96
lr = {lr}
warmup = 2
log_every = 1
eval_batches = 2
{more}
"""
STAGES = [
    STAGE.format(name="pretrain", steps=25, lr=1e-2, more='schedule = "two-stage"'),
    STAGE.format(name="sft", steps=25, lr=5e-3, more="save_every = 10"),
    STAGE.format(name="reward", steps=5, lr=1e-3, more=""),
    STAGE.format(name="dpo", steps=3, lr=5e-4, more="beta = 0.2"),
    STAGE.format(name="ppo", steps=4, lr=5e-4, more='task = "arithmetic"\nnew_tokens = 12\nupdates = 2'),
    STAGE.format(name="grpo", steps=3, lr=5e-4, more='task = "arithmetic"\nnew_tokens = 12\ngroup = 4'),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Bench:
    """A folder with streams and a model that has been through pretrain and sft."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.streams = folder, folder / "streams"
        self.preset = folder / "small.toml"
        self.preset.write_text(PRESET + "".join(STAGES), encoding="utf-8")
        data = write_corpus(folder / "data")
        self.run("prepare", "--data", data, "--arithmetic", 400, "--preset", self.preset, out="streams")
        self.run("pretrain", "--streams", self.streams, "--preset", self.preset, out="base")
        self.run("sft", *self.source("base"), out="sft")

    def source(self, name: str) -> tuple[object, ...]:
        return ("--streams", self.streams, "--from", self.folder / name)

    def run(self, command: str, *options: object, out: str | None = None) -> None:
        where = () if out is None else ("--out", str(self.folder / out))
        with pytest.raises(SystemExit) as stop:
            main([command, *map(str, options), *where, *(("--device", "cpu") if command != "prepare" else ())])
        assert stop.value.code == 0

    def losses(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "loss.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("train"))


def test_sft_learns_from_the_base_and_keeps_what_it_needs(bench: Bench) -> None:
    losses = [row["loss"] for row in bench.losses("sft")]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:3])
    found, base = read_checkpoint(bench.folder / "sft"), read_checkpoint(bench.folder / "base")
    assert found.info["stage"] == "sft" and found.info["preset"] == str(bench.preset)
    assert found.tokens == base.tokens + 25 * 768
    assert ChatTokenizer(found.path).digest == ChatTokenizer(bench.streams).digest


def test_prompt_tokens_have_no_loss(bench: Bench) -> None:
    """The loss of a batch is the sum over the assistant's tokens alone, and no other place gets a gradient."""
    found = rows(bench.streams, "sft", "train")[:40]
    end = ChatTokenizer(bench.streams).end_of_text
    tokens, targets = next(sft_batches(found, 6, 96, end, seed=0, start=0, rank=0, world=1))
    model, _ = load_model(bench.folder / "sft")
    logits = model(tokens).detach().requires_grad_()
    loss = next_token_loss(lambda _: logits, (tokens, targets))
    loss.total.backward()
    table = torch.log_softmax(logits.detach().double(), -1).numpy()
    expected, learned = 0.0, np.zeros(tokens.shape, dtype=bool)
    plan = packed(found, 96, np.random.default_rng((0, 0)).permutation(40).tolist(), end)[:6]
    for b, row in enumerate(plan):
        for t in range(1, len(row["tokens"])):
            if row["mask"][t]:
                expected -= table[b, t - 1, row["tokens"][t]]
                learned[b, t - 1] = True
    assert loss.total.item() == pytest.approx(expected, rel=1e-5)
    assert int(loss.weight) == learned.sum() > 0
    touched = logits.grad.abs().sum(-1).numpy() > 0
    assert (touched == learned).all() and not learned.all()


def test_sft_batches_repeat_resume_and_divide(bench: Bench) -> None:
    found = rows(bench.streams, "sft", "train")[:30]

    def take(count: int, start: int = 0, rank: int = 0, world: int = 1, seed: int = 3) -> list[torch.Tensor]:
        return [targets for _, targets in islice(sft_batches(found, 2, 96, 0, seed, start, rank, world), count)]

    whole = take(40)  # several epochs
    assert all(map(torch.equal, take(36, start=4), whole[4:]))
    assert all(map(torch.equal, take(20, rank=1, world=2), whole[1::2]))
    assert all(map(torch.equal, take(16, start=4, rank=0, world=2), whole[8::2]))
    assert not all(map(torch.equal, take(40, seed=4), whole))
    count = len(packed(found, 96, np.random.default_rng((3, 0)).permutation(30).tolist(), 0)) // 2
    assert count < 20 and not torch.equal(whole[0], whole[count])  # another order in the second epoch
    # An epoch has every row once, whole.
    epoch = packed(found, 96, range(30), 0)
    assert sum((row["mask"] for row in epoch), []).count(1) == sum(row["mask"].count(1) for row in found)
    assert max(len(row["tokens"]) for row in epoch) <= 97
    assert all((targets == IGNORED).any() and (targets != IGNORED).any() for targets in whole)


def test_a_reward_model_comes_out_and_is_no_language_model(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run("reward", *bench.source("sft"), out="reward")
    first = bench.losses("reward")[0]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)  # it starts without an opinion
    assert "held accuracy" in capsys.readouterr().out
    with pytest.raises(TrainError, match=r"has a tensor scalar.weight that this model lacks"):
        load_model(bench.folder / "reward")
    bench.run("ppo", *bench.source("sft"), "--reward-model", bench.folder / "reward", "--steps", 2, out="ppo-judged")
    rewards = [row["reward"] for row in bench.losses("ppo-judged")]
    assert rewards[0] == rewards[1] not in (0, 0.2, 1.0, 1.2)  # two steps with the same answers


@pytest.mark.parametrize(("method", "start"), [("dpo", np.log(2)), ("kto", 0.5), ("orpo", None)])
def test_preferences_move_the_model(bench: Bench, method: str, start: float | None) -> None:
    bench.run("dpo", *bench.source("sft"), "--method", method, out=method)
    losses = bench.losses(method)
    if start is not None:  # at the first step the policy is the reference
        assert losses[0]["loss"] == pytest.approx(start, abs=1e-5)
        assert losses[1]["loss"] != losses[0]["loss"]
    assert np.isfinite(losses[-1]["held_loss"]) and 0 <= losses[-1]["accuracy"] <= 1
    changed, _ = load_model(bench.folder / method)
    before, _ = load_model(bench.folder / "sft")
    assert not torch.equal(changed.embedding.weight, before.embedding.weight)


def test_ppo_learns_from_the_verifier_and_leaves_a_model_that_chats(bench: Bench) -> None:
    bench.run("ppo", *bench.source("sft"), out="ppo")
    steps = bench.losses("ppo")
    assert len(steps) == 4 and steps[0]["kl"] == 0 != steps[2]["kl"]
    assert all(0 <= row["reward"] <= 1.2 and 1 <= row["length"] <= 12 for row in steps)
    model, found = load_model(bench.folder / "ppo")  # without its value head
    assert found.info["head"] == "value" and not hasattr(model, "scalar")


def test_grpo_goes_on_where_it_stopped(bench: Bench) -> None:
    bench.run("grpo", *bench.source("sft"), out="grpo")
    whole = bench.losses("grpo")
    assert whole[0]["kl"] == pytest.approx(0, abs=1e-9) and all(row["kl"] >= 0 for row in whole)
    bench.run("grpo", *bench.source("sft"), "--save-every", 1, "--minutes", 1e-9, out="grpo-again")
    assert read_checkpoint(bench.folder / "grpo-again").step == 1
    bench.run("grpo", *bench.source("sft"), "--save-every", 1, "--resume", out="grpo-again")
    for name in ("loss", "reward", "length"):
        assert [row[name] for row in bench.losses("grpo-again")] == pytest.approx([row[name] for row in whole])


def test_evaluate_measures_what_is_held_out(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    bench.run("evaluate", *bench.source("sft"), "--prompts", 3, "--new-tokens", 10, "--sequence", 64)
    found = json.loads(capsys.readouterr().out)
    assert set(found["arithmetic"]) <= {f"{name} {d}" for name in ("sum", "difference", "product") for d in (1, 2, 3)}
    assert found["rewards"]["gsm8k"]["asked"] == 3 and sum(found["rewards"]["gsm8k"]["counts"].values()) == 3
    assert found["precision"] == "ternary" and found["checkpoint"]["stage"] == "sft"
    # The loss again, row by row, from the file.
    tokens = np.fromfile(bench.streams / "pretrain-held.bin", dtype="<i4")
    model, _ = load_model(bench.folder / "sft")
    total, count = 0.0, 0
    with torch.no_grad():
        for first in range(0, len(tokens) - 64, 64):
            row = torch.tensor(tokens[first : first + 65].astype(np.int64))
            table = model(row[None, :-1])[0].double().log_softmax(-1)
            total -= table[torch.arange(64), row[1:]].sum().item()
            count += 64
    assert found["text"]["tokens"] == count
    assert found["text"]["loss"] == pytest.approx(total / count, abs=2e-4)
    assert found["text"]["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-3)
    assert 0 < found["chat"]["loss"] < found["text"]["loss"] + 5


def test_chat_streams_answers_and_forgets_the_oldest(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    bench.run("chat", "--from", bench.folder / "sft", "--prompt", "What is 3 + 4?", "--temperature", 0)
    once = capsys.readouterr().out.strip()
    model, found = load_model(bench.folder / "sft")
    tokenizer = ChatTokenizer(found.path)
    with torch.no_grad():
        conversation = Conversation(model, tokenizer, Sampling(0), 128, "", 0)
        assert "".join(conversation.ask("What is 3 + 4?")).strip() == once
        assert [turn["role"] for turn in conversation.turns] == ["user", "assistant"]
        short = Conversation(model, tokenizer, Sampling(0), 20, "", 0)
        lines = iter(["Did you see the garden number 3?", "What did you find in the garden?", "/new", "Hi", "/quit"])
        shown = Console(file=io.StringIO(), width=200)
        talk(short, shown, lambda: next(lines))
        assert "forgotten" in shown.file.getvalue() and len(short.turns) == 2
        for _ in range(8):
            list(short.ask("What did you find in the garden?"))
            assert [turn["role"] for turn in short.turns] == ["user", "assistant"] * (len(short.turns) // 2)
        assert short.forgot and 4 <= len(short.turns) < 16
        lines = iter(["far too long " * 100])
        talk(short, shown, lambda: next(lines, "/quit"))
        assert "do not fit the context of 160" in shown.file.getvalue()


def test_samples_are_repeated_in_the_order_of_steps() -> None:
    made: list[int] = []

    def sample(number: int) -> int:
        made.append(number)
        return number

    assert list(islice(repeat(sample, 0, 2, 3), 14)) == [0, 1] * 3 + [2, 3] * 3 + [4, 5]
    assert made == [0, 1, 2, 3, 4, 5]
    assert list(islice(repeat(sample, 12, 2, 3), 3)) == [4, 5, 4]


def test_the_tiny_preset_goes_through_every_stage(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """As the README has it, with fewer steps; the last model leaves as a folder that transformers knows."""
    few = ("--steps", 2)
    bench.run("prepare", "--data", bench.folder / "data", "--arithmetic", 400, out="tiny-streams")
    source = ("--streams", bench.folder / "tiny-streams", "--from")
    bench.run("pretrain", "--streams", bench.folder / "tiny-streams", *few, out="tiny-base")
    bench.run("sft", *source, bench.folder / "tiny-base", *few, out="tiny-sft")
    bench.run("reward", *source, bench.folder / "tiny-sft", *few, out="tiny-reward")
    bench.run("dpo", *source, bench.folder / "tiny-sft", *few, out="tiny-dpo")
    judge = ("--reward-model", bench.folder / "tiny-reward")
    bench.run("ppo", *source, bench.folder / "tiny-dpo", *judge, *few, out="tiny-ppo")
    bench.run("grpo", *source, bench.folder / "tiny-ppo", *few, out="tiny-grpo")
    capsys.readouterr()
    bench.run("evaluate", *source, bench.folder / "tiny-grpo", "--prompts", 1, "--tokens", 5000)
    measured = json.loads(capsys.readouterr().out)
    assert measured["checkpoint"]["stage"] == "grpo" and measured["text"]["loss"] < np.log(1024)
    main_exports(bench.folder / "tiny-grpo", bench.folder / "tiny-hf", bench.folder / "tiny-streams")
    card = read_card(bench.folder / "tiny-hf" / CARD)
    assert (
        "ternary precision, then to answer and for rewards" in card["trained_on"] and "arithmetic" in card["trained_on"]
    )
    assert card["tokens"] == measured["checkpoint"]["tokens"] and len(card["samples"]) == 3
    assert card["samples"][2]["prompt"] == "What is 2+2?" and card["notes"] == "Made by a test."
    losses = [one["loss"] for one in card["held_out"]]
    assert losses == pytest.approx([measured["text"]["loss"], measured["chat"]["loss"]], abs=0.3)
    theirs = AutoTokenizer.from_pretrained(bench.folder / "tiny-hf")
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    expected = ChatTokenizer(bench.folder / "tiny-streams").prompt(messages)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == expected


def main_exports(source: Path, out: Path, streams: Path) -> None:
    told = ("--streams", str(streams), "--note", "Made by a test.")
    with pytest.raises(SystemExit) as stop:
        main(["export", "--from", str(source), "--out", str(out), *told])
    assert stop.value.code == 0 and (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        (
            "sft",
            ("--sequence", 500, "--batch-tokens", 1000),
            "--sequence 500 is longer than the model's context of 160",
        ),
        ("dpo", ("--sequence", 8, "--batch-tokens", 64), "every row is longer than 8 tokens"),
        ("dpo", ("--method", "ipo"), "--method is 'ipo'"),
        ("grpo", ("--group", 3), "--group is 3, but a micro-batch has 8 answers"),
        ("grpo", ("--new-tokens", 96), "leaves no room for a prompt"),
        ("grpo", ("--task", "poems"), "--task is 'poems'"),
        ("ppo", ("--reward-model", "SFT"), "expected a reward model"),
        ("ppo", ("--reward-model", "nowhere"), "nowhere: no checkpoint there"),
        ("evaluate", ("--sequence", 500), "--sequence 500 is longer than the context of 160"),
        ("chat", ("--temperature", -1), "--temperature is -1"),
        ("chat", ("--new-tokens", 155, "--prompt", "What did you find there?"), "do not fit the context of 160"),
    ],
)
def test_bad_options_are_one_message(
    bench: Bench, capsys: pytest.CaptureFixture[str], command: str, options: tuple[object, ...], said: str
) -> None:
    given = [str(bench.folder / "sft") if option == "SFT" else option for option in options]
    refuse(bench, capsys, command, bench.streams, "sft", given, said)


@pytest.mark.parametrize(
    ("command", "name", "content", "said"),
    [
        ("sft", "sft-train.jsonl", None, "sft-train.jsonl: missing; make the streams with"),
        ("sft", "sft-train.jsonl", "", "sft-train.jsonl: empty"),
        ("sft", "sft-train.jsonl", '{"tokens": [1, 2]\n', "sft-train.jsonl, line 1: no JSON"),
        ("sft", "sft-train.jsonl", '{"words": [1]}\n', "a row lacks a field ('tokens')"),
        ("sft", "sft-train.jsonl", '{"tokens": [9000, 2], "mask": [0, 1]}\n', "ids up to 9000"),
        ("reward", "preferences-held.jsonl", "", "preferences-held.jsonl: empty"),
        ("dpo", "preferences-train.jsonl", None, "preferences-train.jsonl: missing"),
        ("ppo", "prompts-train.jsonl", "", "prompts-train.jsonl: empty"),
        (
            "grpo",
            "prompts-train.jsonl",
            '{"prompt": [1], "gold": "2", "task": "gsm8k"}\n',
            "no prompt of task arithmetic",
        ),
        ("evaluate", "pretrain-held.bin", None, "pretrain-held.bin: missing"),
        ("sft", "tokenizer.json", "{}", "is not the tokenizer of"),
        ("grpo", "tokenizer.json", None, "tokenizer.json: missing"),
    ],
)
def test_bad_streams_are_one_message(
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    name: str,
    content: str | None,
    said: str,
) -> None:
    streams = shutil.copytree(bench.streams, tmp_path / "streams")
    (streams / name).unlink()
    if content is not None:
        (streams / name).write_text(content, encoding="utf-8")
    refuse(bench, capsys, command, streams, "sft", [], said)


def test_a_base_that_is_not_there_is_one_message(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    refuse(bench, capsys, "sft", bench.streams, "nobody", [], "nobody: no checkpoint there")


def refuse(
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
    command: str,
    streams: Path,
    source: str,
    options: list[object],
    said: str,
) -> None:
    capsys.readouterr()
    arguments = [command, "--from", str(bench.folder / source), "--device", "cpu", *map(str, options)]
    if command != "chat":
        arguments += ["--streams", str(streams), "--out", str(bench.folder / "refused")]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    message = capsys.readouterr().err
    assert stop.value.code == 1
    assert said in message and message.count("error:") == 1 and "Traceback" not in message, message
    assert not (bench.folder / "refused").exists()
