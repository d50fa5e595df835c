"""Memory plans: the arithmetic, for packs, shapes and figures alone, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packer.errors import PackerError
from packer.pack import Pack
from packer.plan import GIB, kv_bytes_per_token, make_plan, memory_of
from packer.shapes import SHAPES
from tests.support.cli import one_error, run_cli

PACK = Path(__file__).resolve().parents[2] / "examples" / "packs" / "smollm2-135m-ternary"


def test_bytes_a_token_from_a_servers_figures() -> None:
    plan = make_plan(None, kv_gib=8.78, tokens=531_288, context=262_144)
    assert round(plan.bytes_per_token) == 17_745
    assert plan.requests is not None and round(plan.requests, 2) == 2.03


def test_tokens_and_requests_from_bytes_a_token() -> None:
    """The same figures the other way round, with a model of that many bytes a token."""
    memory = memory_of(None, "bitnet-2b")
    assert memory is not None
    plan = make_plan(memory, kv_gib=8.78, context=4096)
    assert plan.bytes_per_token == 2 * 30 * 5 * 128 * 2 == 76_800
    assert plan.tokens == int(8.78 * GIB) // 76_800 == 122_753
    assert plan.requests == pytest.approx(122_753 / 4096)
    assert plan.total_bytes == int(8.78 * GIB) + 874_362_880


@pytest.mark.parametrize(("kv", "each"), [("f32", 4 * 64), ("f16", 2 * 64), ("q8", 64 + 4)])
def test_bytes_of_each_precision(kv: str, each: int) -> None:
    assert kv_bytes_per_token([(3, 64)] * 60, kv) == 60 * 3 * each


def test_a_pack_has_exact_bytes() -> None:
    memory = memory_of(PACK, None)
    assert memory is not None
    pack = Pack(PACK)
    assert memory.weights_bytes == sum(tensor.resident_bytes for tensor in pack.tensors().values())
    plan = make_plan(memory, kv="q8", context=4096)
    assert (plan.kv_bytes, plan.tokens, plan.requests) == (4096 * 60 * 3 * 68, 4096, 1)
    assert make_plan(memory, tokens=100_000).kv_bytes == 100_000 * 60 * 3 * 128


def test_shapes_have_the_sizes_of_their_models() -> None:
    """Parameters as the model cards count them, to three digits; the default model's shape is its pack's."""
    parameters = {name: sum(t.rows * t.columns for t in shape.tensors()) for name, shape in SHAPES.items()}
    assert {name: float(f"{count:.3g}") for name, count in parameters.items()} == {
        "bitnet-2b": 2.41e9,
        "bonsai-1.7b": 1.72e9,
        "bonsai-8b": 8.19e9,
        "smollm2-135m": 135e6,
    }
    shape, pack = SHAPES["smollm2-135m"], Pack(PACK)
    assert shape.program() == pack.program
    assert sum(tensor.resident_bytes for tensor in shape.tensors()) == pack.manifest["resident_bytes"]
    assert parameters["smollm2-135m"] == pack.manifest["parameters"]


@pytest.mark.parametrize("name", ["bonsai-1.7b", "bonsai-8b"])
def test_bonsai_is_ternary_everywhere_and_has_norms_of_heads(name: str) -> None:
    tensors = {tensor.name: tensor for tensor in SHAPES[name].tensors()}
    kinds = {(tensor.encoding, tensor.group) for tensor in tensors.values() if len(tensor.shape) == 2}
    assert kinds == {("ternary", 128)} and {"embed", "layers.0.q_norm", "layers.27.k_norm"} <= set(tensors)
    assert ("lm_head" in tensors) == (name == "bonsai-8b")
    ops = [op for op in SHAPES[name].program()["body"] if op["op"] == "rope_append"]
    assert ops[3]["q_gain"] == "layers.3.q_norm" and ops[3]["eps"] == 1e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nothing to plan"),
        ({"tokens": 5}, "nothing to plan"),
        ({"kv_gib": 0.0, "tokens": 5}, "--kv-gib is 0.0"),
        ({"kv_gib": float("nan"), "tokens": 5}, "--kv-gib is nan"),
        ({"kv_gib": float("inf"), "tokens": 5}, "--kv-gib is inf"),
        ({"kv_gib": 1.0, "tokens": -5}, "--tokens is -5"),
        ({"kv_gib": 1.0, "tokens": 5, "context": 0}, "--context is 0"),
        ({"kv": "f8"}, "'f8'"),
    ],
)
def test_refused_without_a_model(options: dict, words: str) -> None:
    with pytest.raises(PackerError, match=words):
        make_plan(None, **options)


def test_refused_with_a_model() -> None:
    memory = memory_of(None, "bitnet-2b")
    with pytest.raises(PackerError, match="made for 4,096 tokens, found a context of 4,097"):
        make_plan(memory, context=4097)
    with pytest.raises(PackerError, match="--kv-gib or --tokens"):
        make_plan(memory, kv_gib=1, tokens=5)
    with pytest.raises(PackerError, match="not both"):
        memory_of(PACK, "bitnet-2b")


def test_command_line() -> None:
    result = run_cli("plan", "--kv-gib", 8.78, "--tokens", 531288, "--context", 262144)
    assert result.status == 0 and "17,745 bytes" in result.out and "2.03" in result.out
    result = run_cli("plan", "--shape", "bonsai-8b", "--kv", "q8", "--json")
    plan = json.loads(result.out)
    assert plan["bytes_per_token"] == 2 * 36 * 8 * (128 + 4)
    one_error(run_cli("plan", "--shape", "gpt-5"), "gpt-5", "bitnet-2b")
    one_error(run_cli("plan", "no-such-folder"), "no-such-folder")
    one_error(run_cli("plan"), "--kv-gib")
