"""The parts of the engine that need no GPU, in Node: a pytest test for each file of JavaScript tests."""

from __future__ import annotations

import pytest

from tests.engine.node import FOLDER, node

FILES = sorted(path.name for path in FOLDER.glob("*.test.mjs"))


def test_all_files_are_found() -> None:
    assert len(FILES) >= 10


@pytest.mark.parametrize("name", FILES)
def test_unit(name: str) -> None:
    output = node("--test", "--test-reporter=tap", name)
    passed = next(line for line in output.splitlines() if line.startswith("# pass"))
    assert int(passed.split()[-1]) > 0
