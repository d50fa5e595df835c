"""What only Gemma 3 has: checkpoints with a vision part, gains of 1 + weight, and a rounded factor of embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packer.checkpoints import open_checkpoint
from packer.errors import CheckpointError
from packer.export import ExportOptions, export
from packer.models import build_model
from packer.pack import Pack
from shaders.interpreter import ReferenceModel
from tests.support.checkpoints import change_json, tiny_checkpoint, tiny_config, tiny_tensors
from tests.support.cli import one_error, run_cli
from tests.support.families import GEMMA3
from tests.support.numerics import relative_to_range
from tests.support.transformers_models import logits, save_model

from transformers import (  # isort: skip  (after the line that sets up torch)
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
)

IDS = [int(i) for i in np.random.default_rng(7).integers(0, 256, size=40)]
FLOAT = ExportOptions(activations="f32", embedding="f16")
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole() -> Gemma3ForConditionalGeneration:
    """A tiny model with a vision part."""
    config = Gemma3Config(
        text_config=tiny_config("gemma3_text", **GEMMA3), vision_config=VISION, mm_tokens_per_image=4,
        eos_token_id=[3, 5], boi_token_index=268, eoi_token_index=269, image_token_index=270,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    text = tiny_tensors(tiny_config("gemma3_text", **GEMMA3))
    named = {name.replace("model.", "model.language_model.", 1): torch.from_numpy(a) for name, a in text.items()}
    assert not model.load_state_dict(named, strict=False).unexpected_keys
    return model


@pytest.fixture
def folder(whole: Gemma3ForConditionalGeneration, tmp_path: Path) -> Path:
    return save_model(whole, tmp_path / "checkpoint")


def test_the_text_of_a_model_that_sees_is_packed_and_the_rest_named(
    whole: Gemma3ForConditionalGeneration, folder: Path, tmp_path: Path
) -> None:
    result = run_cli("export", folder, "--out", tmp_path / "pack", "--activations", "f32", "--embedding", "f16")
    assert result.status == 0, result.err
    assert "left out: multi_modal_projector, vision_tower" in result.out
    pack = Pack(tmp_path / "pack")
    assert "vision_tower" in pack.manifest["source"]["left_out"] and {3, 5} <= set(pack.manifest["eos_ids"])
    model = ReferenceModel(pack.program, pack.tensors(), capacity=len(IDS))
    assert relative_to_range(model.step(IDS, rows=len(IDS)), logits(whole, IDS)) < 1e-4


def test_names_as_transformers_5_has_them_in_memory(folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    export(folder, tmp_path / "one", FLOAT)
    stored = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("language_model.model.", "model.language_model.", 1)
        if name.startswith("language_model.model.")
        else f"model.{name}": array
        for name, array in stored.items()
    }
    save_file(renamed, folder / "model.safetensors")
    export(folder, tmp_path / "two", FLOAT)
    one, two = (Pack(tmp_path / name).manifest for name in ("one", "two"))
    assert one["shards"] == two["shards"] and one["source"]["left_out"] == two["source"]["left_out"]


def test_a_tensor_that_is_there_twice(folder: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"] = stored["language_model.model.norm.weight"].copy()
    save_file(stored, folder / "model.safetensors")
    one_error(run_cli("export", folder, "--out", tmp_path / "pack"), "model.norm.weight", "both")


@pytest.mark.parametrize("text", [..., None, "gemma3_text", []])
def test_a_model_that_sees_without_a_text_config(folder: Path, tmp_path: Path, text: Any) -> None:
    change_json(folder / "config.json", text_config=text)
    one_error(run_cli("export", folder, "--out", tmp_path / "pack"), "text_config")


def test_what_the_outer_config_says_for_both(folder: Path) -> None:
    """The tie, the type of the weights and the ends of an answer stand in the outer config of older files."""
    config = json.loads((folder / "config.json").read_text())
    for name in ("tie_word_embeddings", "dtype", "eos_token_id", "model_type"):
        config["text_config"].pop(name)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    found = open_checkpoint(folder).info.config
    assert (found["dtype"], found["model_type"], found["eos_token_id"]) == ("bfloat16", "gemma3_text", [3, 5])
    assert found["tie_word_embeddings"] is True


@pytest.mark.parametrize("hidden", [72, 1152])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_factor_of_embeddings_is_rounded_as_transformers_rounds_it(hidden: int, dtype: str) -> None:
    """1152 is the 1B model's: 33.94 in float32, 34 in bfloat16."""
    changes = {**GEMMA3, "hidden_size": hidden, "intermediate_size": 8, "vocab_size": 4, "pad_token_id": 0}
    config = tiny_config("gemma3_text", **changes)
    model = Gemma3ForCausalLM._from_config(Gemma3TextConfig(**config), dtype=getattr(torch, dtype))
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight.fill_(1)
        expected = float(embedding(torch.tensor([1]))[0, 0])
    for field in ("dtype", "torch_dtype"):
        found = build_model({**config, field: dtype}, Path("checkpoint"), set())
        assert found.program({"embed": "f16"} | _encodings(found), "f32")["body"][0]["multiplier"] == expected
    assert build_model({**config, "dtype": "float32"}, Path("checkpoint"), set()).multiplier == np.float32(hidden**0.5)


def _encodings(model: Any) -> dict[str, str]:
    return {tensor.name: "f32" for tensor in model.tensors()}


def test_gains_are_one_more_than_the_weights(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "checkpoint", "gemma3_text", **GEMMA3)
    export(source, tmp_path / "pack", FLOAT)
    stored = tiny_tensors(tiny_config("gemma3_text", **GEMMA3))
    pack = Pack(tmp_path / "pack")
    names = {
        "final_norm": "model.norm",
        "layers.1.k_norm": "model.layers.1.self_attn.k_norm",
        "layers.1.attn_out_norm": "model.layers.1.post_attention_layernorm",
        "layers.1.post_norm": "model.layers.1.pre_feedforward_layernorm",
    }
    for ours, theirs in names.items():
        expected = 1.0 + torch.from_numpy(stored[f"{theirs}.weight"])
        np.testing.assert_array_equal(pack.tensor(ours).data, expected.numpy())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": 3}}, "rope parameters"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_local_base_freq": 0}, "rope_theta"),
        ({"dtype": "int8"}, "dtype"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": None}, "window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ..., "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        build_model(tiny_config("gemma3_text", **{**GEMMA3, **fields}), Path("checkpoint"), set())
