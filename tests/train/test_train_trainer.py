"""The loop: runs repeat, go on, share work among processes, and stop where they must."""

from __future__ import annotations

import builtins
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import ALONE, TINY_MODEL, TINY_RUN, losses, run_train, tokens, write_streams

import torch  # isort: skip  (after tests.support.training, which sets it up)

from examples.train import checkpoint as checkpoints
from examples.train import pretrain as pretraining
from examples.train import trainer as training
from examples.train.checkpoint import load_model, read_checkpoint
from examples.train.config import Preset, TrainConfig
from examples.train.distributed import World, world
from examples.train.errors import NotFinite, TrainError
from examples.train.model import Decoder
from examples.train.pretrain import new_model, next_token_loss, pretrain
from examples.train.streams import IGNORED
from examples.train.trainer import Loss, Run, evaluate_loss, make_optimizer, train

ROOT = Path(__file__).resolve().parents[2]
PRESET = Preset("small", TINY_MODEL, {})
PRESET_FIELDS = {name: value for name, value in vars(TINY_MODEL).items() if name != "fp4_options"}


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_streams(tmp_path_factory.mktemp("streams"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("pretrain", tmp_path / "run", ALONE)


def weights(folder: Path) -> list[torch.Tensor]:
    return list(load_model(folder)[0].state_dict().values())


def test_a_model_learns(streams: Path, run: Run) -> None:
    config = replace(TINY_RUN, steps=60, batch_tokens=256, lr=1e-2)
    result = pretrain(PRESET, streams, config, run)
    # Uniform guessing costs ln 272 = 5.6; a token at random among those that occur, 5.5.
    assert result["step"] == 60 and result["held_loss"] < 4.5 and losses(run.folder)[0] > 5
    found = read_checkpoint(run.folder)
    assert (found.step, found.tokens, found.info["stage"]) == (60, 60 * 256, "pretrain")
    assert found.info["train"]["seed"] == 0 and (found.path / "tokenizer.json").is_file()


def test_seeds_make_runs_repeat(streams: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "other")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        pretrain(PRESET, streams, replace(TINY_RUN, seed=seed), Run("pretrain", folder, ALONE))
    one, two, other = map(losses, folders)
    assert one == two and not set(one) & set(other)
    assert all(map(torch.equal, weights(folders[0]), weights(folders[1])))


@pytest.mark.parametrize("precision", ["ternary", "nvfp4"])
def test_a_run_that_goes_on_gives_the_same_losses(
    streams: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after step 4 of 6, killed in step 5; stochastic rounding included."""
    preset = PRESET.with_model(precision=precision, kv_heads=4)
    config = replace(TINY_RUN, save_every=2, grad_accum=2)
    pretrain(preset, streams, config, Run("pretrain", tmp_path / "whole", ALONE))

    def kill(_: Loss) -> Loss:
        raise KeyboardInterrupt

    run = Run("pretrain", tmp_path / "parts", ALONE)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pretraining, "next_token_loss", failing(10, kill))
        pretrain(preset, streams, config, run)
    assert read_checkpoint(run.folder).step == 4
    pretrain(preset, streams, config, replace(run, resume=True))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(run.folder)) == 6
    assert all(map(torch.equal, weights(tmp_path / "whole"), weights(tmp_path / "parts")))


def test_a_time_limit_saves_and_stops(streams: Path, run: Run, tmp_path: Path) -> None:
    result = pretrain(PRESET, streams, replace(TINY_RUN, minutes=1e-9), run)
    assert result["step"] == 1 == read_checkpoint(run.folder).step
    pretrain(PRESET, streams, TINY_RUN, replace(run, resume=True))
    pretrain(PRESET, streams, TINY_RUN, replace(run, folder=tmp_path / "whole"))
    assert losses(run.folder) == losses(tmp_path / "whole")


def test_two_processes_are_one_with_double_accumulation(streams: Path, tmp_path: Path) -> None:
    preset = tmp_path / "small.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in PRESET_FIELDS.items()]
    table = "[pretrain]\nsteps = 4\nbatch_tokens = 128\nsequence = 16\nwarmup = 1\nlog_every = 1\neval_batches = 3\n"
    preset.write_text("[model]\n" + "\n".join(lines) + "\n" + table)
    arguments = ["pretrain", "--preset", str(preset), "--streams", str(streams), "--device", "cpu"]
    single = run_train(*arguments, "--out", tmp_path / "one", "--grad-accum", "4")
    assert single.status == 0, single.err
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launcher, "-m", "examples.train", *arguments, "--out", str(tmp_path / "two"), "--grad-accum", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    held = [read_checkpoint(tmp_path / name).info["held_loss"] for name in ("one", "two")]
    assert held[0] == pytest.approx(held[1], rel=1e-4)


def fixed(batch: Any) -> Callable[[int], Iterator[Any]]:
    """Batches that are all the same."""

    def batches(start: int) -> Iterator[Any]:
        while True:
            yield batch

    return batches


def test_every_target_counts_alike(run: Run) -> None:
    """Micro-batches of 15 targets and of 1: the loss and the gradient are the mean over 16, not the mean of means."""
    ids = tokens(2, 17)
    full, masked = ids[:1, 1:].clone(), ids[1:, 1:].clone()
    full[0, 0], masked[0, :-1] = IGNORED, IGNORED
    parts = [(ids[:1, :-1], full), (ids[1:, :-1], masked)]

    def batches(start: int) -> Iterator[Any]:
        while True:
            yield from parts

    results, states = [], []
    for accumulated, source in ((2, batches), (1, fixed((ids[:, :-1], torch.cat([full, masked]))))):
        model = new_model(replace(TINY_MODEL, precision="fp32"), 0, ALONE)
        config = replace(TINY_RUN, steps=1, batch_tokens=32, grad_accum=accumulated, weight_decay=0.0)
        folder = run.folder / str(accumulated)
        results.append(train(model, model.config, source, next_token_loss, config, replace(run, folder=folder)))
        states.append(weights(folder))
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-6)
    torch.testing.assert_close(states[0], states[1], atol=1e-5, rtol=1e-4)


def test_the_norm_that_is_clipped_is_of_the_mean(streams: Path, run: Run, tmp_path: Path) -> None:
    """The mean's gradient has a norm of about 1, that of the sum of 64 is far greater: a bound of 10 clips nothing."""
    for name, clip in (("none", 1e9), ("some", 10.0), ("much", 0.1)):
        pretrain(PRESET, streams, replace(TINY_RUN, clip=clip), replace(run, folder=tmp_path / name))
    none, some, much = (losses(tmp_path / name) for name in ("none", "some", "much"))
    assert none == some and none != much


def test_rows_without_a_target_are_no_division_by_zero(run: Run) -> None:
    model = new_model(TINY_MODEL, 0, ALONE)
    batch = tokens(4, 16), torch.full((4, 16), IGNORED)
    result = train(model, model.config, fixed(batch), next_token_loss, replace(TINY_RUN, steps=2), run)
    assert result["loss"] == 0 and all(weight.isfinite().all() for weight in weights(run.folder))


def failing(step: int, error: Callable[[Any], Any]) -> Callable[[Any, Any], Loss]:
    """The loss, changed by ``error`` in one call."""
    calls = 0

    def loss(model: Any, batch: Any) -> Loss:
        nonlocal calls
        calls += 1
        found = next_token_loss(model, batch)
        return error(found) if calls == step else found

    return loss


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_the_run(run: Run, value: float) -> None:
    """At the step where it happened, although lines are further apart; the checkpoint from before stays."""
    model = new_model(TINY_MODEL, 0, ALONE)
    config = replace(TINY_RUN, steps=20, save_every=3, log_every=10)
    broken = failing(5, lambda loss: Loss(loss.total * value, loss.weight))
    batch = tokens(4, 16), tokens(4, 16, seed=1)
    with pytest.raises(NotFinite, match=f"step 5: the loss is {value}.*checkpoint of step 3 in .* stays.*--lr"):
        train(model, model.config, fixed(batch), broken, config, run)
    assert all(weight.isfinite().all() for weight in weights(run.folder))
    with pytest.raises(NotFinite, match="step 1: the loss.*no checkpoint had been saved yet"):
        broken = failing(1, lambda loss: Loss(loss.total * value, loss.weight))
        train(model, model.config, fixed(batch), broken, config, replace(run, folder=run.folder / "new"))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_says_what_would_help(run: Run, error: Exception) -> None:
    def throw(_: Any) -> Loss:
        raise error

    model = new_model(TINY_MODEL, 0, ALONE)
    batch = tokens(4, 16), tokens(4, 16, seed=1)
    with pytest.raises(TrainError) as caught:
        train(model, model.config, fixed(batch), failing(1, throw), TINY_RUN, replace(run, report_memory=True))
    text = str(caught.value)
    assert "out of memory in a micro-batch of 4 rows of 16 tokens" in text
    assert "--grad-accum 2 (micro-batches of 2 rows instead of 4)" in text and "--grad-checkpointing" in text
    parameters = TINY_MODEL.parameters() * 4 / 2**20
    assert f"parameters {parameters:.1f} MiB, gradients {parameters:.1f} MiB" in text
    assert "activations of a micro-batch not measured" not in text
    other = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(model, model.config, fixed(batch), failing(1, lambda _: (_ for _ in ()).throw(other)), TINY_RUN, run)


def test_memory_is_reported(streams: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpointed activations are fewer; half the rows need half."""
    kept = []
    for name, changes in (("plain", {}), ("half", {"grad_accum": 2}), ("less", {"grad_checkpointing": True})):
        run = Run("pretrain", tmp_path / name, ALONE, report_memory=True, keep=False)
        pretrain(PRESET, streams, replace(TINY_RUN, steps=1, batch_tokens=512, **changes), run)
        line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("memory:"))
        kept.append(float(line.split("micro-batch ")[1].split()[0].replace(",", "")))
    plain, half, less = kept
    assert less < 0.7 * plain and 0.4 * plain < half < 0.6 * plain


def test_a_checkpoint_in_the_way_or_of_another_run_is_refused(streams: Path, run: Run) -> None:
    pretrain(PRESET, streams, TINY_RUN, run)
    again = replace(run, resume=True)
    with pytest.raises(TrainError, match="already holds a checkpoint, of step 6: --resume goes on"):
        pretrain(PRESET, streams, TINY_RUN, run)
    with pytest.raises(TrainError, match="is of another model .dim 32 there, 64 here"):
        pretrain(PRESET.with_model(dim=64), streams, TINY_RUN, again)
    with pytest.raises(TrainError, match="was run with seed 0, not 5"):
        pretrain(PRESET, streams, replace(TINY_RUN, seed=5), again)
    with pytest.raises(TrainError, match="is of pretrain, not of sft"):
        pretrain(PRESET, streams, TINY_RUN, replace(again, stage="sft"))
    assert pretrain(PRESET, streams, replace(TINY_RUN, steps=8), again)["step"] == 8


def test_curves_are_written(streams: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(PRESET, streams, replace(TINY_RUN, eval_every=3, log_every=2), run)
    rows = [json.loads(line) for line in (run.folder / "loss.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 3, 4, 6] and [row["tokens"] for row in rows] == [128, 192, 256, 384]
    assert ["held_loss" in row for row in rows] == [False, True, False, True]
    assert (run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().err
    assert "step 6/6" in text and "tokens/s" in text and "left" in text


def test_without_matplotlib_one_line_says_so(
    streams: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    pretrain(PRESET, streams, TINY_RUN, run)
    assert capsys.readouterr().err.count("matplotlib is not installed") == 1
    assert not (run.folder / "loss.png").exists() and len(losses(run.folder)) == 6


def test_emulated_formats_say_so_in_every_line(streams: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(PRESET.with_model(precision="nvfp4", kv_heads=4), streams, TINY_RUN, run)
    lines = [line for line in capsys.readouterr().err.splitlines() if "step" in line]
    assert len(lines) == 6 and all("nvfp4 EMULATED" in line for line in lines)


def test_gains_do_not_decay() -> None:
    model = Decoder(TINY_MODEL)
    optimizer = make_optimizer(model, TINY_RUN, torch.device("cpu"))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.1 if parameter.ndim == 2 else 0.0), name


def test_held_loss_is_a_mean_over_targets() -> None:
    model = new_model(TINY_MODEL, 0, ALONE)
    whole = tokens(4, 16), tokens(4, 16, seed=1)
    parts = [(whole[0][:1], whole[1][:1]), (whole[0][1:], whole[1][1:])]
    one, two = (evaluate_loss(model, next_token_loss, held, TINY_RUN, ALONE) for held in ([whole], parts))
    assert one == pytest.approx(two, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence", "65"], "--sequence 65 is longer than the model's context of 64"),
        (["--batch-tokens", "100"], "batch_tokens 100 cannot be divided into rows of 16 tokens for 1 accumulated"),
        (["--batch-tokens", "64000"], "4000 tokens are too few for a batch of 4000 rows of 16"),
        (["--precision", "int2"], "precision is 'int2', expected one of"),
        (["--schedule", "wild"], "schedule is 'wild', expected one of cosine, two-stage, constant"),
        (["--lr", "-1"], "lr is -1.0, expected more than 0"),
        (["--preset", "huge"], "no preset 'huge'; there are"),
        (["--streams", "/nowhere"], "/nowhere/pretrain-train.bin: missing"),
        (["--precision", "mxfp4"], "mxfp4 EMULATED: a linear with 16 outputs has no whole blocks of 32"),
        (["--device", "cuda"], "this PyTorch sees no GPU"),
    ],
)
def test_bad_input_is_one_message(streams: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    preset = tmp_path / "small.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in PRESET_FIELDS.items()]
    preset.write_text("[model]\n" + "\n".join(lines) + "\n[pretrain]\nsteps = 1\nbatch_tokens = 64\nsequence = 16\n")
    given = {"--preset": str(preset), "--streams": str(streams), "--out": str(tmp_path / "out")}
    given[arguments[0]] = arguments[1]
    result = run_train("pretrain", *(part for pair in given.items() for part in pair))
    assert result.status == 1 and "Traceback" not in result.err
    assert message in " ".join(result.err.split()) and result.err.count("error:") == 1


def test_a_stream_of_another_vocabulary_is_refused(streams: Path, run: Run) -> None:
    with pytest.raises(TrainError, match="pretrain-train.bin: token 255 is outside the model's vocabulary of 200"):
        pretrain(PRESET.with_model(vocab_size=200), streams, TINY_RUN, run)


def test_a_process_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainError, match="process 3 wants GPU 3, but there are 2"), world():
        pass


def test_batches_that_do_not_fit_the_processes_are_refused() -> None:
    with pytest.raises(TrainError, match="on 3 processes; make it a multiple of 48"):
        train(
            Decoder(TINY_MODEL),
            TINY_MODEL,
            fixed(None),
            next_token_loss,
            TrainConfig(steps=1, batch_tokens=64, sequence=16),
            Run("pretrain", Path("unused"), World(0, 3, torch.device("cpu"))),
        )


def test_only_the_first_process_writes(streams: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "save_file", None)  # must not be called
    monkeypatch.setattr(World, "total", lambda self, value: value)
    monkeypatch.setattr(training, "parallel", lambda model, here: model)
    second = World(1, 2, torch.device("cpu"))
    pretrain(PRESET, streams, TINY_RUN, replace(run, world=second))
    assert not run.folder.exists()
