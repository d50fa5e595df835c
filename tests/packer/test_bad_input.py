"""Checkpoints that cannot be packed: exit status 1, one error that names the thing, and nothing written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from packer import checkpoints
from tests.support.checkpoints import change_json, tiny_checkpoint, write_json
from tests.support.cli import one_error, run_cli

Change = Callable[[Path], Any]
Q = "model.layers.0.self_attn.q_proj.weight"
EMBED, GAIN = "model.embed_tokens.weight", "model.norm.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00001-of-00003.safetensors"


def refused(source: Path, *words: object, options: tuple[object, ...] = ()) -> str:
    """Export must fail with these words, and leave no trace."""
    target = source.parent / "made" / "pack"
    error = one_error(run_cli("export", source, "--out", target, *options), *words)
    assert not target.exists()
    assert not target.parent.exists() or os.listdir(target.parent) == []
    return error


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model", shards=3)


def config(**changes: Any) -> Change:
    return lambda folder: change_json(folder / "config.json", **changes)


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    """Edit the arrays of the one file."""

    def edit(folder: Path) -> None:
        arrays = {name: array.copy() for name, array in load_file(folder / SINGLE).items()}
        change(arrays)
        save_file(arrays, folder / SINGLE)

    return edit


def element(name: str, index: Any, value: float) -> Change:
    return tensors(lambda found: found[name].__setitem__(index, value))


def replace(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Change:
    return tensors(lambda found: found.update({name: make(found[name])}))


def write(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str, share: float) -> Change:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return change


def packed(scheme: dict[str, Any] | None, *, scale: Any = 0.5, fill: int = 0b01100100, rows: int = 18) -> Change:
    """Make q_proj packed bytes, with a scale unless it is None, under this quantization_config."""

    def change(folder: Path) -> None:
        def edit(found: dict[str, np.ndarray]) -> None:
            found[Q] = np.full((rows, 72), fill, dtype=np.uint8)
            if scale is not None:
                found[f"{Q}_scale"] = np.asarray(scale)

        tensors(edit)(folder)
        change_json(folder / "config.json", quantization_config=... if scheme is None else scheme)

    return change


OFFLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE = {**OFFLINE, "quantization_mode": "online"}
F32 = np.float32

FAULTS: dict[str, tuple[Change, tuple[str, ...]]] = {
    # Files
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json", "missing")),
    "config is cut": (cut("config.json", 0.5), ("config.json", "JSON")),
    "config is a list": (write("config.json", b"[]"), ("config.json", "object", "list")),
    "config is latin-1": (write("config.json", b'{"a": "\xff"}'), ("config.json", "JSON")),
    "config is deep": (write("config.json", b'{"a":' * 100_000), ("config.json", "JSON")),
    "config has a huge number": (write("config.json", b'{"a": 1' + b"0" * 5000 + b"}"), ("config.json", "JSON")),
    "config is a folder": (
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()), ("config.json",)),
    "generation config is cut": (write("generation_config.json", b"{"), ("generation_config.json", "JSON")),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), (SINGLE, INDEX)),
    "weights are cut": (cut(SINGLE, 0.7), (SINGLE, "safetensors")),
    "weights are cut in the header": (cut(SINGLE, 0.01), (SINGLE, "safetensors")),
    "weights are empty": (write(SINGLE, b""), (SINGLE, "safetensors")),
    "weights are text": (write(SINGLE, b"version https://git-lfs.github.com/spec/v1\n" * 3), (SINGLE, "safetensors")),
    "weights have a huge header": (write(SINGLE, b"\xff" * 64), (SINGLE, "safetensors")),
    # Tokenizer
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json", "--tokenizer")),
    "tokenizer is cut": (cut("tokenizer.json", 0.5), ("tokenizer.json", "JSON")),
    "tokenizer is another JSON": (write("tokenizer.json", b"{}"), ("tokenizer.json",)),
    "tokenizer config is cut": (write("tokenizer_config.json", b"{"), ("tokenizer_config.json", "JSON")),
    "template is latin-1": (write("chat_template.jinja", b"\xff"), ("chat_template.jinja",)),
    "tokenizer is larger than the embedding": (
        lambda folder: enlarge_tokenizer(folder, 300), ("tokenizer", "embedding", "272")),
    "tokenizer has an id beyond the embedding": (
        lambda folder: change_id(folder, "<|endoftext|>", 5000), ("tokenizer", "5000", "272")),
    "EOS beyond the vocabulary": (config(eos_token_id=272), ("eos_token_id", "272")),
    "EOS is negative": (config(eos_token_id=[2, -1]), ("eos_token_id", "-1")),
    "EOS of generation beyond": (
        lambda folder: write_json(folder / "generation_config.json", {"eos_token_id": [5, 999]}), ("999", "272")),
    "no EOS anywhere": (
        lambda folder: (change_json(folder / "config.json", eos_token_id=...),
                        change_json(folder / "tokenizer_config.json", eos_token=...)), ("end-of-text", "config.json")),
    # Config
    **{f"no {field}": (config(**{field: ...}), ("config", field, "missing")) for field in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
        "max_position_embeddings", "rms_norm_eps")},
    "no hidden_act": (config(hidden_act=...), ("hidden_act", "silu", "relu2")),
    "unknown hidden_act": (config(hidden_act="gelu"), ("hidden_act", "gelu", "silu")),
    "hidden_act is a list": (config(hidden_act=["silu"]), ("hidden_act",)),
    "hidden_size is text": (config(hidden_size="72"), ("hidden_size", "'72'")),
    "hidden_size is a fraction": (config(hidden_size=72.5), ("hidden_size", "72.5")),
    "hidden_size is negative": (config(hidden_size=-72), ("hidden_size", "-72")),
    "heads is true": (config(num_attention_heads=True), ("num_attention_heads",)),
    "heads no multiple": (config(num_key_value_heads=4), ("num_attention_heads", "num_key_value_heads")),
    "head_dim too large": (config(head_dim=512), ("head_dim", "512", "256")),
    "head_dim no multiple of 4": (config(head_dim=14), ("head_dim", "14")),
    "eps is text": (config(rms_norm_eps="1e-5"), ("rms_norm_eps",)),
    "eps is negative": (config(rms_norm_eps=-1.0), ("rms_norm_eps",)),
    "eps is NaN": (config(rms_norm_eps=float("nan")), ("rms_norm_eps",)),
    "tied is text": (config(tie_word_embeddings="yes"), ("tie_word_embeddings",)),
    "bias is a number": (config(attention_bias=1), ("attention_bias",)),
    "unknown rope": (config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), ("rope", "dynamic")),
    "experts": (config(num_local_experts=8), ("num_local_experts", "8")),
    "sliding window": (config(sliding_window=4096), ("sliding_window", "4096")),
    "no architecture": (config(model_type=...), ("model_type", "bitnet", "llama")),
    "unknown architecture": (config(model_type="mamba"), ("model_type", "mamba", "bitnet", "llama")),
    "architecture is a list": (config(model_type=["llama"]), ("model_type",)),
    # Quantization
    "unknown method": (config(quantization_config={"quant_method": "gptq"}), ("quant_method", "gptq", "bitnet")),
    "method is missing": (config(quantization_config={}), ("quant_method",)),
    "quantization is text": (config(quantization_config="bitnet"), ("quantization_config",)),
    "quantization is a list": (config(quantization_config=[OFFLINE]), ("quantization_config",)),
    "norms in linears": (config(quantization_config={**OFFLINE, "use_rms_norm": True}), ("use_rms_norm",)),
    "layers that stay float": (
        config(quantization_config={**ONLINE, "modules_to_not_convert": ["lm_head", "model.layers.0"]}),
        ("modules_to_not_convert", "model.layers.0")),
    "modules are text": (config(quantization_config={**ONLINE, "modules_to_not_convert": "lm_head"}),
                         ("modules_to_not_convert",)),
    "unknown linear class": (config(quantization_config={**OFFLINE, "linear_class": "x"}), ("linear_class", "'x'")),
    "unknown mode": (config(quantization_config={**OFFLINE, "quantization_mode": "x"}), ("quantization_mode", "'x'")),
    # Tensors
    "NaN in a linear": (element(Q, (3, 5), np.nan), (SINGLE, Q, "NaN")),
    "infinity in the embedding": (element(EMBED, (3, 5), np.inf), (SINGLE, EMBED, "infinite")),
    "NaN in a gain": (element(GAIN, 5, np.nan), (SINGLE, GAIN, "NaN")),
    "tensor is missing": (tensors(lambda found: found.pop(Q)), (Q, "missing")),
    "last tensor is missing": (tensors(lambda found: found.pop(GAIN)), (GAIN, "missing")),
    "head is missing": (config(tie_word_embeddings=False), ("lm_head.weight", "missing")),
    "linear of wrong rows": (replace(Q, lambda a: a[:-1]), (Q, "[71, 72]", "[72, 72]")),
    "linear of wrong columns": (replace(Q, lambda a: a[:, :-1].copy()), (Q, "[72, 71]")),
    "linear is a vector": (replace(Q, lambda a: a[0].copy()), (Q, "[72]")),
    "embedding of wrong rows": (config(vocab_size=271), (EMBED, "[272, 72]", "[271, 72]")),
    "gain of wrong length": (replace(GAIN, lambda a: a[:-1]), (GAIN, "[71]", "[72]")),
    "linear of integers": (replace(Q, lambda a: a.astype(np.int8)), (Q, "I8")),
    "gain of bytes": (replace(GAIN, lambda a: a.astype(np.uint8)), (GAIN, "packed")),
    "embedding of bytes": (replace(EMBED, lambda a: a.astype(np.uint8)), (EMBED, "packed")),
    "bias that the config denies": (
        tensors(lambda found: found.update({Q.replace("weight", "bias"): np.ones(72, F32)})), ("q_proj.bias", "place")),
    "norms of another graph": (
        tensors(lambda found: found.update({Q.replace("q_proj", "q_norm"): np.ones(12, F32)})), ("q_norm", "place")),
    "layers beyond the config": (config(num_hidden_layers=1), ("model.layers.1", "place")),
    "sub-norms in a llama": (config(model_type="llama"), ("sub_norm", "llama")),
    "not ternary": (element(Q, (0, 0), 0.123), (Q, "not ternary", "--policy q8", "--keep 'layers.*=q4'")),
    # BitNet
    "packed without a word": (packed(None), (Q, "packed", "quantization_config")),
    "packed, said online": (packed(ONLINE), (Q, "packed")),
    "packed code 3": (packed(OFFLINE, fill=0b11000000), (Q, "code of 3")),
    "packed without scale": (packed(OFFLINE, scale=None), (f"{Q}_scale", "missing")),
    "packed rows": (packed(OFFLINE, rows=17), (Q, "[17, 72]", "[18, 72]")),
    "scale 0": (packed(OFFLINE, scale=F32([0])), (f"{Q}_scale", "0.0", "positive")),
    "scale negative": (packed(OFFLINE, scale=F32([-1])), (f"{Q}_scale", "-1.0")),
    "scale NaN": (packed(OFFLINE, scale=F32([np.nan])), (f"{Q}_scale", "NaN")),
    "scale of two": (packed(OFFLINE, scale=F32([1, 2])), (f"{Q}_scale", "one positive number")),
    "scale of none": (packed(OFFLINE, scale=np.zeros(0, F32)), (f"{Q}_scale", "[0]")),
    "scale of bytes": (packed(OFFLINE, scale=np.uint8([1])), (f"{Q}_scale",)),
    "divided scale vanishes": (
        packed({**OFFLINE, "linear_class": "bitlinear"}, scale=F32([1e-45])), (f"{Q}_scale",)),
    "masters said packed": (
        lambda folder: (element(Q, (0, 0), 0.123)(folder), config(quantization_config=OFFLINE)(folder)),
        (Q, "online")),
}  # fmt: skip


def enlarge_tokenizer(folder: Path, size: int) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<extra {index}>" for index in range(size - tokenizer.get_vocab_size())])
    tokenizer.save(str(folder / "tokenizer.json"))


def change_id(folder: Path, token: str, to: int) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for added in content["added_tokens"]:
        if added["content"] == token:
            added["id"] = to
    for vocabulary in [content["model"]["vocab"]]:
        vocabulary["\u0120unused"] = to
    write_json(folder / "tokenizer.json", content)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_checkpoints(name: str, model: Path) -> None:
    change, words = FAULTS[name]
    change(model)
    refused(model, *words)


def test_the_model_without_faults_is_packed(model: Path) -> None:
    assert run_cli("export", model, "--out", model.parent / "pack").status == 0


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / SHARD).unlink(), (SHARD, "missing")),
        (cut(SHARD, 0.5), (SHARD, "safetensors")),
        (write(INDEX, b"{"), (INDEX, "JSON")),
        (write(INDEX, b"{}"), (INDEX, "weight_map")),
        (write(INDEX, b'{"weight_map": []}'), (INDEX, "weight_map")),
        (write(INDEX, b'{"weight_map": {"a": 5}}'), (INDEX, "weight_map")),
        (write(INDEX, b'{"weight_map": {"a": ["x"]}}'), (INDEX, "weight_map")),
        (write(INDEX, b'{"weight_map": {"a": "../../etc/passwd"}}'), (INDEX, "../../etc/passwd")),
        (write(INDEX, b'{"weight_map": {"a": ".."}}'), (INDEX, "..")),
        (write(INDEX, b'{"weight_map": {"a": ""}}'), (INDEX,)),
        (lambda folder: move_in_index(folder), ("index", Q)),
        (lambda folder: drop_from_index(folder), (Q, "missing")),
        (lambda folder: copy_to_another_shard(folder), (Q, "both in", SHARD)),
    ],
)
def test_faults_of_shards(change: Change, words: tuple[str, ...], sharded: Path) -> None:
    change(sharded)
    refused(sharded, *words)


def move_in_index(folder: Path) -> None:
    """Let the index name another shard than the one that has the tensor."""
    index = json.loads((folder / INDEX).read_bytes())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][Q] = next(file for file in files if file != index["weight_map"][Q])
    write_json(folder / INDEX, index)


def copy_to_another_shard(folder: Path) -> None:
    """One tensor in two shards."""
    where = json.loads((folder / INDEX).read_bytes())["weight_map"]
    arrays = load_file(folder / SHARD)
    assert where[Q] != SHARD
    save_file({**arrays, Q: load_file(folder / where[Q])[Q] + 1}, folder / SHARD)


def drop_from_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_bytes())
    del index["weight_map"][Q]
    write_json(folder / INDEX, index)


# --- sources and options ----------------------------------------------------------------------------------------------


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "model.onnx").write_bytes(b"x")
    (tmp_path / "model.gguf").write_bytes(b"not a GGUF file")
    refused(tmp_path / "nowhere", "nowhere", "no such file or folder")
    refused(tmp_path / "empty", "config.json", "missing")
    refused(tmp_path / "model.bin", "config.json", "missing")
    refused(tmp_path / "model.onnx", "model.onnx", ".gguf")
    refused(tmp_path / "model.gguf", "model.gguf")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--activations", "a4"), ("--activations", "a4")),
        (("--embedding", "q2"), ("--embedding", "q2")),
        (("--policy", "f16"), ("--policy", "f16")),
        (("--shard-size", "0"), ("--shard-size",)),
        (("--shard-size", "64"), ("--shard-size",)),
        (("--shard-size", "big"), ("--shard-size",)),
        (("--no-such-option",), ("--no-such-option",)),
        (("--tokenizer", "nowhere"), ("nowhere", "tokenizer.json")),
    ],
)
def test_bad_options(options: tuple[str, ...], words: tuple[str, ...], model: Path) -> None:
    refused(model, *words, options=options)


def test_missing_arguments() -> None:
    one_error(run_cli("export"), "source")
    one_error(run_cli("export", "x"), "--out")
    one_error(run_cli("expoooort"), "expoooort")


@pytest.mark.parametrize("activations", ["a8", "a16"])
def test_integer_activations_need_something_ternary(activations: str, model: Path) -> None:
    arrays = {
        name: array + (0.01 * np.arange(array.size).reshape(array.shape) if "_proj" in name else 0)
        for name, array in load_file(model / SINGLE).items()
    }
    save_file({name: array.astype(np.float32) for name, array in arrays.items()}, model / SINGLE)
    options = ("--policy", "q8", "--activations", activations)
    refused(model, f"--activations {activations}", "ternary", options=options)


def test_an_embedding_beyond_f16(model: Path) -> None:
    element(EMBED, (0, 0), 1e6)(model)
    refused(model, "embed", "1e+06", "65504", options=("--embedding", "f16"))
    assert run_cli("export", model, "--out", model.parent / "pack", "--embedding", "q8").status == 0


def test_a_scale_beyond_f16(model: Path) -> None:
    element(EMBED, (0, 0), 1e30)(model)
    for embedding in ("q8", "q4"):
        refused(model, "embed", "scale", "65504", options=("--embedding", embedding))


def test_values_beyond_f32_are_infinite(model: Path) -> None:
    """float64 checkpoints exist; what float32 does not hold is an error, not an infinity in the pack."""
    replace(EMBED, lambda a: a.astype(np.float64))(model)
    assert run_cli("export", model, "--out", model.parent / "pack").status == 0
    element(EMBED, (3, 4), 1e300)(model)
    refused(model, EMBED, "infinite")


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_float8_with_scales_is_refused(dtype: Any, model: Path) -> None:
    """Alone they are numbers; scales beside them differ in name and meaning from maker to maker."""
    expected = load_file(model / SINGLE)[EMBED].astype(dtype).astype(np.float32)
    arrays = load_file(model / SINGLE)
    save_file(arrays | {EMBED: arrays[EMBED].astype(dtype)}, model / SINGLE)
    checkpoint = checkpoints.open_checkpoint(model)
    np.testing.assert_array_equal(checkpoint.rows(EMBED), expected)
    np.testing.assert_array_equal(checkpoint.rows(EMBED, 3, 70), expected[3:70])
    assert run_cli("export", model, "--out", model.parent / "pack").status == 0
    save_file(arrays | {f"{EMBED}_scale_inv": np.ones(1, F32)}, model / SINGLE)
    refused(model, f"{EMBED}_scale_inv", "place")


def test_float8_not_a_number(model: Path) -> None:
    element(EMBED, (3, 4), np.nan)(model)
    replace(EMBED, lambda a: a.astype(ml_dtypes.float8_e4m3fn))(model)
    refused(model, EMBED, "NaN")


def test_a_file_that_may_not_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the operating system, wherever it shows, is one message too (tests may run as root: so by hand)."""

    def denied(source: Path, tokenizer: Path | None) -> Any:
        raise PermissionError(13, "Permission denied", str(source / "config.json"))

    monkeypatch.setattr("packer.export.open_checkpoint", denied)
    refused(model, "config.json", "Permission denied")
    assert checkpoints.open_checkpoint(model).names()
