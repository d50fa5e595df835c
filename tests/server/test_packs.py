"""Which packs are usable, and why the others are left out."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packer.errors import PackError
from packer.manifest import CHUNK_BYTES
from server.errors import StartupError
from server.packs import PackLibrary, UnservablePack, read_pack

MakePack = Callable[..., Path]
HASH = "0" * 64


def edit(pack: Path, **fields: Any) -> None:
    """Replace fields of pack.json."""
    manifest = json.loads((pack / "pack.json").read_text()) | fields
    (pack / "pack.json").write_text(json.dumps(manifest))


def test_usable_pack(packs: Path) -> None:
    pack = PackLibrary(packs).require_packs()["tiny"]
    assert pack.url == "/packs/tiny/"
    assert set(pack.files) == {
        "LICENSE",
        "pack.json",
        "program.json",
        "report.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "weights-00001.safetensors",
    }
    assert pack.bytes == sum(path.stat().st_size for path in (packs / "tiny").iterdir())


def test_a_pack_itself_may_be_the_folder(packs: Path) -> None:
    assert list(PackLibrary(packs / "tiny").packs()) == ["tiny"]


def test_shard_hash_depends_on_every_chunk(make_pack: MakePack) -> None:
    first, second = bytes(CHUNK_BYTES + 8), bytes(CHUNK_BYTES) + b"8 others"
    etags = {
        read_pack(make_pack(name, shard=shard)).files["weights-00001.safetensors"].etag
        for name, shard in (("one", first), ("two", second))
    }
    assert len(etags) == 2


# tests/packer has a pack for every rule of pack.json; here is one of each kind.
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2}, "version"),
        ({"parameters": "many"}, "field 'parameters'"),
        ({"shards": [{"file": "../secret", "bytes": 1, "chunks": [HASH]}]}, "'../secret'"),
        ({"shards": [{"file": "/secret", "bytes": 1, "chunks": [HASH]}]}, "'/secret'"),
        ({"shards": [{"file": "pack.json", "bytes": 1, "chunks": [HASH]}]}, "'pack.json'"),
        ({"shards": [{"file": "w", "bytes": CHUNK_BYTES + 1, "chunks": [HASH]}]}, "1 chunks, expected 2"),
    ],
)
def test_broken_manifest(packs: Path, fields: dict[str, Any], message: str) -> None:
    edit(packs / "tiny", **fields)
    with pytest.raises(PackError) as error:
        read_pack(packs / "tiny")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": "te'])
def test_pack_json_that_is_none(packs: Path, content: bytes) -> None:
    (packs / "tiny" / "pack.json").write_bytes(content)
    with pytest.raises(PackError, match=r"pack\.json: "):
        read_pack(packs / "tiny")


@pytest.mark.parametrize("fields", [{"bits_per_weight": float("nan")}, {"name": "half a \ud83d"}])
def test_what_the_model_list_could_not_carry(packs: Path, fields: dict[str, Any]) -> None:
    edit(packs / "tiny", **fields)
    with pytest.raises((PackError, UnservablePack), match=r"pack\.json: "):
        read_pack(packs / "tiny")


def test_listed_file_is_missing(packs: Path) -> None:
    (packs / "tiny" / "report.json").unlink()
    with pytest.raises(UnservablePack, match=r"report\.json: missing"):
        read_pack(packs / "tiny")


def test_listed_file_has_another_size(packs: Path) -> None:
    (packs / "tiny" / "weights-00001.safetensors").write_bytes(b"short")
    with pytest.raises(UnservablePack, match=r"weights-00001\.safetensors: expected 2048 bytes, found 5"):
        read_pack(packs / "tiny")


def test_link_out_of_the_pack(packs: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"Apache-2.0\n")
    (packs / "tiny" / "LICENSE").unlink()
    (packs / "tiny" / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(UnservablePack, match="LICENSE: expected a file, found a symbolic link"):
        read_pack(packs / "tiny")


def test_link_out_of_the_packs_folder(packs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(packs / "tiny", tmp_path / "elsewhere")
    (packs / "linked").symlink_to(tmp_path / "elsewhere")
    assert list(PackLibrary(packs).packs()) == ["tiny"]
    assert "pack 'linked' left out: it is a symbolic link" in caplog.text


def test_folder_name_that_is_no_id(make_pack: MakePack, packs: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_pack("two words")
    assert list(PackLibrary(packs).packs()) == ["tiny"]
    assert "pack 'two words' left out: its folder's name may only have" in caplog.text


def test_broken_pack_is_left_out_and_logged_once(
    make_pack: MakePack, packs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(make_pack("broken"), version=9)
    (packs / "empty").mkdir()
    (packs / ".unfinished").mkdir()
    library = PackLibrary(packs)
    with caplog.at_level(logging.WARNING):
        assert list(library.packs()) == ["tiny"]
        assert list(library.packs()) == ["tiny"]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("pack 'broken' left out: ")
    assert "version" in first
    assert second.startswith("pack 'empty' left out: ")
    assert "missing" in second


def test_new_changed_and_removed_packs_are_seen(make_pack: MakePack, packs: Path) -> None:
    library = PackLibrary(packs)
    assert list(library.packs()) == ["tiny"]
    other = make_pack("other")
    assert list(library.packs()) == ["other", "tiny"]
    edit(other, name="Renamed")
    os.utime(other / "pack.json", ns=(1, 1))
    assert library.packs()["other"].manifest["name"] == "Renamed"
    shutil.rmtree(other)
    assert list(library.packs()) == ["tiny"]


def test_packs_folder_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="expected a folder, found nothing"):
        PackLibrary(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="expected a folder, found a file"):
        PackLibrary(tmp_path / "file")


def test_packs_folder_without_a_usable_pack(packs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartupError, match=r"no usable pack \(it has no subfolder\)"):
        PackLibrary(tmp_path / "empty").require_packs()
    edit(packs / "tiny", version=9)
    with pytest.raises(StartupError, match=r"no usable pack \(1 left out\)"):
        PackLibrary(packs).require_packs()
