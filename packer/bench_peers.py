"""The ``peers`` of a benchmark: other engines on the same device in the same run, beside our figures.

``web/bench/peers/all.mjs`` measures them in Node; see the README there.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import PackerError

#: Keys of an entry. name, version: of the npm package. what: ``MatMulNBits``, or a way of decoding. activations: f32,
#: f16. rows, columns: of the matrix. tokens: of a product. context: of decoding. seconds: of a product that waits for
#: the one before, or of a token. ourSeconds: the same of this report. ratio: seconds / ourSeconds. notRun: why there
#: are no seconds. What does not apply is null.
PEER_KEYS = (
    "name",
    "version",
    "what",
    "activations",
    "bits",
    "rows",
    "columns",
    "tokens",
    "context",
    "seconds",
    "ourSeconds",
    "ratio",
    "notRun",
)
PEER_COLUMNS = ("", "of", "bits", "tokens", "theirs", "ours", "times")
_NUMBERS = PEER_KEYS[4:12]
_SCRIPT = Path(__file__).resolve().parents[1] / "web" / "bench" / "peers" / "all.mjs"
_PACKAGE = "onnxruntime-web"
#: Seconds that peers are given, and how long they may take to end after that.
_FULL_SECONDS, _QUICK_SECONDS, _GRACE = 900, 240, 30

#: Called with what is done, the total, and what comes now.
Progress = Callable[[int, int, str], None]


def measure_peers(
    modules: Path,
    node: str,
    report: Mapping[str, Any],
    program: Mapping[str, Any],
    quick: bool = False,
    progress: Progress = lambda *_: None,
    seconds: int | None = None,
) -> list[dict[str, Any]]:
    """Entries (``PEER_KEYS``) of the peers in a ``node_modules`` folder, on the matrices and the shape of the report.

    node: its program. seconds: that they are given. Raises nothing for a peer that fails: its entry says why.
    """
    if not _SCRIPT.is_file():
        return [not_run(_PACKAGE, f"{_SCRIPT} is not there: peers run from Tercet's repository only")]
    limit = seconds or (_QUICK_SECONDS if quick or _software(report) else _FULL_SECONDS)
    # V8's second compiler takes a minute of ONNX Runtime's, in which it would compete with a GPU that is the processor.
    flags = ["--liftoff-only"] if _software(report) else []
    command = [node, *flags, str(_SCRIPT), "--seconds", str(limit), *peer_options(report, program, quick)]
    environment = {**os.environ, "ORT_WEB": str(modules.absolute() / _PACKAGE)}
    try:
        found = list(_entries(command, environment, limit + _GRACE, progress))
    except OSError as error:
        return [not_run(_PACKAGE, f"{node} could not be run ({error.strerror})")]
    entries = [peer_entry(one, report) for one in found]
    return entries or [not_run(_PACKAGE, f"{_SCRIPT.name} gave no entry")]


def _software(report: Mapping[str, Any]) -> bool:
    return bool((report["adapter"] or {}).get("software"))


def peer_options(report: Mapping[str, Any], program: Mapping[str, Any], quick: bool) -> list[str]:
    """Options of all.mjs for what the report measured: its matrices but the head, its tokens, its shape."""
    matrices = [one for one in report["linears"] if one["batchTokens"]]
    forms = dict.fromkeys(f"{one['rows']}x{one['columns']}" for one in matrices)
    options = ["--software"] if _software(report) else ["--quick"] if quick else []
    if matrices:
        options += ["--matrices", ",".join(forms), "--tokens", f"1,{matrices[0]['batchTokens']}"]
    shape = decoder_shape(report, program)
    if not (shape and matrices):
        options += ["--only", "MatMulNBits" if matrices else "decode"]
    if shape:
        context = max(2, report["decode"][0]["context"])
        options += ["--decoder", ",".join(f"{key}={size}" for key, size in shape.items()), "--context", str(context)]
    return options


def decoder_shape(report: Mapping[str, Any], program: Mapping[str, Any]) -> dict[str, int] | None:
    """The sizes that web/bench/peers/decoder_graph.mjs wants; None for a model of another kind."""
    linears = {one["name"]: one for one in report["linears"]}
    caches = list(program["caches"].values())
    if not {"o", "down", "head"} <= set(linears) or not caches or any(one != caches[0] for one in caches):
        return None
    return {
        "layers": len(caches) // 2,
        "hidden": linears["o"]["rows"],
        "heads": linears["o"]["columns"] // caches[0]["head_dim"],
        "kvHeads": caches[0]["heads"],
        "headDim": caches[0]["head_dim"],
        "intermediate": linears["down"]["columns"],
        "vocabulary": linears["head"]["rows"],
    }


def _entries(
    command: Sequence[str], environment: Mapping[str, str], limit: float, progress: Progress
) -> Iterator[dict[str, Any]]:
    """What all.mjs writes; last, an entry with the reason if it did not end well. Raises OSError if it cannot start."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout and process.stderr
    told: list[str] = []
    listener = threading.Thread(target=_listen, args=(process.stderr, progress, told), daemon=True)
    timer = threading.Timer(limit, process.kill)
    try:
        listener.start()
        timer.start()
        for line in process.stdout:
            entry = _object(line)
            if entry:
                yield entry
        if process.wait() != 0:
            listener.join(1)
            yield {"peer": _PACKAGE, "notRun": told[-1] if told else f"Node ended with status {process.returncode}"}
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def _listen(lines: Any, progress: Progress, told: list[str]) -> None:
    """Pass on progress; keep the last of the other lines."""
    for line in lines:
        entry = _object(line)
        if entry and {"done", "total", "label"} <= set(entry):
            progress(entry["done"], entry["total"], entry["label"])
        elif line.strip():
            told[:] = [line.strip()]


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def not_run(name: str, reason: str) -> dict[str, Any]:
    """The entry of a peer that could not be measured."""
    return {**dict.fromkeys(PEER_KEYS), "name": name, "what": "all", "notRun": reason}


def peer_entry(found: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of all.mjs as one of the report, with our seconds beside it."""
    entry = {**dict.fromkeys(PEER_KEYS), "name": str(found.get("peer")), "what": str(found.get("op", "all"))}
    entry |= {key: found[key] for key in PEER_KEYS if key in found}
    if entry["notRun"] is not None:
        return entry
    product = entry["what"] == "MatMulNBits"
    seconds = found.get("secondsPerNode" if product else "secondsPerRun")
    if not seconds:
        return {**entry, "notRun": "its time is less than the noise"}
    if not product:
        entry["tokens"] = 1
    ours = _our_product(entry, report) if product else 1 / report["decode"][0]["tokensPerSecond"]
    return {**entry, "seconds": seconds, "ourSeconds": ours, "ratio": seconds / ours if ours else None}


def _our_product(entry: Mapping[str, Any], report: Mapping[str, Any]) -> float | None:
    """Seconds of our product of that size: where it waits for the one before, or of many tokens."""
    for one in report["linears"]:
        if (one["rows"], one["columns"]) == (entry["rows"], entry["columns"]):
            batch: float | None = one["batchSeconds"] if one["batchTokens"] == entry["tokens"] else None
            return float(one["dependentSeconds"]) if entry["tokens"] == 1 else batch
    return None


def check_peers(peers: Any, where: str) -> None:
    """Raise PackerError if these are no entries of peers."""
    if not isinstance(peers, list):
        raise PackerError(f"{where}: no report of bench: peers is {type(peers).__name__}, expected a list")
    for index, one in enumerate(peers):
        name = f"{where}: peers[{index}]"
        missing = [key for key in PEER_KEYS if not isinstance(one, dict) or key not in one]
        if missing:
            raise PackerError(f"{name} has no {missing[0]!r}")
        for key in _NUMBERS:
            plain = isinstance(one[key], int | float) and not isinstance(one[key], bool)
            if one[key] is not None and not plain:
                raise PackerError(f"{name}: {key} is {one[key]!r}, expected a number or null")
        if (one["seconds"] is None) == (one["notRun"] is None):
            raise PackerError(f"{name}: expected either seconds or the reason in notRun")


def peer_rows(peers: Sequence[Mapping[str, Any]], name: str) -> list[tuple[str, ...]]:
    """Rows of ``PEER_COLUMNS`` of the peer "NAME VERSION"; times: how many times as long it takes."""
    rows: list[tuple[str, ...]] = []
    for one in peers:
        if one["notRun"] is not None or f"{one['name']} {one['version']}" != name:
            continue
        of = f"{one['rows']:,} x {one['columns']:,}" if one["rows"] else f"after {one['context']:,}"
        what = f"{one['what']}, {one['activations']}"
        ours, times = ("", "") if one["ratio"] is None else (_time(one["ourSeconds"]), f"{one['ratio']:.1f}")
        rows.append((what, of, f"{one['bits']}", f"{one['tokens']:,}", _time(one["seconds"]), ours, times))
    return rows


def missing_rows(peers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What could not be measured, and why."""
    rows: list[tuple[str, str]] = []
    for one in peers:
        if one["notRun"] is not None:
            parts = [one["name"], one["what"], one["activations"], one["bits"] and f"{one['bits']} bits"]
            form = one["rows"] and f"{one['rows']:,} x {one['columns']:,}"
            rows.append((" ".join(str(part) for part in [*parts, form] if part), str(one["notRun"])))
    return rows


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:,.2f} ms"
