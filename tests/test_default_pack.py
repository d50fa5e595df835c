"""The pack that `make chat` serves: sound, small, and made of the checkpoint that the README names."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer.export import ExportOptions, export
from packer.pack import Pack
from tests.support.real import real_model

SHARD_MIB = 8


@pytest.fixture(scope="module")
def pack(root: Path) -> Pack:
    return Pack(root / "examples" / "packs" / "smollm2-135m-ternary")


def test_sound_and_small(pack: Pack) -> None:
    pack.verify()
    assert pack.total_bytes <= 56_000_000
    assert max(shard["bytes"] for shard in pack.manifest["shards"]) <= SHARD_MIB << 20
    assert pack.manifest["license"] == "apache-2.0" and {"LICENSE", "NOTICE"} <= set(pack.manifest["files"])


def test_weights_are_those_of_the_checkpoint(pack: Pack, tmp_path: Path) -> None:
    """The exporter of today still gives the same weights, program and tokenizer, byte for byte."""
    export(real_model(), tmp_path / "pack", ExportOptions(name=pack.manifest["name"], shard_mib=SHARD_MIB))
    fresh = Pack(tmp_path / "pack")
    assert fresh.manifest["shards"] == pack.manifest["shards"]
    for file in ("program.json", "tokenizer.json", "tokenizer_config.json"):
        assert fresh.manifest["files"][file] == pack.manifest["files"][file], file
