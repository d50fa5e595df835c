"""MLX packs: 2-bit matrices that are ternary come over trit for trit, others as numbers, broken ones not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from packer.checkpoints import open_checkpoint
from packer.export import ExportOptions, export
from packer.pack import Pack
from packer.ternarize import detect
from shaders.reference import dequantize
from tests.packer import ternary_formats as formats
from tests.support.checkpoints import change_json, tiny_config, tiny_tensors, write_folder
from tests.support.cli import one_error, run_cli

SINGLE = "model.safetensors"
DOWN = "model.layers.0.mlp.down_proj"
EMBED = "model.embed_tokens"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}


def trits_and_scales(shape: tuple[int, int], group: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    trits = random.integers(-1, 2, shape).astype(np.int8)
    return trits, random.uniform(0.01, 1, (shape[0], shape[1] // group)).astype(np.float16)


def mlx_folder(folder: Path, group: int = 128, dtype: Any = np.float16) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny Llama whose linears and embedding MLX packed in 2 bits, and the numbers that they stand for."""
    config = tiny_config("llama", **SIZES, quantization={"bits": 2, "group_size": group})
    config["quantization_config"] = config["quantization"]
    stored, numbers = {}, {}
    for index, (name, array) in enumerate(tiny_tensors(config).items()):
        if array.ndim == 1:
            stored[name] = numbers[name] = array
            continue
        trits, scales = trits_and_scales(array.shape, group, index)
        scales = scales.astype(ml_dtypes.bfloat16).astype(dtype)
        module = name.removesuffix(".weight")
        packed = formats.mlx(trits, scales, group, group)
        stored |= {f"{module}.{kind}": value for kind, value in packed.items()}
        numbers[name] = trits * np.repeat(scales.astype(np.float32), group, axis=1)
    return write_folder(folder, config, stored), numbers


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=str)
@pytest.mark.parametrize("group", [64, 128])
def test_a_pack_of_two_bits_comes_over(group: int, dtype: Any, tmp_path: Path) -> None:
    source, numbers = mlx_folder(tmp_path / "model", group, dtype)
    result = export(source, tmp_path / "pack", ExportOptions())
    pack = Pack(tmp_path / "pack")
    pack.verify()
    assert pack.manifest["linears"] == {"total": 14, "exact": 14}
    assert pack.manifest["source"]["format"] == "mlx"
    for report in result.tensors:
        if report.linears:
            assert (pack.entries[report.name].scale, pack.entries[report.name].group) == ("group", group)
            expected = np.concatenate([numbers[name] for name in report.linears])
            np.testing.assert_array_equal(dequantize(pack.tensor(report.name)), expected)


@pytest.mark.parametrize("stored", [32, 64, 128, 256])
def test_the_same_trits_and_scales_as_the_numbers(stored: int, tmp_path: Path) -> None:
    """Groups of 256, stored in narrower ones."""
    source, _ = mlx_folder(tmp_path / "model")
    arrays = load_file(source / SINGLE)
    trits, scales = trits_and_scales((256, 512), 256, 9)
    arrays |= {f"{DOWN}.{kind}": value for kind, value in formats.mlx(trits, scales, 256, stored).items()}
    save_file(arrays, source / SINGLE)
    change_json(source / "config.json", quantization={"bits": 2, "group_size": 128, DOWN: {"group_size": stored}})
    checkpoint = open_checkpoint(source)
    found, expected = checkpoint.ternary(f"{DOWN}.weight"), detect([checkpoint.rows(f"{DOWN}.weight")])
    assert found is not None and expected is not None and (found.scale_kind, found.group) == ("group", 256)
    np.testing.assert_array_equal(found.trits, trits)
    np.testing.assert_array_equal(found.trits, expected.trits)
    np.testing.assert_array_equal(found.scales.view(np.uint16), scales.view(np.uint16))
    np.testing.assert_array_equal(found.scales.view(np.uint16), expected.scales.view(np.uint16))


@pytest.mark.parametrize("bits", [4, 8])
def test_wider_codes_are_numbers(bits: int, tmp_path: Path) -> None:
    source, _ = mlx_folder(tmp_path / "model")
    arrays, random = load_file(source / SINGLE), np.random.default_rng(2)
    codes = random.integers(0, 2**bits, (272, 256))
    words = np.zeros((272, 256 * bits // 32), np.uint32)
    for (row, column), code in np.ndenumerate(codes):
        words[row, column * bits // 32] |= np.uint32(code) << np.uint32(column * bits % 32)
    arrays[f"{EMBED}.weight"] = words
    save_file(arrays, source / SINGLE)
    change_json(source / "config.json", quantization={"bits": 2, "group_size": 128, EMBED: {"bits": bits}})
    checkpoint = open_checkpoint(source)
    scales, biases = (np.repeat(arrays[f"{EMBED}.{k}"].astype(np.float32), 128, axis=1) for k in ("scales", "biases"))
    assert checkpoint.shape(f"{EMBED}.weight") == (272, 256)
    np.testing.assert_array_equal(checkpoint.rows(f"{EMBED}.weight"), codes.astype(np.float32) * scales + biases)
    assert run_cli("export", source, "--out", tmp_path / "pack").status == 0


def edited(arrays: dict[str, np.ndarray], name: str, index: tuple[int, int], value: Any) -> None:
    arrays[name] = arrays[name].copy()
    arrays[name][index] = value


FAULTS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "a bias of its own": (lambda a: edited(a, f"{DOWN}.biases", (3, 1), -0.123), {}, (DOWN, "not ternary")),
    "a code of 3": (lambda a: edited(a, f"{DOWN}.weight", (3, 1), 0xFFFFFFFF), {}, (DOWN, "not ternary")),
    "a scale that is no number": (lambda a: edited(a, f"{DOWN}.scales", (3, 1), np.nan), {}, (DOWN, "scales", "NaN")),
    "no biases": (lambda a: a.pop(f"{DOWN}.biases"), {}, (f"{DOWN}.biases", "missing")),
    "scales of another shape": (
        lambda a: a.update({f"{DOWN}.scales": np.ones((256, 2), np.float16)}), {}, (f"{DOWN}.scales", "[256, 2]")),
    "words of another type": (
        lambda a: a.update({f"{DOWN}.weight": a[f"{DOWN}.weight"].view(np.int32)}), {}, (f"{DOWN}.weight", "int32")),
    "three bits": (lambda a: None, {"bits": 3, "group_size": 128}, ("bits 3",)),
    "no group": (lambda a: None, {"bits": 2}, ("group_size None",)),
    "another mode": (lambda a: None, {"bits": 2, "group_size": 128, "mode": "mxfp4"}, ("mxfp4",)),
    "another group": (lambda a: None, {"bits": 2, "group_size": 64}, ("scales", "groups of 64")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str, tmp_path: Path) -> None:
    change, quantization, words = FAULTS[name]
    source, _ = mlx_folder(tmp_path / "model")
    arrays = load_file(source / SINGLE)
    change(arrays)
    save_file(arrays, source / SINGLE)
    if quantization:
        change_json(source / "config.json", quantization=quantization)
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), *words)
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("quantization", ["2 bits", [2], None])
def test_a_description_that_is_none(quantization: Any, tmp_path: Path) -> None:
    source, _ = mlx_folder(tmp_path / "model")
    change_json(source / "config.json", quantization=quantization)
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), "quantization", "bits")
