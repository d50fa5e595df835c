"""The public recipe's decoder: imported and packed, every executor gives what its own architecture does."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.bench_engine import dispatches
from packer.bench_native import bytes_per_token
from packer.errors import PackerError
from packer.eval_source import open_source
from packer.export import ExportOptions, export
from packer.pack import Pack
from packer.runner import load_model
from shaders.contract import ContractError
from shaders.interpreter import ReferenceModel
from shaders.native import NativeModel
from shaders.sampling import Sampling
from tests.support.checkpoints import change_json
from tests.support.cli import one_error, run_cli
from tests.support.numerics import relative_to_range
from tests.support.training import run_train

import torch  # isort: skip  (after tests.support.training, which sets it up)

from tests.support.recipe import BLOCKS, CONTEXT, HEADS, WIDTH, recipe, write_recipe  # isort: skip

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


def test_the_native_gpu_gives_logits_and_ids(pack: Pack, expected: np.ndarray) -> None:
    wanted = greedy_ids(pack.program, pack)
    with NativeModel(pack.program, pack.tensors(), capacity=CONTEXT, kv="f32") as native:
        assert [token for token, _ in native.generate(IDS[:9], Sampling(), 20)] == wanted
        native.truncate(0)
        assert relative_to_range(native.step(IDS, rows=len(IDS)), expected) < 2e-3  # f16 weights


def test_all_that_is_new_decides_the_ids(pack: Pack) -> None:
    """Else those that executors give would say little."""
    wanted = greedy_ids(pack.program, pack)
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda found: found["body"].pop(1),  # position
        lambda found: next(op for op in found["body"] if op["op"] == "activate").update(act="silu"),
        lambda found: found["logits"][-1].pop("bias"),
        lambda found: found["tables"]["rope"].update(inv_freq=[1.0] * (WIDTH // HEADS // 2)),
    ]
    for change in changes:
        program = copy.deepcopy(pack.program)
        change(program)
        assert greedy_ids(program, pack) != wanted


def greedy_ids(program: dict[str, Any], pack: Pack) -> list[int]:
    model = ReferenceModel(program, pack.tensors(), capacity=CONTEXT)
    return [token for token, _ in model.generate(IDS[:9], Sampling(), 20)]


def test_no_executor_goes_beyond_the_positions(pack: Pack) -> None:
    """Rotary models only get worse there; here a row is missing."""
    for run in (ReferenceModel, NativeModel):
        with pytest.raises(ContractError, match=f"{CONTEXT} positions, the context is {CONTEXT + 1} tokens"):
            run(pack.program, pack.tensors(), capacity=CONTEXT + 1)
    for backend in ("reference", "native"):
        with pytest.raises(PackerError, match="choose a smaller context"):
            load_model(pack, backend, CONTEXT + 1, "f32")


def test_a_benchmark_counts_one_position_a_token(pack: Pack) -> None:
    tensors = pack.tensors()
    sizes = {name: tensor.resident_bytes for name, tensor in tensors.items()}
    looked_up = {name: sizes.pop(name) for name in ("embed", "positions")}
    rows = sum(size // tensors[name].rows for name, size in looked_up.items())
    assert bytes_per_token(pack, "f16", 0) == sum(sizes.values()) + rows
    with NativeModel(pack.program, tensors, capacity=CONTEXT) as model:
        # Without fusions, on a CPU renderer: norm, qkv, append, attention, o, norm, up, activate, down.
        assert dispatches(model, pack.program)["dispatchesPerLayer"] == 9


@pytest.mark.parametrize(
    ("policy", "told"),
    [("q8", ()), ("q4km", ("--no-eval",)), ("ternary", ("--ternary-planes", 3, "--compensate", "--accept-damage"))],
)
def test_a_policy_is_exported_and_writes(checkpoint: Path, tmp_path: Path, policy: str, told: tuple[Any, ...]) -> None:
    """Measured too, and calibrated, in windows of fewer tokens than other models' have."""
    result = run_cli("export", checkpoint, "--out", tmp_path / "pack", "--policy", policy, *told)
    assert result.status == 0, result.err
    assert "positions" in result.out
    assert (Pack(tmp_path / "pack").manifest["grade"] is None) == ("--no-eval" in told)
    written = run_cli("generate", tmp_path / "pack", "--raw", "--prompt", "Once", "--greedy", "--max-tokens", 4)
    assert written.status == 0, written.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act is 'gelu'", "relu")),
        ({"tie_word_embeddings": True}, ("tie_word_embeddings",)),
        ({"sliding_window": 4}, ("sliding_window",)),
        ({"rope_theta": 10000.0}, ("rope_theta",)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ("rope_scaling",)),
        ({"rope_parameters": {"rope_type": "default"}}, ("rope_parameters",)),
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
