"""Rotary frequencies against transformers' own functions, and rotation against its rotate_half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packer.errors import CheckpointError
from packer.models import build_model
from shaders import reference
from tests.support.checkpoints import tiny_config
from tests.support.transformers_models import transformers_config

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # isort: skip  (after the line that sets up torch)
from transformers.models.bitnet.modeling_bitnet import BitNetRotaryEmbedding, apply_rotary_pos_emb  # isort: skip
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # isort: skip

THETA = {"rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

#: name -> fields of the config, in transformers 5's form.
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0, **THETA},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 500000.0},
    "llama3 long": {
        **LLAMA3,
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "yarn": {**YARN, **THETA},
    "yarn betas": {**YARN, **THETA, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn without truncation": {**YARN, **THETA, "truncate": False},
    "yarn attention factor": {**YARN, **THETA, "attention_factor": 1.25},
    "yarn mscale": {**YARN, **THETA, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn below one": {**YARN, **THETA, "factor": 0.5},
}


def our_table(**changes: Any) -> dict[str, Any]:
    config = tiny_config("llama", head_dim=64, **changes)
    return dict(build_model(config, Path("checkpoint"), {"lm_head.weight"}).rope)


def close(found: Any, expected: Any) -> None:
    """Both are float32; ours is rounded once from float64, theirs at each of up to six operations."""
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=6 * 2**-23)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_frequencies_are_those_of_transformers(name: str, form: str) -> None:
    parameters = SCALINGS[name]
    fields = {form: parameters, "rope_theta": ...}
    if form == "rope_scaling":  # transformers 4: theta beside it, and older files write "type"
        fields = {
            "rope_theta": parameters["rope_theta"],
            "rope_scaling": {k if k != "rope_type" else "type": v for k, v in parameters.items() if k != "rope_theta"},
        }
    table = our_table(**fields)
    config = transformers_config("llama", head_dim=64, rope_theta=..., rope_parameters=dict(parameters))
    inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    close(table["inv_freq"], inv_freq.numpy())
    assert table["scale"] == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 777.0},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}},
        {"rope_theta": ...},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 1000000.0, "rope_scaling": None},
        # The original context may stand beside the rope parameters, where it wins.
        {"rope_scaling": {**LLAMA3}, "original_max_position_embeddings": 32},
        {"rope_scaling": {**YARN}, "original_max_position_embeddings": 32},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {**YARN, "factor": None}},
        # Both forms: transformers prefers the older one.
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "default", **THETA},
        },
    ],
)
@pytest.mark.parametrize("family", ["llama", "bitnet"])
def test_what_a_config_leaves_out_is_read_as_transformers_reads_it(family: str, fields: dict[str, Any]) -> None:
    config = tiny_config(family, head_dim=64, **fields)
    table = build_model(config, Path("checkpoint"), set()).rope
    embedding = {"llama": LlamaRotaryEmbedding, "bitnet": BitNetRotaryEmbedding}[family](
        transformers_config(family, head_dim=64, **fields)
    )
    close(table["inv_freq"], embedding.inv_freq.numpy())
    assert table["scale"] == pytest.approx(embedding.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_rotation_is_that_of_transformers_beyond_the_original_context(name: str) -> None:
    config = transformers_config("llama", head_dim=64, rope_theta=..., rope_parameters=dict(SCALINGS[name]))
    embedding = LlamaRotaryEmbedding(config)
    inv_freq = embedding.inv_freq.numpy()
    random = np.random.default_rng(0)
    tokens, heads = 200, 3
    x = random.standard_normal((tokens, heads, 64)).astype(np.float32)
    table = reference.rope_table(inv_freq, embedding.attention_scaling, tokens)
    cos, sin = embedding(torch.zeros(1), torch.arange(tokens)[None])
    expected = apply_rotary_pos_emb(torch.from_numpy(x)[None], torch.from_numpy(x)[None], cos, sin, unsqueeze_dim=2)
    # cos and sin agree to the last bit or two, so does each product and the sum of two products.
    np.testing.assert_allclose(reference.rope(x, table), expected[0][0].numpy(), atol=4e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {**YARN, "factor": -1.0}}, "factor"),
        ({"rope_scaling": {**YARN, "beta_fast": "fast"}}, "beta_fast"),
        ({"rope_scaling": {**YARN, "attention_factor": "large"}}, "attention_factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "yarn"}, "rope"),
        ({"rope_theta": "large"}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        our_table(**fields)
