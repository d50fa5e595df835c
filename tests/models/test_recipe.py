"""The public recipe's decoder: imported and packed, every executor gives what its own architecture does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.eval_source import open_source
from packer.export import ExportOptions, export
from packer.pack import Pack
from shaders.interpreter import ReferenceModel
from shaders.native import NativeModel
from shaders.sampling import Sampling
from tests.support.checkpoints import change_json
from tests.support.cli import one_error, run_cli
from tests.support.numerics import relative_to_range
from tests.support.training import run_train

import torch  # isort: skip  (after tests.support.training, which sets it up)

from tests.support.recipe import BLOCKS, CONTEXT, WIDTH, recipe, write_recipe  # isort: skip

IDS = [int(i) for i in np.random.default_rng(7).integers(0, 256, size=CONTEXT)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the importer writes."""
    source = write_recipe(tmp_path_factory.mktemp("recipe"))
    told = ("--out", source / "out", "--tokenizer", source / "tokenizer")
    result = run_train("import-recipe", source / "model.pt", *told)
    assert result.status == 0, result.err
    return source / "out"


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Logits of the recipe's own architecture, f32 ``[CONTEXT, V]``."""
    with torch.no_grad():
        return recipe()(torch.tensor([IDS]))[0].numpy()


@pytest.fixture(scope="module")
def pack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """With weights of 16 bits, as near as a pack gets."""
    folder = tmp_path_factory.mktemp("packed") / "pack"
    return Pack(export(checkpoint, folder, ExportOptions(keep=("*=f16",))).path)


def test_the_pack_is_sound_and_positions_stay_as_they_are(pack: Pack, checkpoint: Path) -> None:
    pack.verify()
    assert (pack.manifest["family"], pack.manifest["eos_ids"]) == ("recipe_gpt", [256])
    assert pack.manifest["context_length"] == CONTEXT
    assert pack.entries["positions"].encoding == "f32" and pack.entries["lm_head"].encoding == "f16"
    assert pack.manifest["parameters"] == sum(p.numel() for p in recipe().parameters()) + (BLOCKS - 1) * WIDTH
    stored = run_cli("inspect", pack.path)
    assert stored.status == 0 and "position" in stored.out and "activate" in stored.out


@pytest.mark.parametrize("chunks", [(), (1, 30, 31)])
def test_the_reference_gives_the_recipe_s_logits(pack: Pack, expected: np.ndarray, chunks: tuple[int, ...]) -> None:
    model = ReferenceModel(pack.program, pack.tensors(), capacity=CONTEXT)
    spans = [list(span) for span in np.split(np.array(IDS), chunks)]
    found = np.concatenate([model.step(span, rows=len(span)) for span in spans])
    assert relative_to_range(found, expected) < 2e-3  # f16 weights


def test_in_f32_the_logits_are_the_recipe_s(checkpoint: Path, expected: np.ndarray) -> None:
    subject = open_source(checkpoint)
    model = ReferenceModel(subject.program, dict(subject.tensors), capacity=CONTEXT)
    assert relative_to_range(model.step(IDS, rows=len(IDS)), expected) < 1e-4


def test_the_native_gpu_gives_the_ids(pack: Pack) -> None:
    reference = ReferenceModel(pack.program, pack.tensors(), capacity=CONTEXT)
    wanted = [token for token, _ in reference.generate(IDS[:9], Sampling(), 20)]
    with NativeModel(pack.program, pack.tensors(), capacity=CONTEXT, kv="f32") as native:
        assert [token for token, _ in native.generate(IDS[:9], Sampling(), 20)] == wanted


@pytest.mark.parametrize("policy", ["q8", "q4km", "ternary"])
def test_a_policy_is_exported_and_writes(checkpoint: Path, tmp_path: Path, policy: str) -> None:
    told = ("--policy", policy, "--no-eval")
    result = run_cli("export", checkpoint, "--out", tmp_path / "pack", *told)
    assert result.status == 0, result.err
    written = run_cli("generate", tmp_path / "pack", "--raw", "--prompt", "Once", "--greedy", "--max-tokens", 4)
    assert written.status == 0, written.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act is 'gelu'", "relu")),
        ({"tie_word_embeddings": True}, ("tie_word_embeddings",)),
        ({"sliding_window": 4}, ("sliding_window",)),
        ({"max_position_embeddings": CONTEXT + 1}, ("model.embed_positions.weight", str(CONTEXT + 1))),
    ],
)
def test_what_it_is_not_is_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    change_json(source / "config.json", **changes)
    one_error(run_cli("export", source, "--out", tmp_path / "pack", "--policy", "q8"), *words)
    assert not (tmp_path / "pack").exists()


def test_positions_have_no_other_encoding(checkpoint: Path, tmp_path: Path) -> None:
    told = ("--policy", "q8", "--keep", "positions=q8")
    one_error(run_cli("export", checkpoint, "--out", tmp_path / "pack", *told), "positions=q8", "has such a name")
