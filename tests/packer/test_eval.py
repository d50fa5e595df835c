"""The quality report: its formulas, held against torch and transformers, its gate, and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer import eval as evaluation
from packer.compare import compare_packs
from packer.errors import PackerError
from packer.eval import EvalOptions, cut_windows, evaluate
from packer.eval_measures import Positions, first_difference, log_softmax
from packer.eval_source import open_source, subject_of_pack
from packer.eval_tasks import generate_sums, is_right
from packer.export import ExportOptions, export
from packer.export_gate import GATE
from packer.pack import Pack
from packer.quality import final_grade, grade_of
from tests.support.checkpoints import byte_tokenizer, tiny_config, tiny_tensors, write_folder
from tests.support.cli import one_error, run_cli
from tests.support.packs import change_shard, tiny_pack

FAST = EvalOptions(backend="numpy", tokens=100, sums=0, prompts=0, run_tokens=0)
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps until noon. " * 4


def float_checkpoint(folder: Path, noise: float = 0.02) -> Path:
    """A tiny Llama whose linears are not ternary."""
    config = tiny_config("llama")
    tensors = tiny_tensors(config)
    random = np.random.default_rng(1)
    for name, array in tensors.items():
        if "_proj." in name:
            tensors[name] = (array + noise * random.standard_normal(array.shape)).astype(np.float32)
    return write_folder(folder, config, tensors)


@pytest.fixture
def lossy(tmp_path: Path) -> tuple[Path, Path]:
    """(checkpoint, pack of it in q4)."""
    source = float_checkpoint(tmp_path / "checkpoint")
    export(source, tmp_path / "pack", ExportOptions(keep=("layers.*=q4",)))
    return source, tmp_path / "pack"


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def damage(pack: Path) -> None:
    """Make the layers' weights noise of the same size."""
    random = np.random.default_rng(5)

    def shuffle(arrays: dict[str, np.ndarray]) -> None:
        for key, array in arrays.items():
            if key.startswith("layers.") and ".data." in key and array.ndim == 2:
                arrays[key] = random.permutation(array.reshape(-1)).reshape(array.shape)

    change_shard(pack, shuffle)


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_measures_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    source, pack = (3 * random.standard_normal((50, 33)).astype(np.float32) for _ in range(2))
    targets = random.integers(0, 33, 50)
    positions = Positions()
    positions.add(log_softmax(source[:20]), log_softmax(pack[:20]), targets[:20])
    positions.add(log_softmax(source[20:]), log_softmax(pack[20:]), targets[20:])
    found = positions.summary()

    p, q = (torch.log_softmax(torch.tensor(x, dtype=torch.float64), -1) for x in (source, pack))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    loss = torch.nn.functional.cross_entropy(torch.tensor(pack).double(), torch.tensor(targets), reduction="none")
    assert found["kl"]["mean"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found["kl"]["error"] == pytest.approx(float(kl.std() / 50**0.5), rel=1e-4)
    assert found["kl"]["max"] == pytest.approx(float(kl.max()), rel=1e-4)
    assert found["kl"]["p99"] == pytest.approx(float(torch.quantile(kl, 0.99)), rel=1e-4)
    assert sum(found["kl"]["histogram"]["counts"]) == found["scored_tokens"] == 50
    value = found["perplexity"]["pack"]
    assert value["value"] == pytest.approx(float(loss.mean().exp()), rel=1e-4)
    assert value["error"] == pytest.approx(float(loss.mean().exp() * loss.std() / 50**0.5), rel=1e-4)
    assert found["same_top"]["mean"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    rows = torch.arange(50)
    change = q[rows, targets].exp() - p[rows, targets].exp()
    assert found["rms_probability_change"] == pytest.approx(float(change.square().mean().sqrt()), rel=1e-4)


def test_a_report_is_what_transformers_computes(tmp_path: Path, lossy: tuple[Path, Path]) -> None:
    """KL and perplexity of a q4 pack of a tiny model, from logits of transformers with the decoded weights."""
    transformers_models = pytest.importorskip("tests.support.transformers_models")
    from shaders.reference import dequantize

    source, path = lossy
    (tmp_path / "text.txt").write_text(TEXT)
    report = evaluate(Pack(path), open_source(source), replace(FAST, text=tmp_path / "text.txt", kv="f32"))

    ids = byte_tokenizer().encode(TEXT).ids
    original = transformers_models.load_model(source)
    changed = transformers_models.load_model(source)
    pack, parameters = Pack(path), dict(changed.named_parameters())
    stacked = {"qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "o": ["self_attn.o_proj"],
               "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}  # fmt: skip
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        parameters["model.embed_tokens.weight"].copy_(torch.from_numpy(dequantize(pack.tensor("embed"))))
        for layer in range(2):
            for name, parts in stacked.items():
                values, row = dequantize(pack.tensor(f"layers.{layer}.{name}")), 0
                for part in parts:
                    weight = parameters[f"model.layers.{layer}.{part}.weight"]
                    weight.copy_(torch.from_numpy(values[row : row + len(weight)]))
                    row += len(weight)
    window = ids[: 32 + 100]
    logits = [transformers_models.logits(model, window[:-1])[31:] for model in (original, changed)]
    p, q = (torch.log_softmax(torch.tensor(one, dtype=torch.float64), -1) for one in logits)
    kl = (p.exp() * (p - q)).sum(-1)
    loss = -q[torch.arange(100), window[32:]]
    quality = report["quality"]
    assert quality["scored_tokens"] == 100
    assert quality["kl"]["mean"] == pytest.approx(float(kl.mean()), rel=2e-3)
    assert quality["perplexity"]["pack"]["value"] == pytest.approx(float(loss.mean().exp()), rel=1e-3)


def test_windows_score_each_token_once_and_no_more_than_asked() -> None:
    ids = list(range(1000))
    windows = cut_windows(ids, 256, [7], None)
    assert [window.ids[0] for window in windows] == [7] * 4
    assert [token for window in windows for token in window.ids[1:]] == ids
    assert all(window.first == 32 for window in windows) and windows[0].targets[0] == windows[0].ids[32]
    assert sum(window.rows for window in cut_windows(ids, 256, [], 300)) == 300
    [short] = cut_windows(ids[:20], 256, [], None)
    assert short.first == 5 and short.rows == 15


def test_sums_are_the_same_each_time_and_right() -> None:
    found = generate_sums(4)
    assert found == generate_sums(4) and len(found) == 36 and len({one.question for one in found}) >= 34
    for one in found:
        left, sign, right = one.question.split()
        computed = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]
        assert one.answer == computed >= 0 and max(len(left), len(right)) == one.digits


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [("19", 19, True), (" 12 + 7 = 19.\n5 + 5 = 10", 19, True), ("The answer is **1,234**.", 1234, True),
     ("19.0", 19, True), ("119", 19, False), ("19.5", 19, False), ("", 0, False), ("nineteen", 19, False),
     ("-3", 3, False), ("\n\n8", 8, True)],
)  # fmt: skip
def test_answers_are_read(answer: str, expected: int, right: bool) -> None:
    assert is_right(answer, expected) is right


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_grades_have_the_published_borders() -> None:
    grades = [grade_of(kl) for kl in (0.0, 0.005, 0.0051, 0.07, 0.071, 0.2, 0.201, float("nan"))]
    assert grades == ["good", "good", "usable", "usable", "degraded", "degraded", "BROKEN", "BROKEN"]
    assert final_grade(0.001, exact=True) == "lossless" and final_grade(0.5, exact=True) == "BROKEN"


# --- whole evaluations ------------------------------------------------------------------------------------------------


def test_a_pack_against_itself_has_lost_nothing(lossy: tuple[Path, Path]) -> None:
    pack = Pack(lossy[1])
    options = EvalOptions(kv="f32", backend="numpy", tokens=60, sums=1, prompts=1, run_tokens=30)
    quality = evaluate(pack, subject_of_pack(pack), options)["quality"]
    assert quality["kl"]["max"] == 0 and quality["same_top"]["mean"] == 1
    assert quality["grade"] == "good"  # equal to a q4 pack is not lossless
    assert [answer["first_difference"] for answer in quality["greedy"]] == [None]
    assert {(run["activations"], run["kv"]) for run in quality["runs"]} == {
        ("f32", "f32"),
        ("f32", "f16"),
        ("f32", "q8"),
    }


@pytest.mark.parametrize("family", ["bitnet", "llama"])
def test_activations_of_every_kind_run(family: str, tmp_path: Path) -> None:
    """Coarser activations cost more; the pack's own program and the one built for its kind give the same."""
    pack = tiny_pack(tmp_path, family, options=ExportOptions(embedding="f16"))
    options = EvalOptions(kv="f32", backend="numpy", tokens=60, sums=0, prompts=0, run_tokens=60)
    quality = evaluate(Pack(pack), open_source(tmp_path / "checkpoint"), options)["quality"]
    kl = {run["activations"]: run["kl"]["mean"] for run in quality["runs"] if run["kv"] == "f32"}
    assert kl["f32"] <= kl["a16"] <= kl["a8"] and kl["f32"] < 1e-9 < kl["a8"]
    exported = tmp_path / "a8"
    export(tmp_path / "checkpoint", exported, ExportOptions(embedding="f16", activations="a8"))
    direct = evaluate(Pack(exported), open_source(tmp_path / "checkpoint"), replace(options, run_tokens=0))
    assert direct["quality"]["kl"]["mean"] == pytest.approx(kl["a8"], rel=1e-6)
    floats = tmp_path / "f32"
    export(tmp_path / "checkpoint", floats, ExportOptions(embedding="f16", activations="f32"))
    runs = evaluate(Pack(floats), open_source(tmp_path / "checkpoint"), options)["quality"]["runs"]
    [a8] = [run for run in runs if (run["activations"], run["kv"]) == ("a8", "f32")]
    assert a8["kl"]["mean"] == pytest.approx(kl["a8"], rel=1e-6)


def test_the_native_gpu_measures_what_numpy_does(tmp_path: Path) -> None:
    pack = Pack(tiny_pack(tmp_path, "llama"))
    options = EvalOptions(tokens=40, sums=0, prompts=1, run_tokens=40)
    reports = [
        evaluate(pack, open_source(tmp_path / "checkpoint"), replace(options, backend=backend))["quality"]
        for backend in ("numpy", "native")
    ]
    for one, other in zip(*(report["runs"] for report in reports), strict=True):
        assert one["kl"]["mean"] == pytest.approx(other["kl"]["mean"], rel=0.02), one["label"]
    values = [report["perplexity"]["pack"]["value"] for report in reports]
    assert values[0] == pytest.approx(values[1], rel=1e-3)
    assert reports[0]["greedy"] == reports[1]["greedy"]


def test_tensors_have_their_errors(lossy: tuple[Path, Path]) -> None:
    source, path = lossy
    report = evaluate(Pack(path), open_source(source), FAST)
    table = {entry["name"]: entry for entry in report["tensors"]}
    assert list(table) == [entry["name"] for entry in json.loads((path / "report.json").read_bytes())["tensors"]]
    for name, entry in table.items():
        assert entry["weight_error"] == pytest.approx(entry["error"], rel=1e-3, abs=1e-12), name
    qkv = table["layers.0.qkv"]
    assert 0.5 * qkv["weight_error"] < qkv["output_error"] < 2 * qkv["weight_error"]
    assert not qkv["exact"] and table["layers.0.input_norm"]["weight_error"] == 0


def test_the_command_writes_report_page_and_grade(tmp_path: Path, lossy: tuple[Path, Path]) -> None:
    source, path = lossy
    before = content(path)
    done = run_cli("eval", path, "--against", source, "--backend", "numpy", "--tokens", 60, "--sums", 1,
                   "--json", tmp_path / "r.json")  # fmt: skip
    assert done.status == 0 and "good" in done.out and "60 of Tercet's own text" in done.out, done.err
    pack = Pack(path)
    pack.verify()
    report = json.loads((path / "report.json").read_bytes())
    assert pack.manifest["grade"] == report["quality"]["grade"] == "good"
    assert json.loads((tmp_path / "r.json").read_bytes()) == report
    page = (path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "http" not in page.replace("http-equiv", "") and page.count("<svg") == 3
    changed = {name for name, found in content(path).items() if before.get(name) != found}
    assert changed == {"pack.json", "report.json", "report.html"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["checkpoint", "pack", "r.json"]


def test_names_in_the_page_are_text(tmp_path: Path) -> None:
    source = float_checkpoint(tmp_path / "<i>source&")
    export(source, tmp_path / "pack", ExportOptions(policy="q8", name="<script>alert(1)</script>"))
    assert run_cli("eval", tmp_path / "pack", "--against", source, "--backend", "numpy", "--tokens", 40).status == 0
    page = (tmp_path / "pack" / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "&lt;script&gt;" in page and "<i>source" not in page


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_a_damaged_pack_is_broken(lossy: tuple[Path, Path]) -> None:
    source, path = lossy
    damage(path)
    assert run_cli("eval", path, "--against", source, "--backend", "numpy", "--tokens", 60, "--sums", 0).status == 0
    assert Pack(path).manifest["grade"] == "BROKEN"
    assert "BROKEN" in (path / "report.html").read_text(encoding="utf-8")


def test_export_refuses_a_broken_pack_unless_that_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in another order stand for a conversion that destroys the model."""
    from packer import encodings, export_gate, tensors

    monkeypatch.setattr(export_gate, "GATE", replace(GATE, backend="numpy", tokens=60, sums=0, prompts=0))
    source = float_checkpoint(tmp_path / "checkpoint")

    def ruined(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes, scales = encodings.encode_q8(values)
        return np.random.default_rng(2).permutation(codes), scales

    good = run_cli("export", source, "--out", tmp_path / "good", "--policy", "q8")
    assert good.status == 0 and Pack(tmp_path / "good").manifest["grade"] == "good", good.err
    unmeasured = run_cli("export", source, "--out", tmp_path / "unmeasured", "--policy", "q8", "--no-eval")
    assert unmeasured.status == 0 and Pack(tmp_path / "unmeasured").manifest["grade"] is None

    real = tensors.TensorEncoder._encode

    def encode(self: Any, matrix: Any, values: np.ndarray, encoding: str, tensor_scale: Any) -> Any:
        if encoding == "q8" and not matrix.is_embedding:
            return ruined(values)
        return real(self, matrix, values, encoding, tensor_scale)

    monkeypatch.setattr(tensors.TensorEncoder, "_encode", encode)
    refused = run_cli("export", source, "--out", tmp_path / "pack", "--policy", "q8")
    one_error(refused, "BROKEN", "--accept-damage", tmp_path / "pack")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["checkpoint", "good", "unmeasured"]
    accepted = run_cli("export", source, "--out", tmp_path / "pack", "--policy", "q8", "--accept-damage")
    assert accepted.status == 0 and "BROKEN" in accepted.out, accepted.err
    pack = Pack(tmp_path / "pack")
    pack.verify()
    assert pack.manifest["grade"] == "BROKEN"


def test_exact_packs_are_exported_without_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packer.export_gate.evaluate", lambda *_: pytest.fail("evaluated"))
    tiny_pack(tmp_path)
    assert run_cli("export", tmp_path / "checkpoint", "--out", tmp_path / "again").status == 0


# --- comparing --------------------------------------------------------------------------------------------------------


def test_packs_are_ranked_by_damage_and_unmeasured_ones_come_last(tmp_path: Path) -> None:
    source = float_checkpoint(tmp_path / "checkpoint")
    for name, encoding in (("a-broken", "q4"), ("b-q4", "q4"), ("c-q8", "q8"), ("d-unmeasured", "q8")):
        export(source, tmp_path / name, ExportOptions(keep=(f"layers.*={encoding}",), name=name))
    damage(tmp_path / "a-broken")
    for name in ("a-broken", "b-q4", "c-q8"):
        run_cli("eval", tmp_path / name, "--against", source, "--backend", "numpy", "--tokens", 60, "--sums", 0)
    paths = [tmp_path / name for name in ("d-unmeasured", "a-broken", "b-q4", "c-q8")]
    rows = compare_packs(paths)
    assert [row["name"] for row in rows] == ["c-q8", "b-q4", "a-broken", "d-unmeasured"]
    assert [row["rank"] for row in rows] == [1, 2, 3, None] and all(row["same_measure"] for row in rows)
    shown = run_cli("compare", *paths)
    assert shown.status == 0 and "not measured" in shown.out and "BROKEN" in shown.out
    assert [row["name"] for row in json.loads(run_cli("compare", *paths, "--json").out)] == [r["name"] for r in rows]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_gives_one_error_and_leaves_the_pack(tmp_path: Path, lossy: tuple[Path, Path]) -> None:
    source, path = lossy
    before = content(path)
    other = write_folder(
        tmp_path / "other", tiny_config("llama", vocab_size=280), tiny_tensors(tiny_config("llama", vocab_size=280))
    )
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("Hello")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 20)
    cases: list[tuple[tuple[object, ...], tuple[object, ...]]] = [
        ((tmp_path / "none", "--against", source), ("none", "no such folder")),
        ((path, "--against", tmp_path / "none"), ("none", "no such file")),
        ((path, "--against", other), ("vocabulary of 280", "272")),
        ((path, "--against", source, "--text", tmp_path / "empty.txt"), ("empty.txt", "empty")),
        ((path, "--against", source, "--text", tmp_path / "short.txt"), ("short.txt", "5 tokens", "at least 16")),
        ((path, "--against", source, "--text", tmp_path / "latin.txt"), ("latin.txt", "UTF-8")),
        ((path, "--against", source, "--text", tmp_path / "none.txt"), ("none.txt", "cannot be read")),
        ((path, "--against", source, "--json", tmp_path / "no" / "r.json"), ("r.json", "cannot be written")),
    ]
    for arguments, words in cases:
        one_error(run_cli("eval", *arguments, "--backend", "numpy"), *words)
    one_error(run_cli("compare", path, tmp_path / "none"), "none", "no such folder")
    assert content(path) == before


def test_the_calibration_text_is_no_evaluation_text(tmp_path: Path, lossy: tuple[Path, Path]) -> None:
    source, path = lossy
    (tmp_path / "text.txt").write_text(TEXT)
    report = json.loads((path / "report.json").read_bytes())
    report["calibration"] = {"sha256": hashlib.sha256(TEXT.encode()).hexdigest()}
    text = json.dumps(report)
    (path / "report.json").write_text(text)
    from tests.support.packs import relist

    relist(path)
    with pytest.raises(PackerError, match="calibrated with this very text"):
        evaluate(Pack(path), open_source(source), replace(FAST, text=tmp_path / "text.txt"))
    quality = evaluate(Pack(path), open_source(source), FAST)["quality"]
    assert quality["calibration_sha256"] == report["calibration"]["sha256"] != quality["text"]["sha256"]


def test_an_interrupted_run_leaves_the_pack_as_it_was(
    lossy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = lossy
    before = content(path)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for module, name in ((evaluation, "compare_tensors"), (shutil, "copyfile"), (Path, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, stop)
            done = run_cli("eval", path, "--against", source, "--backend", "numpy", "--tokens", 40, "--sums", 0)
        assert done.status == 130 and "as it was" in done.err
        assert content(path) == before and [one.name for one in path.parent.iterdir() if one.name[0] == "."] == []
