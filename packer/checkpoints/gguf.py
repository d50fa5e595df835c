"""Reads GGUF files of the supported architectures; the gguf package decodes blocks, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ..errors import CheckpointError
from ..ternarize import Ternary, from_groups
from .base import CheckpointInfo, file_sha256, require_finite
from .gguf_config import ROPE_FREQS, Architecture, architecture, hf_config
from .gguf_data import decode_rows, decoded, factor, stored_pieces
from .gguf_header import GgufHeader, GgufTensor, read_header
from .gguf_tokenizer import special_token_ids, tokenizer_files

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LINEAR_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SUB_NORM_NAMES = {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}


class GgufCheckpoint:
    """An open GGUF file; see ``base.Checkpoint``.

    tensors: Hugging Face name -> tensor in the file. scales: Hugging Face name -> number that the whole
    tensor is multiplied by (``.scale`` tensors of BitNet files). interleaved: see ``Architecture``.
    """

    def __init__(
        self,
        path: Path,
        info: CheckpointInfo,
        tensors: Mapping[str, GgufTensor],
        scales: Mapping[str, np.float32],
        interleaved: bool,
    ):
        self.path, self.info = path, info
        self._tensors, self._scales, self._interleaved = tensors, scales, interleaved

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, rows first. Raises CheckpointError if the tensor is missing."""
        return self._tensor(name).shape

    def is_packed(self, name: str) -> bool:
        """Always false: whatever the file stores is decoded to numbers."""
        self._tensor(name)
        return False

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows (of a vector: elements) as float32. Raises CheckpointError on NaN or infinite values."""
        tensor = self._tensor(name)
        start, stop, _ = slice(start, stop).indices(tensor.shape[0])
        if tensor.shape[1:] == ():
            values = decode_rows(self.path, tensor, np.arange(1))[0]
            if self._is_interleaved(name):
                values = values[self._stored_rows(0, len(values))]
            values = values[start:stop]
        else:
            stored = np.arange(start, max(stop, start))
            if self._is_interleaved(name):
                stored = self._stored_rows(start, max(stop, start))
            values = decode_rows(self.path, tensor, stored)
        if name in self._scales:
            values *= self._scales[name]
        return require_finite(values, self.path, name)

    def ternary(self, name: str) -> Ternary | None:
        """Trits and scales of a tensor of a ternary type, as stored; None for other types, and where a code is 2.

        Raises CheckpointError on NaN or infinite scales, and on codes that are none.
        """
        tensor = self._tensor(name)
        if tensor.ternary is None or len(tensor.shape) != 2:
            return None
        order = self._stored_rows(0, tensor.shape[0]) if self._is_interleaved(name) else np.arange(tensor.shape[0])
        trits = np.empty(tensor.shape, dtype=np.int8)
        scales = np.empty((tensor.shape[0], tensor.shape[1] // tensor.ternary.elements), dtype=np.float32)
        for start, stop, piece in stored_pieces(self.path, tensor, order):
            trits[start:stop], scales[start:stop] = decoded(self.path, tensor, tensor.ternary, piece)
            if trits[start:stop].max() > 1:
                return None
        scales *= factor(self.path, tensor) * self._scales.get(name, np.float32(1))
        return from_groups(trits, require_finite(scales, self.path, name), tensor.ternary.elements)

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; the checkpoint is incomplete")
        return self._tensors[name]

    def _is_interleaved(self, name: str) -> bool:
        return self._interleaved and (".q_proj." in name or ".k_proj." in name)

    def _stored_rows(self, start: int, stop: int) -> np.ndarray:
        """Where the file keeps rows ``start:stop`` of Q or K.

        Rotary pairs are rows (i, i + half) of a head here, and rows (2i, 2i + 1) in the file: the inverse of
        ``permute`` of LlamaModel in llama.cpp's converter.
        """
        head_dim: int = self.info.config["head_dim"]
        head, row = np.divmod(np.arange(start, stop), head_dim)
        second, pair = np.divmod(row, head_dim // 2)
        rows: np.ndarray = head * head_dim + 2 * pair + second
        return rows


def open_gguf(path: Path, tokenizer_folder: Path | None = None) -> GgufCheckpoint:
    """Open a GGUF file.

    tokenizer_folder: a folder whose tokenizer.json (and tokenizer_config.json) is taken instead of the
    file's. Raises CheckpointError for files that are damaged, incomplete, or need what is not supported.
    """
    header = read_header(path)
    kind = architecture(header)
    config = hf_config(header, _rope_freqs(header), tokenizer_folder)
    expected = _expected(header, kind, config)
    tensors = _named_tensors(header, kind, expected)
    bos, eos = special_token_ids(header, required=tokenizer_folder is None)
    config |= {"bos_token_id": bos, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
    license_name = header.metadata.get("general.license", "")
    info = CheckpointInfo(
        config=config,
        generation={},
        tokenizer=tokenizer_files(header, tokenizer_folder),
        license=license_name if isinstance(license_name, str) else "",
        source={"format": "gguf", "file": path.name, "sha256": file_sha256(path)},
    )
    return GgufCheckpoint(path, info, tensors, _scales(header, expected), kind.interleaved)


#: Name in the file -> Hugging Face name and shape.
_Expected = dict[str, tuple[str, tuple[int, ...]]]


def _named_tensors(header: GgufHeader, kind: Architecture, expected: _Expected) -> dict[str, GgufTensor]:
    """Hugging Face name -> tensor.

    Raises CheckpointError for missing, unknown, misshapen or undecodable tensors.
    """
    named = {}
    for stored, (name, shape) in expected.items():
        tensor = header.tensors.get(stored)
        if tensor is None:
            raise CheckpointError(f"{header.path}: tensor {stored} is missing; the file is no whole model")
        _check_type(header.path, tensor)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{header.path}: tensor {stored} has shape {list(tensor.shape)}, but the metadata says {list(shape)}"
            )
        named[name] = tensor
    left = set(header.tensors) - set(expected) - set(_scale_names(expected)) - {ROPE_FREQS}
    if left:
        raise CheckpointError(
            f"{header.path}: tensor {min(left)} is not part of a {kind.model_type} model as known here; "
            "leaving it out would give a model that computes something else"
        )
    return named


def _scale_names(expected: _Expected) -> dict[str, str]:
    """Name in the file of a linear's ``.scale`` tensor -> Hugging Face name of its weight."""
    return {
        f"{stored.removesuffix('.weight')}.scale": name
        for stored, (name, _) in expected.items()
        if name.endswith("_proj.weight")
    }


def _scales(header: GgufHeader, expected: _Expected) -> dict[str, np.float32]:
    """Hugging Face name -> factor from ``.scale``, as in llama.cpp ``src/models/bitnet.cpp``."""
    scales = {}
    for stored, name in _scale_names(expected).items():
        if stored in header.tensors:
            scale = _vector(header, header.tensors[stored])
            if scale.shape != (1,):
                raise CheckpointError(f"{header.path}: tensor {stored} has {scale.size} numbers, expected one")
            scales[name] = scale[0]
    return scales


def _expected(header: GgufHeader, kind: Architecture, config: Mapping[str, Any]) -> _Expected:
    """The tensors of a model with this config."""
    hidden, ffn, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    if config["num_hidden_layers"] > len(header.tensors):
        raise CheckpointError(
            f"{header.path}: the metadata says {config['num_hidden_layers']} layers, but there are only "
            f"{len(header.tensors)} tensors; the file is no whole model"
        )
    width, kv_width = (config[count] * config["head_dim"] for count in ("num_attention_heads", "num_key_value_heads"))
    linears = {
        "attn_q": (width, hidden), "attn_k": (kv_width, hidden), "attn_v": (kv_width, hidden),
        "attn_output": (hidden, width), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }  # fmt: skip
    lengths = {name: config["head_dim"] if name.startswith("self_attn.") else hidden for name in kind.norms.values()}
    vectors = {stored: (name, lengths[name]) for stored, name in kind.norms.items()}
    if kind.model_type == "bitnet":
        widths = {"attn_sub_norm": width, "ffn_sub_norm": ffn}
        vectors |= {
            stored: (name, widths[stored])
            for stored, name in _SUB_NORM_NAMES.items()
            if f"blk.0.{stored}.weight" in header.tensors
        }
    shapes = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = (vocabulary, hidden)
    biased = set()
    if config["attention_bias"] or kind.model_type == "qwen2":
        biased |= {"attn_q", "attn_k", "attn_v"}
    if config["attention_bias"]:
        biased.add("attn_output")
    if config["mlp_bias"]:
        biased |= {"ffn_gate", "ffn_up", "ffn_down"}
    expected: _Expected = {stored: (_GLOBAL_NAMES[stored], shape) for stored, shape in shapes.items()}
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        for stored, shape in linears.items():
            expected[f"{ours}.{stored}.weight"] = (f"{theirs}.{_LINEAR_NAMES[stored]}.weight", shape)
            if stored in biased:
                expected[f"{ours}.{stored}.bias"] = (f"{theirs}.{_LINEAR_NAMES[stored]}.bias", shape[:1])
        for stored, (name, length) in vectors.items():
            expected[f"{ours}.{stored}.weight"] = (f"{theirs}.{name}.weight", (length,))
    return expected


def _check_type(path: Path, tensor: GgufTensor) -> None:
    """Refuse a type that neither this nor the gguf package decodes; it is asked for one block of zeros."""
    if tensor.ternary is not None:
        return
    try:
        kind = GGMLQuantizationType(tensor.type_id)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise CheckpointError(
            f"{path}: tensor {tensor.name} has type {tensor.type_name}, which cannot be decoded here; "
            "expected F32, F16, BF16, a quantized type that the gguf package decodes (such as Q8_0, Q4_K), or a "
            "ternary one (TQ1_0, TQ2_0, I2_S, Q1_0, Q2_0, PQ2_0, PTQ1_0)"
        ) from None


def _rope_freqs(header: GgufHeader) -> np.ndarray | None:
    tensor = header.tensors.get(ROPE_FREQS)
    return None if tensor is None else _vector(header, tensor)


def _vector(header: GgufHeader, tensor: GgufTensor) -> np.ndarray:
    _check_type(header.path, tensor)
    if len(tensor.shape) != 1:
        raise CheckpointError(f"{header.path}: tensor {tensor.name} has shape {list(tensor.shape)}, expected a vector")
    return require_finite(decode_rows(header.path, tensor, np.arange(1))[0], header.path, tensor.name)
