"""Ternary types of GGUF: one matrix in each of them gives the same trits and scales, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from packer import encodings
from packer.checkpoints.gguf import open_gguf
from packer.checkpoints.gguf_ternary import TYPES, ternary_type
from packer.errors import CheckpointError
from packer.export import ExportOptions, export
from packer.models import Matrix
from packer.pack import Pack
from packer.tensors import _merge_scales
from packer.ternarize import Ternary, detect
from shaders.reference import dequantize
from tests.packer import ternary_formats as formats
from tests.packer.gguf_files import FFN, HIDDEN, LAYERS, write_foreign
from tests.support.cli import one_error, run_cli

UP, UP_NAME = "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"
Q, Q_NAME = "blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight"
TERNARY = [name for name in formats.BLOCKS if name != "Q1_0"]


def matrix(rows: int, columns: int, group: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Trits and f16 scales ``[rows, columns / group]``; one group is all zeros."""
    random = np.random.default_rng(seed)
    trits = random.integers(-1, 2, (rows, columns)).astype(np.int8)
    scales = random.uniform(0.001, 3, (rows, columns // group)).astype(np.float16)
    trits[rows // 2, -group:] = 0
    scales[rows // 2, -1] = 0
    return trits, scales


def values(trits: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return trits * np.repeat(scales.astype(np.float32), trits.shape[1] // scales.shape[1], axis=1)


def stored(path: Path, name: str, trits: np.ndarray, scales: np.ndarray, tensor: str = UP) -> Path:
    data = formats.encode(name, trits, scales, trits.shape[1] // scales.shape[1])
    return write_foreign(path, {tensor: (data, formats.BLOCKS[name][0], trits.shape)})


def assert_same(found: Ternary | None, expected: Ternary | None) -> None:
    assert found is not None and expected is not None
    assert (found.scale_kind, found.group) == (expected.scale_kind, expected.group)
    assert found.trits.dtype == np.int8 and found.scales.dtype == expected.scales.dtype
    np.testing.assert_array_equal(found.trits, expected.trits)
    np.testing.assert_array_equal(found.scales.view(np.uint8), expected.scales.view(np.uint8))


@pytest.mark.parametrize("name", TERNARY)
def test_groups_come_over_trit_for_trit(name: str, tmp_path: Path) -> None:
    """Groups of 256, which every format holds. The same as looking at the numbers gives."""
    trits, scales = matrix(FFN, 2 * HIDDEN, 256)
    trits, scales = trits[:, :HIDDEN], scales[:, :1]  # one group a row: the model's rows are no longer
    found = open_gguf(stored(tmp_path / "model.gguf", name, trits, scales)).ternary(UP_NAME)
    assert found is not None and found.scale_kind == "row"
    np.testing.assert_array_equal(found.trits, trits)
    np.testing.assert_array_equal(found.scales, scales[:, 0].astype(np.float32))
    assert_same(found, detect([values(trits, scales)]))


DOWN, DOWN_NAME = "blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("name", TERNARY)
@pytest.mark.parametrize("group", [64, 128, 256])
def test_groups_of_columns(name: str, group: int, tmp_path: Path) -> None:
    block = formats.BLOCKS[name][1]
    if block > group:
        pytest.skip("the format has no groups that small")
    trits, scales = matrix(HIDDEN, FFN, group)
    checkpoint = open_gguf(stored(tmp_path / "model.gguf", name, trits, scales, DOWN))
    found = checkpoint.ternary(DOWN_NAME)
    assert found is not None and (found.scale_kind, found.group) == ("group", group)
    np.testing.assert_array_equal(found.trits, trits)
    np.testing.assert_array_equal(found.scales.view(np.uint16), scales.view(np.uint16))
    assert_same(found, detect([values(trits, scales)]))
    np.testing.assert_array_equal(checkpoint.rows(DOWN_NAME), values(trits, scales))


@pytest.mark.parametrize("name", [*TERNARY, "I2_S"])
def test_one_scale_a_tensor_is_one_scale_in_every_format(name: str, tmp_path: Path) -> None:
    trits, _ = matrix(HIDDEN, FFN, 256)
    scales = np.full((HIDDEN, 2), np.float16(0.0371))
    if name == "I2_S":
        data = formats.i2_s(trits, float(scales[0, 0]))
        path = write_foreign(tmp_path / "model.gguf", {DOWN: (data, formats.I2_S, trits.shape)})
    else:
        path = stored(tmp_path / "model.gguf", name, trits, scales, DOWN)
    checkpoint = open_gguf(path)
    expected = Ternary(trits, np.float32([np.float16(0.0371)]), "parts")
    assert_same(checkpoint.ternary(DOWN_NAME), expected)
    np.testing.assert_array_equal(checkpoint.rows(DOWN_NAME, 3, 70), values(trits, scales)[3:70])


def test_binary_weights(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    trits = random.choice(np.int8([-1, 1]), (HIDDEN, FFN))
    scales = random.uniform(0.01, 1, (HIDDEN, FFN // 128)).astype(np.float16)
    found = open_gguf(stored(tmp_path / "model.gguf", "Q1_0", trits, scales, DOWN)).ternary(DOWN_NAME)
    assert_same(found, Ternary(trits, scales, "group", 128))


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_our_encoders_are_those_of_the_gguf_package(name: str) -> None:
    trits, scales = matrix(8, 1024, 256)
    trits[:, ::256] = np.where(scales > 0, 1, 0)  # the package derives a scale from the greatest value
    kind = gguf.GGMLQuantizationType[name]
    np.testing.assert_array_equal(gguf.quantize(values(trits, scales), kind), formats.encode(name, trits, scales, 256))


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_every_byte_decodes_as_in_the_gguf_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    size = TYPES[int(kind)].n_bytes
    blocks = np.arange(256, dtype=np.uint8)[:, None] * np.ones(size, np.uint8) + np.arange(size, dtype=np.uint8)
    at = TYPES[int(kind)].scale_at
    blocks[:, at : at + 2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    codes, scales = TYPES[int(kind)].decode(blocks)
    np.testing.assert_array_equal(codes * scales.astype(np.float32), gguf.dequantize(blocks, kind))


@pytest.mark.parametrize("name", ["TQ2_0", "PTQ1_0", "I2_S"])
def test_rows_of_queries_are_put_in_order(name: str, tmp_path: Path) -> None:
    """Llama files hold Q and K for pairs (2i, 2i + 1); trits and scales move together."""
    trits, scales = matrix(HIDDEN, HIDDEN, 256)
    if name == "I2_S":
        path = write_foreign(tmp_path / "m.gguf", {Q: (formats.i2_s(trits, 0.5), formats.I2_S, trits.shape)})
    else:
        path = stored(tmp_path / "m.gguf", name, trits, scales, Q)
    checkpoint = open_gguf(path)
    found = checkpoint.ternary(Q_NAME)
    assert found is not None
    np.testing.assert_array_equal(found.values(0, HIDDEN), checkpoint.rows(Q_NAME))
    pairs = trits.reshape(4, 32, 2, HIDDEN).swapaxes(1, 2).reshape(trits.shape)
    np.testing.assert_array_equal(found.trits, pairs)


def test_negative_and_zero_scales(tmp_path: Path) -> None:
    """A pack's scales are positive; what a scale of 0 multiplies is 0, whatever the code."""
    trits, scales = matrix(HIDDEN, FFN, 128)
    trits[3, :128], scales[3, 0] = 1, 0
    scales[5, 1] *= -1
    checkpoint = open_gguf(stored(tmp_path / "model.gguf", "PQ2_0", trits, scales, DOWN))
    found = checkpoint.ternary(DOWN_NAME)
    assert found is not None and (found.scales >= 0).all() and (found.trits[3, :128] == 0).all()
    np.testing.assert_array_equal(found.values(0, HIDDEN), values(trits, scales))


@pytest.mark.parametrize("name", ["TQ2_0", "Q2_0 of 64", "Q2_0 of 128", "PQ2_0"])
def test_a_code_of_two_is_not_ternary(name: str, tmp_path: Path) -> None:
    trits, scales = matrix(HIDDEN, FFN, 256)
    trits[7, 300] = 2
    path = stored(tmp_path / "model.gguf", name, trits, scales, DOWN)
    checkpoint = open_gguf(path)
    assert checkpoint.ternary(DOWN_NAME) is None
    np.testing.assert_array_equal(checkpoint.rows(DOWN_NAME), values(trits, scales))


def test_an_export_carries_every_format(tmp_path: Path) -> None:
    """One model in mixed types; the pack decodes to what the file holds and says that all of it is exact."""
    cycle = [*TERNARY, "Q1_0", "I2_S"]
    shapes = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
              "ffn_gate": (FFN, 256), "ffn_up": (FFN, 256), "ffn_down": (256, FFN)}  # fmt: skip
    tensors = {}
    for index, (layer, name) in enumerate((layer, name) for layer in range(LAYERS) for name in shapes):
        trits, scales = matrix(*shapes[name], 256, seed=index)
        form = cycle[index % len(cycle)]
        if form == "Q1_0":
            trits[trits == 0] = 1
        data = formats.i2_s(trits, 0.25) if form == "I2_S" else formats.encode(form, trits, scales, 256)
        kind = formats.I2_S if form == "I2_S" else formats.BLOCKS[form][0]
        tensors[f"blk.{layer}.{name}.weight"] = (data, kind, trits.shape)
    path = write_foreign(tmp_path / "model.gguf", tensors)
    result = run_cli("export", path, "--out", tmp_path / "pack")
    assert result.status == 0, result.err
    text = " ".join(result.out.split())
    assert "14 of 14 linears are exactly the checkpoint's ternary weights; embedding q8: an approximation" in text
    pack, checkpoint = Pack(tmp_path / "pack"), open_gguf(path)
    pack.verify()
    assert pack.manifest["linears"] == {"total": 14, "exact": 14}
    for item in json.loads((tmp_path / "pack" / "report.json").read_bytes())["tensors"]:
        if item["linears"]:
            assert item["exact"] and item["encoding"] == "ternary"
            expected = np.concatenate([checkpoint.rows(name) for name in item["linears"]])
            np.testing.assert_array_equal(dequantize(pack.tensor(item["name"])), expected)


def test_parts_of_different_groups_take_the_finest() -> None:
    gate, up = matrix(8, 512, 64, seed=1), matrix(8, 512, 256, seed=2)
    parts = [
        Ternary(gate[0], gate[1], "group", 64),
        Ternary(up[0], up[1], "group", 256),
        Ternary(up[0], np.float32([0.5]), "parts"),
    ]
    kind, group, scales = _merge_scales(Matrix("m", (("a", 8), ("b", 8), ("c", 8)), 512), parts)
    assert (kind, group, scales.shape, scales.dtype) == ("group", 64, (24, 8), np.float16)
    np.testing.assert_array_equal(scales[8:16], np.repeat(up[1], 4, axis=1))
    assert (scales[16:] == 0.5).all()
    parts[2] = Ternary(up[0], np.float32([0.1]), "parts")
    with pytest.raises(CheckpointError, match="f16 does not"):
        _merge_scales(Matrix("m", (("a", 8), ("b", 8), ("c", 8)), 512), parts)


def test_what_is_written_wrong_is_no_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof decodes what was written: one wrong trit in it, and there is no pack."""
    trits, scales = matrix(HIDDEN, FFN, 256)
    path = stored(tmp_path / "model.gguf", "TQ1_0", trits, scales, DOWN)
    encode = encodings.encode_trits

    def faulty(rows: np.ndarray) -> np.ndarray:
        if rows.shape == trits.shape:
            rows = rows.copy()
            rows[9, 4] = (rows[9, 4] + 2) % 3 - 1
        return encode(rows)

    monkeypatch.setattr(encodings, "encode_trits", faulty)
    with pytest.raises(CheckpointError, match=r"down_proj.*what was written is not what"):
        export(path, tmp_path / "pack", ExportOptions(policy="q8"))
    assert not (tmp_path / "pack").exists()


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("extra", "rows"), [(64, HIDDEN), (-1088, HIDDEN)])
def test_type_42_of_a_length_that_fits_neither_size(extra: int, rows: int, tmp_path: Path) -> None:
    data = np.zeros(rows * FFN // 128 * 34 + extra, np.uint8)
    path = write_foreign(tmp_path / "model.gguf", {DOWN: (data, formats.Q2_0, (rows, FFN))})
    one_error(run_cli("export", path, "--out", tmp_path / "pack"), DOWN, "Q2_0 (42)", "neither")
    assert not (tmp_path / "pack").exists()


def test_type_42_of_a_length_that_fits_both_sizes(tmp_path: Path) -> None:
    """128 weights: 36 bytes and 34 bytes both take 64 with the padding."""
    path = write_foreign(tmp_path / "model.gguf", {DOWN: (np.zeros(34, np.uint8), formats.Q2_0, (1, 128))})
    with pytest.raises(CheckpointError, match="fits both"):
        open_gguf(path)


def test_faults_of_i2_s(tmp_path: Path) -> None:
    trits, _ = matrix(HIDDEN, FFN, 256)
    good = formats.i2_s(trits, 0.5)
    for index, scale in enumerate((0.0, -1.0, np.nan, np.inf)):
        bad = good.copy()
        bad[-32:-28] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
        path = write_foreign(tmp_path / f"scale{index}.gguf", {DOWN: (bad, formats.I2_S, trits.shape)})
        one_error(run_cli("export", path, "--out", tmp_path / "pack", "--policy", "q8"), "ffn_down", "scale")
    bad = good.copy()
    bad[100] |= 3
    path = write_foreign(tmp_path / "code.gguf", {DOWN: (bad, formats.I2_S, trits.shape)})
    one_error(run_cli("export", path, "--out", tmp_path / "pack", "--policy", "q8"), "ffn_down", "code of 3")
    short = write_foreign(tmp_path / "short.gguf", {DOWN: (good[:-64], formats.I2_S, trits.shape)})
    one_error(run_cli("export", short, "--out", tmp_path / "pack"), DOWN, "I2_S (36)")
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_scales_that_are_no_numbers(scale: float, tmp_path: Path) -> None:
    trits, scales = matrix(HIDDEN, FFN, 128)
    scales[9, 1] = scale
    path = stored(tmp_path / "model.gguf", "PTQ1_0", trits, scales, DOWN)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has 1 NaN or infinite"):
        open_gguf(path).ternary(DOWN_NAME)


def test_types_by_number() -> None:
    assert ternary_type(2) is None
    assert ternary_type(42, 64) is not ternary_type(42, 128)
