"""One model as a folder, as GGUF and as MLX: the same pack weights and the same program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from packer.checkpoints.gguf import open_gguf
from packer.checkpoints.gguf_config import ARCHITECTURES
from packer.errors import CheckpointError
from packer.export import ExportOptions, export
from packer.models import build_model
from packer.pack import Pack
from tests.packer import ternary_formats as formats
from tests.packer.gguf_files import metadata, write, write_foreign
from tests.support.checkpoints import tiny_config, tiny_tensors, write_folder
from tests.support.families import BONSAI, BONSAI_GROUP, GEMMA3, bonsai_matrices, bonsai_tensors

ARCHITECTURE = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
#: As many rows as the files have tokens.
COMMON: dict[str, Any] = {"vocab_size": 400}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "gemma3": ("gemma3", {**GEMMA3, "layer_types": ..., "num_hidden_layers": 7, "query_pre_attn_scalar": 12}),
    "gemma3 without windows": (
        "gemma3",
        {**GEMMA3, "layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 12},
    ),
}


def stored_names(architecture: str, names: Mapping[str, Any], layers: int) -> dict[str, str]:
    """Hugging Face name -> name in a file, as the gguf package has it for its converter."""
    table = gguf.get_tensor_name_map(ARCHITECTURE[architecture], layers)
    found = {name: table.get_name(name, try_suffixes=(".weight", ".bias")) for name in names}
    assert None not in found.values(), found
    return {name: str(stored) for name, stored in found.items()}


def fields(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of a file, under the names that the gguf package has."""
    keys = gguf.Keys
    named: dict[str, Any] = {
        keys.LLM.BLOCK_COUNT: config["num_hidden_layers"],
        keys.LLM.CONTEXT_LENGTH: config["max_position_embeddings"],
        keys.LLM.EMBEDDING_LENGTH: config["hidden_size"],
        keys.LLM.FEED_FORWARD_LENGTH: config["intermediate_size"],
        keys.LLM.VOCAB_SIZE: config["vocab_size"],
        keys.Attention.HEAD_COUNT: config["num_attention_heads"],
        keys.Attention.HEAD_COUNT_KV: config["num_key_value_heads"],
        keys.Attention.KEY_LENGTH: config["head_dim"],
        keys.Attention.VALUE_LENGTH: config["head_dim"],
        keys.Attention.LAYERNORM_RMS_EPS: config["rms_norm_eps"],
        keys.Rope.FREQ_BASE: config["rope_theta"],
    }
    if architecture == "gemma3" and "full_attention" not in config.get("layer_types", [])[:1]:
        named[keys.Attention.SLIDING_WINDOW] = config["sliding_window"]
    tokenizer = {key: value for key, value in metadata().items() if key.startswith("tokenizer.")}
    return tokenizer | {key.format(arch=architecture): value for key, value in named.items()}


def as_stored(architecture: str, tensors: Mapping[str, np.ndarray], layers: int) -> dict[str, tuple[np.ndarray, Q]]:
    """Tensors under a file's names, and as llama.cpp's converter changes them: Gemma's gains with their 1."""
    names = stored_names(architecture, tensors, layers)
    one = np.float32(architecture == "gemma3")
    return {names[name]: (array if array.ndim > 1 else array + one, Q.F32) for name, array in tensors.items()}


def weights(pack: Pack) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tensor.encoding, tensor.data.tobytes(), None if tensor.scales is None else tensor.scales.tobytes())
        for name, tensor in pack.tensors().items()
    }


@pytest.mark.parametrize("name", CASES)
def test_the_same_pack_from_a_folder_and_from_gguf(name: str, tmp_path: Path) -> None:
    architecture, changes = CASES[name]
    family = ARCHITECTURES[architecture].model_type
    config = tiny_config(family, **{**COMMON, **changes})
    tensors = tiny_tensors(config)
    file = write(
        tmp_path / "model.gguf",
        architecture,
        fields(architecture, config),
        as_stored(architecture, tensors, config["num_hidden_layers"]),
    )
    one = Pack(export(write_folder(tmp_path / "folder", config, tensors), tmp_path / "one", ExportOptions()).path)
    two = Pack(export(file, tmp_path / "two", ExportOptions()).path)
    assert one.manifest["family"] == two.manifest["family"] == family
    assert weights(one) == weights(two)
    assert one.program == two.program


@pytest.mark.parametrize("form", ["Q2_0 of 128", "PTQ1_0", "mlx"])
def test_bonsai_in_every_form(form: str, tmp_path: Path) -> None:
    """Embedding and head too come over trit for trit."""
    config = tiny_config("qwen3", **{**BONSAI, **COMMON})
    tensors = bonsai_tensors(**COMMON)
    matrices = bonsai_matrices(tiny_tensors(config))
    expected = Pack(export(write_folder(tmp_path / "floats", config, tensors), tmp_path / "one", ExportOptions()).path)
    if form == "mlx":
        stored = {name: array for name, array in tensors.items() if name not in matrices}
        for name, (trits, scales) in matrices.items():
            packed = formats.mlx(trits, scales, BONSAI_GROUP, BONSAI_GROUP)
            stored |= {f"{name.removesuffix('weight')}{kind}": array for kind, array in packed.items()}
        quantization = {"bits": 2, "group_size": BONSAI_GROUP}
        source = write_folder(tmp_path / "mlx", {**config, "quantization": quantization}, stored)
    else:
        source = bonsai_gguf(tmp_path, form, config, tensors, matrices)
    found = Pack(export(source, tmp_path / "two", ExportOptions()).path)
    assert weights(found) == weights(expected) and found.program == expected.program
    assert found.entries["embed"].encoding == "ternary" and found.manifest["grade"] == "lossless"


def bonsai_gguf(
    folder: Path,
    form: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> Path:
    """A GGUF file whose matrices are of a type that the gguf package does not write."""
    names = stored_names("qwen3", tensors, config["num_hidden_layers"])
    kind, _, _ = formats.BLOCKS[form]
    foreign = {
        names[name]: (formats.encode(form, trits, scales, BONSAI_GROUP), kind, trits.shape)
        for name, (trits, scales) in matrices.items()
    }

    def change(found: dict[str, Any], arrays: dict[str, Any]) -> None:
        vectors = {name: array for name, array in tensors.items() if name not in matrices}
        for mapping, new in ((found, fields("qwen3", config)), (arrays, as_stored("qwen3", vectors, 2))):
            mapping.clear()
            mapping.update(new)

    return write_foreign(folder / "model.gguf", foreign, architecture="qwen3", change=change)


def test_norms_are_named_as_the_gguf_package_names_them() -> None:
    for name, architecture in ARCHITECTURE.items():
        theirs = {f"model.layers.0.{norm}.weight": ours for ours, norm in ARCHITECTURES[name].norms.items()}
        expected = stored_names(name, theirs, 1)
        assert {full: f"blk.0.{ours}.weight" for full, ours in theirs.items()} == expected
        known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[architecture]}
        assert {f"blk.{{bid}}.{ours}" for ours in theirs.values()} == {n for n in known if n.endswith("_norm")} - {
            "output_norm"
        }


def gemma(path: Path, layers: int = 3, **extra: Any) -> Path:
    changes = {**COMMON, **GEMMA3, "layer_types": ..., "num_hidden_layers": layers, "head_dim": 16}
    config = tiny_config("gemma3_text", **changes)
    named = {f"gemma3.{name.replace('__', '.')}": value for name, value in extra.items()}
    return write(path, "gemma3", fields("gemma3", config) | named, as_stored("gemma3", tiny_tensors(config), layers))


def test_windows_bases_and_scale_of_gemma3_files(tmp_path: Path) -> None:
    named = {"attention__sliding_window_pattern": 3, "rope__freq_base_swa": 4096.0}
    scaled = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    checkpoint = open_gguf(gemma(tmp_path / "model.gguf", **named, **scaled))
    model = build_model(checkpoint.info.config, checkpoint.path, checkpoint.names())
    assert model.windows == (8, 8, 0)
    assert model.local_rope is not None
    half = 2 / model.head_dim
    assert model.local_rope["inv_freq"][1] == pytest.approx(4096.0**-half, rel=1e-6)
    assert model.rope["inv_freq"][1] == pytest.approx(10000.0**-half / 8, rel=1e-6)  # layers that see all keys alone
    assert model.scale == model.head_dim**-0.5
    large = open_gguf(gemma(tmp_path / "large.gguf", layers=62)).info.config
    assert large["query_pre_attn_scalar"] == 72 // 6 and len(large["layer_types"]) == 62


@pytest.mark.parametrize(
    ("name", "value"),
    [("final_logit_softcapping", 30.0), ("attention.sliding_window", "far"), ("attention.sliding_window_pattern", 0)],
)
def test_gemma3_files_with_other_mathematics(name: str, value: Any, tmp_path: Path) -> None:
    path = gemma(tmp_path / "model.gguf", **{name: value})
    with pytest.raises(CheckpointError, match=name):
        open_gguf(path)


def test_a_window_of_an_architecture_without_one(tmp_path: Path) -> None:
    config = tiny_config("qwen3", **COMMON)
    named = fields("qwen3", config) | {"qwen3.attention.sliding_window": 4096}
    path = write(tmp_path / "model.gguf", "qwen3", named, as_stored("qwen3", tiny_tensors(config), 2))
    with pytest.raises(CheckpointError, match="sliding_window"):
        open_gguf(path)


def test_rotated_weights(tmp_path: Path) -> None:
    config = tiny_config("qwen3", **COMMON)
    for key in ("qwen3.rotation.block", "general.hadamard"):
        named = fields("qwen3", config) | {key: 128}
        path = write(tmp_path / "model.gguf", "qwen3", named, as_stored("qwen3", tiny_tensors(config), 2))
        with pytest.raises(CheckpointError, match=f"{key}.*rotated"):
            open_gguf(path)
