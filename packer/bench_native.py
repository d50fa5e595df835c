"""Measures the native executor: what its device reads, each matrix alone, decode and prefill."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, TypeVar

import numpy as np

from shaders.native import NativeModel, shared_device
from shaders.native_device import Device
from shaders.sampling import Sampling

from .bench_engine import cpu_seconds, dispatches, read_bandwidth, verify_seconds
from .bench_linear import distinct_linears, measure_linear, tensor_bytes
from .pack import Pack
from .plan import kv_bytes_per_token
from .runner import forced_kernels, identity_of

Progress = Callable[[int, int, str], None]
T = TypeVar("T")
_GREEDY = Sampling(temperature=0.0, seed=0)
#: Tokens of the run that comes before the timed ones; about how long a timing of decode is, and its least tokens.
_WARM_TOKENS, _DECODE_SECONDS, _LEAST_TOKENS = 32, 0.5, 16


@dataclass(frozen=True)
class Sizes:
    """How much is measured, as ``Sizes`` in web/engine/measure.js.

    seconds: least of one timing. repeats: timings, of which the median counts. budget: seconds after which they are
    not repeated. buffer_bytes: that are read.
    copy_bytes: of weights that a matrix goes round in. products: of a timing. batch: tokens of a product of many.
    tokens: of a decode timing.
    """

    seconds: float
    repeats: int
    budget: float
    buffer_bytes: int
    copy_bytes: int
    products: int
    batch: int
    tokens: int
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]


FULL = Sizes(0.1, 5, 4.0, 1 << 30, 256 << 20, 256, 512, 256, (128, 1024, 4096), (128, 512, 2048))
QUICK = Sizes(0.03, 3, 0.6, 256 << 20, 128 << 20, 128, 128, 64, (128, 1024), (128, 512))
#: A program on the processor: its figures say little, but the run must end soon.
SOFTWARE = Sizes(0.0, 1, 0.0, 4 << 20, 1 << 18, 1, 4, 3, (8,), (4,))


def measure(
    pack: Pack, context: int, kv: str, quick: bool, progress: Progress, kernels: str | None = None
) -> dict[str, Any]:
    """The report of a pack on the native device. Raises ExecutionError (NativeError)."""
    device = shared_device()
    sizes = SOFTWARE if device.software else QUICK if quick else FULL
    linears = distinct_linears(pack.program, pack.entries)
    contexts, prompts = fitting(sizes.contexts, context - sizes.tokens), fitting(sizes.prompts, context - 1)
    total = 4 + len(linears) + len(contexts) + len(prompts)
    done = 0

    def stage(label: str, work: Callable[[], T]) -> T:
        nonlocal done
        progress(done, total, label)
        result = work()
        done += 1
        return result

    bandwidth = stage("reading memory", lambda: read_bandwidth(device, sizes))
    peak = bandwidth["bytesPerSecond"]
    timed = []
    for linear in linears:
        label = f"the matrix {linear.name}, {linear.entry.shape[0]} x {linear.entry.shape[1]}"
        found = stage(label, lambda linear=linear: measure_linear(device, linear, sizes))  # type: ignore[misc]
        timed.append({**found, "share": found["bytes"] / found["seconds"] / peak})
    began = time.perf_counter()
    options: dict[str, Any] = {"forced": forced_kernels(kernels), "identity": identity_of(pack)}
    options |= {"capacity": context, "kv": kv, "device": device, "speculate": "auto"}
    model = stage("loading", lambda: NativeModel(pack.program, pack.tensors(), **options))
    loaded = time.perf_counter() - began
    with model:
        model.speculate = "off"  # loaded as for an answer; what is measured are plain steps
        runs = _Runs(model, sizes, pack.manifest["vocab_size"])
        decode = [stage(f"writing after {n} tokens", lambda n=n: runs.decode(n)) for n in contexts]  # type: ignore[misc]
        seconds = [stage(f"reading {n} tokens", lambda n=n: runs.prefill(n)) for n in prompts]  # type: ignore[misc]
        verify = stage("verifying drafts", lambda: verify_seconds(model, contexts[0], sizes))
        processor = stage("work of the processor", lambda: cpu_seconds(model, sizes))
        counts = dispatches(model, pack.program)
        constants = model.kernel_constants()
    progress(total, total, "done")
    needed = bytes_per_token(pack, kv, contexts[0])
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": "native",
        "adapter": _adapter(device),
        "model": {
            "name": pack.manifest["name"],
            "parameters": pack.manifest["parameters"],
            "contextLength": context,
            "kvCache": kv,
            "activations": pack.manifest["activations"],
        },
        "bandwidth": bandwidth,
        "linears": timed,
        "decode": decode,
        "prefill": [{"tokens": n, "tokensPerSecond": n / took} for n, took in zip(prompts, seconds, strict=True)],
        "verify": verify,
        "firstTokenSeconds": seconds[0],
        "loadSeconds": loaded,
        **counts,
        "cpuMsPerToken": 1000 * processor,
        "limit": {
            "bytesPerToken": needed,
            "tokensPerSecond": peak / needed,
            "ratio": decode[0]["tokensPerSecond"] * needed / peak,
        },
        "kernels": constants,
        "peers": [],
    }


def bytes_per_token(pack: Pack, kv: str, context: int) -> int:
    """What a token must read: all weights once, of what is looked up one row (unless it is the head), and the cache."""
    operations = [*pack.program["body"], *pack.program["logits"]]
    multiplied = {op["w"] for op in operations if op["op"] == "linear"}
    gathered = {op["w"] for op in operations if op["op"] in ("embed", "position")} - multiplied
    caches = [(cache["heads"], cache["head_dim"]) for cache in pack.program["caches"].values()]
    total = context * kv_bytes_per_token(caches, kv)
    for name, entry in pack.entries.items():
        size = tensor_bytes(entry)
        total += -(-size // entry.shape[0]) if name in gathered else size
    return total


def fitting(wanted: tuple[int, ...], most: int) -> list[int]:
    """The sizes as far as there is room, the largest that fits in place of those that do not."""
    return list(dict.fromkeys(max(1, min(size, most)) for size in wanted))


def _adapter(device: Device) -> dict[str, Any]:
    info = device.wgpu.adapter.info
    texts = {name: str(info.get(name, "")) for name in ("vendor", "architecture", "device", "description")}
    return {**texts, "software": device.software}


class _Runs:
    """Runs of the model itself, on random tokens."""

    def __init__(self, model: NativeModel, sizes: Sizes, vocabulary: int):
        self.model, self.sizes, self.vocabulary = model, sizes, vocabulary
        self.rng = np.random.default_rng(0)

    def decode(self, context: int) -> dict[str, Any]:
        """Tokens a second behind a cache of ``context``."""
        prompt, tokens = self._prompt(context), self.sizes.tokens
        self.model.truncate(0)
        if context > 1:
            self.model.prefill(prompt[:-1])
        if self.sizes.repeats > 1:  # warms up, and tells how many tokens take long enough
            wanted = int(_DECODE_SECONDS * self._rate(prompt, min(_WARM_TOKENS, tokens)))
            tokens = min(tokens, max(_LEAST_TOKENS, wanted))
        rates = self._repeated(lambda: self._rate(prompt, tokens))
        middle = median(rates)
        return {"context": context, "tokensPerSecond": middle, "spread": (max(rates) - min(rates)) / middle}

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt to the first token."""
        if self.sizes.repeats > 1:
            self._first(tokens)  # pipelines of this size are used for the first time
        return median(self._repeated(lambda: self._first(tokens)))

    def _repeated(self, timing: Callable[[], float]) -> list[float]:
        """Several timings, but not for longer than the budget."""
        end = time.perf_counter() + self.sizes.budget
        found = [timing()]
        while len(found) < self.sizes.repeats and time.perf_counter() < end:
            found.append(timing())
        return found

    def _prompt(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, self.vocabulary, count)]

    def _rate(self, prompt: list[int], tokens: int) -> float:
        self.model.truncate(len(prompt) - 1)
        times = [time.perf_counter() for _ in self.model.generate(prompt[-1:], _GREEDY, tokens)]
        return (len(times) - 1) / (times[-1] - times[0])

    def _first(self, tokens: int) -> float:
        prompt = self._prompt(tokens)
        self.model.truncate(0)
        began = time.perf_counter()
        for _ in self.model.generate(prompt, _GREEDY, 1):
            pass
        return time.perf_counter() - began
