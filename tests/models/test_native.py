"""The real model on the native GPU: golden ids, KL to the reference, and each operation fed the same inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from packer.pack import Pack
from shaders.interpreter import ReferenceModel
from shaders.native import NativeModel
from shaders.reference import Quantized
from shaders.sampling import Sampling
from tests.support.numerics import kl_divergence
from tests.support.real import golden, real_pack

CAPACITY = 80
#: Tokens of the operation-by-operation test: enough for two tiles of eight and a rest.
TOKENS = 19
#: Layers whose operations are compared one by one: the first, one in the middle, the last.
LAYERS = (0, 14, 29)


@pytest.fixture(scope="module")
def pack() -> Pack:
    return Pack(real_pack("f16"))


@pytest.fixture(scope="module")
def native(pack: Pack) -> Iterator[NativeModel]:
    with NativeModel(pack.program, pack.tensors(), capacity=CAPACITY, kv="f32") as model:
        yield model


@pytest.mark.parametrize("number", range(8))
def test_golden_ids(native: NativeModel, pack: Pack, number: int) -> None:
    """Up to the first near-tie of each answer; a prompt whose first step is one only shows that it runs."""
    native.truncate(0)
    answer = golden()[number]
    sure = answer["sure"]
    found = [token for token, _ in native.generate(answer["prompt_ids"], Sampling(), max(sure, 1), pack.eos_ids)]
    assert found[:sure] == answer["greedy_ids"][:sure]
    assert len(found) == max(sure, 1)


def test_golden_steps(native: NativeModel, pack: Pack) -> None:
    """Whole answers, near-ties and what follows them included; 0.005 is the border of the grade "good"."""
    reference = ReferenceModel(pack.program, pack.tensors(), capacity=CAPACITY, kv="f32")
    divergence, hits, cached = [], [], []
    for answer in golden():
        ids, rows = answer["prompt_ids"] + answer["greedy_ids"][:-1], len(answer["greedy_ids"])
        shared = next(index for index, token in enumerate(ids) if cached[index : index + 1] != [token])
        native.truncate(shared)
        reference.truncate(shared)
        expected, found = reference.step(ids[shared:], rows), native.step(ids[shared:], rows)
        cached = ids
        divergence.append(kl_divergence(expected, found))
        hits += (found.argmax(axis=1) == answer["greedy_ids"]).tolist()
    assert np.concatenate(divergence).mean() < 0.005
    assert np.mean(hits) >= 0.97


class Recorder:
    """Runs the reference and keeps, for chosen operations, the values before and after."""

    def __init__(self, pack: Pack, ids: list[int]):
        self.model = ReferenceModel(pack.program, pack.tensors(), capacity=CAPACITY, kv="f32")
        self.model.observer = self.observe
        self.values: dict[str, Any] = {}
        self.steps: list[tuple[str, int, Mapping[str, Any], dict[str, Any], Any]] = []
        self.model.step(ids)

    def observe(self, section: str, index: int, op: Mapping[str, Any], result: Any) -> None:
        of_a_layer = any(f"layers.{layer}." in str(op) or op.get("k") == f"k.{layer}" for layer in LAYERS)
        if section == "logits" or op["op"] == "embed" or of_a_layer:
            self.steps.append((section, index, op, dict(self.values), copy.deepcopy(result)))
        self.values[op["out"]] = copy.deepcopy(result)


def test_each_operation_on_the_references_inputs(native: NativeModel, pack: Pack) -> None:
    """Integer products are the same bits; floats differ by rounding only; quantizers by one step at near-ties only."""
    ids = golden()[0]["prompt_ids"][:TOKENS]
    recorder = Recorder(pack, ids)
    native.truncate(0)
    native.device.write(native._live.buffers.runtime["@ids"], np.array(ids, dtype="<u4"))
    exact = 0
    for section, index, op, before, expected in recorder.steps:
        for name in {op.get("x"), op.get("q"), op["out"] if op.get("accumulate") else None} - {None}:
            native.write_value(name, planes(before[name]))
        rows = 1 if section == "logits" else TOKENS
        native.run_operation(section, index, TOKENS, 1)
        found = native.read_value(op["out"], rows)
        where = f"{section}[{index}] {op['op']} {op.get('w', op['out'])}"
        if isinstance(expected, Quantized):
            compare_quantized(found, expected, where)
        elif op["op"] == "linear" and isinstance(before[op["x"]], Quantized) and not op.get("accumulate"):
            assert np.array_equal(found[""], expected), where
            exact += 1
        else:
            compare_floats(found[""], expected, before.get(op["out"]) if op.get("accumulate") else None, where)
    assert exact == 2 * len(LAYERS)


def planes(value: np.ndarray | Quantized) -> dict[str, np.ndarray]:
    if isinstance(value, Quantized):
        return {"q": value.words, "scale": value.scale, "sums": value.sums}
    return {"": value}


def compare_quantized(found: Mapping[str, np.ndarray], expected: Quantized, where: str) -> None:
    """A sum of squares in another order moves x by some 1e-6 of itself: up to 127e-6 steps, so one number in some
    thousands crosses a tie; by two steps none can."""
    difference = found["q"].view(np.int8).astype(int) - expected.words.view(np.int8).astype(int)
    assert np.abs(difference).max() <= 1, where
    assert (difference != 0).mean() < 1e-3, where
    assert np.allclose(found["scale"], expected.scale, rtol=2e-6, atol=0), where
    blocks = difference.reshape(len(found["sums"]), -1, 64).sum(axis=-1)
    assert np.array_equal(found["sums"], expected.sums + blocks), where


def compare_floats(found: np.ndarray, expected: np.ndarray, before: np.ndarray | None, where: str) -> None:
    """Sums of up to 1536 products: 1536 roundings of 2^-24 of the greatest term, in truth about their square root."""
    scale = np.abs(expected).max() + (np.abs(before).max() if before is not None else 0)
    assert np.isfinite(found).all(), where
    assert np.abs(found - expected).max() <= 1536 * 2.0**-24 * scale, where
    error = np.square(found.astype(np.float64) - expected).sum() / np.square(expected.astype(np.float64)).sum()
    assert error < 1e-10, where
