"""The head of a GGUF file: its metadata, and where each tensor lies.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Types and block sizes come from the gguf
package; its GGUFReader is not used here because it keeps NumPy views of every array element (159 MiB for a
vocabulary of 49,152), loops as long as a damaged count says, and stops at type numbers that it does not know.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ..errors import CheckpointError
from .gguf_ternary import I2_S, I2_S_TAIL, Q2_0, Q2_0_SIZES, TernaryType, ternary_type

VERSIONS = (2, 3)
MAX_HEADER_BYTES = 128 << 20  # the largest vocabularies in use take about 20 MiB
MAX_STRINGS = 1 << 21  # in one array
MAX_DIMENSIONS = 4

_Kind = GGUFValueType
_SCALARS: dict[int, str] = {
    _Kind.UINT8: "<u1", _Kind.INT8: "<i1", _Kind.UINT16: "<u2", _Kind.INT16: "<i2", _Kind.UINT32: "<u4",
    _Kind.INT32: "<i4", _Kind.UINT64: "<u8", _Kind.INT64: "<i8", _Kind.FLOAT32: "<f4", _Kind.FLOAT64: "<f8",
    _Kind.BOOL: "?",
}  # fmt: skip
#: Types of forks and types newer than the gguf package, so that errors can name them.
_OTHER_TYPES = {31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "I2_S", 37: "I8_S", 38: "TL1", 42: "Q2_0",
                142: "PQ2_0", 143: "PTQ1_0"}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    shape: rows first, as NumPy has it (GGUF writes it the other way round). offset: in the file, in bytes.
    room: bytes up to the next tensor or the end of the file. ternary: how a ternary type is read, else None.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    room: int
    ternary: TernaryType | None = None

    @property
    def block(self) -> tuple[int, int] | None:
        """(elements, bytes) of a block, None for a type that nobody here knows."""
        if self.ternary is not None:
            return self.ternary.elements, self.ternary.n_bytes
        if self.type_id not in GGML_QUANT_SIZES:
            return None
        elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.type_id)]
        return elements, n_bytes

    @property
    def type_name(self) -> str:
        """Such as ``Q4_1 (3)``."""
        try:
            name = GGMLQuantizationType(self.type_id).name
        except ValueError:
            name = _OTHER_TYPES.get(self.type_id, "unknown")
        return f"{name} ({self.type_id})"


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by lower-case key, and tensors by name.

    Values are numbers, booleans, strings, lists of strings, and NumPy arrays of numbers.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read a GGUF file's head. Raises CheckpointError if the file is no whole GGUF file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            return _read(_Source(stream, path, size))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


class _Source:
    """Takes bytes from the front of a file, and never more than the file has."""

    def __init__(self, stream: BinaryIO, path: Path, size: int):
        self.path, self.size, self.position = path, size, 0
        self._stream = stream

    def take(self, n_bytes: int, what: str) -> bytes:
        """The next bytes."""
        self.expect(n_bytes, what)
        data = self._stream.read(n_bytes)
        if len(data) != n_bytes:
            raise CheckpointError(f"{self.path}: the file became shorter while it was read; try again")
        self.position += n_bytes
        return data

    def expect(self, n_bytes: int, what: str) -> None:
        """Refuse to go on if there are fewer bytes left."""
        if n_bytes > self.size - self.position:
            raise CheckpointError(
                f"{self.path}: {what} needs {n_bytes:,} bytes at offset {self.position:,}, but the file has "
                f"{self.size:,} bytes: it is cut short or damaged; download it again"
            )
        if n_bytes > MAX_HEADER_BYTES - self.position:
            raise CheckpointError(
                f"{self.path}: {what} goes beyond {MAX_HEADER_BYTES >> 20} MiB of metadata, the most "
                "expected; the file is damaged"
            )

    def number(self, dtype: str, what: str) -> Any:
        """One number, as Python has it."""
        kind = np.dtype(dtype)
        return _plain(np.frombuffer(self.take(kind.itemsize, what), dtype=kind)[0])

    def text(self, what: str) -> str:
        """A length and UTF-8 text."""
        data = self.take(self.number("<u8", what), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8 ({error.reason}); the file is damaged") from None


def _plain(number: Any) -> Any:
    """A Python number; float32 becomes the shortest decimal that rounds to it: 1e-05, not 9.9999997e-06."""
    return float(str(number)) if number.dtype == np.float32 else number.item()


def _read(source: _Source) -> GgufHeader:
    _check_magic(source)
    n_tensors = source.number("<u8", "the tensor count")
    n_fields = source.number("<u8", "the metadata count")
    # A field takes at least 13 bytes and a tensor 32: a damaged count is noticed before it is looped over.
    source.expect(13 * n_fields + 32 * n_tensors, f"a head with {n_fields:,} fields and {n_tensors:,} tensors")
    metadata: dict[str, Any] = {}
    for index in range(n_fields):
        key = source.text(f"the name of metadata field {index}").lower()
        if key in metadata:
            raise CheckpointError(f"{source.path}: metadata field {key!r} is there twice; the file is damaged")
        metadata[key] = _value(source, source.number("<u4", f"the type of field {key!r}"), f"field {key!r}")
    parts = metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        raise CheckpointError(
            f"{source.path}: one of {parts!r} parts of a split GGUF file; join them first (llama-gguf-split --merge)"
        )
    return GgufHeader(source.path, metadata, _tensors(source, n_tensors, _alignment(source.path, metadata)))


def _check_magic(source: _Source) -> None:
    magic = source.take(4, "the magic number")
    if magic != b"GGUF":
        raise CheckpointError(f"{source.path}: not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    version = source.number("<u4", "the version")
    if version in VERSIONS:
        return
    if version and version & 0xFFFF == 0:
        raise CheckpointError(f"{source.path}: a big-endian GGUF file, expected little-endian; convert it first")
    raise CheckpointError(
        f"{source.path}: GGUF version {version}, expected {' or '.join(map(str, VERSIONS))}; convert the model again"
    )


def _value(source: _Source, kind: int, what: str) -> Any:
    if kind in _SCALARS:
        return source.number(_SCALARS[kind], what)
    if kind == _Kind.STRING:
        return source.text(what)
    if kind != _Kind.ARRAY:
        raise CheckpointError(
            f"{source.path}: {what} has type {kind}, expected one of GGUF's 0 to 12; the file is damaged"
        )
    item, count = source.number("<u4", what), source.number("<u8", what)
    if item in _SCALARS:
        dtype = np.dtype(_SCALARS[item])
        return np.frombuffer(source.take(count * dtype.itemsize, what), dtype=dtype)
    if item != _Kind.STRING:
        raise CheckpointError(f"{source.path}: {what} is an array of type {item}, expected numbers or strings")
    source.expect(8 * count, f"{what} with {count:,} strings")
    if count > MAX_STRINGS:
        raise CheckpointError(f"{source.path}: {what} has {count:,} strings, expected at most {MAX_STRINGS:,}")
    return [source.text(what) for _ in range(count)]


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: field 'general.alignment' is {alignment!r}, expected a power of two up to 1 MiB"
        )
    return alignment


def _tensors(source: _Source, count: int, alignment: int) -> dict[str, GgufTensor]:
    infos: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for index in range(count):
        name = source.text(f"the name of tensor {index}")
        if name in infos:
            raise CheckpointError(f"{source.path}: tensor {name} is there twice; the file is damaged")
        infos[name] = _tensor_info(source, f"the description of tensor {name}")
    begin = -(-source.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end = source.size
    for name, (type_id, shape, offset) in sorted(infos.items(), key=lambda item: item[1][2], reverse=True):
        start = begin + offset
        room, is_last = max(end - start, 0), not tensors
        elements = _q2_0_elements(source.path, name, shape, room, alignment, is_last) if type_id == Q2_0 else 0
        tensors[name] = GgufTensor(name, type_id, shape, start, room, ternary_type(type_id, elements))
        _check_room(source.path, tensors[name], alignment, is_last)
        end = start
    return tensors


def _tensor_info(source: _Source, what: str) -> tuple[int, tuple[int, ...], int]:
    """(type, shape with rows first, offset from the first tensor)."""
    n_dimensions = source.number("<u4", what)
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise CheckpointError(f"{source.path}: {what}: {n_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    shape = struct.unpack(f"<{n_dimensions}Q", source.take(8 * n_dimensions, what))[::-1]
    if min(shape) < 1 or math.prod(shape) >= 1 << 48:
        raise CheckpointError(
            f"{source.path}: {what}: shape {list(shape)}, expected sizes of 1 or more; the file is damaged"
        )
    return source.number("<u4", what), shape, source.number("<u8", what)


def _q2_0_elements(path: Path, name: str, shape: tuple[int, ...], room: int, alignment: int, is_last: bool) -> int:
    """Elements in a block of type 42, which upstream and a fork gave to blocks of 64 and of 128: the length tells."""
    fits = {}
    for elements, kind in Q2_0_SIZES.items():
        n_bytes = math.prod(shape) // elements * kind.n_bytes
        padded = -(-n_bytes // alignment) * alignment
        fits[elements] = shape[-1] % elements == 0 and (room == padded or (is_last and room == n_bytes))
    found = [elements for elements, does in fits.items() if does]
    if len(found) != 1:
        raise CheckpointError(
            f"{path}: tensor {name} of type Q2_0 ({Q2_0}) and shape {list(shape)} has {room:,} bytes, which fits "
            f"{'both' if found else 'neither'} blocks of 64 weights in 18 bytes {'and' if found else 'nor'} of 128 in "
            "34; the type cannot be told, so convert the model again, to PQ2_0 or TQ2_0"
        )
    return found[0]


def _check_room(path: Path, tensor: GgufTensor, alignment: int, is_last: bool) -> None:
    """A tensor ends where the next one begins, or its type number means something else, or bytes are missing.

    Forks give the same number to different types (39 is MXFP4 here and TL2 in bitnet.cpp), so this also keeps
    one type from being read as another.
    """
    where = f"{path}: tensor {tensor.name} of type {tensor.type_name} and shape {list(tensor.shape)}"
    if tensor.offset % alignment:
        raise CheckpointError(f"{where} begins at offset {tensor.offset}, which is no multiple of {alignment}")
    n_bytes = data_bytes(tensor, path)
    if n_bytes is None:
        return
    padded = -(-n_bytes // alignment) * alignment
    if n_bytes > tensor.room or (not is_last and padded != tensor.room):
        raise CheckpointError(
            f"{where} takes {n_bytes:,} bytes, but there are {tensor.room:,} from offset {tensor.offset:,} "
            f"to the {'end of the file' if is_last else 'next tensor'}: the file is cut short or damaged, or "
            "uses a type of its own"
        )


def data_bytes(tensor: GgufTensor, path: Path) -> int | None:
    """Bytes of a tensor's data, or None for a type that nobody here knows.

    Raises CheckpointError if its rows are no whole number of blocks.
    """
    if tensor.block is None:
        return None
    elements, block_bytes = tensor.block
    if tensor.shape[-1] % elements:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} of type {tensor.type_name} has rows of {tensor.shape[-1]}, "
            f"expected a multiple of {elements}; the file is damaged or has another layout"
        )
    return math.prod(tensor.shape) // elements * block_bytes + (I2_S_TAIL if tensor.type_id == I2_S else 0)
