"""Drafts on the native executor: answers are the same with and without them, and end at the same token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from shaders.native import NativeModel, shared_device
from shaders.native_program import parts_bytes
from shaders.native_waves import Drafting
from shaders.sampling import Sampling
from tests.shaders.tiny_programs import Shape, tiny_model

PROMPT = [5, 300, 0, 77, 77, 12, 200, 41, 9, 150, 3, 3, 299]
CAPACITY = 60
#: Hot enough for a text of which no token comes twice in a row.
VARIED = Sampling(temperature=30.0, top_k=200, top_p=0.95, repetition_penalty=1.3, seed=7)


class Knowing:
    """Guesses what comes, but for every ``wrong``-th token of the text. most: tokens of a guess."""

    def __init__(self, text: Sequence[int], wrong: int, most: int = 7):
        self.text, self.wrong, self.most = text, wrong, most
        self.settled: list[tuple[int, int]] = []

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        start = len(ids)
        guess = self.text[start : start + min(most, self.most)]
        return [(token + 1) % 301 if (start + at) % self.wrong == 0 else token for at, token in enumerate(guess)]

    def settle(self, proposed: Sequence[int], accepted: int) -> None:
        self.settled.append((len(proposed), accepted))


@pytest.fixture(scope="module")
def model() -> Iterator[NativeModel]:
    """With the kernels of a GPU, whatever drives it."""
    description, tensors = tiny_model("a16", shape=Shape(hidden=64, head_dim=16, layers=1))
    device = shared_device()
    software, device.software = device.software, False
    try:
        with NativeModel(description, tensors, capacity=CAPACITY, speculate="on") as native:
            yield native
    finally:
        device.software = software


@pytest.fixture(autouse=True)
def as_it_was(model: NativeModel) -> Iterator[None]:
    drafting = model.drafting
    yield
    model.drafting, model.speculate, model.keep_logits = drafting, "on", False


def answer(model: NativeModel, options: Sampling, count: int, way: str, **more: Any) -> list[int]:
    model.truncate(0)
    model.speculate = way
    return [token for token, _ in model.generate(PROMPT, options, count, **more)]


def guessing(model: NativeModel, source: Any) -> None:
    model.drafting._source = source


def test_it_verifies_with_kernels_for_a_few_tokens(model: NativeModel) -> None:
    assert model.drafting.verifies and model.most_verified == 8
    names = {
        tokens: {launch.kernel.name for launch, _ in model._live.dispatches(["body"], tokens, tokens, 20, True)}
        for tokens in (1, 2, 4, 5, 8)
    }
    assert names[2] == names[4] and any(name.endswith("_4") for name in names[2])
    assert names[5] == names[8] and any(name.endswith("_8") for name in names[5])
    assert not any(name.endswith(("_4", "_8")) for name in names[1])


@pytest.mark.parametrize("options", [Sampling(), VARIED], ids=["greedy", "random"])
@pytest.mark.parametrize("wrong", [1, 3, 5, 1000])
def test_guesses_change_no_token(model: NativeModel, options: Sampling, wrong: int) -> None:
    expected = answer(model, options, 40, "off")
    source = Knowing([*PROMPT, *expected, 1, 2, 3, 4, 5, 6, 7], wrong)
    guessing(model, source)
    assert answer(model, options, 40, "on") == expected
    assert model.position == len(PROMPT) + 39
    assert max(accepted for _, accepted in source.settled) == {1: 0, 3: 2, 5: 4, 1000: 7}[wrong]


def test_guesses_with_norms_of_heads_and_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_device(), "software", False)
    options = {"head_norms": True, "window": 5, "post_norms": True}
    description, tensors = tiny_model("a16", shape=Shape(hidden=64, head_dim=16, layers=1), **options)
    with NativeModel(description, tensors, capacity=CAPACITY, speculate="on") as native:
        assert native.drafting.verifies
        expected = answer(native, Sampling(), 70, "off")
        source = Knowing([*PROMPT, *expected, 1, 2, 3, 4, 5, 6, 7], 5)
        guessing(native, source)
        assert answer(native, Sampling(), 70, "on") == expected
        assert max(accepted for _, accepted in source.settled) == 4


def test_real_guesses(model: NativeModel) -> None:
    expected = answer(model, Sampling(), 40, "off")
    assert answer(model, Sampling(), 40, "on") == expected


@pytest.mark.parametrize("count", [1, 2, 3, 9, 10, 13])
def test_it_ends_at_the_length(model: NativeModel, count: int) -> None:
    every = answer(model, VARIED, 30, "off")
    guessing(model, Knowing([*PROMPT, *every], 4))
    assert answer(model, VARIED, count, "on") == every[:count]
    assert model.position == len(PROMPT) + count - 1


def test_it_ends_where_the_cache_does(model: NativeModel) -> None:
    every = answer(model, VARIED, 1000, "off")
    assert len(every) == CAPACITY - len(PROMPT) + 1
    guessing(model, Knowing([*PROMPT, *every, *range(20)], 1000))
    assert answer(model, VARIED, 1000, "on") == every


def test_it_ends_at_a_stop_token_and_goes_on_from_there(model: NativeModel) -> None:
    every = answer(model, VARIED, 30, "off")
    places = [at for at in range(4, 24) if every[at] not in every[:at]]
    assert len(places) > 8
    for at in places[:8]:
        guessing(model, Knowing([*PROMPT, *every], 1000))
        stopped = answer(model, VARIED, 30, "on", stop={every[at]})
        assert stopped == every[: at + 1] and model.position == len(PROMPT) + at
        # What lies beyond in the cache is written over.
        more = [t for t, _ in model.generate([every[at], 8], VARIED, 5, history=[*PROMPT, *every[:at]])]
        model.truncate(0)
        model.speculate = "off"
        assert more == [t for t, _ in model.generate([*PROMPT, *every[: at + 1], 8], VARIED, 5)]


def test_logits_of_every_step(model: NativeModel) -> None:
    model.keep_logits = True
    runs = []
    for way in ("off", "on"):
        model.truncate(0)
        model.speculate = way
        runs.append(list(model.generate(PROMPT, VARIED, 20)))
        guessing(model, Knowing([*PROMPT, *(token for token, _ in runs[0]), 0], 5))
    for (one, plain), (other, verified) in zip(*runs, strict=True):
        assert one == other and plain is not None and verified is not None
        assert plain.tobytes() == verified.tobytes()


def test_bits_that_differ(model: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of the last size of all: nothing is verified any more, whoever asks for it."""
    logits_at = model.logits_at

    def inexact(position: int, ids: Sequence[int]) -> np.ndarray:
        found = logits_at(position, ids)
        if len(ids) == 7:
            found.view("<u4")[6, 300] ^= 1
        return found

    monkeypatch.setattr(model, "logits_at", inexact)
    model.drafting = Drafting(model, Knowing([], 1), "on")
    assert not model.drafting.verifies and model.drafting.begin("on") is None
    monkeypatch.setattr(model, "verify", None)
    assert len(answer(model, Sampling(), 10, "on")) == 10


def test_auto_follows_what_it_costs(model: NativeModel) -> None:
    model.position = 0
    drafting = Drafting(model, Knowing([], 1), "auto")
    costs = drafting._costs
    assert costs and costs.plain > 0 and len(costs.verify) == 9 and model.position == 0
    every = answer(model, Sampling(), 40, "off")
    source = Knowing([*PROMPT, *every], 1000)
    for price, least, most in ((1.1, 1, 99), (9.0, 0, 0)):
        model.drafting = drafting
        guessing(model, source)
        costs.plain, costs.verify, costs.wait = 1e6, [0, *[price * 1e6] * 8], 0
        calls = count_verifications(model)
        assert answer(model, Sampling(), 40, "auto") == every
        assert least <= len(calls) <= most
        del model.verify


def count_verifications(model: NativeModel) -> list[int]:
    verify, calls = model.verify, []

    def counted(ids: Sequence[int], choose: str, produced: int) -> list[int]:
        calls.append(len(ids))
        return verify(ids, choose, produced)

    model.verify = counted  # type: ignore[method-assign]
    return calls


def test_too_many_tokens(model: NativeModel) -> None:
    with pytest.raises(ValueError, match="9 tokens are to be verified, expected at most 8"):
        model.verify([1] * 9, "greedy", 0)


@pytest.mark.parametrize(
    ("activations", "way", "capacity", "most"), [("a16", "auto", 30, 1), ("f32", "on", 30, 8), ("a16", "on", 5, 5)]
)
def test_where_no_drafts_are_verified(
    activations: str, way: str, capacity: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a software renderer unless they must be, where no kernels do it, and where nothing can be compared."""
    monkeypatch.setattr(shared_device(), "software", True)
    description, tensors = tiny_model(activations, shape=Shape(layers=1))
    with NativeModel(description, tensors, capacity=capacity, speculate=way) as native:
        assert (native.most_verified, native.drafting.verifies) == (most, False)
        assert len(list(native.generate([1, 2], Sampling(), 3))) == 3


def test_ways_have_names() -> None:
    description, tensors = tiny_model(shape=Shape(layers=1))
    with pytest.raises(ValueError, match="speculate is 'yes', expected one of auto, on, off"):
        NativeModel(description, tensors, capacity=8, speculate="yes")


def test_a_binding_that_holds_no_verification() -> None:
    """Attention over the cache for eight tokens would exceed it: the answer is made without drafts."""
    description, tensors = tiny_model(shape=Shape(heads=16, kv_heads=1, layers=1))
    options = {"capacity": 2000, "max_tokens_per_step": 32, "speculate": "on"}
    limit = 4 * parts_bytes(description, 2000, 1)
    with NativeModel(description, tensors, binding_limit=limit, **options) as native:
        assert native.most_verified == 1
