"""The benchmark on the native device: a whole run, and the arithmetic of what it reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import wgpu

from packer import bench_engine
from packer.bench import BenchOptions, run_bench
from packer.bench_engine import read_bandwidth, verify_seconds
from packer.bench_linear import copies_program, distinct_linears, tensor_bytes
from packer.bench_native import SOFTWARE, Sizes, bytes_per_token, fitting
from packer.bench_report import KEYS
from packer.pack import Pack
from packer.synthesize import synthesize
from shaders.native import NativeModel
from shaders.native_device import Device, shared_device
from tests.support.shapes import tiny_shape


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pack]:
    """A tiny pack of each family."""
    folder = tmp_path_factory.mktemp("packs")
    return {family: Pack(synthesize(tiny_shape(family), folder / family)) for family in ("bitnet", "llama")}


@pytest.mark.parametrize("family", ["bitnet", "llama"])
def test_a_run(packs: dict[str, Pack], family: str) -> None:
    told: list[tuple[int, int, str]] = []
    pack = packs[family]
    report = run_bench(BenchOptions(pack.path, context=40), lambda *progress: told.append(progress))
    assert list(report) == list(KEYS)
    assert [one["name"] for one in report["linears"]] == ["qkv", "o", "gate_up", "down", "head"]
    assert [(one["rows"], one["columns"]) for one in report["linears"]] == [
        (120, 72),
        (72, 72),
        (200, 72),
        (72, 100),
        (301, 72),
    ]
    for one in report["linears"]:
        assert one["seconds"] > 0 and one["dependentSeconds"] > 0
        assert one["share"] == pytest.approx(one["bytes"] / one["seconds"] / report["bandwidth"]["bytesPerSecond"])
        assert (one["batchSeconds"] is None) == (one["name"] == "head")
    assert report["backend"] == "native" and report["adapter"]["software"] is True
    assert [one["context"] for one in report["decode"]] == [8] and [one["tokens"] for one in report["prefill"]] == [4]
    assert [one["tokens"] for one in report["verify"]] == [1] and report["verify"][0]["seconds"] > 0
    limit = report["limit"]
    assert limit["bytesPerToken"] == bytes_per_token(pack, "f16", 8)
    assert limit["tokensPerSecond"] == pytest.approx(report["bandwidth"]["bytesPerSecond"] / limit["bytesPerToken"])
    assert limit["ratio"] == pytest.approx(report["decode"][0]["tokensPerSecond"] / limit["tokensPerSecond"])
    assert report["dispatchesPerToken"] >= 2 * report["dispatchesPerLayer"] + 3
    totals = Counter(total for _, total, _ in told)
    assert len(totals) == 1 and told[-1][0] == told[-1][1] and [done for done, _, _ in told] == list(range(len(told)))


def test_what_verifying_costs(packs: dict[str, Pack], monkeypatch: pytest.MonkeyPatch) -> None:
    """On what passes for a GPU; every timed step is the same, wherever the one before ended."""
    device, pack = shared_device(), packs["bitnet"]
    monkeypatch.setattr(device, "software", False)
    steps: list[list[int]] = []

    def timed(device: Device, encode: Callable[[], wgpu.GPUCommandBuffer], sizes: Sizes) -> list[float]:
        for _ in range(2):
            device.queue.submit([encode()])
            steps.append(device.read(model._live.buffers.runtime["@step"], "<u4", 4).tolist())
        return [1.0, 3.0, 2.0]

    monkeypatch.setattr(bench_engine, "timings", timed)
    with NativeModel(pack.program, pack.tensors(), capacity=40, speculate="on") as model:
        for context, position in ((8, 8), (128, 32)):
            steps.clear()
            found = verify_seconds(model, context, SOFTWARE)
            assert found == [{"tokens": tokens, "seconds": 2.0} for tokens in (1, 2, 4, 8)]
            assert steps[0::2] == steps[1::2]
            # So many tokens were taken, at least the one that each step chooses.
            taken = [produced for _, _, _, produced in steps[0::2]]
            assert [one[0] - position for one in steps[0::2]] == taken and all(count >= 1 for count in taken)
            assert all(one[1:3] == [1, 1] for one in steps)


def test_bytes_of_a_token(packs: dict[str, Pack]) -> None:
    """The tied embedding is the head and read as a whole; one that is only gathered from counts one row."""
    tied, apart = packs["bitnet"], packs["llama"]
    weights = sum(tensor.resident_bytes for tensor in tied.tensors().values())
    each = 2 * 2 * 2 * 12 * 2  # k and v of 2 layers, 2 heads of 12 halves
    assert bytes_per_token(tied, "f16", 0) == weights
    assert bytes_per_token(tied, "f16", 10) == weights + 10 * each
    weights = sum(tensor.resident_bytes for tensor in apart.tensors().values())
    embed = apart.tensor("embed").resident_bytes
    assert bytes_per_token(apart, "f16", 0) == weights - embed + -(-embed // 301)


def test_tensor_bytes_are_those_of_the_tensors(packs: dict[str, Pack]) -> None:
    for pack in packs.values():
        for name, tensor in pack.tensors().items():
            assert tensor_bytes(pack.entries[name]) == tensor.resident_bytes


def test_copies_go_round_with_outputs_of_their_own(packs: dict[str, Pack]) -> None:
    pack = packs["bitnet"]
    linear = distinct_linears(pack.program, pack.entries)[1]
    program = copies_program(linear, 3, 7)
    apart, chained = program["logits"], program["random"]
    assert [op["w"] for op in apart] == ["w.0", "w.1", "w.2", "w.0", "w.1", "w.2", "w.0"]
    assert len({op["out"] for op in apart}) == 7 and {op["out"] for op in chained} == {"y"}
    assert all(op["accumulate"] for op in apart), "what the program's own product does, its copies do"
    assert program["values"]["x"] == {"dtype": "a8", "shape": ["T", 72]}


def test_sizes_fit_the_context() -> None:
    assert fitting((128, 1024, 4096), 3840) == [128, 1024, 3840]
    assert fitting((128, 1024), 64) == [64]
    assert fitting((8,), -3) == [1]


def test_bandwidth_reads_what_it_says() -> None:
    found = read_bandwidth(shared_device(), SOFTWARE)
    assert found["bufferBytes"] == SOFTWARE.buffer_bytes
    assert np.isfinite(found["bytesPerSecond"]) and found["bytesPerSecond"] >= found["medianBytesPerSecond"] > 0
