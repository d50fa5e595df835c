"""The peers of the benchmark: their models are what ONNX Runtime takes, and what is timed is what is claimed.

ONNX Runtime Web is large and only `make bench` installs it; without it, only what needs no ONNX Runtime is tested.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.node import SWIFTSHADER, WEBGPU, node

PEERS = Path(__file__).resolve().parents[2] / "web" / "bench" / "peers"
ORT_WEB = Path(os.environ.get("ORT_WEB", PEERS.parent / "node_modules" / "onnxruntime-web"))
ENV = {
    **os.environ,
    "VK_ICD_FILENAMES": str(SWIFTSHADER),
    "XDG_RUNTIME_DIR": "/tmp",
    "WEBGPU_NODE": str(WEBGPU),
    "ORT_WEB": str(ORT_WEB),
}
needs_ort = pytest.mark.skipif(
    not (ORT_WEB.is_dir() and SWIFTSHADER.is_file() and WEBGPU.is_dir()),
    reason="needs onnxruntime-web (npm ci in web/bench), web/node_modules and Chromium's Vulkan driver",
)


def evaluate(module: str, expression: str) -> Any:
    """The value of a JavaScript expression, in which `m` is a module of the peers."""
    path = (PEERS / module).as_uri()
    script = f"import * as m from {json.dumps(path)}; process.stdout.write(JSON.stringify({expression}))"
    return json.loads(node("--input-type=module", "--eval", script))


def run_peer(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Its second compiler would spend a minute on functions that run twice here.
    command = ["node", "--liftoff-only", str(PEERS / script), *arguments]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400, check=False)


def results(script: str, *arguments: str) -> list[dict[str, Any]]:
    done = run_peer(script, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_halves_are_those_of_numpy() -> None:
    # Both signs, fractions that round up to the next power of two, the ends of the range of normal halves.
    numbers = [0, 1, -1, 1.9999, 1 + 2**-11 + 2**-20, 1 + 2**-11 - 2**-20, 0.1, -3.14159, 65504, 2**-14, 0.00153]
    bits = evaluate("quantized.mjs", f"{json.dumps(numbers)}.map(m.halfBits)")
    assert bits == np.array(numbers, np.float16).view(np.uint16).tolist()
    back = evaluate("quantized.mjs", f"m.values(Uint16Array.from({json.dumps(bits)}))")
    assert back == np.array(numbers, np.float16).astype(float).tolist()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_expected_product_is_that_of_numpy(bits: int) -> None:
    """Codes of 128 columns a block, lowest bits first, the last block padded."""
    rows, columns, block = 5, 200, 128
    form = json.dumps({"rows": rows, "columns": columns, "bits": bits})
    found = evaluate(
        "quantized.mjs",
        "(() => { "
        f"const form = {form}, matrix = m.randomMatrix('w', form, 'f32', 9), x = m.exactActivations(1, {columns}); "
        "return [matrix.map(({shape, data}) => [shape, [...data]]), [...x], "
        f"[...Array({rows}).keys()].map((row) => m.expectedElement(x, form, matrix, row))]; }})()",
    )
    ((shape, packed), (_, scales)), x, product = found
    assert shape == [rows, 2, block * bits // 8]
    slots = np.array(packed, np.uint8)[:, None] >> np.arange(0, 8, bits, dtype=np.uint8)
    codes = (slots & (2**bits - 1)).reshape(rows, 2, block).astype(float)
    weights = (codes - 2 ** (bits - 1)) * np.array(scales).reshape(rows, 2, 1)
    assert len(np.unique(codes)) > 2
    np.testing.assert_allclose(product, weights.reshape(rows, -1)[:, :columns] @ np.array(x), rtol=1e-12)


def test_activations_are_exact_in_int8() -> None:
    x = np.array(evaluate("quantized.mjs", "[...m.exactActivations(3, 208)]")).reshape(3, 208)
    assert (np.abs(x * 64) <= 127).all() and (x * 64 == np.round(x * 64)).all()
    assert all(np.abs(x[:, first : first + 32]).max(axis=1).tolist() == [127 / 64] * 3 for first in range(0, 192, 32))


def test_all_names_what_could_not_be_run() -> None:
    """Without ONNX Runtime every entry says so, and the exit status is that of success."""
    env = {**ENV, "ORT_WEB": "/nowhere"}
    command = ["node", str(PEERS / "all.mjs"), "--quick"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    names = [entry["peer"] for entry in entries]
    assert names == ["onnxruntime-web", "@huggingface/transformers", "@wllama/wllama"]
    assert all(len(entry["notRun"]) > 30 for entry in entries)


@pytest.mark.parametrize(
    ("script", "arguments", "word"),
    [
        ("matmulnbits.mjs", ["64"], "rows x columns"),
        ("matmulnbits.mjs", ["64xno"], "64xno"),
        ("matmulnbits.mjs", ["--bits", "3"], "--bits"),
        ("decoder.mjs", ["gpt"], "smollm2-135m"),
        ("decoder.mjs", ["--context", "1"], "context"),
        ("decoder.mjs", ["layers=2,hidden=64"], "vocabulary=N"),
        ("all.mjs", ["--only", "prefill"], "--only"),
        ("all.mjs", ["--seconds", "0"], "--seconds"),
    ],
)
def test_bad_arguments_are_named(script: str, arguments: list[str], word: str) -> None:
    done = run_peer(script, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert word in done.stderr and "    at " not in done.stderr


@needs_ort
def test_products_are_timed_on_a_driver() -> None:
    """Each product is compared with its values by the script itself. 200 columns: the last block is padded."""
    entries = results("matmulnbits.mjs", "--software", "--tokens", "1,33", "40x200")
    assert [(entry["bits"], entry["tokens"]) for entry in entries] == [(4, 1), (4, 33), (2, 1), (2, 33)]
    for entry in entries:
        assert (entry["peer"], entry["op"], entry["rows"], entry["columns"]) == (
            "onnxruntime-web",
            "MatMulNBits",
            40,
            200,
        )
        assert entry["weightBytes"] == 40 * 2 * (128 * entry["bits"] // 8 + 4)
        assert entry["secondsPerRun"] > 0 and entry["graphCapture"] and "SwiftShader" in entry["device"]


@needs_ort
def test_a_product_that_is_another_one_is_not_timed(tmp_path: Path) -> None:
    copy = tmp_path / "peers"
    copy.mkdir()
    for path in PEERS.glob("*.mjs"):
        text = path.read_text()
        # Another zero point is expected than ONNX Runtime has.
        (copy / path.name).write_text(text.replace("2 ** (bits - 1)) * factors", "2 ** (bits - 1) + 1) * factors"))
    command = ["node", "--liftoff-only", str(copy / "matmulnbits.mjs"), "--software", "--bits", "4"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400, check=False)
    (entry,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert "secondsPerRun" not in entry and "is the product with none" in entry["notRun"]


SIZES = "layers=2,hidden=128,heads=4,kvHeads=2,headDim=32,intermediate=256,vocabulary=300"


@needs_ort
def test_a_decoder_runs_on_a_driver() -> None:
    """Both ways give finite logits, the same ones, and one cache grows; the script itself refuses anything else."""
    entries = results("decoder.mjs", "--software", "--bits", "4", "--context", "9", SIZES)
    assert [(entry["op"], entry["shape"], entry["context"]) for entry in entries] == [
        ("decode", SIZES, 9),
        ("decode, replayed", SIZES, 9),
    ]
    # Every code and scale of two layers and the head, once.
    rows = 2 * (256 * 128 + 128 * 128 + 2 * 256 * 128 + 128 * 256) + 300 * 128
    for entry in entries:
        assert entry["tokensPerSecond"] == pytest.approx(1 / entry["secondsPerRun"])
        assert entry["weightBytes"] == rows * 4 // 8 + rows // 128 * 4
    assert entries[0]["tokens"] == 3


@needs_ort
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        # A cache that has not grown, weights of zero, and a position that differs between the two ways.
        ("rows += 1;", "rows += 2;", "total_sequence_length"),
        ("const scale = 1 /", "const scale = 0 /", "did not run"),
        ("[1], context - 1)", "[1], context - 2)", "of the largest"),
    ],
)
def test_a_decoder_that_is_another_one_is_not_timed(tmp_path: Path, old: str, new: str, reason: str) -> None:
    copy = tmp_path / "peers"
    copy.mkdir()
    for path in PEERS.glob("*.mjs"):
        (copy / path.name).write_text(path.read_text().replace(old, new))
    command = ["node", "--liftoff-only", str(copy / "decoder.mjs"), "--software", "--bits", "4", "--context", "9"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400, check=False)
    told = " ".join(json.loads(line).get("notRun", "") for line in done.stdout.splitlines())
    assert reason in told, told


@needs_ort
def test_halves_make_the_same_decoder() -> None:
    command = ["node", "--liftoff-only", str(Path(__file__).with_name("peer_types.mjs")), str(PEERS)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    logits = {dtype: np.array(values) for dtype, values in json.loads(done.stdout).items()}
    assert logits["f32"].shape == (256,) and np.std(logits["f32"]) > 0.1
    np.testing.assert_allclose(logits["f16"], logits["f32"], atol=0.01 * np.abs(logits["f32"]).max())
