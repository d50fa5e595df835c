"""PyTorch checkpoints: the same pack as from safetensors; whatever is not plain tensors is refused."""

from __future__ import annotations

import builtins
import collections
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from packer.pack import Pack
from tests.support.checkpoints import tiny_checkpoint, tiny_config, write_folder, write_json
from tests.support.cli import ROOT, one_error, run_cli

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def torch_folder(folder: Path, shards: int = 1, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """The tiny model as PyTorch files, and beside it, under another name, as safetensors."""
    source = tiny_checkpoint(folder)
    arrays = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    (source / "model.safetensors").unlink()
    if shards == 1:
        torch.save(arrays, source / SINGLE, **options)
        return source
    where = {}
    for index in range(shards):
        names, file = sorted(arrays)[index::shards], f"pytorch_model-{index + 1:05d}-of-{shards:05d}.bin"
        torch.save({name: arrays[name] for name in names}, source / file, **options)
        where |= dict.fromkeys(names, file)
    write_json(source / INDEX, {"weight_map": where})
    return source


def assert_same_weights(found: Path, expected: Path) -> None:
    ours, theirs = Pack(found).tensors(), Pack(expected).tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor.data, theirs[name].data)
        np.testing.assert_array_equal(tensor.scales, theirs[name].scales)


@pytest.mark.parametrize(
    ("shards", "options"),
    [(1, {}), (3, {}), (1, {"_use_new_zipfile_serialization": False})],
    ids=["one", "three", "old"],
)
def test_the_pack_is_that_of_safetensors(shards: int, options: dict[str, bool], tmp_path: Path) -> None:
    source = torch_folder(tmp_path / "model", shards, torch.float32, **options)
    assert run_cli("export", source, "--out", tmp_path / "pack").status == 0
    assert run_cli("export", tiny_checkpoint(tmp_path / "other"), "--out", tmp_path / "expected").status == 0
    assert_same_weights(tmp_path / "pack", tmp_path / "expected")
    assert Pack(tmp_path / "pack").manifest["source"]["format"] == "pytorch"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_types(dtype: torch.dtype, tmp_path: Path) -> None:
    source = torch_folder(tmp_path / "model", dtype=dtype)
    assert run_cli("export", source, "--out", tmp_path / "pack").status == 0
    assert Pack(tmp_path / "pack").manifest["linears"] == {"total": 14, "exact": 14}


def test_one_file_by_name(tmp_path: Path) -> None:
    source = torch_folder(tmp_path / "model")
    (source / SINGLE).rename(source / "weights.pt")
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), "model.safetensors", SINGLE)
    assert run_cli("export", source / "weights.pt", "--out", tmp_path / "pack").status == 0


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    source = torch_folder(tmp_path / "model")
    torch.save({"weight": torch.ones(2), "more": Hostile(tmp_path / "mark")}, source / SINGLE)
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), SINGLE, "more than tensors", "safetensors")
    assert not (tmp_path / "mark").exists() and not (tmp_path / "pack").exists()


@pytest.mark.parametrize(
    "content",
    [
        [torch.ones(2)],
        {"model": {"weight": torch.ones(2)}},
        {},
        {1: torch.ones(2)},
        {"x": torch.ones(2).to_sparse()},
        collections.OrderedDict(x="text"),
    ],
    ids=["a list", "nested", "empty", "numbers", "sparse", "text"],
)
def test_what_is_no_dictionary_of_tensors(content: Any, tmp_path: Path) -> None:
    source = torch_folder(tmp_path / "model")
    torch.save(content, source / SINGLE)
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), SINGLE, "state_dict")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_files_that_are_cut(share: float, tmp_path: Path) -> None:
    source = torch_folder(tmp_path / "model")
    data = (source / SINGLE).read_bytes()
    (source / SINGLE).write_bytes(data[: int(share * len(data))])
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), SINGLE, "not a whole PyTorch file")


def test_shards(tmp_path: Path) -> None:
    source = torch_folder(tmp_path / "model", shards=3)
    second = source / "pytorch_model-00002-of-00003.bin"
    whole = second.read_bytes()
    first = torch.load(source / "pytorch_model-00001-of-00003.bin", weights_only=True)
    torch.save({**torch.load(second, weights_only=True), next(iter(first)): torch.ones(2)}, second)
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), next(iter(first)), "both in", second.name)
    second.unlink()
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), second.name, "missing")
    second.write_bytes(whole)
    assert run_cli("export", source, "--out", tmp_path / "pack").status == 0


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, known = torch_folder(tmp_path / "model"), builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    one_error(run_cli("export", source, "--out", tmp_path / "pack"), SINGLE, "tercet[torch]")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from Linux's /proc")
def test_files_are_mapped(tmp_path: Path) -> None:
    """One row of a matrix of 400 MB: the process does not hold the matrix."""
    torch.save({"model.norm.weight": torch.zeros(100_000, 1000)}, tmp_path / SINGLE)
    write_folder(tmp_path, tiny_config("llama"), {})
    (tmp_path / "model.safetensors").unlink()
    script = (
        "import sys, pathlib, torch\nfrom packer.checkpoints.torch_files import load\n"
        "def rss():\n    return int(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])\n"
        "before = rss()\nrow = load(pathlib.Path(sys.argv[1]))['model.norm.weight'][5:6].float().numpy()\n"
        "print('grew', rss() - before)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, tmp_path / SINGLE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(re.search(r"grew (-?\d+)", result.stdout).group(1)) < 100_000  # type: ignore[union-attr]  # KiB
