"""Random tiny models of each family: the reference in ``f32`` activations against transformers in float32.

Linears are exactly ternary and embeddings exact in f16, so both compute with the same weights; only the order of
float32 sums differs: 1e-7 of the logits' range is typical, 1e-4 the limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packer.checkpoints import open_checkpoint
from packer.eval_source import subject_of_checkpoint
from packer.export import ExportOptions, export
from packer.pack import Pack
from shaders.interpreter import ReferenceModel
from shaders.reference import dequantize
from tests.support.checkpoints import IM_END, change_json
from tests.support.families import BONSAI, FAMILY_CASES, GEMMA3, QWEN_WINDOW
from tests.support.numerics import relative_to_range
from tests.support.transformers_models import load_model, load_tensors, logits, random_model, save_model

FLOAT = ExportOptions(activations="f32", embedding="f16")
IDS = [int(i) for i in np.random.default_rng(7).integers(0, 256, size=70)]

ROPE_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 500000.0,
    "original_max_position_embeddings": 32,
}

GEMMA3_SCALING = {"rope_type": "linear", "factor": 4.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bitnet silu": ("bitnet", {}),
    "bitnet relu2": ("bitnet", {"hidden_act": "relu2"}),
    "bitnet untied": ("bitnet", {"tie_word_embeddings": False}),
    "bitnet attention bias": ("bitnet", {"attention_bias": True}),
    "bitnet multi-head": ("bitnet", {"num_key_value_heads": 6}),
    "llama": ("llama", {}),
    "llama gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama multi-head": ("llama", {"num_key_value_heads": 6}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama wide heads": ("llama", {"head_dim": 20}),
    "llama narrow heads": ("llama", {"head_dim": 4}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama mlp bias": ("llama", {"mlp_bias": True}),
    "llama eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama theta": (
        "llama",
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    ),
    "llama linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama llama3": ("llama", {"rope_parameters": ROPE_LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": ROPE_YARN}),
    "bitnet yarn": ("bitnet", {"rope_parameters": {**ROPE_YARN, "beta_fast": 8.0, "beta_slow": 2.0}}),
    **{f"{name} window": case for name, case in FAMILY_CASES.items()},
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral untied": ("mistral", {"sliding_window": 1, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"sliding_window": 5}),  # which counts only with use_sliding_window
    "qwen2 types": ("qwen2", {**QWEN_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": ROPE_YARN}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3 bias": ("qwen3", {"attention_bias": True, "head_dim": 20}),
    "qwen3 eps": ("qwen3", {"rms_norm_eps": 0.1}),
    "gemma3 scaling": (
        "gemma3_text",
        {**GEMMA3, "rope_theta": 777.0, "rope_local_base_freq": 55.0, "rope_scaling": GEMMA3_SCALING},
    ),
    "gemma3 pattern": ("gemma3_text", {**GEMMA3, "layer_types": ..., "sliding_window_pattern": 2}),
    "gemma3 one in six": ("gemma3_text", {**GEMMA3, "layer_types": ..., "num_hidden_layers": 6}),
    "gemma3 untied": ("gemma3_text", {**GEMMA3, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma3 eps": ("gemma3_text", {**GEMMA3, "rms_norm_eps": 0.1}),
}


def reference_logits(pack: Path, ids: list[int], chunks: tuple[int, ...] = ()) -> np.ndarray:
    """Logits of every position by the NumPy reference, fed at once or in chunks."""
    opened = Pack(pack)
    model = ReferenceModel(opened.program, opened.tensors(), capacity=len(ids))
    spans = np.split(np.asarray(ids), np.cumsum(chunks))
    return np.concatenate([model.step(list(span), rows=len(span)) for span in spans if len(span)])


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, changes = CASES[name]
    model = random_model(family, **changes)
    export(save_model(model, tmp_path / "checkpoint"), tmp_path / "pack", FLOAT)
    pack = Pack(tmp_path / "pack")
    pack.verify()
    assert pack.manifest["grade"] == "lossless"
    assert pack.manifest["family"] == family
    assert relative_to_range(reference_logits(pack.path, IDS), logits(model, IDS)) < 1e-4


@pytest.mark.parametrize("name", [*FAMILY_CASES, "bonsai"])
def test_a_source_is_measured_as_the_model_that_it_is(name: str, tmp_path: Path) -> None:
    """``eval`` and ``--compensate`` run the checkpoint itself: here its program with its own weights."""
    family, changes = FAMILY_CASES.get(name, ("qwen3", BONSAI))
    model = random_model(family, **changes)
    source = subject_of_checkpoint(open_checkpoint(save_model(model, tmp_path / "checkpoint")))
    found = ReferenceModel(source.program, source.tensors, capacity=len(IDS)).step(IDS, rows=len(IDS))
    assert relative_to_range(found, logits(model, IDS)) < 1e-4


def test_steps_of_any_length_give_the_same_logits(tmp_path: Path) -> None:
    export(save_model(random_model("bitnet"), tmp_path / "checkpoint"), tmp_path / "pack", FLOAT)
    whole = reference_logits(tmp_path / "pack", IDS)
    assert relative_to_range(reference_logits(tmp_path / "pack", IDS, (1, 1, 30, 5)), whole) < 1e-6


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("bitnet relu2", {"hidden_act": "silu"}),  # microsoft/BitNet#588
        ("bitnet silu", {"hidden_act": "relu2"}),
        ("llama yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("llama llama3", {"rope_parameters": {**ROPE_LLAMA3, "factor": 4.0}}),
        ("llama linear", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
        ("llama eps", {"rms_norm_eps": 1e-5}),
        ("qwen3 eps", {"rms_norm_eps": 1e-5}),
        ("mistral window", {"sliding_window": 10}),
        ("qwen2 window", {"use_sliding_window": False, "layer_types": ...}),
        ("qwen3 window", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("gemma3 window", {"sliding_window": 9}),
        ("gemma3 window", {"query_pre_attn_scalar": 12}),
        ("gemma3 scaling", {"rope_parameters": ..., "rope_scaling": None}),
        ("gemma3 eps", {"rms_norm_eps": 1e-6}),
        ("llama multi-head", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24}),
    ],
)
def test_the_config_decides(name: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    """The same tensors with another config are another model: the comparison above can fail."""
    family, changes = CASES[name]
    model = random_model(family, **changes)
    folder = save_model(model, tmp_path / "checkpoint")
    change_json(folder / "config.json", **wrong)
    export(folder, tmp_path / "pack", FLOAT)
    assert relative_to_range(reference_logits(tmp_path / "pack", IDS), logits(model, IDS)) > 1e-3


@pytest.mark.parametrize("linears", ["q8", "q4"])
def test_quantized_linears_compute_with_their_decoded_weights(linears: str, tmp_path: Path) -> None:
    """Transformers, loaded with what the pack's tensors decode to, gives the pack's logits."""
    model = random_model("llama", attention_bias=True)
    random = np.random.default_rng(3)
    names = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    dense = {
        name: (0.1 * random.standard_normal(array.shape)).astype(np.float32) if "_proj.weight" in name else array
        for name, array in names.items()
    }
    load_tensors(model, dense)
    folder = save_model(model, tmp_path / "checkpoint")
    export(folder, tmp_path / "pack", ExportOptions(keep=(f"layers.*={linears}",), embedding="q8"))
    pack = Pack(tmp_path / "pack")
    assert {entry.encoding for name, entry in pack.entries.items() if ".qkv" in name} >= {linears}
    assert relative_to_range(reference_logits(pack.path, IDS), logits(model, IDS)) > 1e-4  # they did change
    load_tensors(model, dense | decoded_tensors(pack))
    assert relative_to_range(reference_logits(pack.path, IDS), logits(model, IDS)) < 1e-4


def decoded_tensors(pack: Pack) -> dict[str, np.ndarray]:
    """The pack's matrices under their names in the checkpoint."""
    found = {"model.embed_tokens.weight": dequantize(pack.tensor("embed"))}
    width, kv_width = 72, 24
    for layer in range(2):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        q, k, v = np.split(dequantize(pack.tensor(f"{ours}.qkv")), [width, width + kv_width])
        gate, up = np.split(dequantize(pack.tensor(f"{ours}.gate_up")), 2)
        found |= {f"{theirs}.self_attn.{name}_proj.weight": part for name, part in zip("qkv", (q, k, v), strict=True)}
        found |= {f"{theirs}.mlp.gate_proj.weight": gate, f"{theirs}.mlp.up_proj.weight": up}
        found[f"{theirs}.self_attn.o_proj.weight"] = dequantize(pack.tensor(f"{ours}.o"))
        found[f"{theirs}.mlp.down_proj.weight"] = dequantize(pack.tensor(f"{ours}.down"))
    return found


def test_half_precision_checkpoints_give_the_same_logits(tmp_path: Path) -> None:
    """Linears are exact in bf16 and f16, and the rest is rounded before either of the two sees it."""
    for dtype in (torch.bfloat16, torch.float16):
        folder = save_model(random_model("bitnet").to(dtype), tmp_path / str(dtype))
        export(folder, tmp_path / f"pack-{dtype}", FLOAT)
        found = reference_logits(tmp_path / f"pack-{dtype}", IDS)
        assert relative_to_range(found, logits(load_model(folder), IDS)) < 1e-4


def test_end_tokens_are_the_union_of_three_files(tmp_path: Path) -> None:
    folder = save_model(random_model("llama", eos_token_id=[3, 5]), tmp_path / "checkpoint")
    change_json(folder / "generation_config.json", eos_token_id=[5, 9])
    export(folder, tmp_path / "pack", FLOAT)
    assert Pack(tmp_path / "pack").manifest["eos_ids"] == [3, 5, 9, IM_END]


def test_tied_head_is_stored_once_and_an_untied_one_beside_it(tmp_path: Path) -> None:
    tied = export(save_model(random_model("llama"), tmp_path / "a"), tmp_path / "tied", FLOAT)
    untied = export(
        save_model(random_model("llama", tie_word_embeddings=False), tmp_path / "b"),
        tmp_path / "untied",
        FLOAT,
    )
    assert "lm_head" not in tied.manifest and "lm_head" not in Pack(tied.path).entries
    assert "lm_head" in Pack(untied.path).entries
    assert untied.manifest["parameters"] - tied.manifest["parameters"] == 272 * 72
