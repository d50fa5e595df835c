"""Each program in examples/ runs as its docstring says and shows what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXPECTED = {
    "ask.py": "Paris",
    "follow_one_token.py": "'The'",
    "read_a_pack.py": "bits a weight",
}


def test_every_example_is_tested(root: Path) -> None:
    assert {path.name for path in (root / "examples").glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_example(root: Path, name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, root / "examples" / name], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout
