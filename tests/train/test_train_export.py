"""From checkpoint to pack: transformers and the packer's reference compute what the decoder does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.export import ExportOptions
from packer.export import export as pack
from packer.pack import Pack
from shaders.interpreter import ReferenceModel
from tests.support.cli import run_cli
from tests.support.numerics import relative_to_range
from tests.support.training import model, run_train, tokens, write_tokenizer
from tests.support.transformers_models import load_model as load_transformers

import torch  # isort: skip  (after tests.support.training, which sets it up)
from transformers.integrations.bitnet import pack_weights  # isort: skip

from examples.train.checkpoint import save_checkpoint
from examples.train.config import load_preset
from examples.train.errors import TrainError
from examples.train.export import export, pack_trits
from examples.train.model import Decoder

SHAPES: dict[str, dict[str, Any]] = {
    "ternary": {},
    "ternary without sub-norms": {"sub_norms": False, "activation": "relu2"},
    "float": {"precision": "fp32", "sub_norms": False},
    "float with sub-norms": {"precision": "fp32", "rope_theta": 500.0, "kv_heads": 4},
}
CLASSES = {
    "ternary": "BitNet",
    "ternary without sub-norms": "Llama",
    "float": "Llama",
    "float with sub-norms": "BitNet",
}


def saved(folder: Path, made: Decoder, **info: Any) -> Path:
    tokenizer = write_tokenizer(folder / "tokenizer")
    save_checkpoint(
        folder / "run", made, made.config, info={"stage": "pretrain", "step": 1, **info}, tokenizer=tokenizer
    )
    return folder / "run"


@pytest.fixture(scope="module", params=SHAPES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Decoder]:
    """(name, Hugging Face folder, decoder)."""
    folder = tmp_path_factory.mktemp("export")
    made = model(**SHAPES[request.param])
    export(saved(folder, made), folder / "out")
    return request.param, folder / "out", made


def decoder_logits(made: Decoder, ids: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return made(ids)[0].numpy()


def test_transformers_gives_the_same_logits(exported: tuple[str, Path, Decoder]) -> None:
    """int8 rounding amplifies float noise where a value lies at a border, by 1/127 of the greatest; a wrong name,
    scale, norm or rotary base moves all logits by a tenth of their range and more."""
    name, folder, made = exported
    ids = tokens(1, 40)
    other = load_transformers(folder)
    assert type(other).__name__ == f"{CLASSES[name]}ForCausalLM"
    with torch.no_grad():
        expected = other(ids).logits[0].numpy()
    found = decoder_logits(made, ids)
    if "ternary" in name:
        assert np.quantile(np.abs(found - expected), 0.9) < 1e-3 * (expected.max() - expected.min())
        assert relative_to_range(found, expected) < 2e-2
    else:
        assert relative_to_range(found, expected) < 1e-5


def test_the_pack_is_lossless_and_gives_the_same_logits(exported: tuple[str, Path, Decoder], tmp_path: Path) -> None:
    name, folder, made = exported
    arguments = ["--no-eval", "--embedding", "f16"] + ([] if "ternary" in name else ["--policy", "q8"])
    result = run_cli("export", folder, "--out", tmp_path / "pack", *arguments)
    assert result.status == 0, result.err
    if "ternary" in name:
        assert "14 of 14 linears are exactly the checkpoint's ternary weights" in " ".join(result.out.split())
    path = Pack(tmp_path / "pack")
    path.verify()
    ids = tokens(1, 30)
    reference = ReferenceModel(path.program, path.tensors(), capacity=30)
    found, expected = reference.step(ids[0].tolist(), rows=30), decoder_logits(made, ids)
    # f16 of the embedding, q8 of float linears, and int8 borders as above.
    assert np.quantile(np.abs(found - expected), 0.9) < 2e-2 * (expected.max() - expected.min())
    assert relative_to_range(found, expected) < 5e-2
    assert path.manifest["activations"] == ("a8" if "ternary" in name else "f32")


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 33])
def test_trits_are_packed_as_transformers_packs_them(rows: int) -> None:
    trits = torch.from_numpy(np.random.default_rng(rows).integers(-1, 2, (rows, 13)).astype(np.float32))
    assert torch.equal(pack_trits(trits), pack_weights(trits))


def test_13m_packs_below_5_mb(tmp_path: Path) -> None:
    """With the packer's q8 embedding, and room for the tokenizer that 4096 tokens need (0.3 MB)."""
    torch.manual_seed(0)
    made = Decoder(load_preset("13m").model)
    export(saved(tmp_path, made), tmp_path / "out")
    result = pack(tmp_path / "out", tmp_path / "pack", ExportOptions())
    assert result.bytes < 4.5e6
    # The preset it is compared with at equal bytes, in bf16.
    assert 2 * load_preset("2m").model.parameters() == pytest.approx(result.weight_bytes, rel=0.02)
    linears = result.manifest["linears"]
    assert linears["exact"] == linears["total"] == 49


def test_the_chat_ends_where_a_turn_ends(tmp_path: Path) -> None:
    export(saved(tmp_path, model()), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert config["eos_token_id"] == 258 and generation["eos_token_id"] == [258, 256]
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_command_and_what_it_refuses(tmp_path: Path) -> None:
    run = saved(tmp_path, model(precision="nvfp4", sub_norms=False, dim=32, kv_heads=4, ffn_dim=48), tokens=12_345)
    good = run_train("export", "--from", run, "--out", tmp_path / "out")
    assert good.status == 0 and "nvfp4 EMULATED" in good.out and "12,345 tokens" in good.out, good.err
    again = run_train("export", "--from", run, "--out", tmp_path / "out")
    assert again.status == 1 and "already there and not empty" in again.err
    nothing = run_train("export", "--from", tmp_path / "nowhere", "--out", tmp_path / "other")
    assert nothing.status == 1 and "no checkpoint there" in nothing.err and not (tmp_path / "other").exists()


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved(tmp_path, model())
    (run / "checkpoint" / "tokenizer.json").write_text("{")
    with pytest.raises(TrainError, match="tokenizer.json: not a tokenizer"):
        export(run, tmp_path / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == {"run", "tokenizer"}
