"""Distillation: both nets against transformers, latents, loss, decoding, conversations, and a whole small run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.card import CARD, read_card
from tests.support.cli import one_error, run_cli
from tests.support.training import run_train
from tests.support.transformers_models import load_model, logits, random_model, save_model

import torch  # isort: skip  (after tests.support, which sets it up)

from examples.train.corpora import load_text
from examples.train.distill.answers import loops
from examples.train.distill.bundle import bundle
from examples.train.distill.conversations import Recipe, Script, write
from examples.train.distill.decode import Decoder
from examples.train.distill.fold import fold
from examples.train.distill.kit import Kit
from examples.train.distill.latents import inside, packed, rounded, trits, unpacked
from examples.train.distill.loop import Log, Loop
from examples.train.distill.loss import kl, relation_error
from examples.train.distill.measure import measure
from examples.train.distill.options import Options
from examples.train.distill.prompts import is_held_out
from examples.train.distill.rows import Stream, with_states
from examples.train.distill.start import from_checkpoint, from_compact, from_teacher
from examples.train.distill.student import Student
from examples.train.distill.teacher import Teacher, load_teacher
from examples.train.distill.texts import read_texts, write_texts
from examples.train.errors import TrainError

CPU = torch.device("cpu")
ARTICLES = {
    f"Topic {index}": {
        "extract": f"Topic {index} is number {index} of all topics. It is known for the letter {chr(97 + index % 26)}. "
    }
    for index in range(120)
}


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama by transformers, with byte tokens and a tied head."""
    model = random_model("llama", tie_word_embeddings=True, attention_bias=False, mlp_bias=False)
    return save_model(model, tmp_path_factory.mktemp("teacher") / "llama")


@pytest.fixture(scope="module")
def teacher(teacher_folder: Path) -> Teacher:
    return load_teacher(teacher_folder, CPU)


@pytest.fixture(scope="module")
def kit_folder(teacher_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit")
    (folder / "articles.json").write_text(json.dumps(ARTICLES))
    bundle(folder / "kit", teacher_folder, folder / "articles.json", None, None, None, None)
    return folder / "kit"


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (rows, length))).int()


def student_of(teacher: Teacher) -> Student:
    return from_teacher(teacher, tokens(2, 16))


def head_logits(net: Teacher | Student, ids: torch.Tensor) -> np.ndarray:
    return (net.hidden(ids).float() @ net.embedding.T).detach().numpy()


def near(found: np.ndarray, wanted: np.ndarray, share: float) -> None:
    """Within a share of the range of the wanted numbers: bf16 products against f32 ones."""
    assert np.abs(found - wanted).max() < share * (wanted.max() - wanted.min())


def test_the_teacher_computes_what_transformers_does(teacher: Teacher, teacher_folder: Path) -> None:
    ids = tokens(1, 24)
    near(head_logits(teacher, ids)[0], logits(load_model(teacher_folder), ids[0].tolist()), 0.02)


def test_an_exported_student_is_what_transformers_computes(teacher: Teacher, kit_folder: Path, tmp_path: Path) -> None:
    student = student_of(teacher)
    with torch.no_grad():  # scales that are no means, and norms that are not constant
        for vector in student.vectors():
            vector += torch.rand(vector.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    fold(student, Kit(kit_folder, CPU), tmp_path / "out")
    model = load_model(tmp_path / "out")
    assert type(model).__name__ == "BitNetForCausalLM"
    ids = tokens(1, 24, seed=1)
    near(head_logits(student, ids)[0], logits(model, ids[0].tolist()), 0.015)
    again = from_checkpoint(teacher, tmp_path / "out")
    for name, latents in student.latents.items():
        assert torch.equal(trits(again.latents[name]), trits(latents))
    result = run_cli("export", tmp_path / "out", "--out", tmp_path / "pack")
    assert result.status == 0, result.err


def test_latents_keep_their_trits_through_cells_and_four_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 40, 64, generator=generator)
    wanted = torch.randint(-1, 2, values.shape, generator=generator).float()
    latents = inside(values, wanted)
    assert torch.equal(trits(latents), wanted)
    agreeing = inside(values, trits(values), margin=0.0)
    torch.testing.assert_close(agreeing, values / values.abs().mean((1, 2), keepdim=True), rtol=1e-4, atol=1e-5)
    codes = packed(latents)
    assert codes.dtype == torch.uint8 and codes.numel() * 2 == latents.numel()
    assert torch.equal(trits(unpacked(codes)), wanted)
    assert (unpacked(packed(agreeing)) - agreeing).abs().mean() < 0.12


def test_gradients_pass_straight_through_the_rounding() -> None:
    latents = torch.randn(2, 8, 16).requires_grad_(True)
    weight = torch.randn(2, 8, 16)
    (rounded(latents).float() * weight).sum().backward()
    assert latents.grad is not None
    wanted = weight / latents.detach().abs().mean((1, 2), keepdim=True)
    torch.testing.assert_close(latents.grad, wanted, rtol=0.02, atol=0.02)


def test_the_gradient_of_kl_is_that_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    head, theirs = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((50, 16), (2, 5, 16)))
    ours = torch.randn(2, 5, 16, generator=generator).bfloat16()
    value, gradient = kl(ours, theirs, head)
    exact = ours.float().requires_grad_(True)
    logs = torch.log_softmax(exact @ head.float().T, -1)
    wanted = torch.log_softmax(theirs.float() @ head.float().T, -1)
    loss = torch.nn.functional.kl_div(logs, wanted, reduction="none", log_target=True).sum(-1).mean()
    loss.backward()
    assert exact.grad is not None
    assert value.item() == pytest.approx(loss.item(), rel=0.02)
    near(gradient.float().numpy(), exact.grad.numpy(), 0.02)
    assert kl(theirs, theirs, head)[0].item() == 0


def test_relations_of_the_same_vectors_do_not_differ() -> None:
    x = torch.randn(1, 6, 2, 8)
    assert relation_error(x, x).item() == pytest.approx(0, abs=1e-6)
    assert relation_error(x, -2 * x).item() > 0.01


@pytest.mark.parametrize("kind", ["teacher", "student"])
def test_decoding_gives_the_states_of_a_whole_pass(teacher: Teacher, kind: str) -> None:
    net: Any = teacher if kind == "teacher" else student_of(teacher)
    if kind == "student":
        net.freeze()
    ids = tokens(3, 20)
    states = torch.zeros(3, 20, teacher.config.dim, dtype=torch.bfloat16)
    forced = torch.cat([ids.long(), torch.zeros(3, 1, dtype=torch.long)], 1)
    found = torch.zeros_like(ids)
    write(Decoder(net, 3, 20), forced, lambda hidden: hidden[:, 0].long(), found, states)
    assert torch.equal(found, ids)
    # int8 rounding makes steps of near-ties in the student, so most positions are compared, not the farthest.
    error = (states.float() - net.hidden(ids).float()).norm(dim=-1) / net.hidden(ids).float().norm(dim=-1)
    assert error.median() < 0.02


def test_conversations_take_turns(kit_folder: Path) -> None:
    kit = Kit(kit_folder, CPU)
    frame, rng = kit.phrases, np.random.default_rng(0)
    script = Script(40, 400, Recipe(plain=0.1, begun=0.1, given=0.5), kit.prompts("train"), frame, rng, CPU)
    found = torch.zeros(40, 400, dtype=torch.int32)
    letter = kit.tokenizer.token_to_id("x")
    said = torch.zeros(40, dtype=torch.long)

    class Net:
        def step(self, current: torch.Tensor, position: int) -> torch.Tensor:
            return current

    def pick(current: torch.Tensor) -> torch.Tensor:  # a word of five letters, then the end of the turn
        said.copy_(torch.where(current == letter, said + 1, 0))
        return torch.where(said >= 5, frame.end_of_turn, letter)

    stand_in: Any = Net()
    write(stand_in, script.forced, pick, found, advance=script.advance)
    texts = [kit.tokenizer.decode(row, skip_special_tokens=False) for row in found.tolist()]
    chats = [text for text in texts if text.startswith("<|im_start|>system\n")]
    plain = [text for text in texts if text.startswith("<|endoftext|>")]
    assert len(chats) + len(plain) == 40 and chats and any("is number" in text[:60] for text in plain)
    for text in chats:
        roles = [turn.partition("\n")[0] for turn in text.split("<|im_start|>")[1:-1]]  # the last is cut
        assert roles == ["system", *(["user", "assistant"] * 40)[: len(roles) - 1]]
        assert "xxxxx<|im_end|>\n" in text
    assert not any("<|im_start|>" in text for text in plain)


def test_held_out_prompts_and_articles_are_not_trained_on(kit_folder: Path) -> None:
    kit = Kit(kit_folder, CPU)
    training, held = ({tuple(row) for row in kit.prompts(part).pools["titles"]} for part in ("train", "held"))
    assert training and held and not training & held
    text = kit.tokenizer.decode(kit.text("encyclopedia", 64).flatten().tolist())
    kept = kit.tokenizer.decode(kit.text("held", 64).flatten().tolist())
    for title in ARTICLES:
        if is_held_out(title):
            assert f"{title} is number" not in text
    assert any(f"{title} is number" in kept for title in ARTICLES if is_held_out(title))


def test_loops_are_phrases_of_three_words_four_times() -> None:
    assert loops("a b c d " * 4) and not loops("a b c d " * 3) and not loops("one answer")


def streams_of(teacher: Teacher) -> list[Stream]:
    rows = tokens(12, 16), tokens(8, 32, seed=1)
    return [Stream(str(each.shape[1]), each, with_states(teacher, each, 64), 1.0) for each in rows]


def loop_of(teacher: Teacher, folder: Path, **options: Any) -> Loop:
    held = tokens(4, 16, seed=2)
    return Loop(
        teacher, student_of(teacher), streams_of(teacher), {"held": (held, with_states(teacher, held, 64))},
        Options(steps=12, batch_tokens=64, lr=0.02, warmup=2, log_every=1, **options), folder,
        Log(folder / "log.jsonl"),
    )  # fmt: skip


def logged(folder: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {event["step"]: event["kl"] for event in events if event["event"] == "step"}


@pytest.mark.parametrize("options", [{}, {"state_weight": 1.0, "relation_weight": 0.1, "extra_until": 0.5}])
def test_training_comes_nearer_and_resumes_with_the_same_losses(
    teacher: Teacher, tmp_path: Path, options: dict[str, float]
) -> None:
    whole = loop_of(teacher, tmp_path / "whole", **options)
    before = whole.measured()["held"].kl
    whole.run()
    assert whole.measured()["held"].kl < before
    half = loop_of(teacher, tmp_path / "half", **options)
    half.run(until=0.5)
    half.save()
    again = loop_of(teacher, tmp_path / "half", **options)
    assert again.load() and again.step == 6
    again.run()
    assert logged(tmp_path / "half") == logged(tmp_path / "whole")
    compact = from_compact(teacher, tmp_path / "half" / "compact")
    for name, latents in half.student.latents.items():
        assert torch.equal(trits(compact.latents[name]), trits(latents))
    rows = tokens(2, 16)
    states = with_states(teacher, rows, 64)
    kept, stored = measure(half.student, states, rows), measure(compact, states, rows)
    assert kept.kl == pytest.approx(stored.kl, rel=0.02)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_state(teacher: Teacher, tmp_path: Path) -> None:
    loop = loop_of(teacher, tmp_path)
    loop.run(until=0.25)
    loop.save()
    with torch.no_grad():
        loop.student.vectors()[0].fill_(float("nan"))
    with pytest.raises(TrainError, match="the loss is nan at step"):
        loop.run()
    assert loop_of(teacher, tmp_path).load()


def test_a_whole_run_by_its_commands(kit_folder: Path, tmp_path: Path) -> None:
    kit, out = ("--kit", kit_folder), tmp_path / "run"
    result = run_train(
        "distill", "run", *kit, "--out", out, "--start", "teacher", "--steps", 6, "--rows", 8, "--batches", 2,
        "--length", 160, "--text-length", 320, "--batch-tokens", 640, "--held-prompts", 2, "--student-batches", 1,
    )  # fmt: skip
    assert result.status == 0, result.err
    results = json.loads((out / "results.json").read_text())
    assert results["steps"] == 6 and results["distinct_tokens"] >= 8 * 160
    samples = json.loads((out / "samples.json").read_text())
    assert len(samples["answers"]) == 20 and set(samples["loops"]) == {"teacher", "student"}
    result = run_train(
        "distill", "evaluate", *kit, "--chat", out / "held-chat.npy", "--text-length", 320, "--json",
        tmp_path / "measures.json", "--model", f"new={out / 'compact'}", "--model", "teacher=teacher",
    )  # fmt: skip
    assert result.status == 0, result.err
    found = json.loads((tmp_path / "measures.json").read_text())
    assert found["teacher"]["chat"]["kl"] == 0 and found["teacher"]["chat"]["same_top"] == 1
    assert found["new"]["chat"]["kl"] == pytest.approx(results["measures"]["chat"]["kl"], rel=0.02)
    result = run_train("distill", "texts", *kit, "--rows", out / "sampled.npy", "--out", tmp_path / "texts.jsonl.gz")
    assert result.status == 0, result.err
    assert {document.kind for document in load_text(tmp_path / "texts.jsonl.gz")} <= {"conversation", "text"}
    told = ("--run", out, "--before", 1000, "--name", "a toy", "--note", "Made by a test.")
    assert run_train("distill", "export", *kit, out / "compact", tmp_path / "hf", *told).status == 0
    assert (tmp_path / "hf" / "config.json").exists()
    card = read_card(tmp_path / "hf" / CARD)
    assert card["tokens"] == 1000 + results["tokens_seen"] and "Distilled from a toy" in card["trained_on"]
    assert len(card["samples"]) == 20 and card["notes"].endswith("Made by a test.")
    perplexity = results["measures"]["chat"]["perplexity"]
    assert math.exp(card["held_out"][0]["loss"]) == pytest.approx(perplexity, rel=1e-3)


def test_rows_become_conversations_and_texts(kit_folder: Path) -> None:
    tokenizer = Kit(kit_folder, CPU).tokenizer
    start, end, turn = "<|im_start|>", "<|im_end|>\n", [{"role": "user", "content": "Hi."}]
    opened = f"{start}system\nBe kind.{end}{start}user\nHi.{end}"
    answered = f"{opened}{start}assistant\n Yes? {end}"
    whole = [*turn, {"role": "assistant", "content": "Yes?"}]
    cases: dict[str, dict[str, object] | None] = {
        answered: {"messages": whole},
        f"{answered}{start}user\nAnd": {"messages": whole},
        f"{answered}{start}user\nAnd?{end}{start}assistant\n{'a b c ' * 5}{end}": {"messages": whole},
        f"{answered}<|endoftext|>{start}user\nMore{end}": {"messages": whole},
        opened: None,
        f"{opened}{start}assistant\nYe": None,
        "<|endoftext|>A text.<|endoftext|>Another": {"text": "A text."},
        f"<|endoftext|>{'a b c ' * 5}": None,
    }
    rows = [tokenizer.encode(text, add_special_tokens=False).ids for text in cases]
    for row, expected in zip(rows, cases.values(), strict=True):
        assert list(read_texts(np.array([row]), tokenizer)) == ([expected] if expected else [])
    with pytest.raises(TrainError, match="none of the rows holds a whole answer"):
        write_texts(iter(()), kit_folder / "none.jsonl")
    assert not list(kit_folder.glob("none*"))


BAD: dict[str, tuple[Callable[[Path], list[object]], list[str]]] = {
    "no kit": (lambda kit: ["samples", "--kit", kit.parent, "--model", "a=teacher"], ["tokenizer.json"]),
    "no length of the run": (lambda kit: ["run", "--kit", kit, "--out", kit / "x"], ["seconds or steps"]),
    "shares without the teacher": (
        lambda kit: ["run", "--kit", kit, "--out", kit / "x", "--steps", 1, "--text-share", 0.9],
        ["0.12, 0.9, 0.08", "below 1"],
    ),
    "no rows": (
        lambda kit: ["evaluate", "--kit", kit, "--chat", kit / "none.npy", "--model", "a=teacher"],
        ["none.npy", "run sample first"],
    ),
    "a model without a name": (
        lambda kit: ["samples", "--kit", kit, "--model", "teacher"],
        ["NAME=FOLDER"],
    ),
    "a card of no run": (
        lambda kit: ["export", "--kit", kit, "--run", kit, kit / "x", kit / "y"],
        ["results.json", "a distillation that ended"],
    ),
    "export of the teacher": (lambda kit: ["export", "--kit", kit, "teacher", kit / "x"], ["no ternary model"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message(name: str, kit_folder: Path) -> None:
    arguments, words = BAD[name]
    one_error(run_train("distill", *arguments(kit_folder)), *words)


def test_too_little_text_is_said(kit_folder: Path) -> None:
    with pytest.raises(TrainError, match=r"text\.npz: held has fewer than 20000 tokens"):
        Kit(kit_folder, CPU).text("held", 20_000)
