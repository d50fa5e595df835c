"""import-recipe: the same logits as the recipe's architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.train.cli import main
from examples.train.errors import TrainError
from examples.train.import_recipe import import_recipe
from examples.train.recipe_model import load_recipe
from tests.support.recipe import BLOCKS, CONTEXT, HEADS, VOCABULARY, WIDTH, recipe


def save(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


@pytest.mark.parametrize(("scale", "divisor"), [("head", WIDTH // HEADS), ("width", WIDTH)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_logits_are_the_recipe_s(tmp_path: Path, scale: str, divisor: int, wrapped: bool) -> None:
    theirs = recipe(divisor)
    state = theirs.state_dict()
    if wrapped:  # as its trainer saves it, from a compiled and distributed model
        state = {f"module._orig_mod.{name}": value for name, value in state.items()}
        state = {"model_state_dict": state, "losses": [1.0], "config": {"n_head": HEADS}, "device": "cpu"}
    out = tmp_path / "out"
    config = import_recipe(save(tmp_path / "model.pt", state), out, scale)
    assert (config.heads, config.layers, config.max_context, config.ffn_dim) == (HEADS, BLOCKS, CONTEXT, 4 * WIDTH)
    tokens = torch.randint(0, VOCABULARY, (4, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(load_recipe(out)(tokens), theirs(tokens), rtol=1e-4, atol=1e-4)
        other = import_recipe(tmp_path / "model.pt", tmp_path / "other", "width" if scale == "head" else "head")
        assert other == config
        assert (load_recipe(tmp_path / "other")(tokens) - theirs(tokens)).abs().max() > 0.1
    # LayerNorms are RMSNorms there: no biases of norms, but q, k and v have some.
    sizes = {name: tensor.numel() for name, tensor in load_file(out / "model.safetensors").items()}
    change = (3 * BLOCKS - (2 * BLOCKS + 1)) * WIDTH
    assert sum(sizes.values()) == sum(parameter.numel() for parameter in theirs.parameters()) + change
    assert not [name for name in sizes if name.endswith("norm.bias")]


def test_the_command_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "model.pt", recipe().state_dict())
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "tokenizer.json").write_text("{}", encoding="utf-8")
    out, gpt2 = tmp_path / "out", str(tmp_path / "gpt2")
    with pytest.raises(SystemExit) as stop:
        main(["import-recipe", str(tmp_path / "model.pt"), "--out", str(out), "--tokenizer", gpt2])
    assert stop.value.code == 0 and "2 blocks of width 24" in capsys.readouterr().out
    record = json.loads((out / "config.json").read_text())
    assert record["model_type"] == "recipe_gpt" and record["vocab_size"] == VOCABULARY
    assert sorted(entry.name for entry in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


class Surprise:
    """Something that a checkpoint must not bring along."""


def test_bad_files_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = recipe().state_dict()
    head, hidden = "attn_blocks.1.attn.heads.2.key.weight", "attn_blocks.1.mlp.hidden.bias"
    cases = [
        ({"model_state_dict": good, "extra": Surprise()}, "holds Python objects"),
        ([1, 2], "expected a dict"),
        ({}, "expected a dict"),
        ({"blocks.0.wq.weight": torch.ones(2, 2)}, "no classic decoder of the recipe: token_embed.weight not found"),
        ({name: value for name, value in good.items() if name != head}, f"tensor {head} is missing"),
        ({**good, hidden: torch.ones(5)}, f"{hidden} makes [5], expected [96]"),
        ({**good, "value_head.weight": torch.ones(1)}, "has a tensor value_head.weight"),
    ]
    for number, (state, said) in enumerate(cases):
        path = save(tmp_path / f"{number}.pt", state)
        refuse(capsys, said, path, tmp_path / "out")
    (tmp_path / "noise.pt").write_bytes(b"no checkpoint")
    refuse(capsys, "noise.pt", tmp_path / "noise.pt", tmp_path / "out")
    refuse(capsys, "absent.pt: No such file", tmp_path / "absent.pt", tmp_path / "out")
    path = save(tmp_path / "good.pt", good)
    refuse(capsys, "expected one of head, width", path, tmp_path / "out", "--attention-scale", "sqrt")
    refuse(capsys, "holds no tokenizer.json", path, tmp_path / "out", "--tokenizer", str(tmp_path))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.new").exists()
    refuse(capsys, "is not empty", path, tmp_path)


def refuse(capsys: pytest.CaptureFixture[str], said: str, path: Path, out: Path, *options: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["import-recipe", str(path), "--out", str(out), *options])
    message = capsys.readouterr().err
    assert stop.value.code == 1 and said in message and "Traceback" not in message, message


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="config.json"):
        load_recipe(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(TrainError, match="model_type is 'llama'"):
        load_recipe(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "recipe_gpt"}', encoding="utf-8")
    with pytest.raises(TrainError, match="not what import-recipe writes"):
        load_recipe(tmp_path)
