"""Calibration: inputs of the source's linears, what compensation does to a pack, and which texts may be used."""

from __future__ import annotations

import hashlib
import json
import re
import tracemalloc
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer import calibrate
from packer.calibrate import Calibration, calibration_text
from packer.checkpoints import open_checkpoint
from packer.compensate import DAMPING, compensated_planes, inverse_factor
from packer.errors import PackerError
from packer.eval import EvalOptions, Text, evaluate
from packer.eval_source import open_source, subject_of_checkpoint
from packer.export import ExportOptions, export
from packer.pack import Pack
from packer.workers import Workers
from shaders.interpreter import ReferenceModel
from shaders.reference import dequantize
from tests.packer.test_convert import LINEARS, TEXT, encodings, float_model
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cli import one_error, run_cli


@pytest.mark.parametrize("workers", [1, 3])
def test_inputs_are_those_of_the_source(workers: int, tmp_path: Path) -> None:
    """Operation by operation in windows, as a model that runs each window at once."""
    source = float_model(tmp_path / "model", max_position_embeddings=100)
    subject = subject_of_checkpoint(open_checkpoint(source))
    calibration = Calibration(subject, Text("text", TEXT), Workers(workers))
    grams: dict[str, Any] = {}
    ids = subject.tokenizer.encode(TEXT).ids
    assert calibration.tokens == len(ids) > 200
    for start in range(0, len(ids), 100):
        model = ReferenceModel(subject.program, dict(subject.tensors), capacity=100)
        plain = model._op_linear

        def watched(op: Any, values: Any, plain: Any = plain) -> Any:
            grams[op["w"]] = grams.get(op["w"], 0) + values[op["x"]].astype(np.float64).T @ values[op["x"]]
            return plain(op, values)

        model._op_linear = watched  # type: ignore[method-assign]
        model.step(ids[start : start + 100])
    for name in [f"layers.{layer}.{kind}" for layer in range(2) for kind in LINEARS]:
        expected = inverse_factor(grams[name])
        np.testing.assert_allclose(calibration.factor(name), expected, atol=2e-3 * np.abs(expected).max())
    with pytest.raises(PackerError, match=r"layers\.0\.qkv"):
        calibration.factor("layers.0.qkv")


def test_a_linear_may_be_passed_over(tmp_path: Path) -> None:
    """One that is kept in another encoding needs no factor, but those after it see what it does."""
    subject = subject_of_checkpoint(open_checkpoint(float_model(tmp_path / "model")))
    every, some = (Calibration(subject, Text("text", TEXT)) for _ in range(2))
    factors = {
        name: every.factor(name) for name in [f"layers.{layer}.{kind}" for layer in range(2) for kind in LINEARS]
    }
    for name in ("layers.0.gate_up", "layers.1.down"):
        np.testing.assert_array_equal(some.factor(name), factors[name])


@pytest.mark.parametrize("columns", [1, 7, 511, 512, 513, 1100])
def test_factors_are_those_of_the_inverse(columns: int) -> None:
    """H^-1 = U^T U; in strips, as NumPy finds it of the whole."""
    random = np.random.default_rng(columns)
    inputs = random.standard_normal((300, columns)) * np.exp(random.standard_normal(columns))
    gram = inputs.T @ inputs
    hessian = 2 * gram + np.eye(columns) * 2 * DAMPING * gram.diagonal().mean()
    found = inverse_factor(gram).astype(np.float64)
    np.testing.assert_allclose(found.T @ found @ hessian, np.eye(columns), atol=1e-3)
    assert not np.tril(found, -1).any() and (found.diagonal() > 0).all()
    np.testing.assert_array_equal(inverse_factor(np.triu(gram), overwrite=True), inverse_factor(gram))


def test_memory_holds_the_inputs_of_one_linear(tmp_path: Path) -> None:
    """Of all windows the hidden state and these inputs, and its matrix in f64 and f32; not what lies between linears,
    nor keys and values of layers that are done. The factor of the widest is made within that."""
    subject = subject_of_checkpoint(open_checkpoint(float_model(tmp_path / "model", intermediate_size=1600)))
    calibration = Calibration(subject, Text("text", TEXT * 8))
    inputs, matrix = 4 * calibration.tokens * (72 + 1600), 1600**2
    tracemalloc.start()
    try:
        for name in ("layers.0.gate_up", "layers.0.down", "layers.1.down"):
            calibration.factor(name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert inputs < peak < inputs + 12 * matrix + 512 * 1600 * 8 * 2 + (4 << 20)


def test_a_text_that_takes_too_much_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of_checkpoint(open_checkpoint(float_model(tmp_path / "model")))
    monkeypatch.setattr(calibrate, "MOST_BYTES", 4 * (72 + 100) * len(TEXT))
    Calibration(subject, Text("text", TEXT))
    with pytest.raises(PackerError, match=f"has {len(TEXT) + 1} tokens.* at most {len(TEXT)} tokens"):
        Calibration(subject, Text("text", TEXT + "."))


def test_compensation_is_written_and_its_text_is_refused(tmp_path: Path) -> None:
    source, text = float_model(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(TEXT)
    result = run_cli("export", source, "--out", tmp_path / "pack", "--policy", "ternary", "--ternary-planes", 3,
                     "--compensate", "--calibration", text, "--accept-damage")  # fmt: skip
    assert result.status == 0, result.err
    report = json.loads((tmp_path / "pack" / "report.json").read_bytes())
    assert report["calibration"] == {"sha256": hashlib.sha256(TEXT.encode()).hexdigest()}
    assert report["quality"]["calibration_sha256"] == report["calibration"]["sha256"]
    calibration = Calibration(subject_of_checkpoint(open_checkpoint(source)), Text("text", TEXT))
    values = open_checkpoint(source).rows("model.layers.0.self_attn.o_proj.weight")
    expected = compensated_planes(values, calibration.factor("layers.0.o"), 3, 64).values()
    names = ("layers.0.o", "layers.0.o.plane1", "layers.0.o.plane2")
    total = sum(dequantize(Pack(tmp_path / "pack").tensor(name)) for name in names)
    np.testing.assert_allclose(total, expected, atol=1e-6)
    refused = run_cli("eval", tmp_path / "pack", "--against", source, "--text", text, "--backend", "numpy")
    one_error(refused, "text.txt", "calibrated with this very text")


def test_compensation_lessens_the_damage(tmp_path: Path) -> None:
    source = float_model(tmp_path / "model")
    found = {}
    for compensate in (False, True):
        path = tmp_path / f"pack-{compensate}"
        export(source, path, ExportOptions(policy="ternary", ternary_planes=2, compensate=compensate))
        fast = EvalOptions(backend="numpy", tokens=200, sums=0, prompts=0, run_tokens=0)
        found[compensate] = evaluate(Pack(path), open_source(source), fast)["quality"]["kl"]["mean"]
        assert ("calibration" in json.loads((path / "report.json").read_bytes())) is compensate
    assert found[True] < found[False]


def test_the_own_texts_share_no_sentence() -> None:
    own = calibration_text(None).content
    measured = files("packer").joinpath("eval_text.txt").read_text(encoding="utf-8")
    one, other = ({part.strip() for part in re.split(r"(?<=[.!?:])\s|\n", text)} - {""} for text in (own, measured))
    assert len(own) > 5000 and not one & other


def test_exact_checkpoints_need_no_calibration(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    export(source, tmp_path / "plain", ExportOptions())
    export(source, tmp_path / "asked", ExportOptions(policy="ternary", ternary_planes=3, compensate=True))
    report = json.loads((tmp_path / "asked" / "report.json").read_bytes())
    assert "calibration" not in report and Pack(tmp_path / "asked").manifest["grade"] is None
    assert encodings(tmp_path / "asked") == encodings(tmp_path / "plain")
