"""The engine's reader against the broken packs of tests/packer: the same rules as the packer's reader."""

from __future__ import annotations

import shutil
from pathlib import Path

from packer.export import ExportOptions
from tests.engine.node import node_json
from tests.packer.test_hostile_packs import FLAT
from tests.support.packs import tiny_pack

#: Only `verify` looks at values; the engine would have to read every weight back from the GPU.
VALUES = ("trits", "padding")
#: JSON has one kind of number: what Python reads as a float is an integer to JavaScript.
INTEGERS = ("a fraction", "[120, 72.0]", "[120.0]", "bos_id 1.0")
#: JavaScript reads the number as infinity and the depth without a stack, so the next rule refuses them.
OTHERWISE = {"pack.json has a number of 5000 digits": "version", "pack.json is deep": "version"}


def test_broken_packs_are_refused_by_the_same_rules(tmp_path: Path) -> None:
    whole = tiny_pack(tmp_path / "whole", "bitnet", options=ExportOptions(embedding="q4"))
    folders = [whole]
    for index, (_, _, change) in enumerate(FLAT):
        folders.append(Path(shutil.copytree(whole, tmp_path / str(index))))
        change(folders[-1])
    good, *found = node_json("hostile_answers.mjs", [str(folder) for folder in folders])
    assert good is None, good
    wrong = []
    for (rule, name, _), answer in zip(FLAT, found, strict=True):
        expected = None if rule in VALUES or name in INTEGERS else OTHERWISE.get(name, rule)
        if (answer["rule"] if answer and "rule" in answer else answer) != expected:
            wrong.append((rule, name, answer))
    assert wrong == []
    codes = {answer["code"] for answer in found if answer}
    assert codes == {"pack-invalid", "pack-unsupported", "download-failed", "chunk-corrupt"}
