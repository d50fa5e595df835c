"""The card of a model: what is refused, and how it comes from a checkpoint into a pack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packer.card import CARD, MOST_BYTES, check_card, read_card
from packer.errors import PackerError
from packer.export import ExportOptions, export
from packer.pack import Pack
from packer.writer import file_entry
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cli import run_cli

FULL: dict[str, Any] = {
    "trained_on": "Two books.",
    "tokens": 12345,
    "held_out": [{"text": "a third book", "loss": 2.5, "tokens": 100}, {"text": "chat", "loss": 3}],
    "samples": [{"prompt": "Hello", "answer": "[red]Hi\n"}],
    "sampling": "Greedy.",
    "notes": "Do not trust it.",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trained_on": None}, "trained_on must be text, found null"),
        ({"trained_on": " "}, "trained_on must be text"),
        ({"tokens": -1}, "tokens must be a whole number of 0 or more, found -1"),
        ({"tokens": True}, "tokens must be a whole number"),
        ({"notes": 3}, "notes must be text, found 3"),
        ({"held_out": {}}, "held_out must be a list of at most 64 objects"),
        ({"held_out": [{"text": "x", "loss": float("inf")}]}, "held_out[0]: loss must be a finite number"),
        ({"held_out": [{"text": "x", "loss": 1, "tokens": "3"}]}, "held_out[0]: tokens must be a whole number"),
        ({"samples": [{"prompt": "x"}]}, "samples[0]: answer must be text, found null"),
        ({"samples": ["x"]}, "samples[0] must be an object with prompt, answer, found str"),
        ({"samples": [{"prompt": "x", "answer": "y"}] * 65}, "samples must be a list of at most 64"),
    ],
)
def test_what_a_card_must_not_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PackerError) as error:
        check_card(FULL | changes, "here.json")
    assert str(error.value).startswith("here.json") and words in str(error.value)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100_000, b" " * (MOST_BYTES + 1), None])
def test_files_that_are_no_card(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / CARD
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PackerError, match=CARD):
        read_card(path)


def test_only_the_known_fields_are_kept() -> None:
    assert check_card(FULL | {"more": 1}, "x") == FULL
    assert check_card({"trained_on": "Text."}, "x") == {"trained_on": "Text.", "held_out": [], "samples": []}


def test_a_checkpoints_card_goes_into_the_pack(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    (source / CARD).write_text(json.dumps(FULL | {"more": 1}))
    export(source, tmp_path / "pack", ExportOptions())
    pack = Pack(tmp_path / "pack")
    pack.verify()
    assert json.loads((pack.path / CARD).read_bytes()) == FULL
    shown = run_cli("inspect", pack.path)
    assert shown.status == 0
    assert all(words in shown.out for words in ("trained on", "Two books.", "12,345", "Do not trust it."))


def test_a_card_that_is_named_comes_first(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    (source / CARD).write_text(json.dumps(FULL))
    (tmp_path / "own.json").write_text(json.dumps(FULL | {"trained_on": "Mine."}))
    result = run_cli("export", source, "--out", tmp_path / "pack", "--card", tmp_path / "own.json")
    assert result.status == 0, result.err
    assert read_card(tmp_path / "pack" / CARD)["trained_on"] == "Mine."


def test_a_bad_card_leaves_no_pack(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    (source / CARD).write_text("{}")
    result = run_cli("export", source, "--out", tmp_path / "pack")
    assert result.status == 1 and f"{CARD}: trained_on must be text" in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_pack_with_a_broken_card_can_be_looked_at(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    (source / CARD).write_text(json.dumps(FULL))
    export(source, tmp_path / "pack", ExportOptions())
    manifest = json.loads((tmp_path / "pack" / "pack.json").read_bytes())
    (tmp_path / "pack" / CARD).write_bytes(b"[]")
    manifest["files"][CARD] = file_entry(b"[]")  # nothing else is wrong with it
    (tmp_path / "pack" / "pack.json").write_text(json.dumps(manifest))
    shown = run_cli("inspect", tmp_path / "pack", "--json")
    assert shown.status == 0
    assert "the card cannot be read" in json.loads(shown.out)["notes"]
