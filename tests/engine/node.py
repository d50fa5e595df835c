"""Runs JavaScript of these tests in Node, for pytest."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
WEBGPU = FOLDER.parents[1] / "web" / "node_modules" / "webgpu"
#: SwiftShader as Debian's Chromium carries it: a Vulkan driver that Dawn takes and that needs no GPU.
SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")


def node(*arguments: str, seconds: float = 240, env: dict[str, str] | None = None, stdin: str = "") -> str:
    """Standard output of Node, whose exit status must be 0."""
    done = subprocess.run(
        ["node", *arguments],
        cwd=FOLDER,
        env={**os.environ, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"node {' '.join(arguments)}: {done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def node_json(script: str, question: Any, **options: Any) -> Any:
    """What a script of this folder answers to a question, both as JSON."""
    return json.loads(node(script, stdin=json.dumps(question), **options))
