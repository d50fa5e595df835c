"""Exports: the same bytes again, shards within their limit, nothing half-written, little memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import load_file, save_file

from packer import writer
from packer.errors import PackerError
from packer.export import ExportOptions, export
from packer.manifest import TensorEntry
from packer.pack import Pack
from packer.writer import PackWriter
from shaders.reference import dequantize, unpack_trits
from tests.packer.gguf_files import write_model
from tests.support.checkpoints import change_json, tiny_checkpoint, tiny_config, tiny_tensors, write_folder
from tests.support.cli import ROOT, one_error, run_cli, start_cli
from tests.support.packs import tiny_pack


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def only(folder: Path) -> list[str]:
    """Names in a folder, hidden ones too."""
    return sorted(os.listdir(folder))


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [ExportOptions(), ExportOptions(keep=("layers.*=q4",), embedding="q4", shard_mib=1)], ids=str
)
def test_the_same_source_gives_the_same_bytes(options: ExportOptions, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    export(source, tmp_path / "one", options)
    time.sleep(1.1)  # a time written in seconds would differ
    shutil.copytree(source, tmp_path / "elsewhere" / "model")
    export(tmp_path / "elsewhere" / "model", tmp_path / "deep" / "er" / "two", options)
    assert contents(tmp_path / "one") == contents(tmp_path / "deep" / "er" / "two")


def test_a_gguf_file_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        source = write_model(tmp_path / folder / "model.gguf", [Q.TQ2_0, Q.Q8_0])
        export(source, tmp_path / folder / "pack", ExportOptions(policy="q8"))
        Pack(tmp_path / folder / "pack").verify()
    assert contents(tmp_path / "a" / "pack") == contents(tmp_path / "b" / "pack")
    assert Pack(tmp_path / "a" / "pack").manifest["name"] == "model"  # the file's name without its suffix


def test_shards_of_the_source_do_not_matter(tmp_path: Path) -> None:
    export(tiny_checkpoint(tmp_path / "a" / "model"), tmp_path / "single", ExportOptions())
    export(tiny_checkpoint(tmp_path / "b" / "model", shards=3), tmp_path / "sharded", ExportOptions())
    single, sharded = contents(tmp_path / "single"), contents(tmp_path / "sharded")
    assert len(json.loads(sharded["pack.json"])["source"]["files"]) == 3
    for name in single.keys() | sharded.keys():
        if name != "pack.json":  # it names the source's files
            assert single[name] == sharded[name], name


@pytest.mark.parametrize("embedding", ["q8", "q4", "nvfp4", "f16"])
@pytest.mark.parametrize("columns", [1024, 1023])
def test_large_tensors_are_cut_into_slices_and_shards(embedding: str, columns: int, tmp_path: Path) -> None:
    changes = {"vocab_size": 3000, "hidden_size": columns, "num_hidden_layers": 1, "intermediate_size": 1700}
    source = tiny_checkpoint(tmp_path / "model", "llama", **changes)
    export(source, tmp_path / "pack", ExportOptions(embedding=embedding, shard_mib=1))
    pack = Pack(tmp_path / "pack")
    pack.verify()
    shards = pack.manifest["shards"]
    assert len(shards) > 3
    assert all(shard["bytes"] == (pack.path / shard["file"]).stat().st_size <= 1 << 20 for shard in shards)
    assert [shard["file"] for shard in shards] == [f"weights-{i + 1:05d}.safetensors" for i in range(len(shards))]
    slices = pack.entries["embed"].slices
    assert len(slices) > 1 and sum(slices) == 3000
    assert all(rows % 64 == 0 for rows in slices[:-1])
    # Put together again they are what one slice would hold.
    export(source, tmp_path / "whole", ExportOptions(embedding=embedding, shard_mib=63))
    whole = Pack(tmp_path / "whole")
    assert whole.entries["embed"].slices == (3000,)
    for name, tensor in pack.tensors().items():
        np.testing.assert_array_equal(tensor.data, whole.tensor(name).data)
        np.testing.assert_array_equal(tensor.scales, whole.tensor(name).scales)
        assert tensor.tensor_scale == whole.tensor(name).tensor_scale


def test_tensors_come_in_the_order_of_first_use(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model", tie_word_embeddings=False, vocab_size=12000, num_hidden_layers=3)
    export(source, tmp_path / "pack", ExportOptions(shard_mib=1, embedding="f16"))
    pack = Pack(tmp_path / "pack")
    shard_of = {name: pack._where[next(iter(entry.keys()))].name for name, entry in pack.entries.items()}
    used = ["embed", *(f"layers.{layer}.down" for layer in range(3)), "lm_head"]
    assert [shard_of[name] for name in used] == sorted(shard_of[name] for name in used)
    assert shard_of["embed"] != shard_of["lm_head"]


def test_the_manifest_describes_the_pack(tmp_path: Path) -> None:
    changes = {"num_key_value_heads": 2, "max_position_embeddings": 99, "attention_bias": True}
    source = tiny_checkpoint(tmp_path / "model", "bitnet", **changes)
    (source / "LICENSE").write_text("terms\n")
    (source / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n")
    result = export(source, tmp_path / "pack", ExportOptions(description="For tests."))
    pack = Pack(tmp_path / "pack")
    manifest = pack.manifest
    layer = 120 * 72 + 72 * 72 + 200 * 72 + 72 * 100
    norms = 2 * 72 + 72 + 100 + 120 + 72  # two norms, two sub-norms, biases of qkv and o
    assert manifest["parameters"] == 272 * 72 + 2 * (layer + norms) + 72
    assert manifest["name"] == "model" and manifest["description"] == "For tests."
    assert (manifest["license"], manifest["family"]) == ("apache-2.0", "bitnet")
    assert manifest["context_length"] == 99 and manifest["vocab_size"] == 272
    assert manifest["kv"] == {"layers": 2, "kv_heads": 2, "head_dim": 12}
    shard_bytes = sum(file.stat().st_size for file in (tmp_path / "pack").glob("*.safetensors"))
    assert manifest["bits_per_weight"] == pytest.approx(8 * shard_bytes / manifest["parameters"], abs=1e-4)
    # qkv and gate_up have three and two f32 scales, the others one; 72 columns take 16 bytes, 100 take 20.
    ternary_bytes = 2 * ((120 + 72 + 200) * 16 + 72 * 20 + 4 * (3 + 1 + 2 + 1))
    assert manifest["ternary_bits_per_weight"] == pytest.approx(8 * ternary_bytes / (2 * layer), abs=1e-4)
    assert manifest["resident_bytes"] == sum(tensor.resident_bytes for tensor in pack.tensors().values())
    assert (tmp_path / "pack" / "LICENSE").read_text() == "terms\n"
    assert result.bytes == sum(file.stat().st_size for file in (tmp_path / "pack").iterdir())
    report = json.loads((tmp_path / "pack" / "report.json").read_bytes())
    assert [item["name"] for item in report["tensors"]] == list(result_names(result))
    assert set(pack.entries) == {item["name"] for item in report["tensors"]}


def result_names(result: object) -> list[str]:
    return [report.name for report in result.tensors]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("folder", "name"), [("bitnet-1.58bit-3B", "bitnet-1.58bit-3B"), ("m", "m")])
def test_a_pack_is_named_after_its_source(folder: str, name: str, tmp_path: Path) -> None:
    """A dot in a folder's name begins no suffix."""
    export(tiny_checkpoint(tmp_path / folder), tmp_path / "pack", ExportOptions())
    assert Pack(tmp_path / "pack").manifest["name"] == name


def test_names_that_are_no_unicode_are_made_printable(tmp_path: Path) -> None:
    """Arguments and file names are bytes to the system; here a lone byte FF, and half a surrogate pair in a file."""
    source = tiny_checkpoint(tmp_path / "model").rename(tmp_path / os.fsdecode(b"model \xff"))
    (source / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "chat_template": "x", "y": "\\ud83d"}')
    assert run_cli("export", source, "--out", tmp_path / "one").status == 0
    assert run_cli("export", source, "--out", tmp_path / "two", "--name", os.fsdecode(b"\xfe")).status == 0
    assert [Pack(tmp_path / name).manifest["name"] for name in ("one", "two")] == ["model ?", "?"]
    assert json.loads((tmp_path / "one" / "tokenizer_config.json").read_bytes())["y"] == "\ud83d"


@pytest.mark.parametrize(
    ("family", "scheme", "options", "activations"),
    [
        ("llama", None, ExportOptions(), "a16"),
        ("llama", None, ExportOptions(activations="a8"), "a8"),
        ("llama", None, ExportOptions(activations="f32"), "f32"),
        ("bitnet", {"linear_class": "autobitlinear", "quantization_mode": "online"}, ExportOptions(), "a8"),
        ("bitnet", {"linear_class": "autobitlinear"}, ExportOptions(activations="a16"), "a16"),
    ],
)
def test_activations(
    family: str, scheme: dict | None, options: ExportOptions, activations: str, tmp_path: Path
) -> None:
    """a8 where the checkpoint was trained with them, else a16; f32 where nothing is ternary."""
    source = tiny_checkpoint(tmp_path / "model", family)
    if scheme is not None:
        change_json(source / "config.json", quantization_config={"quant_method": "bitnet", **scheme})
    export(source, tmp_path / "pack", options)
    pack = Pack(tmp_path / "pack")
    assert pack.manifest["activations"] == activations
    dtypes = {value["dtype"] for value in pack.program["values"].values()}
    assert dtypes == ({"f32"} if activations == "f32" else {"f32", activations})


def test_kinds_of_scales_are_kept(tmp_path: Path) -> None:
    """A scale a tensor, a row or a group of columns, and parts of different kinds; all without loss."""
    config = tiny_config("llama", hidden_size=192, num_hidden_layers=1)
    tensors = tiny_tensors(config)
    random = np.random.default_rng(0)

    def scaled(name: str, scales: np.ndarray) -> None:
        trits = np.sign(tensors[f"model.layers.0.{name}.weight"])
        trits[:, ::64] = 1
        tensors[f"model.layers.0.{name}.weight"] = (trits * scales).astype(np.float32)

    scaled("self_attn.q_proj", random.uniform(1, 2, (72, 1)))
    scaled("self_attn.o_proj", random.uniform(1, 2, (192, 1)))
    for name in ("gate", "up"):
        groups = random.uniform(1, 2, (100, 3)).astype(np.float16)
        scaled(f"mlp.{name}_proj", np.repeat(groups, 64, axis=1))
    export(write_folder(tmp_path / "model", config, tensors), tmp_path / "pack", ExportOptions())
    pack = Pack(tmp_path / "pack")
    pack.verify()
    kinds = {name: (entry.scale, entry.group) for name, entry in pack.entries.items() if entry.encoding == "ternary"}
    assert kinds == {
        "layers.0.qkv": ("row", 0),  # by row and twice by part
        "layers.0.o": ("row", 0),
        "layers.0.gate_up": ("group", 64),
        "layers.0.down": ("parts", 0),
    }
    sources = {
        "layers.0.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "layers.0.o": ["self_attn.o_proj"],
        "layers.0.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "layers.0.down": ["mlp.down_proj"],
    }
    for name, parts in sources.items():
        expected = np.concatenate([tensors[f"model.layers.0.{part}.weight"] for part in parts])
        np.testing.assert_array_equal(dequantize(pack.tensor(name)), expected)


def test_floats_with_several_scales_a_matrix_are_kept(tmp_path: Path) -> None:
    """As TriLM has them, one for each device it was trained on: by blocks of rows, and of columns where a layer is cut
    the other way; in bfloat16, bit for bit."""
    config = tiny_config("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=1)
    tensors = tiny_tensors(config)
    random = np.random.default_rng(0)
    for name, array in tensors.items():
        if "_proj." not in name:
            continue
        blocks = random.uniform(0.01, 0.1, 4).astype(ml_dtypes.bfloat16).astype(np.float32)
        rows, columns = array.shape
        scales = np.repeat(blocks, columns // 4)[None] if "down_proj" in name else np.repeat(blocks, rows // 4)[:, None]
        tensors[name] = (np.sign(array) * scales).astype(ml_dtypes.bfloat16)
    export(write_folder(tmp_path / "model", config, tensors), tmp_path / "pack", ExportOptions())
    pack = Pack(tmp_path / "pack")
    assert pack.manifest["linears"] == {"total": 7, "exact": 7}
    kinds = {name: (entry.scale, entry.group) for name, entry in pack.entries.items() if entry.encoding == "ternary"}
    assert kinds == {
        "layers.0.qkv": ("row", 0), "layers.0.o": ("row", 0), "layers.0.gate_up": ("row", 0),
        "layers.0.down": ("group", 256)}  # fmt: skip
    for report in json.loads((tmp_path / "pack" / "report.json").read_bytes())["tensors"]:
        if report["linears"]:
            assert report["exact"]
            expected = np.concatenate([tensors[name].astype(np.float32) for name in report["linears"]])
            np.testing.assert_array_equal(dequantize(pack.tensor(report["name"])), expected)


def test_the_summary_says_what_is_exact(tmp_path: Path) -> None:
    config = tiny_config("llama", num_hidden_layers=3)
    tensors = tiny_tensors(config)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.random.default_rng(0).standard_normal(tensors[name].shape).astype(np.float32)
    source = write_folder(tmp_path / "model", config, tensors)
    result = run_cli("export", source, "--out", tmp_path / "pack", "--policy", "q8")
    assert (
        "20 of 21 linears are exactly the checkpoint's ternary weights; embedding q8: an approximation; "
        "1 of them in q8: an approximation" in " ".join(result.out.split())
    )
    assert Pack(tmp_path / "pack").manifest["linears"] == {"total": 21, "exact": 20}


def test_a_matrix_that_is_ternary_in_part_takes_the_encoding_of_the_rest(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = tiny_tensors(config)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = np.random.default_rng(0).standard_normal(tensors[name].shape).astype(np.float32)
    export(write_folder(tmp_path / "model", config, tensors), tmp_path / "pack", ExportOptions(policy="q8"))
    pack = Pack(tmp_path / "pack")
    assert pack.entries["layers.0.qkv"].encoding == "q8" and pack.entries["layers.1.qkv"].encoding == "ternary"
    found = dequantize(pack.tensor("layers.0.qkv"))
    # Ternary rows have one magnitude, which q8 holds to the rounding of its f16 scale.
    np.testing.assert_allclose(found[:72], tensors["model.layers.0.self_attn.q_proj.weight"], rtol=2**-11)
    np.testing.assert_allclose(found[72:96], tensors[name], atol=0.02)
    assert pack.manifest["activations"] == "a16" and pack.manifest["grade"] is None


def test_the_report_measures_the_error(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    for embedding, low, high in (("f16", 0, 0), ("q8", 1e-4, 0.01), ("q4", 0.01, 0.15)):
        result = export(source, tmp_path / embedding, ExportOptions(embedding=embedding))
        report = next(report for report in result.tensors if report.name == "embed")
        stored = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
        error = dequantize(Pack(result.path).tensor("embed")) - stored
        assert low <= report.error <= high
        assert report.error == pytest.approx(np.sqrt(np.square(error).sum() / np.square(stored).sum()), rel=1e-3)
        assert report.exact == (embedding == "f16")
        assert result.manifest["grade"] == ("lossless" if embedding == "f16" else None)
    down = next(report for report in result.tensors if report.name == "layers.0.down")
    trits = unpack_trits(Pack(result.path).tensor("layers.0.down").data, 100)
    assert down.zeros == (trits == 0).mean() and down.exact


def test_harmless_extra_tensors_are_left_out(tmp_path: Path) -> None:
    config = tiny_config("llama")
    plain = tiny_tensors(config)
    extra = {
        "lm_head.weight": plain["model.embed_tokens.weight"],  # the head is tied: a copy of the embedding
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32),
    }
    export(write_folder(tmp_path / "a", config, plain), tmp_path / "one", ExportOptions(name="x"))
    export(write_folder(tmp_path / "b", config, plain | extra), tmp_path / "two", ExportOptions(name="x"))
    assert contents(tmp_path / "one").keys() == contents(tmp_path / "two").keys()
    for name, data in contents(tmp_path / "one").items():
        assert name == "pack.json" or data == contents(tmp_path / "two")[name]


# --- the target -------------------------------------------------------------------------------------------------------


def test_an_existing_target_is_refused_and_kept(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    for kind in ("pack", "full", "empty", "file", "link"):
        target = tmp_path / kind
        if kind == "pack":
            export(source, target, ExportOptions(name="first"))
        elif kind == "file":
            target.write_text("mine")
        elif kind == "link":
            target.symlink_to(tmp_path / "nowhere")
        else:
            target.mkdir()
            if kind == "full":
                (target / "thesis.txt").write_text("mine")
        before = contents(target) if target.is_dir() else None
        error = one_error(run_cli("export", source, "--out", target), target, "--force")
        assert "already there" in error
        assert before is None or contents(target) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_force_replaces_packs_and_empty_folders_only(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    export(source, tmp_path / "pack", ExportOptions(name="first", embedding="f16"))
    (tmp_path / "pack" / "weights-00009.safetensors").write_bytes(b"old")
    assert run_cli("export", source, "--out", tmp_path / "pack", "--force", "--name", "second").status == 0
    assert Pack(tmp_path / "pack").manifest["name"] == "second"
    assert "weights-00009.safetensors" not in contents(tmp_path / "pack")
    (tmp_path / "empty").mkdir()
    export(source, tmp_path / "empty", ExportOptions(force=True))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "pack")
    for name in ("full", "file", "link"):
        one_error(run_cli("export", source, "--out", tmp_path / name, "--force"), tmp_path / name)
    assert contents(tmp_path / "full") == {"thesis.txt": b"mine"} and (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "link").is_symlink()
    assert only(tmp_path) == ["empty", "file", "full", "link", "model", "pack"]


@pytest.mark.parametrize("target", ["/", ".", "/proc/pack", "/dev/null/pack"])
def test_a_target_that_cannot_be_is_one_error(target: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    for force in ([], ["--force"]):
        one_error(run_cli("export", source, "--out", target, *force), target)


def test_a_file_in_the_way_of_the_target_is_one_error(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    (tmp_path / "file").write_text("mine")
    one_error(run_cli("export", source, "--out", tmp_path / "file" / "pack"), tmp_path / "file" / "pack")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_replacement_keeps_the_old_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    export(source, tmp_path / "pack", ExportOptions(name="first"))
    rename = Path.rename

    def failing(self: Path, other: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PackerError, match="Input/output"):
        export(source, tmp_path / "pack", ExportOptions(name="second", force=True))
    assert Pack(tmp_path / "pack").manifest["name"] == "first"
    assert only(tmp_path) == ["model", "pack"]


def test_the_pack_is_whole_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a process may end, what stands at the target is a whole pack or none."""
    source = tiny_checkpoint(tmp_path / "model")
    rename, moved = Path.rename, []

    def watched(self: Path, other: Path) -> Path:
        Pack(self).verify()
        moved.append(Path(other).name)
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", watched)
    export(source, tmp_path / "pack", ExportOptions())
    assert moved == ["pack"]


# --- interruption and full disks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes a second or two to export."""
    folder = tmp_path_factory.mktemp("slow") / "model"
    return tiny_checkpoint(folder, "llama", vocab_size=60_000, hidden_size=256, num_hidden_layers=8)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_export_leaves_no_pack(
    number: signal.Signals, existing: bool, slow_source: Path, tmp_path: Path
) -> None:
    target, options = tmp_path / "pack", ["--shard-size", 1, "--embedding", "q4", "--workers", 3]
    if existing:
        tiny_pack(tmp_path / "made")
        (tmp_path / "made" / "pack").rename(target)
        shutil.rmtree(tmp_path / "made")
        options.append("--force")
    before = contents(target) if existing else {}
    process = start_cli("export", slow_source, "--out", target, *options)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".pack.partial-*/weights-00002.safetensors")):  # it is in the middle
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number), err
    assert "Traceback" not in err and not out.strip()
    assert (contents(target) if target.exists() else {}) == before
    left = [path for path in tmp_path.iterdir() if path != target]
    if number == signal.SIGINT:
        assert not left and "stopped" in err
    assert not any((path / "pack.json").exists() for path in left)  # what SIGKILL leaves is no pack
    # And what it leaves is not in the way of the next try.
    assert run_cli("export", tiny_checkpoint(tmp_path / "model"), "--out", target, "--force").status == 0
    Pack(target).verify()


def test_a_full_disk_is_one_error(slow_source: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the operating system refuses to write on."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); "
        "from packer.cli import main; main(sys.argv[1:])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "export", slow_source, "--out", tmp_path / "pack", "--shard-size", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr and "cannot write" in result.stderr and "disk full" in result.stderr
    assert only(tmp_path) == []


@pytest.mark.parametrize("file", ["program.json", "pack.json", "tokenizer.json"])
def test_a_disk_that_is_full_at_the_end_is_one_error(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    write = Path.write_bytes

    def failing(self: Path, data: bytes) -> int:
        if self.name == file:
            write(self, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", failing)
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), "No space left", file)
    assert only(tmp_path) == ["model"]


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 20_000, 20_000))
    monkeypatch.setattr(writer, "save_file", lambda *_: pytest.fail("something was written"))
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), "free", "MB")
    assert only(tmp_path) == ["model"]


# --- memory -----------------------------------------------------------------------------------------------------------


def big_checkpoint(folder: Path, layers: int, vocabulary: int, dtype: type, *, is_ternary: bool) -> int:
    """A checkpoint with layers of 16.8 million weights each; bytes of its largest tensor."""
    config = tiny_config(
        "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=16, head_dim=64, vocab_size=vocabulary,
    )  # fmt: skip
    tensors = tiny_tensors(config)
    config["num_hidden_layers"] = layers
    written = {}
    for name, array in tensors.items():
        if "_proj." in name and not is_ternary:
            array[0, 0] += np.float32(1)
        for layer in range(layers) if ".layers.0." in name else [0]:
            written[name.replace(".layers.0.", f".layers.{layer}.")] = array.astype(dtype)
    write_folder(folder, config, written)
    return max(array.nbytes for array in written.values())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
@pytest.mark.parametrize(
    ("layers", "vocabulary", "dtype", "is_ternary"),
    [(6, 8000, np.float32, True), (1, 64000, ml_dtypes.bfloat16, False)],
    ids=["many tensors", "a large tensor"],
)
def test_memory_stays_below_twice_the_largest_tensor_and_300_mib(
    layers: int, vocabulary: int, dtype: type, is_ternary: bool, tmp_path: Path
) -> None:
    """Peak of the resident set, file pages included. The first checkpoint is larger than the limit as a whole; the
    second has a tensor whose float32 form and its encoding would exceed it."""
    largest = big_checkpoint(tmp_path / "model", layers, vocabulary, dtype, is_ternary=is_ternary)
    limit = 2 * largest + (300 << 20)
    if layers > 1:
        assert (tmp_path / "model" / "model.safetensors").stat().st_size > limit
    script = (
        "import sys\nfrom packer.cli import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print(open('/proc/self/status').read())"
    )
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            "export",
            tmp_path / "model",
            "--out",
            tmp_path / "pack",
            "--policy",
            "q8",
            "--no-eval",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    encodings = {entry.encoding for entry in Pack(tmp_path / "pack").entries.values()}
    assert encodings == ({"ternary", "q8", "f32"} if is_ternary else {"q8", "f32"})
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", result.stdout).group(1)) << 10  # type: ignore[union-attr]
    assert peak < limit, f"{peak >> 20} MiB, at most {limit >> 20}"


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_summary_shows_sizes_of_the_whole_file(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    result = run_cli("export", source, "--out", tmp_path / "pack", "--name", "My [model] [/]")
    assert result.status == 0, result.err
    text = " ".join(result.out.split())
    manifest = Pack(tmp_path / "pack").manifest
    assert manifest["name"] == "My [model] [/]" and "My [model] [/]" in text
    for words in ("ternary", "q8", "linears", "embedding", "exact", f"{manifest['bits_per_weight']:.2f} bits a weight"):
        assert words in text


def test_the_writer_cuts_shards_by_their_whole_size(tmp_path: Path) -> None:
    """Headers count too."""
    packs = PackWriter(tmp_path / "pack", 100_000, force=False)
    for index in range(60):
        name = f"tensor.{index}." + "x" * 50
        packs.add(f"{name}.data.0", np.zeros(1500, dtype=np.float32))
        packs.entries[name] = TensorEntry(name, "f32", (1500,), None, (), 0, (1,))
    packs.flush()
    files = sorted(next(tmp_path.glob(".pack.partial-*")).glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert all(60_000 < size <= 100_000 for size in sizes[:-1]) and sizes[-1] <= 100_000
    assert sorted(key for file in files for key in load_file(file)) == sorted(
        f"{name}.data.0" for name in packs.entries
    )
    assert packs.shard_total == sum(sizes)
    packs.abandon()
    assert only(tmp_path) == []


def test_files_can_be_read_by_others(tmp_path: Path) -> None:
    """A server under another account must be able to serve a pack (safetensors writes files for the owner alone)."""
    save_file({"x": np.zeros(1)}, tmp_path / "plain.safetensors")
    pack = tiny_pack(tmp_path)
    assert {file.stat().st_mode & 0o444 for file in pack.iterdir()} == {0o444}
