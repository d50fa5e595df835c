"""The native executor against the NumPy one, on programs built by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import wgpu

from shaders import native_cases, native_waves, program
from shaders.interpreter import ReferenceModel
from shaders.native import NativeModel, shared_device
from shaders.native_errors import (
    ContextFull,
    DeviceUnsupported,
    NumbersBroken,
    OutOfDeviceMemory,
    SelfCheckFailed,
)
from shaders.sampling import Sampling, penalize, sample
from shaders.selfcheck import stored_cases
from tests.shaders.tiny_programs import Shape, tiny_model

PROMPT = [5, 300, 0, 77, 77, 12, 200, 41, 9, 150, 3, 3, 299]
VARIANTS: dict[str, dict[str, Any]] = {
    "a8 with sub-norms": {"activations": "a8", "act": "relu2"},
    "a8 by row, no sub-norms": {"activations": "a8", "scales": "row", "sub_norms": False, "bias": True},
    "a16 by group": {"activations": "a16", "scales": "group", "embedding": "q4"},
    "f32 activations": {"activations": "f32", "embedding": "f16", "act": "gelu_tanh"},
    "f32 activations, q8 linears": {
        "activations": "f32",
        "linears": "q8",
        "embedding": "f32",
        "sub_norms": False,
    },
    "nvfp4 linears, q4a embedding": {
        "activations": "f32",
        "linears": "nvfp4",
        "embedding": "q4a",
        "sub_norms": False,
    },
    "mxfp4 linears, nvfp4 embedding": {
        "activations": "f32",
        "linears": "mxfp4",
        "embedding": "nvfp4",
        "sub_norms": False,
    },
    "q4a linears, mxfp4 embedding": {
        "activations": "f32",
        "linears": "q4a",
        "embedding": "mxfp4",
        "sub_norms": False,
    },
    "norms of heads, a window, post-norms": {
        "activations": "a16",
        "head_norms": True,
        "window": 4,
        "post_norms": True,
    },
    "norms of heads alone": {"activations": "f32", "head_norms": True, "sub_norms": False},
}


def both(
    kv: str = "f32", capacity: int = 40, native: dict[str, Any] | None = None, **options: Any
) -> tuple[NativeModel, ReferenceModel]:
    description, tensors = tiny_model(**options)
    program.check(description, {name: (weight.encoding, weight.shape) for name, weight in tensors.items()})
    return (
        NativeModel(description, tensors, capacity=capacity, kv=kv, **(native or {})),
        ReferenceModel(description, tensors, capacity=capacity, kv=kv),
    )


@pytest.fixture
def model() -> Iterator[NativeModel]:
    description, tensors = tiny_model()
    with NativeModel(description, tensors, capacity=40) as native:
        yield native


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference as a share of the range of the expected numbers."""
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.ptp(expected))


# Two layers. Float differences are a few U; an integer activation that falls on the other side of a tie moves a
# logit by about one step of its row, 1/127 of the largest (a8) or 1/32639 (a16), times one weight in fifty.
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_references(variant: str) -> None:
    native, reference = both(**VARIANTS[variant])
    with native:
        bound = 5e-3 if VARIANTS[variant]["activations"] == "a8" else 2e-5
        assert difference(native.step(PROMPT, rows=len(PROMPT)), reference.step(PROMPT, rows=len(PROMPT))) < bound
        for token in (8, 190):
            assert difference(native.step([token]), reference.step([token])) < bound
        assert native.position == reference.position == len(PROMPT) + 2


# Over hundreds of keys more integers lie near a tie: a few steps of 1/32639.
@pytest.mark.parametrize(("activations", "window", "bound"), [("f32", 70, 2e-5), ("a16", 70, 2e-4), ("a16", 300, 2e-4)])
def test_a_gpus_operations_norm_heads_and_keep_to_the_window(
    activations: str, window: int, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention split over chunks of keys, of which a window hides some: below 256 keys, about them, and far above."""
    monkeypatch.setattr(shared_device(), "software", False)
    options = {"head_norms": True, "window": window, "post_norms": True, "shape": Shape(head_dim=16)}
    native, reference = both(capacity=430, native={"speculate": "off"}, activations=activations, **options)
    ids = np.random.default_rng(window).integers(0, 301, 420).tolist()
    with native:
        for end in (150, 255, 420):
            part = ids[reference.position : end]
            native.prefill(part[:-3])
            reference.step(part[:-3])
            for token in part[-3:]:
                assert difference(native.step([token]), reference.step([token])) < bound
        used = {operation.op["op"] for operation in native._live.operations()}
    merges = {"merge_linear"} if activations == "a16" else set()
    assert {"rope_attention", "attention_merge", "norm", *merges} <= used


# The cache rounds keys and values in both executors alike; one that rounds the other way errs by a step of it.
@pytest.mark.parametrize(("kv", "bound"), [("f32", 2e-5), ("f16", 5e-4), ("q8", 2e-2)])
def test_cache_kinds(kv: str, bound: float) -> None:
    native, reference = both(kv=kv, activations="f32")
    with native:
        assert difference(native.step(PROMPT, rows=3), reference.step(PROMPT, rows=3)) < bound
        assert difference(native.step([6]), reference.step([6])) < bound


@pytest.mark.parametrize("chunk", [1, 5, 8, 12, 13, 256])
def test_chunks_change_nothing(chunk: int) -> None:
    description, tensors = tiny_model("f32")
    with NativeModel(description, tensors, capacity=40, kv="f32") as whole:
        expected = whole.step(PROMPT, rows=len(PROMPT))
    with NativeModel(description, tensors, capacity=40, kv="f32", max_tokens_per_step=chunk) as native:
        assert difference(native.step(PROMPT, rows=len(PROMPT)), expected) < 2e-5
        native.truncate(0)
        native.prefill(PROMPT[:-1])
        assert difference(native.step(PROMPT[-1:]), expected[-1:]) < 2e-5


def test_a_common_prefix_is_kept(model: NativeModel) -> None:
    first = model.step(PROMPT)
    model.step([1, 2, 3])
    model.truncate(6)
    assert model.position == 6
    np.testing.assert_array_equal(model.step(PROMPT[6:]), first)


def test_logits_of_one_row_or_all(model: NativeModel) -> None:
    every = model.logits(PROMPT, all_rows=True)
    model.truncate(0)
    assert every.shape == (len(PROMPT), 301)
    # One row goes through another kernel than several.
    assert difference(model.logits(PROMPT), every[-1:]) < 2e-5


@pytest.mark.parametrize(
    "options",
    [Sampling(), Sampling(temperature=1.2, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.3, seed=7)],
)
def test_tokens_chosen_on_the_gpu(options: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids as the reference's choice from the native logits, one submit a token or many."""
    description, tensors = tiny_model()
    with NativeModel(description, tensors, capacity=60, keep_logits=True) as native:
        steps = list(native.generate(PROMPT, options, 25))
    seen = np.zeros(301, dtype=bool)
    seen[PROMPT] = True
    for index, (token, logits) in enumerate(steps):
        assert logits is not None
        assert token == sample(penalize(logits, seen, options.repetition_penalty), options, len(PROMPT) + index)
        seen[token] = True
    monkeypatch.setattr(native_waves, "WAVE_SECONDS", 1000)  # submits of 1, 2, 4, 8 and 9 steps
    with NativeModel(description, tensors, capacity=60) as native:
        assert [token for token, _ in native.generate(PROMPT, options, 25)] == [token for token, _ in steps]
        assert native.position == len(PROMPT) + 24


def test_greedy_text_is_the_references() -> None:
    native, reference = both(activations="f32")
    with native:
        expected = [token for token, _ in reference.generate(PROMPT, Sampling(), 20)]
        assert [token for token, _ in native.generate(PROMPT, Sampling(), 20)] == expected


def test_stop_token_ends_and_leaves_a_usable_cache(model: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_waves, "WAVE_SECONDS", 1000)  # so that the GPU runs on beyond the stop token
    every = [token for token, _ in model.generate(PROMPT, Sampling(temperature=2.0, seed=3), 20)]
    model.truncate(0)
    place = next(index for index in range(6, 20) if every[index] not in every[:index])
    stop = every[place]
    stopped = [token for token, _ in model.generate(PROMPT, Sampling(temperature=2.0, seed=3), 20, stop={stop})]
    assert stopped == every[: place + 1]
    assert model.position == len(PROMPT) + place
    after = model.step([stop])
    model.truncate(0)
    assert difference(model.step([*PROMPT, *stopped]), after) < 5e-3


def test_text_ends_where_the_context_does() -> None:
    native, reference = both(activations="f32", capacity=20)
    with native:
        tokens = [token for token, _ in native.generate(PROMPT, Sampling(), 100)]
        assert tokens == [token for token, _ in reference.generate(PROMPT, Sampling(), 100)]
        assert len(tokens) == 20 - len(PROMPT) + 1


def test_penalty_counts_the_history(model: NativeModel) -> None:
    options = Sampling(repetition_penalty=100.0)
    best = int(model.step(PROMPT)[-1].argmax())
    model.truncate(0)
    model.prefill(PROMPT[:5])
    tokens = [token for token, _ in model.generate(PROMPT[5:], options, 1, history=[*PROMPT[:5], best])]
    assert tokens != [best]


# 64 rows of 36 columns are 2 KiB in q4, 4 KiB in q8, 5 KiB in f16 and 9 KiB in f32.
@pytest.mark.parametrize("embedding", ["q8", "q4", "q4a", "nvfp4", "mxfp4", "f16", "f32"])
def test_tall_matrices_in_pieces(embedding: str) -> None:
    description, tensors = tiny_model(embedding=embedding, shape=Shape(kv_heads=1, head_dim=8, layers=1), bias=True)
    with NativeModel(description, tensors, capacity=15) as whole:
        expected = whole.step(PROMPT, rows=len(PROMPT))
        ids = [token for token, _ in whole.generate([1], Sampling(), 1)]
    limit = 1024 * (10 if embedding in ("q8", "f16", "f32") else 4)
    with NativeModel(description, tensors, capacity=15, binding_limit=limit, max_tokens_per_step=3) as native:
        assert len(native._store.pieces["embed"]) > 1
        assert native._store.pieces["embed"][1].symbols["ROW0"] % 64 == 0
        np.testing.assert_allclose(native.step(PROMPT, rows=len(PROMPT)), expected, atol=np.ptp(expected) * 5e-3)
        assert [token for token, _ in native.generate([1], Sampling(), 1)] == ids


def test_rows_that_no_binding_holds() -> None:
    description, tensors = tiny_model()
    with pytest.raises(
        DeviceUnsupported, match=r"tensor embed: 64 rows have 4,096 bytes, the GPU binds 1,024"
    ) as caught:
        NativeModel(description, tensors, capacity=8, binding_limit=1024)
    assert (caught.value.needed, caught.value.found) == (4096, 1024)


def test_context_that_no_binding_holds() -> None:
    description, tensors = tiny_model()
    with pytest.raises(DeviceUnsupported, match=r"cache k\.0 needs a buffer of 480,000 bytes, .* at most 4,096 tokens"):
        NativeModel(description, tensors, capacity=10_000, binding_limit=4096 * 48)


def test_full_context(model: NativeModel) -> None:
    with pytest.raises(ContextFull, match="41 tokens do not fit the cache of 40"):
        model.step([1] * 41)
    assert model.position == 0


@pytest.mark.parametrize("ids", [[], [301], [-1]])
def test_ids_outside_the_vocabulary(model: NativeModel, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be 0 to 300"):
        model.prefill(ids)


@pytest.mark.parametrize("options", [Sampling(), Sampling(temperature=1.0)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_numbers_are_told(options: Sampling, value: float) -> None:
    description, tensors = tiny_model()
    gain = tensors["layers.1.post_norm"]
    gain.data[3] = value
    with (
        NativeModel(description, tensors, capacity=40) as native,
        pytest.raises(NumbersBroken, match="NaN or infinite"),
    ):
        list(native.generate(PROMPT, options, 5))


def test_out_of_memory_says_what_was_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    description, tensors = tiny_model()
    device = shared_device()
    freed = []

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(device_wgpu, name)

        def create_buffer(self, **options: Any) -> Any:
            if "cache" in options["label"]:
                raise wgpu.GPUOutOfMemoryError("Out of Memory")
            buffer = device_wgpu.create_buffer(**options)
            freed.append(buffer)
            return buffer

    device_wgpu = device.wgpu
    monkeypatch.setattr(device, "wgpu", Full())
    with pytest.raises(
        OutOfDeviceMemory, match=r"cache k\.0 .*the weights need [\d,]+ bytes.* smaller context"
    ) as caught:
        NativeModel(description, tensors, capacity=8)
    assert caught.value.needed == sum(weight.resident_bytes for weight in tensors.values())


def test_a_device_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    description, tensors = tiny_model()
    cases = stored_cases()
    wrong = replace(cases[0], expected={name: data ^ 1 for name, data in cases[0].expected.items()})
    monkeypatch.setattr(native_cases, "stored_cases", lambda: (wrong, *cases[1:]))
    monkeypatch.setattr(shared_device(), "self_checked", False)
    with pytest.raises(SelfCheckFailed, match="computes wrongly: expand;") as caught:
        NativeModel(description, tensors, capacity=8)
    assert caught.value.kernels == ("expand",)


def test_closed_models_say_so(model: NativeModel) -> None:
    model.close()
    with pytest.raises(ValueError, match="closed"):
        model.step([1])


def test_operations_one_by_one() -> None:
    """What an operation writes when it is fed the reference's own inputs."""
    native, reference = both(activations="a16")
    outputs: dict[tuple[str, int], Any] = {}
    reference.observer = lambda section, index, op, out: outputs.__setitem__((section, index), out)
    reference.step(PROMPT)
    with native:
        native.step(PROMPT)
        native.truncate(0)
        body = native.program["body"]
        a = outputs["body", 1]
        native.write_value("a", {"q": a.words, "scale": a.scale, "sums": a.sums})
        native.run_operation("body", 2, len(PROMPT))
        assert body[2]["op"] == "linear"
        np.testing.assert_array_equal(native.read_value("qkv", len(PROMPT))[""], outputs["body", 2])
        native.write_value("h", {"": outputs["body", 0]})
        native.run_operation("body", 1, len(PROMPT))
        written = native.read_value("a", len(PROMPT))
        np.testing.assert_allclose(written["scale"], a.scale, rtol=2e-6)
        assert written["q"].shape == a.words.shape and written["sums"].shape == a.sums.shape
