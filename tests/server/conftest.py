"""A small page, small packs, and the application that serves them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from packer.manifest import CHUNK_BYTES
from server.app import create_app

BASE_URL = "http://127.0.0.1:8000"

MakePack = Callable[..., Path]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def manifest_for(shards: dict[str, bytes], files: dict[str, bytes]) -> dict[str, Any]:
    """A pack.json, as a dict, that lists these files."""
    return {
        "format": "tercet-pack",
        "version": 1,
        "name": "Tiny",
        "description": "A pack for tests.",
        "family": "llama",
        "license": "apache-2.0",
        "source": {},
        "tensors": {},
        "bos_id": None,
        "parameters": 1000,
        "vocab_size": 10,
        "context_length": 128,
        "activations": "a8",
        "bits_per_weight": 2.5,
        "ternary_bits_per_weight": 1.6,
        "resident_bytes": 4096,
        "kv": {"layers": 2, "kv_heads": 1, "head_dim": 8},
        "eos_ids": [1],
        "grade": None,
        "chunk_bytes": CHUNK_BYTES,
        "shards": [
            {
                "file": name,
                "bytes": len(content),
                "chunks": [sha256(content[at : at + CHUNK_BYTES]) for at in range(0, len(content), CHUNK_BYTES)],
            }
            for name, content in shards.items()
        ],
        "files": {name: {"bytes": len(content), "sha256": sha256(content)} for name, content in files.items()},
    }


def write_pack(folder: Path, shard: bytes = bytes(range(256)) * 8, **fields: Any) -> Path:
    """Write a pack whose one shard holds `shard`; `fields` replace fields of its pack.json."""
    shards = {"weights-00001.safetensors": shard}
    files = {
        "program.json": b'{"ops_version": 1}',
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "report.json": b"{}",
        "LICENSE": b"Apache-2.0\n",
    }
    folder.mkdir(parents=True)
    for name, content in (shards | files).items():
        (folder / name).write_bytes(content)
    (folder / "pack.json").write_text(json.dumps(manifest_for(shards, files) | fields))
    return folder


@pytest.fixture
def make_pack(tmp_path: Path) -> MakePack:
    """`make_pack(id, shard=bytes, **fields)` writes a pack into the folder `packs`."""

    def make(pack_id: str, **changes: Any) -> Path:
        return write_pack(tmp_path / "packs" / pack_id, **changes)

    return make


@pytest.fixture
def packs(make_pack: MakePack) -> Path:
    """A folder with the pack `tiny`."""
    return make_pack("tiny").parent


@pytest.fixture
def page(tmp_path: Path) -> dict[str, Path]:
    """The folders of a page as small as the server accepts, and files in them that it must not serve."""
    contents = {
        "/app": {
            "index.html": "<p>{{ version }}</p>",
            "main.js": "1\n",
            "look.css": "p {}\n",
            ".hidden.js": "2\n",
        },
        "/engine": {"index.js": "export {}\n", "notes.md": "notes\n"},
        "/vendor": {
            "jinja.js": "1\n",
            "jinja.d.ts": "\n",
            "jinja.LICENSE.txt": "MIT\n",
            "tokenizers.js": "1\n",
        },
        "/shaders": {"kernels.json": "{}\n", "add.wgsl": "// add\n", "native.py": "secret = 1\n"},
    }
    folders = {url: tmp_path / "page" / url.strip("/") for url in contents}
    for url, files in contents.items():
        folders[url].mkdir(parents=True)
        for name, text in files.items():
            (folders[url] / name).write_text(text)
    return folders


@pytest.fixture
def app(packs: Path, page: dict[str, Path]) -> FastAPI:
    return create_app(packs, folders=page)


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return TestClient(app, base_url=BASE_URL, raise_server_exceptions=False)
