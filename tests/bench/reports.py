"""A report with round figures."""

from __future__ import annotations

from typing import Any


def example_report(**changes: Any) -> dict[str, Any]:
    """A report of bench; changes: top-level keys."""
    linear = {"name": "qkv", "rows": 3840, "columns": 2560, "encoding": "ternary", "bytes": 2_473_000, "seconds": 1e-6}
    batch = {"share": 0.5, "dependentSeconds": 4e-6, "batchTokens": 512, "batchSeconds": 1e-4}
    return {
        "date": "2026-12-02T16:00:00+00:00",
        "backend": "node",
        "adapter": {
            "vendor": "v",
            "architecture": "a",
            "device": "d",
            "description": "GPU <1> &",
            "software": False,
        },
        "model": {"name": "Tiny", "parameters": 5, "contextLength": 4096, "kvCache": "f16", "activations": "a8"},
        "bandwidth": {"bytesPerSecond": 4.4e12, "medianBytesPerSecond": 4.3e12, "bufferBytes": 1 << 30},
        "linears": [
            {**linear, **batch},
            {**linear, **batch, "name": "head", "batchTokens": None, "batchSeconds": None},
        ],
        "decode": [
            {"context": 128, "tokensPerSecond": 1000.0, "spread": 0.01},
            {"context": 1024, "tokensPerSecond": 900.0, "spread": 0.02},
        ],
        "prefill": [{"tokens": 128, "tokensPerSecond": 9000.0}, {"tokens": 512, "tokensPerSecond": 20000.0}],
        "verify": [{"tokens": 1, "seconds": 0.001}, {"tokens": 4, "seconds": 0.0016}],
        "firstTokenSeconds": 0.014,
        "loadSeconds": 1.5,
        "dispatchesPerToken": 185,
        "dispatchesPerLayer": 6.0,
        "cpuMsPerToken": 0.08,
        "limit": {"bytesPerToken": 1_000_000_000, "tokensPerSecond": 4400.0, "ratio": 1000 / 4400},
        "kernels": {"norm_linear 3840x2560": {"ROWS": 32}},
        "peers": [],
        **changes,
    }
