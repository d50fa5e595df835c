"""A random checkpoint in the shape of a 7B model, written layer by layer, and what an export of it takes.

    python -m tests.support.big_checkpoint write FOLDER --shape llama-7b --kind float
    python -m tests.support.big_checkpoint measure FOLDER OUT --workers 2 --policy q8 --no-eval

Kinds: ``float`` (normal numbers, bf16), ``ternary`` (bf16, exactly ternary), ``packed`` (BitNet's bytes and scales).
A ``float`` checkpoint of 7B weights takes 13.5 GB of disk.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.support.checkpoints import byte_tokenizer, tiny_config, tokenizer_config, write_json

SHAPES: dict[str, dict[str, int]] = {
    "llama-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 32000,
    },
    "falcon3-7b": {
        "hidden_size": 3072, "intermediate_size": 23040, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 131072,
    },
    "small": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 64, "vocab_size": 8000,
    },
}  # fmt: skip
KINDS = ("float", "ternary", "packed")


def write(folder: Path, shape: str, kind: str, layers: int | None = None) -> None:
    """A folder with a shard for each layer; only one layer is in memory at a time."""
    config = tiny_config("llama", **SHAPES[shape], tie_word_embeddings=False, max_position_embeddings=4096)
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    if kind == "packed":
        config["quantization_config"] = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    folder.mkdir(parents=True)
    where = {}
    for index, tensors in enumerate(_shards(config, kind)):
        name = f"model-{index + 1:05d}-of-{config['num_hidden_layers'] + 2:05d}.safetensors"
        save_file(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def _shards(config: dict[str, Any], kind: str) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    width, kv_width = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    linears = {
        "self_attn.q_proj": (width, hidden), "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden), "self_attn.o_proj": (hidden, width),
        "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    gain = np.ones(hidden, dtype=ml_dtypes.bfloat16)
    embedding = (config["vocab_size"], hidden)
    yield {"model.embed_tokens.weight": _normal(random, embedding), "model.norm.weight": gain}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors = {f"{prefix}.{name}.weight": gain for name in ("input_layernorm", "post_attention_layernorm")}
        for name, shape in linears.items():
            tensors |= _linear(random, f"{prefix}.{name}.weight", shape, kind)
        yield tensors
    yield {"lm_head.weight": _normal(random, embedding)}


def _linear(random: np.random.Generator, name: str, shape: tuple[int, int], kind: str) -> dict[str, np.ndarray]:
    if kind == "float":
        return {name: _normal(random, shape)}
    if kind == "ternary":
        values = np.array([-0.03125, 0, 0.03125], dtype=ml_dtypes.bfloat16)
        return {name: values[random.integers(0, 3, size=shape, dtype=np.uint8)]}
    codes = random.integers(0, 3, size=(4, shape[0] // 4, shape[1]), dtype=np.uint8)
    packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    return {name: packed, f"{name}_scale": np.array([0.03125], dtype=ml_dtypes.bfloat16)}


def _normal(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """bf16; a few rows at a time, so that float32 numbers take little memory."""
    values = np.empty(shape, dtype=ml_dtypes.bfloat16)
    for rows in np.array_split(values, max(1, shape[0] // 256)):
        rows[...] = random.standard_normal(rows.shape, dtype=np.float32) * np.float32(0.02)
    return values


def measure(folder: Path, out: Path, workers: int, options: list[str]) -> None:
    """Run ``export`` in a process of its own and print how long it took and how much memory it had at most.

    The greatest resident set is the kernel's own count (``ru_maxrss``), pages of mapped files included.
    """
    weights = sum(_weights(file) for file in sorted(folder.glob("*.safetensors")))
    arguments = ["export", folder, "--out", out, "--workers", workers, "--force", *options]
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "packer", *map(str, arguments)], check=True)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(
        f"{workers} workers: {weights / 1e9:.2f} billion weights, {size / 1e9:.2f} GB in {seconds:.1f} s: "
        f"{weights / seconds / 1e6:.1f} M weights/s, {size / seconds / 1e6:.0f} MB/s; peak {peak / 2**30:.2f} GiB"
    )


def _weights(file: Path) -> int:
    with safe_open(file, framework="np") as opened:
        views = [opened.get_slice(key) for key in opened.keys()]  # noqa: SIM118 (no mapping)
        return sum(int(np.prod(view.get_shape())) * (4 if view.get_dtype() == "U8" else 1) for view in views)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--shape", choices=list(SHAPES), default="llama-7b")
    writing.add_argument("--kind", choices=KINDS, default="float")
    writing.add_argument("--layers", type=int)
    measuring = commands.add_parser("measure")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--workers", type=int, default=2)
    given, options = parser.parse_known_args()
    if given.command == "write":
        write(given.folder, given.shape, given.kind, given.layers)
    else:
        measure(given.folder, given.out, given.workers, options)


if __name__ == "__main__":
    main()
