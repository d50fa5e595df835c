"""Configs that say what is not supported are refused by name, and what they leave out is as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packer.errors import CheckpointError
from packer.linears import bitnet_scheme
from packer.models import FAMILIES, build_model, gemma3, mistral, qwen2, qwen3
from tests.support.checkpoints import tiny_checkpoint, tiny_config
from tests.support.cli import one_error, run_cli
from tests.support.families import FAMILY_CASES
from tests.support.transformers_models import transformers_config

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # isort: skip  (after what sets up torch)

WHERE = Path("checkpoint")

#: Fields that change what a model computes, with a value of a model that has it.
REFUSED: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts": 128,
    "n_routed_experts": 64,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125,
    "scale_emb": 12,
    "clip_qkv": 8.0,
    "attention_chunk_size": 8192,
    "use_bidirectional_attention": True,
    "num_kv_shared_layers": 15,
    "hidden_size_per_layer_input": 256,
    "use_qk_norm": True,
    "no_rope_layers": [1, 1, 1, 0],
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.25,
    "rope_interleaved": True,
    "mrope_section": [16, 24, 24],
    "attn_temperature_tuning": True,
    "kv_lora_rank": 512,
    "block_configs": [{}],
    "hadamard": True,
    "rotation": {"kind": "block"},
    "weights_rotated": 1,
}
ROPES: dict[str, dict[str, Any]] = {
    "mrope_section": {"rope_type": "default", "mrope_section": [16, 24, 24]},
    "mrope": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [2.0]},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama_4_scaling_beta": {"rope_type": "default", "llama_4_scaling_beta": 0.1},
    "full_attention": {"full_attention": {"rope_type": "default"}},
}


def model(family: str, **changes: Any) -> Any:
    case = dict(FAMILY_CASES.get(family.removesuffix("_text"), ("", {}))[1])
    if family == "recipe_gpt":
        case |= {"tie_word_embeddings": False, "rope_theta": ...}
    return build_model(tiny_config(family, **{**case, **changes}), WHERE, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_refused_field_of_every_family(family: str) -> None:
    model(family)
    for field, value in REFUSED.items():
        with pytest.raises(CheckpointError, match=field) as error:
            model(family, **{field: value})
        assert str(WHERE) in str(error.value), field
        model(family, **{field: None})


@pytest.mark.parametrize("name", ROPES)
def test_rope_parameters_that_nobody_reads(name: str) -> None:
    for family in set(FAMILIES) - {"gemma3_text"}:
        with pytest.raises(CheckpointError, match=name):
            model(family, rope_parameters=ROPES[name])


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("llama", {"sliding_window": 4096}, "sliding_window"),
        ("bitnet", {"sliding_window": 4096}, "sliding_window"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("llama", {"layer_types": "full_attention"}, "layer_types"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("qwen2", {"layer_types": ["sliding_attention", "linear_attention"]}, "layer_types"),
        ("qwen3", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ("qwen3", {"max_window_layers": -1}, "max_window_layers"),
        ("qwen3", {"use_sliding_window": 1}, "use_sliding_window"),
        ("qwen3", {"query_pre_attn_scalar": 168}, "query_pre_attn_scalar"),
        ("qwen2", {"hidden_act": "quick_gelu"}, "hidden_act"),
        ("qwen3", {"head_dim": 300}, "head_dim"),
    ],
)
def test_windows_and_other_fields_that_do_not_fit(family: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        model(family, **fields)


def test_harmless_values_and_fields_of_published_configs() -> None:
    """SmolLM2, Falcon3 and Llama-3-1.58 have some of these; none of them says anything about the forward pass."""
    plain = model("llama")
    extras = {
        "rope_interleaved": False, "is_llama_config": True, "pretraining_tp": 1, "activation": "swiglu",
        "attention_dropout": 0.1, "initializer_range": 0.02, "use_cache": True, "rope_scaling": None,
        "transformers_version": "4.46.0", "num_experts": 0, "layer_types": ["full_attention"] * 2, "rotation": None,
        "hadamard": False, "sliding_window": None, "rotary_emb_base": 10000,
    }  # fmt: skip
    assert model("llama", **extras) == plain
    assert model("mistral", layer_types=["sliding_attention"] * 2) == model("mistral")


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma2", "gemma3n", "mixtral", "LLaMA2", None, 3, ["llama"]])
def test_unknown_families(kind: Any, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model", "llama", model_type=kind)
    result = run_cli("export", source, "--out", tmp_path / "pack")
    one_error(result, "model_type", "bitnet, gemma3, gemma3_text, llama, mistral, qwen2, qwen3")


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ("bitnet", "quant_method"),
        ({}, "quant_method"),
        ({"quant_method": "bitnet", "linear_class": "hbitlinear"}, "hbitlinear"),
        ({"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "late"}, "late"),
        ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm"),
        ({"quant_method": "bitnet", "modules_to_not_convert": ["mlp"]}, "modules_to_not_convert"),
        ({"quant_method": "bitnet", "hadamard_transform": True}, "hadamard_transform"),
        ({"quant_method": "spinquant"}, "spinquant"),
        ({"quant_method": "bitnet", "inputs": {"online_rotation": "block"}}, "online_rotation"),
    ],
)
def test_quantization_that_nobody_knows(quantization: Any, words: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model", "llama", quantization_config=quantization)
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), words)


def test_rotated_weights_of_an_mlx_pack(tmp_path: Path) -> None:
    quantization = {"bits": 2, "group_size": 64, "hadamard": {"block": 128}}
    source = tiny_checkpoint(tmp_path / "model", "qwen3", quantization=quantization)
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), "hadamard", "rotated")


@pytest.mark.parametrize("bits", [(1, 16), (2, 8), (1, None), ("1", 8)])
def test_bits_of_other_1bitllm_models(bits: tuple[Any, Any]) -> None:
    with pytest.raises(CheckpointError, match="weight_bits"):
        bitnet_scheme({"weight_bits": bits[0], "input_bits": bits[1]}, "config")


@pytest.mark.parametrize("module", [mistral, qwen2, qwen3, gemma3], ids=lambda module: module.__name__.split(".")[-1])
def test_what_a_config_leaves_out_is_as_in_transformers(module: Any) -> None:
    kind = module.__name__.rpartition(".")[2]
    default = CONFIG_MAPPING["gemma3_text" if kind == "gemma3" else kind]()
    for field, value in module.DEFAULTS.items():
        if field == "sliding_window" and kind.startswith("qwen"):
            continue  # null there without use_sliding_window; nobody reads it then
        assert getattr(default, field) == value, field


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("first", [0, 1, 2, 4])
def test_layers_that_slide_are_those_of_transformers(family: str, first: int) -> None:
    """Published configs have no ``layer_types``."""
    fields = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": first}
    theirs = transformers_config(family, **fields).layer_types
    expected = tuple(7 if kind == "sliding_attention" else 0 for kind in theirs)
    assert build_model(tiny_config(family, **fields), WHERE, set()).windows == expected


def test_what_gemma3_leaves_out_is_as_in_transformers() -> None:
    """Published configs say little more than the sizes; the windows, both bases and the scale come from the class."""
    fields = {name: ... for name in ("rope_theta", "rms_norm_eps", "head_dim", "hidden_act")}
    config = tiny_config("gemma3_text", num_hidden_layers=7, **fields)
    theirs = transformers_config("gemma3_text", num_hidden_layers=7, **fields)
    ours = build_model(config, WHERE, set())
    sliding = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert ours.windows == tuple(theirs.sliding_window if slides else 0 for slides in sliding)
    assert ours.scale == theirs.query_pre_attn_scalar**-0.5 and ours.head_dim == theirs.head_dim
    for table, kind in ((ours.rope, "full_attention"), (ours.local_rope, "sliding_attention")):
        base = theirs.rope_parameters[kind]["rope_theta"]
        assert table is not None and table["inv_freq"][1] == pytest.approx(base ** (-2 / theirs.head_dim), rel=1e-6)
