"""Checkpoints: whole or the old one, and nothing of another model, stage or tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import change_json
from tests.support.training import TINY_MODEL, model, write_tokenizer

import torch  # isort: skip  (after tests.support.training, which sets it up)
from safetensors.torch import load_file, save_file  # isort: skip

from examples.train import checkpoint as module
from examples.train.checkpoint import (
    check_same_model,
    check_tokenizer,
    find_checkpoint,
    load_model,
    load_optimizer,
    load_weights,
    read_checkpoint,
    save_checkpoint,
)
from examples.train.errors import TrainError
from examples.train.model import Decoder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    info = {"stage": "pretrain", "step": 7, "tokens": 700}
    tokenizer = write_tokenizer(tmp_path / "streams")
    save_checkpoint(
        tmp_path / "run", made, made.config, info=info, optimizer=optimizer.state_dict(), tokenizer=tokenizer
    )
    return tmp_path / "run"


def test_what_was_saved_comes_back(saved: Path) -> None:
    found, checkpoint = load_model(saved)
    assert (checkpoint.step, checkpoint.tokens, checkpoint.model) == (7, 700, TINY_MODEL)
    for (name, one), other in zip(model().state_dict().items(), found.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert load_optimizer(saved)["param_groups"][0]["lr"] == 1e-3
    assert find_checkpoint(saved) == find_checkpoint(saved / "checkpoint") == saved / "checkpoint"
    assert sorted(file.name for file in (saved / "checkpoint").iterdir()) == [
        "config.json",
        "model.safetensors",
        "state.pt",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [entry.name for entry in saved.iterdir()] == ["checkpoint"]


def test_masters_serve_every_precision(saved: Path) -> None:
    found, _ = load_model(saved, precision="fp32")
    assert found.config.precision == "fp32"
    assert torch.equal(found.blocks[1].down.weight, model().blocks[1].down.weight)


@pytest.mark.parametrize("moment", ["save_file", "rename"])
def test_a_save_that_is_cut_short_leaves_the_old_one(saved: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(seed=1)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    if moment == "save_file":
        monkeypatch.setattr(module, "save_file", die)
    else:  # between the two renames
        real = Path.rename
        monkeypatch.setattr(Path, "rename", lambda own, to: real(own, to) if own.name == "checkpoint" else die())
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(saved, made, made.config, info={"step": 8})
    monkeypatch.undo()
    assert load_model(saved)[1].step == 7
    save_checkpoint(saved, made, made.config, info={"step": 9})
    assert load_model(saved)[1].step == 9 and [entry.name for entry in saved.iterdir()] == ["checkpoint"]


def test_another_shape_is_named(saved: Path) -> None:
    with pytest.raises(TrainError, match=r"blocks.0.gate.weight is \[48, 32\], expected \[64, 32\]"):
        load_weights(Decoder(replace(TINY_MODEL, ffn_dim=64, sub_norms=False)), saved)
    with pytest.raises(TrainError, match="has no tensor blocks.2.attention_norm.weight"):
        load_weights(model(layers=3), saved)
    with pytest.raises(TrainError, match="has a tensor blocks.1.attention_norm.weight that this model lacks"):
        load_weights(model(layers=1), saved)
    with pytest.raises(
        TrainError, match=r"another model \(dim 32 there, 64 here; precision ternary there, fp32 here\)"
    ):
        check_same_model(saved, replace(TINY_MODEL, dim=64, precision="fp32"), read_checkpoint(saved).model)


def test_some_tensors_alone(saved: Path) -> None:
    other = model(layers=3)
    load_weights(other, saved, only=[name for name in other.state_dict() if not name.startswith("blocks.2")])
    assert torch.equal(other.embedding.weight, model().embedding.weight)


def test_another_tokenizer_is_refused(saved: Path, tmp_path: Path) -> None:
    check_tokenizer(read_checkpoint(saved), tmp_path / "streams")
    check_tokenizer(read_checkpoint(saved), saved / "checkpoint")
    change_json(tmp_path / "streams" / "tokenizer.json", truncation=None, version="other")
    with pytest.raises(TrainError, match="is not the tokenizer of .*its token ids mean other text"):
        check_tokenizer(read_checkpoint(saved), tmp_path / "streams")
    with pytest.raises(TrainError, match="tokenizer.json: missing; make it with"):
        check_tokenizer(read_checkpoint(saved), tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"dim": 4}}', '{"model": 3}', "\xff"])
def test_a_broken_config_is_named(saved: Path, text: str) -> None:
    (saved / "checkpoint" / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(TrainError, match="config.json: not a checkpoint's config"):
        read_checkpoint(saved)


def test_unknown_fields_of_the_model_are_named(saved: Path) -> None:
    path = saved / "checkpoint" / "config.json"
    record = json.loads(path.read_text())
    record["model"]["experts"] = 8
    path.write_text(json.dumps(record))
    with pytest.raises(TrainError, match="unknown fields of the model: experts"):
        read_checkpoint(saved)


def test_missing_and_broken_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="no checkpoint there"):
        read_checkpoint(tmp_path / "nowhere")
    (saved / "checkpoint" / "state.pt").write_bytes(b"no pickle")
    with pytest.raises(TrainError, match="state.pt: cannot be read"):
        load_optimizer(saved)
    (saved / "checkpoint" / "state.pt").unlink()
    with pytest.raises(TrainError, match="state.pt: missing, so this run cannot go on"):
        load_optimizer(saved)
    (saved / "checkpoint" / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(TrainError, match="model.safetensors: cannot be read"):
        load_model(saved)


def test_no_code_comes_with_a_state(saved: Path) -> None:
    """A pickle that would run something is refused, not run."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (Path("/nonexistent/evil"),)  # type: ignore[return-value]

    torch.save({"x": Evil()}, saved / "checkpoint" / "state.pt")
    with pytest.raises(TrainError, match="state.pt: cannot be read"):
        load_optimizer(saved)


def test_only_floats_of_the_model_are_kept(saved: Path) -> None:
    path = saved / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    assert set(tensors) == set(model().state_dict()) and all(t.dtype == torch.float32 for t in tensors.values())
    save_file({name: t for name, t in tensors.items() if name != "norm.weight"}, path)
    with pytest.raises(TrainError, match="has no tensor norm.weight"):
        load_model(saved)
