"""The decoder: its cache, its sizes, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.training import TINY_MODEL, model, tokens

import torch  # isort: skip  (after tests.support.training, which sets it up)
import torch.nn.functional as F  # isort: skip

from examples.train.config import ModelConfig, load_preset
from examples.train.errors import TrainError
from examples.train.model import Decoder, KVCache


@pytest.mark.parametrize("changes", [{}, {"sub_norms": False, "precision": "fp32"}, {"kv_heads": 4, "heads": 4}])
def test_parameters_are_counted(changes: dict[str, Any]) -> None:
    made = model(**changes)
    assert made.config.parameters() == sum(parameter.numel() for parameter in made.parameters())


@pytest.mark.parametrize("precision", ["fp32", "ternary"])
def test_a_cache_changes_nothing(precision: str) -> None:
    made, ids = model(precision=precision), tokens(3, 40)
    whole = made(ids)
    cache = KVCache(made.config, batch=3, length=48)
    parts = torch.cat([made(part, cache) for part in ids.split([7, 1, 30, 2], dim=1)], dim=1)
    torch.testing.assert_close(parts, whole, atol=2e-5, rtol=0)
    assert cache.position == 40


def test_padding_on_the_left_changes_nothing() -> None:
    """Rows of different lengths in one batch, as sampling has them, over a border of the cache's stride."""
    made, lengths = model(precision="fp32", max_context=200), [5, 1, 12]
    ids = tokens(3, 12)
    start = torch.tensor([12 - length for length in lengths])
    cache = KVCache(made.config, batch=3, length=150, start=start)
    more = tokens(3, 130, seed=1)
    found = torch.cat([made(ids, cache), made(more, cache)], dim=1)
    for row, length in enumerate(lengths):
        alone = made(torch.cat([ids[row, 12 - length :], more[row]])[None])
        torch.testing.assert_close(found[row, 12 - length :], alone[0], atol=2e-5, rtol=0)
    assert found.isfinite().all(), "padding must not become NaN"


def test_a_cache_that_goes_back_forgets() -> None:
    made, ids = model(precision="fp32"), tokens(1, 20)
    cache = KVCache(made.config, batch=1, length=20)
    made(ids, cache)
    cache.position = 10
    torch.testing.assert_close(made(ids[:, 10:], cache), made(ids)[:, 10:], atol=2e-5, rtol=0)


def test_no_token_sees_the_future() -> None:
    made, ids = model(precision="fp32"), tokens(1, 20)
    other = ids.clone()
    other[0, 12] += 1
    one, two = made(ids), made(other)
    torch.testing.assert_close(one[:, :12], two[:, :12])
    assert (one[:, 12:] - two[:, 12:]).abs().amax(-1).gt(1e-4).all()


def test_checkpointed_gradients_are_the_same() -> None:
    ids, gradients = tokens(2, 16), []
    for keep_less in (False, True):
        made = model()
        made.grad_checkpointing = keep_less
        F.cross_entropy(made(ids).flatten(0, 1), ids.flatten()).backward()
        gradients.append([parameter.grad for parameter in made.parameters()])
    torch.testing.assert_close(*gradients)


def test_hidden_states_lead_to_the_logits() -> None:
    made, ids = model(), tokens(2, 9)
    torch.testing.assert_close(made.head(made(ids, hidden=True)), made(ids))


def test_relu2_is_another_activation() -> None:
    one, two = model(precision="fp32"), model(precision="fp32", activation="relu2")
    gate = torch.tensor([-2.0, 3.0])
    assert not torch.allclose(one(tokens(1, 5)), two(tokens(1, 5)))
    torch.testing.assert_close(two.blocks[0].gated(gate, torch.ones(2)), torch.tensor([0.0, 9.0]))


def test_too_long_a_sequence_or_cache_is_refused() -> None:
    made = model()
    with pytest.raises(TrainError, match="65 tokens is longer than the model's context of 64"):
        made(tokens(1, 65))
    with pytest.raises(TrainError, match="cache of 65 tokens is longer than the model's context of 64"):
        KVCache(made.config, batch=1, length=65)
    cache = KVCache(made.config, batch=1, length=10)
    made(tokens(1, 8), cache)
    with pytest.raises(TrainError, match="11 tokens do not fit a cache of 10"):
        made(tokens(1, 3), cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "int3"}, "precision is 'int3', expected one of fp32, bf16, ternary, nvfp4, mxfp4"),
        ({"activation": "gelu"}, "activation is 'gelu', expected one of silu, relu2"),
        ({"kv_heads": 3}, "4 heads are no multiple of 3 kv_heads"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"layers": 0}, "layers is 0, expected a whole number of 1 or more"),
        ({"tie_embedding": False}, "tie_embedding is false"),
        ({"fp4_options": ["no-hadamard"]}, "are of nvfp4 and mxfp4, not of ternary"),
        ({"precision": "nvfp4", "fp4_options": ["no-hurry"]}, "fp4_options is 'no-hurry', expected one of"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        replace(TINY_MODEL, **changes)


@pytest.mark.parametrize("name", ["tiny", "2m", "13m", "gap10m"])
def test_presets_can_be_trained(name: str) -> None:
    preset = load_preset(name)
    config = preset.train("pretrain")
    assert config.micro_batch() >= 1 and config.sequence <= preset.model.max_context
    assert preset.options("prepare")["vocabulary"] == preset.model.vocab_size


def test_most_of_13m_is_ternary() -> None:
    config = load_preset("13m").model
    embedding = config.vocab_size * config.dim
    assert 12e6 < config.parameters() < 14e6 and embedding < 0.15 * config.parameters()


def test_gap10m_has_whole_blocks() -> None:
    config = load_preset("gap10m").model
    assert 9e6 < config.parameters() < 11e6
    for precision in ("nvfp4", "mxfp4"):
        small = replace(config, precision=precision, vocab_size=8, layers=2)
        assert isinstance(Decoder(small), Decoder)  # a size that is no whole number of blocks is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pretrain]\nsteps = 1\n", r"has no table \[model\]"),
        ("[model]\ndim = 'a'\n", "missing .* required"),
        ("[model\n", "preset.toml"),
    ],
)
def test_a_broken_preset_is_named(text: str, message: str, tmp_path: Any) -> None:
    (tmp_path / "preset.toml").write_text(text)
    with pytest.raises(TrainError, match=message):
        load_preset(str(tmp_path / "preset.toml"))


def test_an_unknown_preset_or_stage_is_named() -> None:
    with pytest.raises(TrainError, match="no preset 'huge'; there are 13m, 2m, gap10m, tiny"):
        load_preset("huge")
    with pytest.raises(TrainError, match="preset tiny has no stage rest"):
        load_preset("tiny").train("rest")


def test_a_model_config_reads_lists(tmp_path: Any) -> None:
    config = ModelConfig(8, 32, 1, 1, 1, 32, 32, precision="nvfp4", fp4_options=["no-hadamard"])  # type: ignore[arg-type]
    assert config.fp4_options == ("no-hadamard",) and config.label == "nvfp4 EMULATED (no-hadamard)"
