"""The real model of the tests, its golden answers and packs of it, made once a session."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from packer.export import ExportOptions, ExportResult, export

#: Folder with the real models: beside the repository, or wherever this variable says.
SHARED = Path(os.environ.get("TERCET_SHARED", Path(__file__).resolve().parents[3] / "shared"))
MODEL = SHARED / "models" / "smollm2-135m-ternary"


def real_model() -> Path:
    """The checkpoint's folder; the calling test is skipped where it is not there."""
    if not (MODEL / "config.json").is_file():
        pytest.skip(f"needs the real model in {MODEL} (set TERCET_SHARED to the folder that has models/)")
    return MODEL


def golden() -> list[dict[str, Any]]:
    """Prompts with transformers' greedy ids and the highest logits; see the model's README."""
    return json.loads((real_model() / "golden.json").read_text(encoding="utf-8"))


@cache
def real_export(embedding: str) -> ExportResult:
    """An export of the real model with this embedding encoding, done once a session."""
    source = real_model()
    folder = Path(tempfile.mkdtemp(prefix="tercet-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return export(source, folder / "pack", ExportOptions(name="SmolLM2 135M ternary", embedding=embedding))


def real_pack(embedding: str) -> Path:
    """The folder of that pack."""
    return real_export(embedding).path
