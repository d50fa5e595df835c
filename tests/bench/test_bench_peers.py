"""Peers in the report: what they are measured on, what stands beside them, and that none of them ends a benchmark."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packer import bench, bench_peers
from packer.bench import BenchOptions, run_bench
from packer.bench_peers import PEER_KEYS, decoder_shape, measure_peers, not_run, peer_entry, peer_options
from packer.bench_report import check_report, report_tables
from packer.bench_run import main, plain
from packer.errors import PackerError
from packer.shapes import SHAPES
from packer.synthesize import synthesize
from tests.bench.reports import example_report
from tests.support.cli import one_error, run_cli
from tests.support.shapes import tiny_shape

PRODUCT = {
    "peer": "onnxruntime-web",
    "version": "1.31.1",
    "op": "MatMulNBits",
    "activations": "f16",
    "bits": 4,
    "rows": 3840,
    "columns": 2560,
    "tokens": 1,
    "secondsPerRun": 1.0,
    "secondsPerNode": 2e-5,
}
DECODE = {"peer": "onnxruntime-web", "version": "1.31.1", "op": "decode", "activations": "f32", "bits": 2}


def linears() -> list[dict[str, Any]]:
    """Those of bitnet-2b."""
    one = example_report()["linears"][0]
    sizes = {"qkv": (3840, 2560), "o": (2560, 2560), "gate_up": (13824, 2560), "down": (2560, 6912)}
    found = [{**one, "name": name, "rows": rows, "columns": columns} for name, (rows, columns) in sizes.items()]
    return [*found, {**one, "name": "head", "rows": 128256, "columns": 2560, "batchTokens": None, "batchSeconds": None}]


def fake_peers(folder: Path, text: str) -> Path:
    script = folder / "all.mjs"
    script.write_text(text)
    return script


def node() -> str:
    found = shutil.which("node")
    if not found:
        pytest.skip("no Node")
    return found


def test_peers_are_asked_for_what_was_measured() -> None:
    report, program = example_report(linears=linears()), SHAPES["bitnet-2b"].program()
    assert decoder_shape(report, program) == {
        "layers": 30,
        "hidden": 2560,
        "heads": 20,
        "kvHeads": 5,
        "headDim": 128,
        "intermediate": 6912,
        "vocabulary": 128256,
    }
    options = peer_options(report, program, quick=True)
    assert options[:5] == ["--quick", "--matrices", "3840x2560,2560x2560,13824x2560,2560x6912", "--tokens", "1,512"]
    assert options[5:] == [
        "--decoder",
        "layers=30,hidden=2560,heads=20,kvHeads=5,headDim=128,intermediate=6912,vocabulary=128256",
        "--context",
        "128",
    ]
    other = peer_options(example_report(), program, quick=False)
    assert "--decoder" not in other and other[-2:] == ["--only", "MatMulNBits"], "a model of another kind"


def test_ours_stands_beside_theirs() -> None:
    report = example_report()
    entry = peer_entry(PRODUCT, report)
    assert set(entry) == set(PEER_KEYS)
    assert (entry["seconds"], entry["ourSeconds"], entry["ratio"]) == (2e-5, 4e-6, pytest.approx(5))
    batch = peer_entry({**PRODUCT, "tokens": 512, "secondsPerNode": 3e-4}, report)
    assert (batch["ourSeconds"], batch["ratio"]) == (1e-4, pytest.approx(3))
    unlike = peer_entry({**PRODUCT, "tokens": 7}, report)
    assert (unlike["seconds"], unlike["ourSeconds"], unlike["ratio"]) == (2e-5, None, None)
    noise = peer_entry({**PRODUCT, "secondsPerNode": None}, report)
    assert noise["seconds"] is None and "noise" in noise["notRun"]
    decode = peer_entry({**DECODE, "context": 128, "secondsPerRun": 0.004}, report)
    assert (decode["tokens"], decode["ourSeconds"], decode["ratio"]) == (1, 0.001, pytest.approx(4))
    broken = peer_entry({**DECODE, "notRun": "no such luck"}, report)
    assert broken["ratio"] is None and broken["notRun"] == "no such luck"
    peers = [entry, batch, decode, broken, not_run("other", "why not")]
    check_report(example_report(peers=peers), "here")
    text = "\n".join(plain(rows) for rows in report_tables(example_report(peers=peers)))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "MatMulNBits, f16 3,840 x 2,560 4 1 20.0 us 4.0 us 5.0" in lines
    assert "decode, f32 after 128 2 1 4.00 ms 1.00 ms 4.0" in lines
    assert "onnxruntime-web decode f32 2 bits no such luck" in lines and "other all why not" in lines
    assert text.count("Beside ") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ratio": "5"}, r"peers\[0\]: ratio is '5'"),
        ({"notRun": "but it was"}, "either seconds or the reason"),
        ({"seconds": None}, "either seconds or the reason"),
    ],
)
def test_wrong_entries_are_named(change: dict[str, Any], words: str) -> None:
    entry = peer_entry(PRODUCT, example_report())
    with pytest.raises(PackerError, match=words):
        check_report(example_report(peers=[{**entry, **change}]), "here")
    with pytest.raises(PackerError, match="has no 'name'"):
        check_report(example_report(peers=[{}]), "here")
    with pytest.raises(PackerError, match="expected a list"):
        check_report(example_report(peers={}), "here")


def test_what_a_peer_wrote_before_it_failed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        f"console.log(JSON.stringify({json.dumps(PRODUCT)})); console.log('noise'); console.log('[1]');"
        'console.error(JSON.stringify({done: 1, total: 2, label: "here"}));'
        "if (process.env.ORT_WEB.endsWith('node_modules/onnxruntime-web')) { console.error('it fell over'); }"
        "process.exitCode = 3;"
    )
    monkeypatch.setattr(bench_peers, "_SCRIPT", fake_peers(tmp_path, text))
    told: list[tuple[int, int, str]] = []
    program = SHAPES["bitnet-2b"].program()
    peers = measure_peers(
        tmp_path / "node_modules", node(), example_report(), program, progress=lambda *x: told.append(x)
    )
    assert [peer["notRun"] for peer in peers] == [None, "it fell over"]
    assert told == [(1, 2, "here")] and peers[0]["ratio"] == pytest.approx(5)


def test_a_peer_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "_SCRIPT", fake_peers(tmp_path, "setInterval(() => 0, 1000);"))
    monkeypatch.setattr(bench_peers, "_GRACE", 0)
    (entry,) = measure_peers(tmp_path, node(), example_report(), SHAPES["bitnet-2b"].program(), seconds=1)
    assert "status -9" in entry["notRun"]


def test_no_peers_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = SHAPES["bitnet-2b"].program()
    (entry,) = measure_peers(tmp_path, str(tmp_path / "node"), example_report(), program)
    assert "could not be run" in entry["notRun"]
    first, *_ = measure_peers(tmp_path, node(), example_report(), program)
    assert str(tmp_path) in first["notRun"] and "onnxruntime-web" in first["notRun"]
    monkeypatch.setattr(bench_peers, "_SCRIPT", tmp_path / "nowhere.mjs")
    (entry,) = measure_peers(tmp_path, node(), example_report(), program)
    assert "nowhere.mjs is not there" in entry["notRun"]


def test_bench_measures_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the report of a backend; without Node, the reason."""
    pack = synthesize(tiny_shape(), tmp_path / "pack")
    monkeypatch.setattr(bench, "run_node", lambda *_: example_report())
    monkeypatch.setattr(bench_peers, "_SCRIPT", fake_peers(tmp_path, f"console.log('{json.dumps(PRODUCT)}')"))
    monkeypatch.setattr(bench, "_node", node)
    options = BenchOptions(pack, backend="node", peers=tmp_path)
    assert [peer["name"] for peer in run_bench(options)["peers"]] == ["onnxruntime-web"]
    assert main([str(pack), "--backend", "node", "--peers", str(tmp_path), "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["peers"][0]["rows"] == 3840
    one_error(run_cli("bench", pack, "--peers", tmp_path, "--peers-seconds", 0), "--peers-seconds is 0")

    def none() -> str:
        raise PackerError("Node is not there")

    monkeypatch.setattr(bench, "_node", none)
    assert run_bench(options)["peers"][0]["notRun"] == "Node is not there"


def test_the_limit_ends_scripts_that_hang(tmp_path: Path) -> None:
    """all.mjs ends them itself, keeps their entries, and does not start the rest."""
    source = Path(bench_peers._SCRIPT).parent
    for name in ("all.mjs", "ort.mjs", "onnx.mjs"):
        shutil.copy(source / name, tmp_path)
    (tmp_path / "matmulnbits.mjs").write_text("console.log('{\"kept\": 1}'); setInterval(() => 0, 1000);")
    for name in ("webgpu", "onnxruntime-web"):
        (tmp_path / "node_modules" / name).mkdir(parents=True)
        (tmp_path / "node_modules" / name / "package.json").write_text("{}")
    command = [node(), str(tmp_path / "all.mjs"), "--only", "MatMulNBits", "--seconds", "1"]
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    first, *others = [json.loads(line) for line in done.stdout.splitlines()]
    assert first == {"kept": 1} and len(others) == 4
    assert all("was over" in entry["notRun"] for entry in others)
    assert sys.platform != "linux" or "Error" not in done.stderr
