"""Metadata of GGUF files becomes the config that transformers reads, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from packer.checkpoints.gguf import GgufCheckpoint, open_gguf
from packer.errors import CheckpointError
from packer.models import build_model
from tests.packer.gguf_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, write_bitnet, write_model


def test_config_is_the_one_that_transformers_reads(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf")
    expected = AutoConfig.from_pretrained(model.parent, gguf_file=model.name)
    config = LlamaConfig(**open_gguf(model).info.config)
    for field in (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "vocab_size",
        "tie_word_embeddings", "attention_bias", "mlp_bias", "bos_token_id", "eos_token_id",
        "rope_parameters",
    ):  # fmt: skip
        assert getattr(config, field) == getattr(expected, field), field
    assert np.float32(config.rms_norm_eps) == np.float32(expected.rms_norm_eps)


def with_fields(path: Path, architecture: str = "llama", drop: tuple[str, ...] = (), **fields: Any) -> Path:
    """A model with these fields of its architecture (a dot is written as two underscores)."""

    def change(found: dict[str, Any], _tensors: dict) -> None:
        for name, value in fields.items():
            found[f"{architecture}.{name.replace('__', '.')}"] = value
        for name in drop:
            del found[f"{architecture}.{name}"]

    return write_model(path, architecture=architecture, change=change)


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "linear, old name": ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "linear, factor 1": (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0},
        {"rope_type": "default"},
    ),
    "none": ({"rope__scaling__type": "none"}, {"rope_type": "default"}),
    "yarn": (
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 8.0,
            "rope__scaling__original_context_length": 512,
            "rope__scaling__yarn_beta_fast": 24.0,
        },  # fmt: skip
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 24.0},
    ),
}


def rope_table(checkpoint: GgufCheckpoint) -> Any:
    """The frequencies that a pack of this checkpoint gets."""
    return build_model(checkpoint.info.config, checkpoint.path, checkpoint.names()).rope


@pytest.mark.parametrize(("fields", "rope"), ROPES.values(), ids=ROPES)
def test_rope_scaling(tmp_path: Path, fields: dict[str, Any], rope: dict[str, Any]) -> None:
    checkpoint = open_gguf(with_fields(tmp_path / "model.gguf", **fields))
    theirs = LlamaConfig(**checkpoint.info.config | {"rope_parameters": rope | {"rope_theta": 500000.0}})
    kind = rope["rope_type"]
    if kind == "default":
        steps = np.arange(0, HEAD_DIM, 2) / HEAD_DIM
        frequencies, scale = torch.tensor(500000.0**-steps, dtype=torch.float32), 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    table = rope_table(checkpoint)
    np.testing.assert_allclose(table["inv_freq"], frequencies.numpy(), rtol=1e-6)
    assert table["scale"] == pytest.approx(scale)


def test_yarn_attention_factor_multiplies(tmp_path: Path) -> None:
    fields = ROPES["yarn"][0] | {"rope__scaling__attn_factor": 0.5}
    config = open_gguf(with_fields(tmp_path / "model.gguf", **fields)).info.config
    own = LlamaConfig(**config | {"rope_parameters": ROPES["yarn"][1] | {"rope_theta": 500000.0}})
    _, scale = ROPE_INIT_FUNCTIONS["yarn"](own, "cpu")
    assert config["rope_parameters"]["attention_factor"] == pytest.approx(0.5 * scale)


def test_rope_freqs_of_llama_3(tmp_path: Path) -> None:
    """llama.cpp's converter stores Llama 3's scaling as factors: plain frequencies divided by scaled ones."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    theirs = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=HEAD_DIM, rope_parameters=rope)
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")[0].numpy()
    plain = 500000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)

    def change(_fields: dict, tensors: dict) -> None:
        tensors["rope_freqs.weight"] = ((plain / frequencies).astype(np.float32), Q.F32)

    checkpoint = open_gguf(write_model(tmp_path / "model.gguf", change=change))
    assert not any("rope" in name for name in checkpoint.names())
    table = rope_table(checkpoint)
    assert frequencies[-1] < 0.2 * plain[-1]  # the scaling is there
    np.testing.assert_allclose(table["inv_freq"], frequencies, rtol=1e-6)


def test_bitnet_act_is_never_guessed(tmp_path: Path) -> None:
    path = write_bitnet(tmp_path / "model.gguf", "bitnet")
    with pytest.raises(CheckpointError, match=r"hidden_activation.*relu2, silu"):
        open_gguf(path)
    assert (
        open_gguf(write_bitnet(tmp_path / "named.gguf", "bitnet", hidden_activation="silu")).info.config["hidden_act"]
        == "silu"
    )
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_act": "relu2"}')
    (folder / "tokenizer.json").write_bytes(open_gguf(write_model(tmp_path / "l.gguf")).info.tokenizer.tokenizer)
    assert open_gguf(path, folder).info.config["hidden_act"] == "relu2"
    with pytest.raises(CheckpointError, match="'hidden_activation' is 'gelu'"):
        open_gguf(write_bitnet(tmp_path / "other.gguf", "bitnet", hidden_activation="gelu"))


NOT_SUPPORTED: dict[str, Any] = {
    "expert_count": 8,
    "expert_used_count": 2,
    "attention__sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "residual_scale": 0.22,
    "embedding_scale": 12.0,
    "logit_scale": 8.0,
    "attention__scale": 0.015625,
    "attention__causal": False,
    "attention__clamp_kqv": 8.0,
    "rope__dimension_count": 32,
    "attention__value_length": 32,
    "rope__scaling__type": "longrope",
    "rope__dimension_sections": [16, 8, 8, 0],
    "attention__head_count": [4, 2],
    "invented_by_a_later_version": 1,
}


@pytest.mark.parametrize(("name", "value"), NOT_SUPPORTED.items(), ids=NOT_SUPPORTED)
def test_what_changes_the_mathematics_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = with_fields(tmp_path / "model.gguf", **{name: value})
    with pytest.raises(CheckpointError, match=name.replace("__", r"\.")) as error:
        open_gguf(path)
    assert str(path) in str(error.value)


def test_neutral_values_are_accepted(tmp_path: Path) -> None:
    fields = {
        "expert_count": 0, "residual_scale": 1.0, "attention__causal": True,
        "attention__scale": HEAD_DIM**-0.5,
        "attention__head_count_kv": [KV_HEADS] * 2, "rope__scaling__finetuned": False,
        "tensor_data_layout": "Meta AI original pth",
    }  # fmt: skip
    config = open_gguf(with_fields(tmp_path / "model.gguf", **fields)).info.config
    assert config["num_key_value_heads"] == KV_HEADS


NEEDED = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_missing_fields_are_named(tmp_path: Path, name: str) -> None:
    path = with_fields(tmp_path / "model.gguf", drop=(name,))
    with pytest.raises(CheckpointError, match=rf"{name!r} is (missing|None)") as error:
        open_gguf(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("architecture", ["qwen3moe", "granite", "gemma2", "LLaMA2"])
def test_other_architectures_are_refused(tmp_path: Path, architecture: str) -> None:
    path = write_model(tmp_path / "model.gguf", architecture=architecture)
    with pytest.raises(CheckpointError, match=rf"'{architecture}'.*bitnet-b1\.58, gemma3, llama, qwen2, qwen3"):
        open_gguf(path)
