"""Ternary-Bonsai: Qwen3 whose embedding and output head are ternary as well, in groups of 128 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.export import ExportOptions, ExportResult, export
from packer.pack import Pack
from shaders.interpreter import ReferenceModel
from shaders.native import NativeModel
from shaders.sampling import Sampling
from tests.support.checkpoints import tiny_checkpoint, tiny_config, write_folder
from tests.support.cli import one_error, run_cli
from tests.support.families import BONSAI, bonsai_tensors
from tests.support.numerics import relative_to_range
from tests.support.transformers_models import greedy, load_model, logits

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 256, size=30)]
TOKENS = 10


def bonsai(folder: Path, **changes: Any) -> Path:
    return write_folder(folder, tiny_config("qwen3", **{**BONSAI, **changes}), bonsai_tensors(**changes))


@pytest.fixture(scope="module", params=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bonsai(tmp_path_factory.mktemp(request.param), tie_word_embeddings=request.param == "tied")


@pytest.fixture(scope="module")
def result(source: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return export(source, tmp_path_factory.mktemp("pack") / "pack", ExportOptions())


def test_all_of_it_is_ternary_without_a_word(source: Path, result: ExportResult) -> None:
    pack = Pack(result.path)
    pack.verify()
    tied = "untied" not in str(source)
    matrices = {name: entry for name, entry in pack.entries.items() if len(entry.shape) == 2}
    assert ("lm_head" in matrices) != tied and "embed" in matrices
    assert {(entry.encoding, entry.scale, entry.group) for entry in matrices.values()} == {("ternary", "group", 128)}
    assert pack.manifest["grade"] == "lossless" and pack.manifest["activations"] == "a16"
    assert pack.manifest["linears"] == {"total": 14, "exact": 14}  # the layers'; embedding and head are counted apart
    norm, head = pack.program["logits"]
    assert head["w"] == ("embed" if tied else "lm_head") and head["x"] == norm["out"] == "last.a16"


def test_logits_are_those_of_transformers(source: Path, result: ExportResult, tmp_path: Path) -> None:
    """Exactly the weights; what a16 rounds is a 65,278th of each token's greatest activation."""
    expected = logits(load_model(source), IDS)
    floats = export(source, tmp_path / "floats", ExportOptions(activations="f32"))
    for path, limit in ((floats.path, 1e-4), (result.path, 1e-3)):
        pack = Pack(path)
        model = ReferenceModel(pack.program, pack.tensors(), capacity=len(IDS))
        assert relative_to_range(model.step(IDS, rows=len(IDS)), expected) < limit


def test_native_ids_are_those_of_transformers(source: Path, result: ExportResult) -> None:
    pack, expected = Pack(result.path), greedy(load_model(source), IDS, TOKENS)
    with NativeModel(pack.program, pack.tensors(), capacity=64, kv="f32") as native:
        found = [token for token, _ in native.generate(IDS, Sampling(), TOKENS)]
        native.truncate(0)
        rows = native.step(IDS, rows=len(IDS))
    assert found[: len(expected)] == expected
    reference = ReferenceModel(pack.program, pack.tensors(), capacity=64, kv="f32")
    assert relative_to_range(rows, reference.step(IDS, rows=len(IDS))) < 1e-3


@pytest.mark.parametrize(
    ("options", "encodings"),
    [
        ({"embedding": "q8"}, ("q8", "q8")),
        ({"embedding": "f16"}, ("f16", "f16")),
        ({"keep": ("lm_head=q4",)}, ("ternary", "q4")),
        ({"keep": ("embed=ternary",)}, ("ternary", "ternary")),
        ({"embedding": "q8", "keep": ("embed=ternary",)}, ("ternary", "q8")),
        ({"policy": "q8"}, ("ternary", "ternary")),
    ],
    ids=str,
)
def test_other_encodings_when_asked(options: dict[str, Any], encodings: tuple[str, str], tmp_path: Path) -> None:
    source = bonsai(tmp_path / "checkpoint", num_hidden_layers=1, tie_word_embeddings=False)
    pack = Pack(export(source, tmp_path / "pack", ExportOptions(**options)).path)
    assert (pack.entries["embed"].encoding, pack.entries["lm_head"].encoding) == encodings
    assert {entry.encoding for name, entry in pack.entries.items() if name.endswith("qkv")} == {"ternary"}


def test_an_embedding_that_is_not_ternary(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", "qwen3", num_hidden_layers=1)
    assert Pack(export(source, tmp_path / "pack", ExportOptions()).path).entries["embed"].encoding == "q8"
    refused = run_cli("export", source, "--out", tmp_path / "other", "--keep", "embed=ternary")
    one_error(refused, "embed", "ternary")
    assert not (tmp_path / "other").exists()
