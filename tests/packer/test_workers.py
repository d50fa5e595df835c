"""``--workers``: the same bytes with any number, little memory, and faults and interrupts as with one."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from packer import linears
from packer.errors import PackerError
from packer.export import ExportOptions, export
from packer.pack import Pack
from packer.workers import Workers, default_workers
from tests.packer.gguf_files import write_model
from tests.packer.test_convert import float_model
from tests.support.checkpoints import tiny_checkpoint, tiny_config, tiny_tensors, write_folder
from tests.support.cli import one_error, run_cli

ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty rows of the narrowest matrix a piece, so that matrices of tiny models have several."""
    monkeypatch.setattr(linears, "PIECE_BYTES", 30 * 4 * 72)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("ternary", {}),
        ("ternary", {"keep": ("layers.*=q4a", "lm_head=nvfp4")}),
        ("online", {}),
        ("floats", {"policy": "q4km"}),
        ("floats", {"policy": "all-fp4"}),
        ("floats", {"policy": "ternary", "ternary_planes": 2}),
        ("floats", {"policy": "ternary", "ternary_planes": 2, "compensate": True}),
        ("gguf", {"policy": "q8"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_any_number_gives_the_same_bytes(
    source: str, options: dict[str, Any], small_pieces: None, tmp_path: Path
) -> None:
    if source == "gguf":
        path = write_model(tmp_path / "model.gguf", [Q.TQ2_0, Q.Q8_0])
    elif source == "floats":
        path = float_model(tmp_path / "model")
    else:
        changes = {"quantization_config": ONLINE} if source == "online" else {}
        path = tiny_checkpoint(tmp_path / "model", **changes)
    packs = []
    for count in (1, 2, 5):
        export(path, tmp_path / f"pack-{count}", ExportOptions(workers=count, shard_mib=1, **options))
        packs.append(contents(tmp_path / f"pack-{count}"))
    assert packs[0] == packs[1] == packs[2]
    Pack(tmp_path / "pack-5").verify()


def test_the_command_takes_a_number(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    for name, options in {"one": ("--workers", 1), "three": ("--workers", 3), "default": ()}.items():
        result = run_cli("export", source, "--out", tmp_path / name, *options)
        assert result.status == 0, result.err
    assert contents(tmp_path / "one") == contents(tmp_path / "three") == contents(tmp_path / "default")
    one_error(run_cli("export", source, "--out", tmp_path / "none", "--workers", 0), "--workers")
    assert 1 <= default_workers() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("count", [1, 4])
def test_a_fault_in_a_late_piece_is_one_error(count: int, small_pieces: None, tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"][60, 5] = np.nan
    source = write_folder(tmp_path / "model", config, tensors)
    result = run_cli("export", source, "--out", tmp_path / "pack", "--workers", count)
    one_error(result, "model.layers.1.mlp.down_proj.weight", "1 NaN")
    assert os.listdir(tmp_path) == ["model"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker")]


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupt_between_pieces_leaves_nothing(
    count: int, small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to the thread that waits for the workers."""
    from packer.slices import Rows

    added: list[int] = []
    plain = Rows.add

    def interrupted(self: Rows, piece: np.ndarray) -> None:
        plain(self, piece)
        added.append(len(piece))
        if len(added) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(Rows, "add", interrupted)
    result = run_cli("export", tiny_checkpoint(tmp_path / "model"), "--out", tmp_path / "pack", "--workers", count)
    assert result.status == 130 and "stopped" in result.err
    assert len(added) == 20 and os.listdir(tmp_path) == ["model"]


# --- the map ----------------------------------------------------------------------------------------------------------


def test_results_come_in_order_though_pieces_end_in_another() -> None:
    def work(item: int) -> int:
        time.sleep(0.02 if item % 3 == 0 else 0)
        return item * item

    with Workers(3) as workers:
        assert list(workers.map(work, range(30))) == [item * item for item in range(30)]
        assert list(workers.map(work, [])) == []


@pytest.mark.parametrize("count", [1, 3])
def test_few_pieces_are_under_way(count: int) -> None:
    """Whoever is slow to take results is not flooded with them."""
    begun: list[int] = []
    with Workers(count) as workers:
        for taken, _ in enumerate(workers.map(begun.append, range(50)), start=1):
            time.sleep(0.002)
            assert len(begun) <= taken + 2 * count
    assert sorted(begun) == list(range(50))


def test_threads_work_at_once() -> None:
    meeting = threading.Barrier(3, timeout=30)  # passes only if three are in it
    with Workers(3) as workers:
        assert sorted(workers.map(lambda _: meeting.wait(), range(3))) == [0, 1, 2]


def test_the_first_error_in_order_is_raised_and_the_rest_is_not_begun() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 4:
            time.sleep(0.05)  # a later one fails earlier
        if item >= 4:
            raise PackerError(f"piece {item}")
        return item

    results: list[int] = []
    with pytest.raises(PackerError, match="piece 4"), Workers(3) as workers:
        results.extend(iter(workers.map(work, range(1000))))
    assert max(begun) < 20


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["q8", "nvfp4", "f16"])
def test_memory_does_not_grow_with_a_tensor(encoding: str, tmp_path: Path) -> None:
    """Peak of what NumPy holds: pieces with their intermediate arrays, and two shards; the tensor is much larger."""
    config = tiny_config("llama", hidden_size=256, vocab_size=80_000)
    tensors = tiny_tensors(config)
    source, count = write_folder(tmp_path / "model", config, tensors), 2
    options = ExportOptions(embedding=encoding, shard_mib=1, workers=count, keep=("embed=" + encoding,))
    bound = (count + 1) * 5 * linears.PIECE_BYTES + 3 * (1 << 20)
    tensor = tensors["model.embed_tokens.weight"].nbytes
    del tensors
    tracemalloc.start()
    try:
        export(source, tmp_path / "pack", options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bound < tensor / 2, f"{peak:,} bytes, at most {bound:,}; the tensor has {tensor:,}"
