"""Packs with the shape of a known model and random weights: as fast and as large, but nobody to talk to."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from shaders.float4 import E8M0_BIAS
from shaders.weights import WeightTensor

from . import __version__
from .encodings import encode_trits
from .errors import PackerError, PackError
from .manifest import MAX_SHARD_BYTES, TensorEntry
from .shapes import Shape

#: Byte of each number of five trits; see FORMAT.md.
_TERNARY_BYTES = ((np.arange(243) * 256 + 242) // 243).astype(np.uint8)
#: Standard deviations of trits, of int8 from -127 to 127, and of nibbles, all equally probable.
_TRIT_DEVIATION, _INT8_DEVIATION, _INT4_DEVIATION, _E2M1_DEVIATION = (2 / 3) ** 0.5, 73.6, 4.6, 2.93
_SHARD_BYTES = MAX_SHARD_BYTES - (1 << 20)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: Called before each tensor with its number and the count of tensors.
Progress = Callable[[int, int], None]


def random_tensors(shape: Shape, seed: int = 0) -> Iterator[WeightTensor]:
    """The shape's tensors in order, with random weights; a tensor depends on its name and the seed alone.

    Scales keep the output of each linear near a standard deviation of 1, so that no activation overflows.
    """
    for tensor in shape.tensors():
        rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
        yield random_weights(rng, tensor)


def random_weights(rng: np.random.Generator, like: WeightTensor) -> WeightTensor:
    """Random weights in the form of a tensor whose bytes are not looked at."""
    data: np.ndarray
    scales: np.ndarray | None = None
    if len(like.shape) == 1:
        data = (1 + 0.05 * rng.standard_normal(like.columns)).astype(np.float32)
    elif like.encoding == "ternary":
        data = _random_trits(rng, like.rows, like.columns)
        scales = _scales(rng, like, _TRIT_DEVIATION)
    elif like.encoding == "q8":
        data = rng.integers(-127, 128, like.data.shape, dtype=np.int8)
        data[:, like.columns :] = 0
        scales = _scales(rng, like, _INT8_DEVIATION)
    elif like.encoding == "q4":
        nibbles = rng.integers(0, 16, (like.rows, 2 * like.data.shape[1]), dtype=np.uint8)
        nibbles[:, like.columns :] = 8
        data = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        scales = _scales(rng, like, _INT4_DEVIATION)
    elif like.group:
        return _random_low_bits(rng, like)
    else:
        data = np.zeros(like.data.shape, dtype=np.float16 if like.encoding == "f16" else np.float32)
        data[:, : like.columns] = rng.standard_normal(like.shape, dtype=np.float32) / like.columns**0.5
    return WeightTensor(like.name, like.encoding, like.shape, data, scales, like.scale_kind, like.parts, like.group)


def _random_low_bits(rng: np.random.Generator, like: WeightTensor) -> WeightTensor:
    """Random q4a, nvfp4 or mxfp4."""
    assert like.scales is not None
    nibbles = rng.integers(0, 16, (like.rows, 2 * like.data.shape[1]), dtype=np.uint8)
    nibbles[:, like.columns :] = 0
    own = None
    if like.encoding == "q4a":
        scales = _scales(rng, like, _INT4_DEVIATION)
        scales[:, 1::2] = -7.5 * scales[:, 0::2]
    elif like.encoding == "nvfp4":
        scales = rng.integers(0x38, 0x40, like.scales.shape, dtype=np.uint8)  # 1 to 1.875
        own = float(np.float32(1 / (1.46 * _E2M1_DEVIATION * like.columns**0.5)))
    else:
        middle = E8M0_BIAS - round(np.log2(_E2M1_DEVIATION * like.columns**0.5))
        scales = rng.integers(middle - 1, middle + 1, like.scales.shape, dtype=np.uint8)
    return replace(like, data=nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scales=scales, tensor_scale=own)


def _random_trits(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Random base-3 bytes ``[rows, 4*ceil(columns/20)]``, drawn directly; the last block is padded as it must be."""
    width = 4 * -(-columns // 20)
    data: np.ndarray = _TERNARY_BYTES[rng.integers(0, 243, (rows, width), dtype=np.uint8)]
    rest = columns % 20
    if rest:
        data[:, -4:] = encode_trits(rng.integers(-1, 2, (rows, rest), dtype=np.int8))
    return data


def _scales(rng: np.random.Generator, like: WeightTensor, deviation: float) -> np.ndarray:
    assert like.scales is not None
    middle = 1 / (deviation * like.columns**0.5)
    scales: np.ndarray = (middle * rng.uniform(0.8, 1.2, like.scales.shape)).astype(like.scales.dtype)
    return scales


def synthesize(shape: Shape, target: Path, seed: int = 0, progress: Progress = lambda *_: None) -> Path:
    """Write a pack of this shape; what was at ``target`` before is replaced. Raises PackerError."""
    from .writer import PackWriter  # late: plans need no safetensors

    writer = PackWriter(target, _SHARD_BYTES, force=True)
    try:
        count = len(shape.tensors())
        for index, tensor in enumerate(random_tensors(shape, seed)):
            progress(index, count)
            _add(writer, tensor)
        writer.flush()
        writer.finish(_manifest(shape, writer.shard_total, seed), shape.program(), _files(shape))
    except BaseException:
        writer.abandon()
        raise
    progress(count, count)
    return target


def cached_pack(shape: Shape, progress: Progress = lambda *_: None, folder: Path | None = None) -> Path:
    """The shape's pack in the user's cache folder, made on the first call. Raises PackerError."""
    from .pack import Pack

    key = zlib.crc32(f"{__version__} {json.dumps(shape.program(), sort_keys=True)} {shape}".encode())
    target = (folder or cache_folder()) / f"{shape.name}-{key:08x}"
    try:
        Pack(target)
    except PackError:
        synthesize(shape, target, progress=progress)
    return target


def cache_folder() -> Path:
    """Where synthesized packs are kept: ``XDG_CACHE_HOME``, or ``.cache`` in the home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tercet" / "shapes"


def _add(writer, tensor: WeightTensor) -> None:
    if len(tensor.shape) == 1:
        writer.add(f"{tensor.name}.data.0", tensor.data)
        slices: tuple[int, ...] = (1,)
    else:
        slices = _slices(tensor)
        start = 0
        for index, rows in enumerate(slices):
            writer.add(f"{tensor.name}.data.{index}", tensor.data[start : start + rows])
            if tensor.group and tensor.scales is not None:
                writer.add(f"{tensor.name}.scale.{index}", tensor.scales[start : start + rows])
            start += rows
        if tensor.scale_kind == "parts" and tensor.scales is not None:
            writer.add(f"{tensor.name}.scale", tensor.scales)
        if tensor.tensor_scale is not None:
            writer.add(f"{tensor.name}.tensor_scale", np.array([tensor.tensor_scale], dtype=np.float32))
    writer.entries[tensor.name] = TensorEntry(
        tensor.name, tensor.encoding, tensor.shape, tensor.scale_kind, tensor.parts, tensor.group, slices
    )


def _slices(tensor: WeightTensor) -> tuple[int, ...]:
    """Rows of each slice, so that data and scales of one fit a shard."""
    row_bytes = tensor.data[0].nbytes + (4 if tensor.encoding == "q4a" else 2) * tensor.groups
    most: int = max(64, (_SHARD_BYTES - 4096) // row_bytes // 64 * 64)
    full, rest = divmod(tensor.rows, most)
    return (most,) * full + ((rest,) if rest else ())


def _manifest(shape: Shape, weight_bytes: int, seed: int) -> dict:
    model, tensors = shape.model, shape.tensors()
    parameters = sum(tensor.rows * tensor.columns for tensor in tensors)
    return {
        "name": f"{shape.title}, random weights",
        "description": "For benchmarks: says nothing that makes sense.",
        "license": "",
        "family": model.family,
        "source": {"shape": shape.name, "seed": seed},
        "activations": shape.activations,
        "parameters": parameters,
        "vocab_size": model.vocabulary,
        "context_length": model.context,
        "bits_per_weight": round(weight_bytes * 8 / parameters, 4),
        "ternary_bits_per_weight": _ternary_bits(tensors),
        "resident_bytes": sum(tensor.resident_bytes for tensor in tensors),
        "kv": {"layers": model.layers, "kv_heads": model.kv_heads, "head_dim": model.head_dim},
        "bos_id": None,
        "eos_ids": [256],
        "grade": "BROKEN",
    }


def _ternary_bits(tensors: list[WeightTensor]) -> float:
    ternary = [tensor for tensor in tensors if tensor.encoding == "ternary"]
    size = sum(tensor.data.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes) for tensor in ternary)
    return round(8 * size / sum(tensor.rows * tensor.columns for tensor in ternary), 4)


def _files(shape: Shape) -> dict[str, bytes]:
    config = {
        "eos_token": _SPECIAL[0],
        "chat_template": _CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    report = {"tercet": __version__, "options": {"shape": shape.name}, "tensors": []}
    files = {"tokenizer.json": _tokenizer(shape.model.vocabulary), "tokenizer_config.json": config}
    return {name: json.dumps(value).encode() for name, value in {**files, "report.json": report}.items()}


def _tokenizer(vocabulary: int) -> dict:
    """``tokenizer.json``: a token a byte, three special ones, and a placeholder for each id that is left."""
    if vocabulary < 256 + len(_SPECIAL):
        raise PackerError(f"a vocabulary of {vocabulary} is too small to synthesize, expected at least 259")
    tokens = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokens |= {text: 256 + index for index, text in enumerate(_SPECIAL)}
    tokens |= {f"<unused {number}>": number for number in range(len(tokens), vocabulary)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": tokens[text], "content": text, **flags} for text in _SPECIAL],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": tokens,
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself if it can be seen, else one from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
