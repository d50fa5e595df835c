"""The benchmark of the page's engine in Node, on Dawn with SwiftShader."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer.bench import BenchOptions, run_bench
from packer.bench_native import bytes_per_token
from packer.bench_report import KEYS
from packer.pack import Pack
from packer.synthesize import synthesize
from tests.engine.node import SWIFTSHADER, node_json
from tests.support.shapes import tiny_shape

pytestmark = pytest.mark.skipif(not SWIFTSHADER.exists(), reason="no SwiftShader")


@pytest.fixture(autouse=True)
def software_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dawn on a driver that is everywhere."""
    monkeypatch.setenv("VK_ICD_FILENAMES", str(SWIFTSHADER))


def test_a_run(tmp_path: Path) -> None:
    pack = Pack(synthesize(tiny_shape(), tmp_path / "pack"))
    told: list[str] = []
    options = BenchOptions(pack.path, backend="node", context=40, kv="q8")
    report = run_bench(options, lambda done, total, label: told.append(label))
    assert list(report) == list(KEYS)
    for key, inside in KEYS.items():
        for one in report[key] if isinstance(report[key], list) else [report[key]]:
            assert not inside or set(one) == set(inside), key
    assert report["backend"] == "node" and report["adapter"]["software"] is True
    assert report["model"]["kvCache"] == "q8" and report["model"]["contextLength"] == 40
    assert [one["name"] for one in report["linears"]] == ["qkv", "o", "gate_up", "down", "head"]
    assert all(one["seconds"] > 0 and one["dependentSeconds"] > 0 for one in report["linears"])
    assert report["limit"]["bytesPerToken"] == bytes_per_token(pack, "q8", report["decode"][0]["context"])
    assert report["dispatchesPerToken"] >= 2 * report["dispatchesPerLayer"] + 3
    assert [one["tokens"] for one in report["verify"]] == [1] and report["verify"][0]["seconds"] > 0
    assert report["loadSeconds"] > 0 and report["firstTokenSeconds"] > 0
    assert told[-1] == "done" and "reading memory" in told


def test_the_engine_is_whole_afterwards(tmp_path: Path) -> None:
    """Measuring, and stopping it, leaves no buffers and the same answers."""
    pack = synthesize(tiny_shape("llama"), tmp_path / "pack")
    answer = node_json("../bench/measure_answers.mjs", {"pack": str(pack)})
    assert answer["after"] == answer["before"], "the same ids as before"
    assert answer["codes"] == {"during": "busy", "aborted": "aborted", "before": "aborted", "meanwhile": "busy"}
    whole, stopped = answer["bytes"]
    assert whole == stopped, "no buffer is left"
    assert answer["names"] == ["qkv", "o", "gate_up", "down", "head"]
