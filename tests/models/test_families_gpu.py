"""Tiny models of each family on the native GPU: the ids that transformers picks, beyond the window too."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer.export import ExportOptions, export
from packer.pack import Pack
from shaders.native import NativeModel
from shaders.sampling import Sampling
from tests.support.families import FAMILY_CASES, FAMILY_PROMPT
from tests.support.transformers_models import greedy, random_model, save_model

TOKENS = 12


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, changes = FAMILY_CASES[name]
    model = random_model(family, **changes)
    export(save_model(model, tmp_path / "checkpoint"), tmp_path / "pack", ExportOptions(embedding="f16"))
    pack = Pack(tmp_path / "pack")
    expected = greedy(model, FAMILY_PROMPT, TOKENS)
    with NativeModel(pack.program, pack.tensors(), capacity=64, kv="f32") as native:
        found = [token for token, _ in native.generate(FAMILY_PROMPT, Sampling(), TOKENS)]
    assert found[: len(expected)] == expected
