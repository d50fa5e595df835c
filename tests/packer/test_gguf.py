"""GGUF checkpoints: weights and config as transformers and gguf read them, and what is refused."""

from __future__ import annotations

import gc
import hashlib
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from transformers import AutoModelForCausalLM

from packer.checkpoints.gguf import GgufCheckpoint, open_gguf
from packer.errors import CheckpointError
from tests.packer.gguf_files import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    smollm_path,
    write_bitnet,
    write_model,
)

TYPES = {
    "floats": [Q.F32, Q.F16, Q.BF16],
    "legacy": [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0],
    "k-quants": [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K],
    "ternary": [Q.TQ1_0, Q.TQ2_0],
    "others": [Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4, Q.IQ2_XS],
}


@pytest.fixture(scope="session")
def smollm() -> GgufCheckpoint:
    return open_gguf(smollm_path())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


def rows_of_pairs(stored: np.ndarray, heads: int) -> np.ndarray:
    """Q or K as transformers orders their rows: ``permute`` of its convert_llama_weights_to_hf.py."""
    pairs = stored.reshape(heads, len(stored) // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(stored.shape)


@pytest.mark.parametrize("kinds", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("head", [False, True], ids=["tied", "untied"])
def test_weights_are_those_that_transformers_loads(tmp_path: Path, kinds: list[Q], head: bool) -> None:
    path = write_model(tmp_path / "model.gguf", kinds, head=head)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    state = {name: tensor.numpy() for name, tensor in expected.state_dict().items()}
    if not head:
        del state["lm_head.weight"]  # tied: the embedding again
    checkpoint = open_gguf(path)
    assert checkpoint.names() == sorted(state)
    assert checkpoint.info.config["tie_word_embeddings"] is not head
    for name, values in state.items():
        assert checkpoint.shape(name) == values.shape
        assert not checkpoint.is_packed(name)
        rows = checkpoint.rows(name)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, values, err_msg=name)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"])
def test_slices_are_parts_of_the_whole(tmp_path: Path, name: str) -> None:
    checkpoint = open_gguf(write_model(tmp_path / "model.gguf", [Q.Q4_1, Q.Q8_0]))
    name = f"model.layers.1.{name}.weight"
    whole = checkpoint.rows(name)
    rng = np.random.default_rng(3)
    cuts = [(0, 1), (31, 33), (HEAD_DIM - 1, HEAD_DIM + 1), (5, 5), (9, 4), (100, 10**6), (-3, None)]
    cuts += [tuple(sorted(rng.integers(0, len(whole), 2).tolist())) for _ in range(40)]
    for start, stop in cuts:
        np.testing.assert_array_equal(checkpoint.rows(name, start, stop), whole[start:stop])


def test_slices_of_vectors(model: Path) -> None:
    checkpoint = open_gguf(model)
    whole = checkpoint.rows("model.norm.weight")
    assert whole.shape == (HIDDEN,)
    np.testing.assert_array_equal(checkpoint.rows("model.norm.weight", 7, 19), whole[7:19])


def test_real_weights_are_those_that_gguf_decodes(smollm: GgufCheckpoint) -> None:
    checkpoint = smollm
    gc.disable()  # GGUFReader makes an array of every token, and collecting among them takes most of its time
    try:
        reader = gguf.GGUFReader(smollm.path)
    finally:
        gc.enable()
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert len(checkpoint.names()) == len(stored) == 272

    def decoded(name: str) -> np.ndarray:
        return gguf.dequantize(stored[name].data, stored[name].tensor_type)

    same = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.17.mlp.down_proj.weight": "blk.17.ffn_down.weight",
        "model.layers.17.input_layernorm.weight": "blk.17.attn_norm.weight",
        "model.layers.29.post_attention_layernorm.weight": "blk.29.ffn_norm.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
        "model.layers.29.self_attn.o_proj.weight": "blk.29.attn_output.weight",
    }
    for name, theirs in same.items():
        np.testing.assert_array_equal(checkpoint.rows(name), decoded(theirs), err_msg=name)
    query, key = (checkpoint.rows(f"model.layers.3.self_attn.{part}_proj.weight") for part in "qk")
    np.testing.assert_array_equal(query, rows_of_pairs(decoded("blk.3.attn_q.weight"), 9))
    np.testing.assert_array_equal(key, rows_of_pairs(decoded("blk.3.attn_k.weight"), 3))


def test_real_config_and_source(smollm: GgufCheckpoint) -> None:
    info = smollm.info
    assert info.config == {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "vocab_size": 49152,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "rope_theta": 100000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    assert info.license == "apache-2.0"
    digest = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # as its publisher states it
    assert info.source == {"format": "gguf", "file": smollm.path.name, "sha256": digest}


def test_slices_need_little_memory(smollm: GgufCheckpoint) -> None:
    """The embedding has 113 MB as float32; a slice needs three times its own size and no more."""
    tracemalloc.start()
    try:
        for start in range(0, 49152, 1024):
            assert len(smollm.rows("model.embed_tokens.weight", start, start + 1024)) == 1024
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert smollm.rows("model.embed_tokens.weight").nbytes == 49152 * 576 * 4
        whole_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert whole_peak < (49152 * 576 * 4) * 1.5  # the decoder's own buffers stay small, too


def test_source_hash(model: Path) -> None:
    assert open_gguf(model).info.source["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()


@pytest.mark.parametrize("architecture", ["bitnet-b1.58", "BitNet-b1.58", "bitnet-25"])
def test_bitnet(tmp_path: Path, architecture: str) -> None:
    """BitNet files keep Q and K in Hugging Face's order: llama.cpp rotates them as it does GPT-NeoX."""
    path = write_bitnet(tmp_path / "model.gguf", architecture)
    checkpoint = open_gguf(path)
    config = checkpoint.info.config
    assert (config["model_type"], config["hidden_act"], config["hidden_size"]) == ("bitnet", "relu2", HIDDEN)
    assert (checkpoint.rows("model.layers.1.self_attn.attn_sub_norm.weight") == 2).all()
    assert (checkpoint.rows("model.layers.1.mlp.ffn_sub_norm.weight") == 3).all()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.1.attn_q.weight"]
    query = checkpoint.rows("model.layers.1.self_attn.q_proj.weight")
    np.testing.assert_array_equal(query, gguf.dequantize(stored.data, stored.tensor_type))


def test_bitnet_without_sub_norms(tmp_path: Path) -> None:
    names = open_gguf(write_bitnet(tmp_path / "model.gguf", "bitnet-b1.58", norms=False)).names()
    assert not any("sub_norm" in name for name in names)


def test_scale_tensors_multiply(tmp_path: Path) -> None:
    def change(_fields: dict, tensors: dict) -> None:
        tensors["blk.0.ffn_up.scale"] = (np.array([0.25], np.float32), Q.F32)

    plain = open_gguf(write_model(tmp_path / "plain.gguf", [Q.TQ1_0]))
    scaled = open_gguf(write_model(tmp_path / "scaled.gguf", [Q.TQ1_0], change=change))
    name = "model.layers.0.mlp.up_proj.weight"
    assert scaled.names() == plain.names()
    np.testing.assert_array_equal(scaled.rows(name, 3, 9), plain.rows(name, 3, 9) * np.float32(0.25))


def test_biases(tmp_path: Path) -> None:
    sizes = {"attn_q": HEADS, "attn_k": KV_HEADS, "attn_v": KV_HEADS, "attn_output": HEADS}
    values = {name: np.arange(heads * HEAD_DIM, dtype=np.float32) for name, heads in sizes.items()}

    def change(_fields: dict, tensors: dict) -> None:
        for layer in range(2):
            tensors |= {f"blk.{layer}.{name}.bias": (value, Q.F32) for name, value in values.items()}

    checkpoint = open_gguf(write_model(tmp_path / "model.gguf", change=change))
    assert (checkpoint.info.config["attention_bias"], checkpoint.info.config["mlp_bias"]) == (True, False)
    key = checkpoint.rows("model.layers.1.self_attn.k_proj.bias")
    np.testing.assert_array_equal(key, rows_of_pairs(values["attn_k"], KV_HEADS))
    np.testing.assert_array_equal(checkpoint.rows("model.layers.1.self_attn.k_proj.bias", 60, 70), key[60:70])
    np.testing.assert_array_equal(checkpoint.rows("model.layers.1.self_attn.v_proj.bias"), values["attn_v"])


def tensor_change(name: str, data: np.ndarray | None, kind: Q = Q.F32):
    def change(_fields: dict, tensors: dict) -> None:
        if data is None:
            del tensors[name]
        else:
            tensors[name] = (data, kind)

    return change


WRONG_TENSORS = {
    "missing": ("blk.1.ffn_up.weight", None, Q.F32, "is missing"),
    "no embedding": ("token_embd.weight", None, Q.F32, "is missing"),
    "another shape": ("blk.0.attn_k.weight", np.zeros((HIDDEN, HIDDEN), np.float32), Q.F32, "has shape"),
    "an extra norm": (
        "blk.0.attn_q_norm.weight",
        np.ones(HEAD_DIM, np.float32),
        Q.F32,
        "not part of a llama",
    ),
    "one bias": ("blk.0.attn_q.bias", np.ones(HIDDEN, np.float32), Q.F32, "not part of a llama"),
    "a type without decoder": (
        "blk.0.attn_v.weight",
        np.zeros((128, 256), np.int32),
        Q.I32,
        r"type I32 \(26\)",
    ),
    "scales of rows": ("blk.0.attn_q.scale", np.ones(4, np.float32), Q.F32, "expected one"),
    "a third layer": (
        "blk.2.ffn_up.weight",
        np.ones((FFN, HIDDEN), np.float32),
        Q.F32,
        "not part of a llama",
    ),
}


@pytest.mark.parametrize(("name", "data", "kind", "message"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_wrong_tensors_are_named(tmp_path: Path, name: str, data: Any, kind: Q, message: str) -> None:
    path = write_model(tmp_path / "model.gguf", change=tensor_change(name, data, kind))
    with pytest.raises(CheckpointError, match=message) as error:
        open_gguf(path)
    assert name in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.Q8_0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_a_number_is_refused_where_it_is_read(tmp_path: Path, kind: Q, bad: float) -> None:
    stored = gguf.quantize(np.ones((FFN, HIDDEN), np.float32), kind)
    at = (300, 0) if kind != Q.Q8_0 else (300, slice(0, 2))  # a block of Q8_0 begins with its scale
    stored[at] = np.array([bad], np.float16).view(np.uint8) if kind == Q.Q8_0 else bad
    path = write_model(tmp_path / "model.gguf", change=tensor_change("blk.0.ffn_up.weight", stored, kind))
    checkpoint = open_gguf(path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.rows(name, 0, 300).shape == (300, HIDDEN)
    with pytest.raises(CheckpointError, match=rf"{name} has \d+ NaN or infinite") as error:
        checkpoint.rows(name, 300, 301)
    assert str(path) in str(error.value)


def test_unknown_names(model: Path) -> None:
    checkpoint = open_gguf(model)
    for ask in (checkpoint.shape, checkpoint.rows, checkpoint.is_packed):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            ask("lm_head.weight")
