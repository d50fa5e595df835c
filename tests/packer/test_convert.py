"""Models that were not trained ternary: policies, globs, planes in a pack, calibration, and what the command says."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.checkpoints import open_checkpoint
from packer.encodings import encode_f32
from packer.eval_run import with_activations
from packer.eval_tensors import measure
from packer.export import ExportOptions, export
from packer.models import Matrix, build_model
from packer.pack import Pack
from packer.planes import fit_planes
from packer.policy import Policy, use_more_bits
from shaders.case_kit import random_weight
from shaders.interpreter import ReferenceModel
from shaders.native import NativeModel, shared_device
from shaders.reference import dequantize
from shaders.rewrite import rewrite
from shaders.weights import WeightTensor
from tests.engine.node import node_json
from tests.support.checkpoints import tiny_config, tiny_tensors, write_folder
from tests.support.cli import one_error, run_cli

IDS = [72, 101, 108, 108, 111, 32, 119, 111, 114]
LINEARS = ("qkv", "o", "gate_up", "down")
TEXT = "A tailor cut his cloth by the light of two candles, and the third he kept for Sundays. " * 6


def float_model(folder: Path, **changes: Any) -> Path:
    """A tiny Llama whose linears are Gaussian; ``ternary`` names parts that stay exactly ternary."""
    ternary = changes.pop("ternary", ())
    config = tiny_config("llama", **changes)
    tensors, random = tiny_tensors(config), np.random.default_rng(1)
    for name, array in tensors.items():
        if "_proj.weight" in name and not any(part in name for part in ternary):
            tensors[name] = (0.1 * random.standard_normal(array.shape)).astype(np.float32)
    return write_folder(folder, config, tensors)


def encodings(pack: Path) -> dict[str, str]:
    """Of the matrices."""
    return {name: entry.encoding for name, entry in Pack(pack).entries.items() if len(entry.shape) == 2}


def reports(pack: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads((pack / "report.json").read_bytes())["tensors"]}


def matrices(config: dict[str, Any]) -> list[Matrix]:
    tied = config["tie_word_embeddings"]
    model = build_model(config, Path("model"), [] if tied else ["lm_head.weight"])
    return [tensor for tensor in model.tensors() if isinstance(tensor, Matrix)]


# --- policies and globs -----------------------------------------------------------------------------------------------


def test_the_wider_tensors_are_the_published_ones() -> None:
    """llama.cpp, ``use_more_bits`` for 30 layers."""
    wide = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    assert [layer for layer in range(30) if use_more_bits(layer, 30)] == wide
    all_of_them = matrices(tiny_config("llama", num_hidden_layers=30))
    policy = Policy("q4km", (), all_of_them, 30, True)
    for matrix in all_of_them[1:]:
        _, layer, kind = matrix.name.split(".")
        expected = "q8" if kind in ("qkv", "down") and int(layer) in wide else "q4a"
        assert {choice.encoding for choice in policy.linears(matrix)} == {expected}, matrix.name


@pytest.mark.parametrize(
    ("policy", "tied", "embed", "head"),
    [("q4km", True, "q8", None), ("q4km", False, "q4a", "q8"), ("q8", False, "q8", "q8"),
     ("ternary", False, None, None), ("all-fp4", False, "nvfp4", "nvfp4"), (None, False, None, None)],
)  # fmt: skip
def test_embedding_and_head(policy: str | None, tied: bool, embed: str | None, head: str | None) -> None:
    found = matrices(tiny_config("llama", tie_word_embeddings=tied))
    choices = Policy(policy, (), found, 2, tied)
    assert choices.embedding(found[0]).encoding == embed
    assert tied or choices.embedding(found[-1]).encoding == head


@pytest.mark.parametrize(
    ("glob", "hit"),
    [("layers.0.qkv", "0.qkv"), ("layers.0.q_proj", "0.q"), ("layers.0.self_attn.q_proj", "0.q"),
     ("model.layers.0.self_attn.q_proj.weight", "0.q"), ("layers.[01].*", "0.qkv 0.rest 1.qkv 1.rest"),
     ("layers.*.v_proj", "0.v 1.v 2.v"), ("lm_head", "embed"), ("embed", "embed"),
     ("model.embed_tokens.weight", "embed"), ("*", "embed 0.qkv 0.rest 1.qkv 1.rest 2.qkv 2.rest")],
)  # fmt: skip
def test_globs_match_every_name_of_a_linear(glob: str, hit: str) -> None:
    found = matrices(tiny_config("llama", num_hidden_layers=3))
    policy = Policy("q8", (f"{glob}=q4",), found, 3, True)
    expected = set()
    for one in hit.split():
        layer, _, kind = one.partition(".")
        rest = ("o_proj", "gate_proj", "up_proj", "down_proj")
        kinds = {"qkv": ("q_proj", "k_proj", "v_proj"), "rest": rest}.get(kind, (f"{kind}_proj",))
        expected |= {"embed"} if one == "embed" else {f"layers.{layer}.{name}" for name in kinds}
    kept = {"embed"} if policy.embedding(found[0]).kept else set()
    for matrix in found[1:]:
        for (name, _), choice in zip(matrix.sources, policy.linears(matrix), strict=True):
            if choice.kept:
                kept.add(re.sub(r"^model|self_attn\.|mlp\.|\.weight$", "", name).strip("."))
    assert kept == expected


def test_the_last_glob_counts_and_exact_linears_stay(tmp_path: Path) -> None:
    source = float_model(tmp_path / "model", ternary=("layers.0",), tie_word_embeddings=False)
    keep = ("*=mxfp4", "layers.1.*=q8", "lm_head=q4", "layers.0.down_proj=q8")
    export(source, tmp_path / "kept", ExportOptions(policy="ternary", keep=keep))
    expected = {"embed": "mxfp4", "lm_head": "q4"} | {f"layers.0.{name}": "mxfp4" for name in LINEARS}
    expected |= {f"layers.1.{name}": "q8" for name in LINEARS} | {"layers.0.down": "q8"}
    assert encodings(tmp_path / "kept") == expected
    export(source, tmp_path / "stays", ExportOptions(policy="all-fp4", keep=("layers.0.*=ternary",)))
    found = encodings(tmp_path / "stays")
    assert {found[f"layers.0.{name}"] for name in LINEARS} == {"ternary"}
    assert {found[f"layers.1.{name}"] for name in LINEARS} | {found["embed"], found["lm_head"]} == {"nvfp4"}
    listed = reports(tmp_path / "stays")
    assert listed["layers.0.o"]["choice"] == "exactly ternary" and listed["layers.0.o"]["exact"] is True
    assert listed["layers.1.o"]["choice"] == "--policy all-fp4" and listed["layers.1.o"]["exact"] is False
    assert Pack(tmp_path / "stays").manifest["linears"] == {"total": 14, "exact": 7}


def test_a_fused_matrix_takes_the_widest_of_its_parts(tmp_path: Path) -> None:
    source = float_model(tmp_path / "model", ternary=("k_proj",))
    export(
        source, tmp_path / "pack", ExportOptions(policy="ternary", keep=("layers.0.v_proj=q8", "layers.1.q_proj=q4"))
    )
    found, listed = encodings(tmp_path / "pack"), reports(tmp_path / "pack")
    assert (found["layers.0.qkv"], found["layers.1.qkv"], found["layers.0.o"]) == ("q8", "q4", "ternary")
    assert listed["layers.0.qkv"]["choice"] == "--keep layers.0.v_proj=q8; the widest of ternary, ternary, q8"
    assert listed["layers.0.gate_up"]["choice"] == "--policy ternary"


def test_an_embedding_that_is_asked_for_goes_before_the_policy(tmp_path: Path) -> None:
    source = float_model(tmp_path / "model")
    export(source, tmp_path / "pack", ExportOptions(policy="all-fp4", embedding="f16"))
    assert encodings(tmp_path / "pack")["embed"] == "f16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("q_proj", "--policy q8", "--policy q4km", "--keep", "--ternary-planes 3")),
        (("--keep", "layers.0.*=q8"), ("model.layers.1.self_attn.q_proj", "--policy q8")),
        (("--policy", "q3"), ("--policy", "q3", "q4km")),
        (("--policy", "q8", "--keep", "layers.9.*=q8"), ("layers.9.*=q8", "layers.0.q_proj", "embed")),
        (("--policy", "q8", "--keep", "layers.0.*=q5"), ("layers.0.*=q5", "q4a", "nvfp4")),
        (("--policy", "q8", "--keep", "layers.0.*="), ("--keep layers.0.*=", "nothing")),
        (("--policy", "q8", "--keep", "q8"), ("--keep q8", "GLOB=ENCODING")),
        (("--policy", "q8", "--keep", "=q8"), ("--keep =q8", "GLOB=ENCODING")),
        (("--policy", "ternary", "--keep", "*=ternary"), ("--keep *=ternary", "embed", "layers.*=ternary")),
        (("--policy", "q8", "--ternary-planes", "2"), ("--ternary-planes", "--policy ternary")),
        (("--policy", "ternary", "--ternary-planes", "4"), ("--ternary-planes", "equal to 3")),
        (("--policy", "q8", "--compensate"), ("--compensate", "--policy ternary")),
        (("--policy", "ternary", "--calibration", "x.txt"), ("--calibration", "--compensate")),
        (("--policy", "ternary", "--compensate", "--calibration", "none.txt"), ("none.txt", "cannot be read")),
        (("--policy", "ternary", "--compensate", "--calibration", "short.txt"), ("short.txt", "5 tokens", "64")),
        (("--policy", "ternary", "--compensate", "--calibration", "bad.txt"), ("bad.txt", "not UTF-8")),
        (("--policy", "ternary", "--compensate", "--calibration", "eval.txt"), ("eval.txt", "measured")),
    ],
)
def test_options_that_cannot_be_followed(
    options: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = float_model(tmp_path / "model")
    (tmp_path / "short.txt").write_text("Five.")
    (tmp_path / "bad.txt").write_bytes(b"\xff" * 99)
    (tmp_path / "eval.txt").write_bytes(files("packer").joinpath("eval_text.txt").read_bytes())
    monkeypatch.chdir(tmp_path)
    one_error(run_cli("export", source, "--out", tmp_path / "pack", *options), *words)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["bad.txt", "eval.txt", "model", "short.txt"]


# --- planes in a pack -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(checkpoint with biases, pack of three planes)."""
    folder = tmp_path_factory.mktemp("planes")
    source = float_model(folder / "model", attention_bias=True)
    export(source, folder / "pack", ExportOptions(policy="ternary", ternary_planes=3, shard_mib=1))
    return source, folder / "pack"


def test_a_matrix_is_the_sum_of_its_planes(planes: tuple[Path, Path]) -> None:
    source, path = planes
    pack, listed = Pack(path), reports(path)
    pack.verify()
    values = open_checkpoint(source).rows("model.layers.1.mlp.down_proj.weight")
    names = ["layers.1.down", "layers.1.down.plane1", "layers.1.down.plane2"]
    total = sum(dequantize(pack.tensor(name)) for name in names)
    np.testing.assert_allclose(total, fit_planes(values, 3).values(), atol=1e-6)
    expected = np.sqrt(np.square(total - values).sum() / np.square(values).sum())
    assert 0.02 < expected < 0.09
    for plane, name in enumerate(names):
        entry = listed[name]
        assert (entry["planes"], entry["plane"], entry["choice"]) == (3, plane, "--policy ternary")
        assert entry["error"] == pytest.approx(expected, rel=1e-3) and entry["exact"] is False
        assert entry["linears"] == ([] if plane else ["model.layers.1.mlp.down_proj.weight"])
    manifest = pack.manifest
    weights = {name: entry.shape for name, entry in pack.entries.items() if ".plane" not in name}
    assert manifest["parameters"] == sum(int(np.prod(shape)) for shape in weights.values())
    assert manifest["activations"] == "a16" and manifest["linears"] == {"total": 14, "exact": 0}
    assert manifest["grade"] is None and 3 * 1.6 < manifest["ternary_bits_per_weight"] < 3 * 2.3


def test_executors_add_the_planes(planes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, on a CPU renderer's operations and on a GPU's, give what one float matrix with the sum gives."""
    pack, rows = Pack(planes[1]), len(IDS)
    tensors = pack.tensors()
    first = [op for op in pack.program["body"] if ".plane" not in op.get("w", "")]
    assert len(pack.program["body"]) - len(first) == 2 * 2 * 4
    whole = dict(tensors)
    for name in [name for name in tensors if f"{name}.plane1" in tensors]:
        total = sum(dequantize(tensors[each]) for each in (name, f"{name}.plane1", f"{name}.plane2"))
        padded = np.pad(total, ((0, 0), (0, -total.shape[1] % 4)))
        whole[name] = WeightTensor(name, "f32", tensors[name].shape, padded)
    plain = with_activations(pack.program | {"body": first}, "a16", "f32", set())
    expected = ReferenceModel(plain, whole, capacity=32).step(IDS, rows)

    def difference(found: np.ndarray) -> float:
        return float(np.abs(found - expected[-len(found) :]).max() / np.ptp(expected))

    assert difference(ReferenceModel(pack.program, tensors, capacity=32).step(IDS, rows)) < 1e-3
    assert difference(ReferenceModel(pack.program | {"body": first}, tensors, capacity=32).step(IDS, rows)) > 0.02
    for software in (True, False):
        monkeypatch.setattr(shared_device(), "software", software)
        with NativeModel(pack.program, tensors, capacity=32, speculate="off") as native:
            assert difference(native.step(IDS, rows)) < 1e-3
            native.truncate(rows - 1)
            assert difference(native.step(IDS[-1:])) < 1e-3


def test_both_rewriters_keep_a_value_that_planes_read(planes: tuple[Path, Path]) -> None:
    program = Pack(planes[1]).program
    asked = [
        {"ops": program["body"], "later": program["logits"], "refused": [], "software": software, "keys": keys}
        for software in (False, True) for keys in (64, 512)
    ]  # fmt: skip
    made = [rewrite(one["ops"], one["later"], lambda op: True, one["software"], one["keys"]) for one in asked]
    assert node_json("rewrite_answers.mjs", asked) == made
    for ops in made:
        assert not any(op["op"].endswith("_linear") for op in ops)  # each activation feeds three products
        written = {"h"}
        for op in ops:
            reads = [op[field] for field in ("x", "q") if field in op]
            assert not [value for value in reads if value not in written and value not in ("@ids",)], op
            written.add(op.get("out", ""))


def test_the_same_source_gives_the_same_bytes(planes: tuple[Path, Path], tmp_path: Path) -> None:
    source = planes[0]
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    options = ExportOptions(policy="ternary", ternary_planes=2, compensate=True, calibration=text)
    for name in ("one", "two"):
        export(source, tmp_path / name, options)
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two


def test_eval_compares_a_matrix_with_the_sum_of_its_planes() -> None:
    rng = np.random.default_rng(5)
    first, second = (random_weight(rng, "ternary", 6, 130, group=64) for _ in range(2))
    whole = WeightTensor("w", "f32", first.shape, encode_f32(dequantize(first) + dequantize(second)))
    inputs = rng.standard_normal((3, 130)).astype(np.float32)
    together, alone = measure(whole, first, inputs, [second]), measure(whole, first, inputs)
    assert together["weight_error"] == together["output_error"] == 0 and together["exact"]
    assert alone["weight_error"] > 0.3 and not alone["exact"]
