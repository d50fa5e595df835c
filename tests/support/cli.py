"""The packer's command line, in this process or in one of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from packer.cli import main

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class CliResult:
    """How a command ended. An exception other than SystemExit is not caught: it would be a traceback."""

    status: int
    out: str
    err: str


def run_cli(*arguments: object) -> CliResult:
    """``python -m packer ARGUMENTS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    status = 0
    # Wide, so that no word of a message is cut in two.
    with redirect_stdout(out), redirect_stderr(err), patch.dict(os.environ, {"COLUMNS": "200"}):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    return CliResult(status, out.getvalue(), err.getvalue())


def start_cli(*arguments: object, **options: object) -> subprocess.Popen[str]:
    """``python -m packer ARGUMENTS`` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "packer", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def one_error(result: CliResult, *words: object) -> str:
    """Assert that the command failed with one message that holds these words, and return the message."""
    text = " ".join(result.err.split())
    assert result.status in (1, 2), f"exit status {result.status}: {result.out}{result.err}"
    assert "Traceback" not in text
    assert text.lower().count("error") >= 1, text
    for word in words:
        assert str(word) in text, f"{word!r} is not in: {text}"
    assert result.out.strip() == "" or "Usage" in result.out, f"output beside the error: {result.out}"
    return text
