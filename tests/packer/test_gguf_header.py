"""The head of GGUF files: as the gguf package reads it, and files cut short, damaged or hostile."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.constants import GGUFValueType as V

from packer.checkpoints.gguf import open_gguf
from packer.checkpoints.gguf_header import read_header
from packer.errors import CheckpointError
from tests.packer.gguf_files import write, write_model


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = Q.F32, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def head(fields: list[bytes], tensors: list[bytes], n_fields: int = -1, n_tensors: int = -1) -> bytes:
    """A head whose counts may lie."""
    counts = (len(tensors) if n_tensors < 0 else n_tensors, len(fields) if n_fields < 0 else n_fields)
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(fields + tensors)


LLAMA = field("general.architecture", V.STRING, text("llama"))
HUGE = (1 << 64) - 1


def strings(count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", V.STRING, count) + data


def numbers(count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", V.UINT32, count) + data


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut short"),
    "three bytes": (b"GGU", "cut short"),
    "not GGUF": (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
    "no version": (b"GGUF", "the version needs 4 bytes"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0) + bytes(64), "GGUF version 1, expected 2 or 3"),
    "version 0": (b"GGUF" + bytes(64), "GGUF version 0"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "cut short"),
    "nothing in it": (head([], []), "general.architecture"),
    "huge field count": (head([LLAMA], [], n_fields=HUGE), "cut short"),
    "huge tensor count": (head([LLAMA], [], n_tensors=1 << 60), "cut short"),
    "one field too many": (head([LLAMA], [], n_fields=2), "metadata field 1"),
    "huge key": (head([struct.pack("<Q", HUGE) + bytes(64)], []), "the name of metadata field 0"),
    "huge string": (head([field("a", V.STRING, struct.pack("<Q", 1 << 62) + bytes(64))], []), "field 'a'"),
    "huge array of strings": (head([field("a", V.ARRAY, strings(1 << 61))], []), "field 'a' with"),
    "huge array of numbers": (head([field("a", V.ARRAY, numbers(1 << 62))], []), "field 'a'"),
    "array of arrays": (
        head([field("a", V.ARRAY, struct.pack("<IQ", V.ARRAY, 1) + bytes(64))], []),
        "array of type 9",
    ),
    "unknown value type": (head([field("a", 77, bytes(64))], []), "field 'a' has type 77"),
    "not UTF-8": (head([field("a", V.STRING, text(b"\xff\xfe"))], []), "field 'a' is not UTF-8"),
    "field twice": (head([LLAMA, LLAMA], []), "'general.architecture' is there twice"),
    "alignment 3": (
        head([field("general.alignment", V.UINT32, struct.pack("<I", 3))], []),
        "general.alignment",
    ),
    "alignment 0": (
        head([field("general.alignment", V.UINT32, struct.pack("<I", 0))], []),
        "general.alignment",
    ),
    "split file": (head([LLAMA, field("split.count", V.UINT16, struct.pack("<H", 3))], []), "one of 3 parts"),
    "no dimensions": (head([LLAMA], [tensor("t", ())]) + bytes(64), "0 dimensions"),
    "five dimensions": (head([LLAMA], [tensor("t", (1,) * 5)]) + bytes(64), "5 dimensions"),
    "huge dimension count": (
        head([LLAMA], [text("t") + struct.pack("<I", 1 << 31) + bytes(32)]),
        "dimensions",
    ),
    "size zero": (head([LLAMA], [tensor("t", (0, 4))]) + bytes(64), r"shape \[0, 4\]"),
    "huge shape": (head([LLAMA], [tensor("t", (1 << 63, 1 << 63))]) + bytes(64), "shape"),
    "tensor twice": (
        head([LLAMA], [tensor("t", (4,)), tensor("t", (4,), offset=32)]) + bytes(128),
        "t is there twice",
    ),
    "tensors on top of each other": (
        head([LLAMA], [tensor("t", (4,)), tensor("u", (4,))]) + bytes(128),
        "there are 0 from",
    ),
    "beyond the end": (
        head([LLAMA], [tensor("t", (1 << 20, 1 << 10))]) + bytes(128),
        "tensor t .*takes 4,294,967,296",
    ),
    "offset beyond the end": (
        head([LLAMA], [tensor("t", (4,), offset=1 << 40)]) + bytes(128),
        "tensor t .*end of the file",
    ),
    "offset wraps around": (
        head([LLAMA], [tensor("t", (4,), offset=HUGE - 31)]) + bytes(128),
        "tensor t .*end of the file",
    ),
    "offset not aligned": (head([LLAMA], [tensor("t", (4,), offset=4)]) + bytes(128), "no multiple of 32"),
    "gap": (
        head([LLAMA], [tensor("t", (4,)), tensor("u", (4,), offset=64)]) + bytes(256),
        "tensor t .*64 from offset",
    ),
    "part of a block": (
        head([LLAMA], [tensor("t", (2, 48), Q.Q8_0)]) + bytes(256),
        "expected a multiple of 32",
    ),
    "TL2 under the number of MXFP4": (
        head([LLAMA], [tensor("t", (32, 64), 39), tensor("u", (4,), offset=416)]) + bytes(1024),
        "type of its own",
    ),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(CheckpointError, match=message) as error:
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)
    assert error.value.__cause__ is None
    assert peak < 16 << 20
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(("kind", "name"), [(37, "I8_S"), (38, "TL1"), (200, "unknown")])
def test_types_without_decoder_are_named(tmp_path: Path, kind: int, name: str) -> None:
    """A whole model of which one tensor has another type number."""
    path = write_model(tmp_path / "model.gguf")
    whole, described = path.read_bytes(), tensor("blk.1.ffn_up.weight", (512, 256))[:-12]
    at = whole.index(described) + len(described)
    path.write_bytes(whole[:at] + struct.pack("<I", kind) + whole[at + 4 :])
    with pytest.raises(CheckpointError, match=rf"blk\.1\.ffn_up\.weight has type {name} \({kind}\)"):
        open_gguf(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf", [Q.Q4_0]).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 64, 7), *range(100, len(whole), len(whole) // 40), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="cut short|ends after"):
            open_gguf(path)


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    checkpoint = open_gguf(path)
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="tensor blk.*ends after .* bytes"):
        for name in checkpoint.names():
            checkpoint.rows(name)


def test_flipped_bytes_never_give_a_traceback(tmp_path: Path) -> None:
    """Damage in the head: either a CheckpointError or, where it hits a name or a token, an open file."""
    whole = bytearray(write_model(tmp_path / "whole.gguf", [Q.Q8_0]).read_bytes())
    n_head = whole.index(b"blk.1.ffn_norm.weight") + 64
    path, rng, refused = tmp_path / "damaged.gguf", random.Random(11), 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(n_head)] = rng.choice((0, 1, 8, 9, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            open_gguf(path)
        except CheckpointError:
            refused += 1
    assert refused > 20


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(CheckpointError, match="cannot be read") as error:
            open_gguf(path)
        assert str(path) in str(error.value)


def plain(value: Any) -> Any:
    """As GGUFReader gives it, with float32 as float32."""
    if isinstance(value, float):
        return np.float32(value)
    return value.tolist() if isinstance(value, np.ndarray) else value


VALUES: dict[str, tuple[Callable[[gguf.GGUFWriter, str], None], Any]] = {
    "uint8": (lambda writer, key: writer.add_uint8(key, 200), 200),
    "int8": (lambda writer, key: writer.add_int8(key, -100), -100),
    "uint16": (lambda writer, key: writer.add_uint16(key, 65000), 65000),
    "int16": (lambda writer, key: writer.add_int16(key, -32000), -32000),
    "uint64": (lambda writer, key: writer.add_uint64(key, 1 << 63), 1 << 63),
    "int64": (lambda writer, key: writer.add_int64(key, -(1 << 62)), -(1 << 62)),
    "float32": (lambda writer, key: writer.add_float32(key, 1e-5), 1e-5),
    "float64": (lambda writer, key: writer.add_float64(key, 1 / 3), 1 / 3),
    "bool": (lambda writer, key: writer.add_bool(key, True), True),
    "string": (lambda writer, key: writer.add_string(key, "größer\n"), "größer\n"),
    "strings": (lambda writer, key: writer.add_array(key, ["", "a", "日本"]), ["", "a", "日本"]),
    "ints": (lambda writer, key: writer.add_array(key, [1, -2, 3]), [1, -2, 3]),
    "floats": (lambda writer, key: writer.add_array(key, [0.5, 0.25]), [0.5, 0.25]),
}


def test_values_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, (write_value, _) in VALUES.items():
        write_value(writer, f"Test.{name}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(path).metadata
    for name, (_, expected) in VALUES.items():
        value = found[f"test.{name}"]  # keys are compared without case
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, name


@pytest.mark.parametrize("alignment", [32, 256])
def test_head_is_the_one_that_gguf_reads(tmp_path: Path, alignment: int) -> None:
    tensors = {
        "one": (np.arange(5, dtype=np.float32), Q.F32),
        "two": (gguf.quantize(np.ones((3, 64), np.float32), Q.Q8_0), Q.Q8_0),
        "three": (np.ones((2, 3, 4), np.float16), Q.F16),
        "four": (gguf.quantize(np.ones((7, 256), np.float32), Q.TQ1_0), Q.TQ1_0),
    }
    path = tmp_path / "head.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_array("some.list", ["x"] * 5)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header, reader = read_header(path), gguf.GGUFReader(path)
    fields = {key: value.contents() for key, value in reader.fields.items() if not key.startswith("GGUF.")}
    assert {key: plain(value) for key, value in header.metadata.items()} == fields
    assert len(header.tensors) == len(reader.tensors)
    for expected in reader.tensors:
        found = header.tensors[expected.name]
        assert found.shape == tuple(reversed(expected.shape.tolist()))
        assert (found.offset, found.type_id) == (expected.data_offset, expected.tensor_type)
        assert found.room >= expected.n_bytes


def test_adapters_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "lora.gguf", "llama", {"general.type": "adapter"}, {})
    with pytest.raises(CheckpointError, match=r"'general\.type' is 'adapter'"):
        open_gguf(path)
