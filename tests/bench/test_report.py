"""Reports: what is checked, tables, files, the chart; and what the commands refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from packer.bench import BenchOptions, run_bench, run_node
from packer.bench_peers import PEER_KEYS
from packer.bench_plot import draw, plot_files
from packer.bench_report import KEYS, LATER, check_report, read_report, report_tables, write_report
from packer.bench_run import main, plain
from packer.cli_bench import _table
from packer.errors import PackerError
from packer.synthesize import synthesize
from tests.bench.reports import example_report
from tests.support.cli import one_error, run_cli
from tests.support.shapes import tiny_shape

ENGINE = Path(__file__).resolve().parents[2] / "web" / "engine"


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    write_report(example_report(), tmp_path / "r.json")
    assert read_report(tmp_path / "r.json") == example_report()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_wanted(key: str) -> None:
    report = example_report()
    del report[key]
    with pytest.raises(PackerError, match=f"here: .*'{key}' is missing"):
        check_report(report, "here")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode": []}, "'decode' is no list with figures"),
        ({"decode": [{"context": 1, "tokensPerSecond": 2}]}, r"decode\[0\] has no 'spread'"),
        ({"decode": [{"context": 1, "tokensPerSecond": "x", "spread": 0}]}, "tokensPerSecond is 'x'"),
        ({"limit": 5}, "limit has no 'bytesPerToken'"),
        ({"bandwidth": {"bytesPerSecond": True, "medianBytesPerSecond": 1, "bufferBytes": 1}}, "is True"),
    ],
)
def test_wrong_figures_are_named(changes: dict, words: str) -> None:
    with pytest.raises(PackerError, match=words):
        check_report(example_report(**changes), "here")
    with pytest.raises(PackerError, match="found list"):
        check_report([], "here")


def test_the_engine_has_the_same_keys() -> None:
    """The typedefs of the JavaScript report against KEYS; test_node.py compares a report itself."""
    source = (ENGINE / "measure.js").read_text(encoding="utf-8")
    typedef = source.split("@typedef {object} MeasureReport\n")[1].split(" *\n")[0]
    assert re.findall(r"@property \{.*\} (\w+)\n", typedef) == list(KEYS)
    text = source + "".join((ENGINE / f"measure_{part}.js").read_text() for part in ("linear", "bandwidth", "verify"))
    for key in ("bandwidth", "linears", "decode", "prefill", "verify", "limit"):
        for name in KEYS[key]:
            assert re.search(rf"\b{name}: ", text), f"{key}.{name}"


def test_tables_say_it() -> None:
    text = "\n".join(plain(rows) for rows in report_tables(example_report()))
    assert "4.40 TB/s over 1,024 MiB" in text
    assert "4,400 tok/s, of which 23 % are reached" in text
    macs = 3840 * 2560 * 512 / 1e-4 / 1e12
    assert re.search(r"qkv +3,840 x 2,560 +ternary +1.00 +50 % +4.00\n", text)
    assert re.search(rf"qkv +512 +0.100 +{macs:.2f}\n", text) and not re.search(r"head +512", text)
    assert re.search(r"\n +1 +1.000 +1.00 x\n +4 +1.600 +1.60 x\n", text)
    assert re.search(r"128 +1,000.0 +1.0 %", text) and re.search(r"512 +20,000\n", text)
    plain_rows = report_tables(example_report(adapter=None))[0].rows
    assert ("device", "unknown (node)") in plain_rows


def test_tables_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Every head and figure is whole, with the largest matrices and a peer of a long name."""
    linears = [{**one, "rows": 128256, "columns": 27648, "name": "gate_up"} for one in example_report()["linears"]]
    peer = dict.fromkeys(PEER_KEYS) | {"name": "onnxruntime-web", "version": "1.22.0", "bits": 4, "activations": "f16"}
    peer |= {"what": "MatMulNBits", "rows": 128256, "columns": 27648, "tokens": 512}
    peer |= {"seconds": 1.2346, "ourSeconds": 0.9876, "ratio": 1234.5}
    decode = {"what": "decode", "rows": None, "columns": None, "context": 4096, "tokens": 1}
    kernels = {"merge_linear 27648x27648": {"ROWS": 32, "WORKGROUP": 256, "COLUMNS": 4}}
    tables = report_tables(example_report(linears=linears, peers=[peer, peer | decode], kernels=kernels))
    console = Console(width=80)
    for rows in tables:
        console.print(_table(rows))
    shown = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown and max(map(len, shown.splitlines())) <= 80
    lines = [line.split() for line in shown.splitlines()]
    for rows in tables:
        assert rows.title.split() in lines
        for cells in (rows.columns, *rows.rows) if any(rows.columns) else ():
            words = " ".join(cells[1:]).split()
            assert any(words == line[-len(words) :] for line in lines), cells


def test_reports_from_before_a_key(tmp_path: Path) -> None:
    report = example_report()
    for key in LATER:
        del report[key]
    write_report(report, tmp_path / "old.json")
    old = read_report(tmp_path / "old.json")
    assert old == example_report(**LATER)
    assert not {"Verifying drafts", "Kernels"} & {rows.title for rows in report_tables(old)}
    plot_files([tmp_path / "old.json"], tmp_path / "chart.svg")
    only_one = example_report(verify=[{"tokens": 1, "seconds": 1.0}])
    assert "Verifying drafts" not in {rows.title for rows in report_tables(only_one)}


def test_the_chart(tmp_path: Path) -> None:
    svg = draw([example_report(), example_report(model={**example_report()["model"], "name": "Other"})])
    root = ElementTree.fromstring(svg)
    space = {"s": "http://www.w3.org/2000/svg"}
    texts = [node.text for node in root.findall("s:text", space)]
    assert texts.count("Writing") == 2 and "Other" in texts and "1,000 tok/s, 23 %" in texts
    assert any("GPU <1> &" in str(text) for text in texts)
    bars = [(float(node.get("width", 0)), node.get("fill")) for node in root.findall("s:rect", space)]
    limits, writing = ([width for width, fill in bars if fill == wanted] for wanted in ("#d9dee5", "#1f6feb"))
    assert writing[0] / limits[0] == pytest.approx(1000 / 4400, rel=0.01)
    assert writing[1] / limits[1] == pytest.approx(900 / 4400, rel=0.01)
    widest = float(root.get("width", 0))
    assert all(
        float(node.get("x", 0)) + float(node.get("width", 0)) <= widest for node in root.findall("s:rect", space)
    )
    write_report(example_report(), tmp_path / "r.json")
    plot_files([tmp_path / "r.json"], tmp_path / "chart.svg")
    assert ElementTree.parse(tmp_path / "chart.svg")


def test_commands_refuse(tmp_path: Path) -> None:
    one_error(run_cli("bench", "--shape", "gpt-5"), "gpt-5", "bonsai-8b")
    one_error(run_cli("bench"), "pack or --shape")
    one_error(run_cli("bench", tmp_path / "none"), "none", "no such folder")
    one_error(run_cli("bench", "--shape", "bitnet-2b", "--json", tmp_path / "no" / "r.json"), "r.json", "no folder")
    one_error(run_cli("bench", "--shape", "bitnet-2b", "--json", tmp_path), "is a folder")
    pack = synthesize(tiny_shape(), tmp_path / "pack")
    for backend in ("native", "node"):
        one_error(run_cli("bench", pack, "--backend", backend, "--context", 65), "--context is 65", "2 to 64")
    one_error(run_cli("bench", pack, pack), "one pack at a time")
    one_error(run_cli("bench", "--plot", tmp_path / "c.svg"), "nothing to draw")
    one_error(run_cli("bench", "--plot", tmp_path / "c.svg", pack / "pack.json"), "pack.json", "'date' is missing")
    one_error(run_cli("bench", "--plot", tmp_path / "c.svg", tmp_path / "none.json"), "none.json", "cannot be read")
    assert not (tmp_path / "c.svg").exists()


def test_the_plain_entry_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shape", "gpt-5"]) == 1
    assert main(["--shape", "bitnet-2b", "--json", str(tmp_path / "no" / "r.json")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("error: ") == 2 and "bonsai-1.7b" in err


def test_errors_of_node_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = synthesize(tiny_shape(), tmp_path / "pack")
    monkeypatch.setenv("WEBGPU_NODE", str(tmp_path / "nowhere"))
    with pytest.raises(PackerError, match="nowhere: Dawn is not there"):
        run_node(pack, 64, "f16", quick=True, progress=lambda *_: None)
    monkeypatch.setattr("packer.bench.shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("packer.bench.find_spec", lambda _: None)
    with pytest.raises(PackerError, match="Node is not there"):
        run_bench(BenchOptions(pack, backend="node"))


def test_no_device_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shaders.native_errors import DeviceMissing

    def none() -> None:
        raise DeviceMissing("wgpu found no GPU", "install a Vulkan driver")

    monkeypatch.setattr("packer.bench_native.shared_device", none)
    pack = synthesize(tiny_shape(), tmp_path / "pack")
    one_error(run_cli("bench", pack, "--json", tmp_path / "r.json"), "wgpu found no GPU", "install a Vulkan driver")
    assert not (tmp_path / "r.json").exists()


def test_reports_in_the_repository_are_reports() -> None:
    for path in sorted(Path(__file__).resolve().parents[2].glob("examples/bench/*.json")):
        assert json.dumps(read_report(path))
