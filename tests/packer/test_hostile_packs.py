"""Packs that break the rules of FORMAT.md, at least one a rule: each is refused under the rule's name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import packer
from packer.errors import PackError
from packer.export import ExportOptions
from packer.manifest import _FIELDS, CHUNK_BYTES, MAX_HEADER_BYTES, MAX_JSON_BYTES, MAX_SHARD_BYTES
from packer.pack import Pack
from tests.support.cli import one_error, run_cli
from tests.support.packs import change_bytes, change_manifest, change_program, change_shard, recode, relist, tiny_pack

FORMAT = (Path(packer.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
SHARD = "weights-00001.safetensors"
QKV, EMBED, GAIN = "layers.0.qkv", "embed", "layers.0.input_norm"
LOW_BITS = ("q4a", "nvfp4", "mxfp4")

Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound pack with ternary, q4 and f32 tensors; no column count is a multiple of a block."""
    pack = tiny_pack(tmp_path_factory.mktemp("whole"), "bitnet", options=ExportOptions(embedding="q4"))
    Pack(pack).verify()
    return pack


# --- ways to break a pack ---------------------------------------------------------------------------------------------


def manifest(*path: str | int, to: Any = ...) -> Change:
    """Set what stands at a path of pack.json; without ``to`` take it out."""

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for step in path[:-1]:
            place = place[step]
        if to is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = to

    return lambda pack: change_manifest(pack, change)


def program(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda pack: change_program(pack, change)


def arrays(change: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    return lambda pack: change_shard(pack, change)


def put(key: str, index: Any, value: Any) -> Change:
    """Set one element of a shard's array."""
    return arrays(lambda found: found[key].__setitem__(index, value))


def raw(name: str, content: bytes) -> Change:
    """Replace a file's bytes; for pack.json nothing is listed anew."""

    def change(pack: Path) -> None:
        (pack / name).write_bytes(content)
        if name != "pack.json":
            relist(pack)

    return change


def header(change: Callable[[dict[str, Any]], Any] = lambda found: None, *, pad: int = 0, tail: bytes = b"") -> Change:
    """Rewrite the header of the shard, with ``pad`` bytes too many after it and ``tail`` at the end of the file."""

    def rewrite(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        text += b" " * (-len(text) % 8 + pad)
        return len(text).to_bytes(8, "little") + text + data[8 + length :] + tail

    return lambda pack: change_bytes(pack, SHARD, rewrite)


def move_tensor(key: str, by: int) -> Change:
    """Say that a tensor lies elsewhere in its shard."""
    return header(lambda found: found[key].update(data_offsets=[at + by for at in found[key]["data_offsets"]]))


def second_shard(pack: Path) -> None:
    """A copy of the shard, so that every key is there twice."""
    shutil.copy(pack / SHARD, pack / "weights-00002.safetensors")
    change_manifest(
        pack, lambda found: found["shards"].append({**found["shards"][0], "file": "weights-00002.safetensors"})
    )


def set_text(pack: Path, field: str, text: str) -> None:
    """Set a number of pack.json to something that Python's JSON writer would not write."""
    change_manifest(pack, lambda found: found.update({field: "HERE"}))
    (pack / "pack.json").write_text((pack / "pack.json").read_text().replace('"HERE"', text))


def flip(name: str, at: int) -> Change:
    """Change one byte and list nothing anew."""

    def change(pack: Path) -> None:
        data = bytearray((pack / name).read_bytes())
        data[at] ^= 1
        (pack / name).write_bytes(data)

    return change


def append(name: str) -> Change:
    return lambda pack: (pack / name).write_bytes((pack / name).read_bytes() + b" ")


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


WRONG_VALUES: dict[str, list[Any]] = {
    "name": [3, None, ["x"], "half a pair \ud800"],
    "description": [None],
    "license": [None, 3],
    "family": [{}],
    "source": [[], "x"],
    "activations": ["a4", None, ["a8"]],
    "parameters": [0, -1, "5", 1.5, True, 10**20],
    "vocab_size": [0, 1.5, None],
    "context_length": [0, True],
    "bits_per_weight": [None, "2", True, 10**400],
    "ternary_bits_per_weight": ["1.6", False],
    "resident_bytes": [0, -1],
    "kv": [None, [], {"layers": 2, "kv_heads": 2}, {"layers": 0, "kv_heads": 2, "head_dim": 12}],
    "bos_id": [-1, "1", True, 1.0],
    "eos_ids": [None, 5, {"0": 1}],
    "grade": ["superb", 1, ["good"]],
    "chunk_bytes": [1048576, "4194304", None],
    "shards": [{}, [None], [{"file": 3, "bytes": 1, "chunks": []}], [{"file": "a", "bytes": 0, "chunks": []}]],
    "files": [[], {"a": None}, {"a": {"bytes": -1, "sha256": "0" * 64}}, {"a": {"bytes": 1, "sha256": "0" * 63}}],
    "tensors": [[], None],
}
NO_TRITS = sorted(set(range(256)) - {-(-number * 256 // 243) for number in range(243)})  # the 13 that encode nothing
BAD_NAMES = ["../x", "a/b", "a\\b", ".hidden", "", "x" * 101, "pack.json", "a b", "é", "a\n", "C:x", "/etc/passwd"]


POSITION = {"op": "position", "w": EMBED, "accumulate": True}


def add_positions(pack: Path) -> None:
    """The rows of the embedding, 272, become those of the first positions too."""
    recode(pack, EMBED, "f32")
    program(lambda found: found["body"].insert(1, {**POSITION, "out": found["body"][0]["out"]}))(pack)


def coded(encoding: str, key: str, index: Any = None, value: Any = None) -> Change:
    """Store the embedding in another encoding, then set one element of what it has, or without an index take it out."""

    def change(pack: Path) -> None:
        recode(pack, EMBED, encoding)
        if index is not None:
            put(f"{EMBED}.{key}", index, value)(pack)
        else:
            arrays(lambda found: found.pop(f"{EMBED}.{key}"))(pack)

    return change


CASES: dict[str, list[tuple[str, Change]]] = {
    "path": [
        *((f"file {name!r}", manifest("files", name, to={"bytes": 1, "sha256": "0" * 64})) for name in BAD_NAMES),
        ("shard outside", manifest("shards", 0, "file", to="../x")),
        ("shard is the program", manifest("shards", 0, "file", to="program.json")),
        ("shard twice", lambda pack: change_manifest(pack, lambda found: found["shards"].append(found["shards"][0]))),
    ],
    "json": [
        ("pack.json is cut", raw("pack.json", b'{"format": "tercet-pack", ')),
        ("pack.json is empty", raw("pack.json", b"")),
        ("pack.json is a list", raw("pack.json", b"[]")),
        ("pack.json is null", raw("pack.json", b"null")),
        ("pack.json is latin-1", raw("pack.json", b'{"name": "\xff"}')),
        ("pack.json is UTF-16", raw("pack.json", '{"a": 1}'.encode("utf-16"))),
        ("pack.json has a BOM", raw("pack.json", b"\xef\xbb\xbf{}")),
        ("pack.json has a NaN", raw("pack.json", b'{"a": NaN}')),
        ("pack.json has an Infinity", raw("pack.json", b'{"a": -Infinity}')),
        ("pack.json has a number of 5000 digits", raw("pack.json", b'{"a": 1' + b"0" * 5000 + b"}")),
        ("pack.json is deep", raw("pack.json", nested(100_000))),
        ("pack.json is large", raw("pack.json", b'{"a": "' + b"x" * MAX_JSON_BYTES + b'"}')),
        ("program.json is cut", raw("program.json", b"{")),
        ("program.json is a list", raw("program.json", b"[]")),
        ("program.json has a NaN", raw("program.json", b'{"ops_version": NaN}')),
        ("program.json is large", raw("program.json", b'{"a": "' + b"x" * MAX_JSON_BYTES + b'"}')),
    ],
    "missing": [
        ("pack.json", lambda pack: (pack / "pack.json").unlink()),
        ("the folder", shutil.rmtree),
        ("the shard", lambda pack: (pack / SHARD).unlink()),
        ("tokenizer.json", lambda pack: (pack / "tokenizer.json").unlink()),
        ("program.json", lambda pack: (pack / "program.json").unlink()),
        ("report.json is a folder", lambda pack: ((pack / "report.json").unlink(), (pack / "report.json").mkdir())),
        *((f"{name} in files", manifest("files", name)) for name in
          ("program.json", "tokenizer.json", "tokenizer_config.json", "report.json")),
    ],
    "length": [
        ("shard too long", append(SHARD)),
        ("program too long", append("program.json")),
        ("shard cut", lambda pack: (pack / SHARD).write_bytes((pack / SHARD).read_bytes()[:-1])),
        ("report listed longer", manifest("files", "report.json", "bytes", to=10**9)),
    ],
    "hash": [
        ("shard's last byte", flip(SHARD, -1)),
        ("tokenizer.json", flip("tokenizer_config.json", -2)),
        ("report.json listed with another", manifest("files", "report.json", "sha256", to="0" * 64)),
        ("chunk listed with another", manifest("shards", 0, "chunks", 0, to="0" * 64)),
    ],
    "version": [
        ("newer", manifest("version", to=2)),
        ("text", manifest("version", to="1")),
        ("true", manifest("version", to=True)),
        ("missing", manifest("version")),
        ("list", manifest("version", to=[1])),
        ("another format", manifest("format", to="gguf")),
        ("no format", manifest("format")),
    ],
    "field": [
        *((f"no {field}", manifest(field)) for field in _FIELDS),
        *((f"{field} {value!r:.30}", manifest(field, to=value)) for field, values in WRONG_VALUES.items()
          for value in values),
        ("bits_per_weight beyond floats", lambda pack: set_text(pack, "bits_per_weight", "1e999")),
        ("chunks too few", manifest("shards", 0, "chunks", to=[])),
        ("chunks too many", manifest("shards", 0, "chunks", to=["0" * 64] * 2)),
        ("chunk is no hash", manifest("shards", 0, "chunks", to=["G" * 64])),
        ("shard bytes is text", manifest("shards", 0, "bytes", to="5")),
        ("tensor is null", manifest("tensors", QKV, to=None)),
        ("tensor is a list", manifest("tensors", QKV, to=[])),
    ],
    "eos": [
        ("none", manifest("eos_ids", to=[])),
        ("beyond the vocabulary", manifest("eos_ids", to=[272])),
        ("negative", manifest("eos_ids", to=[-1])),
        ("text", manifest("eos_ids", to=["2"])),
        ("true", manifest("eos_ids", to=[True])),
        ("a fraction", manifest("eos_ids", to=[1.0])),
        ("a list", manifest("eos_ids", to=[[1]])),
    ],
    "shape": [
        *((f"{shape!r}", manifest("tensors", QKV, "shape", to=shape)) for shape in
          ([], [120, 72, 1], "120x72", None, [120, 0], [-120, 72], [120, 72.0], [120, True], [120, 2**31], {"0": 1})),
        ("missing", manifest("tensors", QKV, "shape")),
        ("group no multiple of 64", manifest("tensors", QKV, to={
            "encoding": "ternary", "shape": [120, 72], "scale": "group", "group": 60, "slices": [120]})),
        ("group is text", manifest("tensors", QKV, to={
            "encoding": "ternary", "shape": [120, 72], "scale": "group", "group": "64", "slices": [120]})),
    ],
    "encoding": [
        ("unknown", manifest("tensors", QKV, "encoding", to="q3")),
        ("missing", manifest("tensors", QKV, "encoding")),
        ("a list", manifest("tensors", QKV, "encoding", to=["ternary"])),
        ("unknown scale", manifest("tensors", QKV, "scale", to="column")),
        ("ternary without scale", manifest("tensors", QKV, "scale")),
        ("q4 with scale", manifest("tensors", EMBED, "scale", to="row")),
        ("scale is an object", manifest("tensors", QKV, "scale", to={})),
        ("vector in f16", manifest("tensors", GAIN, "encoding", to="f16")),
    ],
    "slices": [
        *((f"{slices!r}", manifest("tensors", QKV, "slices", to=slices)) for slices in
          ([], [119], [60, 61], [121, -1], [120, 0], "120", None, [120.0], [True] * 120)),
        ("missing", manifest("tensors", QKV, "slices")),
        ("parts do not add up", manifest("tensors", QKV, "parts", to=[72, 24, 25])),
        ("parts missing", manifest("tensors", QKV, "parts")),
        ("vector in two", manifest("tensors", GAIN, "slices", to=[36, 36])),
    ],
    "tensor": [
        ("key missing", arrays(lambda found: found.pop(f"{QKV}.data.0"))),
        ("scale missing", arrays(lambda found: found.pop(f"{QKV}.scale"))),
        ("dtype", arrays(lambda found: found.update({f"{QKV}.data.0": found[f"{QKV}.data.0"].view(np.int8)}))),
        ("rows", arrays(lambda found: found.update({f"{QKV}.data.0": found[f"{QKV}.data.0"][:-1]}))),
        ("columns", arrays(lambda found: found.update({f"{QKV}.data.0": found[f"{QKV}.data.0"][:, :-1]}))),
        ("dimensions", arrays(lambda found: found.update({f"{QKV}.data.0": found[f"{QKV}.data.0"].reshape(-1)}))),
        ("scales too few", arrays(lambda found: found.update({f"{QKV}.scale": found[f"{QKV}.scale"][:2]}))),
        ("scales in f64", arrays(lambda found: found.update({f"{QKV}.scale": found[f"{QKV}.scale"].astype("f8")}))),
        ("in two shards", second_shard),
        ("no shards", manifest("shards", to=[])),
        ("sliced otherwise", manifest("tensors", QKV, "slices", to=[60, 60])),
        ("q4a with the scales of q4", manifest("tensors", EMBED, "encoding", to="q4a")),
        ("mxfp4 with the scales of q4", manifest("tensors", EMBED, "encoding", to="mxfp4")),
        ("nvfp4 without its own scale", coded("nvfp4", "tensor_scale")),
    ],
    "extra": [
        ("key", arrays(lambda found: found.update(surprise=np.zeros(1, np.float32)))),
        ("own scale of q4", arrays(lambda found: found.update({f"{EMBED}.tensor_scale": np.ones(1, np.float32)}))),
        ("scale of a vector", arrays(lambda found: found.update({f"{GAIN}.scale": np.zeros(1, np.float32)}))),
    ],
    "trits": [
        *((f"byte {byte}", put(f"{QKV}.data.0", (3, 0), byte)) for byte in NO_TRITS),
        ("the last byte", put(f"{QKV}.data.0", (-1, -1), NO_TRITS[-1])),
    ],
    "padding": [
        # Byte 14 holds columns 70 to 74 of 72; codes 1 1 1 1 1 are right, each of the last three alone is not.
        *((f"code {4 - n} of a byte", put(f"{QKV}.data.0", (5, 14), -(-(121 - 3**n) * 256 // 243))) for n in range(3)),
        ("codes 0 of a byte", put(f"{QKV}.data.0", (5, 14), 0)),
        ("trits in whole bytes", put(f"{QKV}.data.0", (5, 15), 0)),
        ("nibbles", put(f"{EMBED}.data.0", (0, 36), 0x80)),  # columns 72 and 73
        ("the last nibble", put(f"{EMBED}.data.0", (-1, -1), 0x98)),
        *((f"nibbles of {encoding}", coded(encoding, "data.0", (0, 36), 0x80)) for encoding in LOW_BITS),
        *((f"the last nibble of {encoding}", coded(encoding, "data.0", (-1, -1), 0x10)) for encoding in LOW_BITS),
    ],
    "finite": [
        ("a gain", put(f"{GAIN}.data.0", 0, np.nan)),
        ("a scale of a part", put(f"{QKV}.scale", 2, np.inf)),
        ("a scale of a group", put(f"{EMBED}.scale.0", (271, 2), np.nan)),
        ("a minimum", coded("q4a", "scale.0", (271, 5), np.inf)),
        *((f"E4M3 scale {code}", coded("nvfp4", "scale.0", (271, 4), code)) for code in (127, 128, 255)),
        *((f"E8M0 scale {code}", coded("mxfp4", "scale.0", (271, 2), code)) for code in (253, 255)),
        *((f"own scale {value}", coded("nvfp4", "tensor_scale", 0, value)) for value in (np.nan, -np.inf, 2e35)),
    ],
    "shard-size": [("listed", manifest("shards", 0, "bytes", to=MAX_SHARD_BYTES + 1))],
    "header-size": [
        ("too large", raw(SHARD, (MAX_HEADER_BYTES + 8).to_bytes(8, "little") + b"{}" + b" " * MAX_HEADER_BYTES)),
        ("absurd", raw(SHARD, b"\xff" * 16)),
        ("four bytes", raw(SHARD, b"\x00" * 4)),
    ],
    "header": [
        ("no JSON", raw(SHARD, (8).to_bytes(8, "little") + b"notjson!")),
        ("no object", raw(SHARD, (8).to_bytes(8, "little") + b"[]      ")),
        ("empty", raw(SHARD, bytes(8))),
        ("longer than the file", raw(SHARD, (1024).to_bytes(8, "little") + b"{}      ")),
        ("data at no multiple of 8", header(pad=4)),
        ("bytes after the tensors", header(tail=bytes(8))),
        ("a gap", move_tensor(f"{QKV}.scale", 4)),
        ("an overlap", move_tensor(f"{QKV}.scale", -4)),
        ("outside the file", move_tensor(f"{QKV}.scale", 1 << 30)),
        ("shape and bytes disagree", header(lambda found: found[f"{QKV}.scale"].update(shape=[4]))),
        ("huge shape", header(lambda found: found[f"{QKV}.scale"].update(shape=[2**62, 2**62]))),
        ("unknown dtype", header(lambda found: found[f"{QKV}.scale"].update(dtype="F31"))),
        ("no offsets", header(lambda found: found[f"{QKV}.scale"].pop("data_offsets"))),
        ("negative offsets", header(lambda found: found[f"{QKV}.scale"].update(data_offsets=[-4, 8]))),
    ],
    # The many faults of programs stand in tests/shaders/test_program.py; here, that packs are checked for them.
    "ops-version": [("newer", program(lambda found: found.update(ops_version=2)))],
    "operation": [
        ("unknown", program(lambda found: found["body"].insert(1, {"op": "convolve"}))),
        ("q_gain alone", program(lambda found: found["body"][3].update(q_gain=GAIN))),
        ("negative window", program(lambda found: found["body"][4].update(window=-1))),
        ("positions of q4", program(
            lambda found: found["body"].insert(1, {**POSITION, "out": found["body"][0]["out"]}))),
        ("integers are accumulated", program(
            lambda found: found["body"].insert(2, {**found["body"][1], "accumulate": True}))),
        ("empty program", raw("program.json", b'{"ops_version": 1}')),
    ],
    "reference": [
        ("tensor", program(lambda found: found["body"][2].update(w="nothing"))),
        ("value", program(lambda found: found["body"][2].update(x="nothing"))),
    ],
    "program-shape": [
        ("head_dim", program(lambda found: found["caches"]["k.0"].update(head_dim=10))),
        ("vocabulary", manifest("vocab_size", to=273)),
        ("fewer positions than the context", lambda pack: (
            add_positions(pack), manifest("context_length", to=273)(pack))),
    ],
}  # fmt: skip

FLAT = [(rule, name, change) for rule, cases in CASES.items() for name, change in cases]


def rules_of_the_format() -> set[str]:
    """Names in brackets, and those that end a sentence at the end of a line or table cell."""
    return set(re.findall(r"\(`([a-z-]+)`\)", FORMAT)) | set(
        re.findall(r"\. `([a-z-]+)`(?= \||$)", FORMAT, re.MULTILINE)
    )


def test_every_rule_of_the_format_has_a_case() -> None:
    assert rules_of_the_format() == set(CASES)


def test_the_format_documents_the_fields_that_are_checked() -> None:
    table = FORMAT[FORMAT.index("## pack.json") : FORMAT.index("## Tensors")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert documented == {*_FIELDS, "format", "version"}
    assert set(WRONG_VALUES) == set(_FIELDS)
    assert str(CHUNK_BYTES) in table


@pytest.mark.parametrize(("rule", "name", "change"), FLAT, ids=[f"{rule}-{name}" for rule, name, _ in FLAT])
def test_a_broken_pack_is_refused_by_rule(rule: str, name: str, change: Change, whole: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    shutil.copytree(whole, pack)
    change(pack)
    with pytest.raises(PackError) as caught:
        Pack(pack).verify()
    assert caught.value.rule == rule, str(caught.value)
    assert str(pack) in str(caught.value) and f"[{rule}]" in str(caught.value)
    assert len(str(caught.value)) < 600
    error = one_error(run_cli("verify", pack), rule)
    assert pack.name in error


def test_only_values_and_hashes_wait_for_verify(whole: Path, tmp_path: Path) -> None:
    """Opening a pack finds everything but these."""
    for rule, name, change in FLAT:
        if rule not in ("hash", "trits", "padding", "finite"):
            pack = tmp_path / f"{rule} {name}".replace("/", "_")[:60]
            shutil.copytree(whole, pack)
            change(pack)
            with pytest.raises(PackError):
                Pack(pack)
            shutil.rmtree(pack, ignore_errors=True)


def test_unknown_fields_are_ignored(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "pack")
    change_manifest(tmp_path / "pack", lambda found: found.update(new=1))
    change_manifest(tmp_path / "pack", lambda found: found["tensors"][QKV].update(new=1))
    change_program(tmp_path / "pack", lambda found: (found.update(new=1), found["body"][0].update(new=1)))
    Pack(tmp_path / "pack").verify()


@pytest.mark.parametrize("encoding", LOW_BITS)
def test_what_hostile_packs_are_made_of_is_sound(encoding: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "pack")
    recode(tmp_path / "pack", EMBED, encoding)
    Pack(tmp_path / "pack").verify()


def test_positions_for_a_whole_context_are_sound(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "pack")
    add_positions(tmp_path / "pack")
    manifest("context_length", to=272)(tmp_path / "pack")
    Pack(tmp_path / "pack").verify()


def test_f16_padding_and_values_are_verified(tmp_path: Path) -> None:
    """73 columns: three of padding in f16."""
    changes = {"hidden_size": 74, "head_dim": 12}
    pack = tiny_pack(tmp_path, "llama", options=ExportOptions(embedding="f16"), **changes)
    Pack(pack).verify()
    for index, value, rule in (((0, 74), 1, "padding"), ((0, 0), np.inf, "finite")):
        shutil.copytree(pack, tmp_path / rule)
        change_shard(tmp_path / rule, lambda found, i=index, v=value: found[f"{EMBED}.data.0"].__setitem__(i, v))
        with pytest.raises(PackError) as caught:
            Pack(tmp_path / rule).verify()
        assert caught.value.rule == rule


# --- fuzzing ----------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(0, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["ternary", "f32", "parts", "group", SHARD, QKV, "[/bold]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def victim(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "pack")
    return tmp_path / "pack"


def examine(pack: Path) -> None:
    """A sound pack can be read and shown; a broken one is a PackError; anything else fails the test."""
    try:
        opened = Pack(pack)
        opened.tensors()
        opened.verify()
    except PackError as error:
        assert error.rule in CASES
    shown = run_cli("inspect", pack)
    assert shown.status in (0, 1)


@FUZZ
@given(data=st.data())
def test_any_value_anywhere_in_the_json(victim: Path, whole: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["pack.json", "program.json"]))
    document = json.loads((whole / name).read_bytes())
    place: Any = document
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 3)) == 0:
            place[key] = data.draw(JSON)
            break
        place = place[key]
    for file in ("pack.json", "program.json"):
        shutil.copy(whole / file, victim / file)
    (victim / name).write_text(json.dumps(document), encoding="utf-8", errors="surrogatepass")
    if name == "program.json":
        relist(victim)
    examine(victim)


@FUZZ
@given(data=st.data())
def test_any_bytes_anywhere(victim: Path, whole: Path, data: st.DataObject) -> None:
    """Bytes replaced, put in or cut out; hashes and lengths made right again except for those of pack.json."""
    name = data.draw(st.sampled_from(["pack.json", "program.json", SHARD]))
    content = (whole / name).read_bytes()
    region = min(len(content), 4000)  # a shard's header lies at its start
    start = data.draw(st.integers(0, region))
    stop = start + data.draw(st.sampled_from([0, 1, 1, 2, 8, len(content)]))
    new = content[:start] + data.draw(st.binary(max_size=8)) + content[stop:]
    for file in ("pack.json", "program.json", SHARD):
        shutil.copy(whole / file, victim / file)
    (victim / name).write_bytes(new)
    if name != "pack.json":
        relist(victim)
    examine(victim)
