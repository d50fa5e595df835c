"""``selfcheck.json``: the few cases, with what must come out, that an engine runs on a device before it trusts it.

``python -m shaders.selfcheck`` writes the file, ``--check`` fails if it is not what would be written.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .case_kit import Case, from_base64, to_base64
from .cases import all_cases
from .checks import Close, Exact

FILE = Path(__file__).parent / "selfcheck.json"
VERSION = 1
MOST_BYTES = 200_000

#: At least one case a kernel and main variant; each with numbers on which every device must agree.
NAMES = (
    "expand 3x19",
    "dequantize ternary 3x61",
    "dequantize q8 3x61",
    "dequantize q4 3x61",
    "dequantize f16 3x61",
    "embed small piece",
    "embed times 12",
    "norm f32 2x65",
    "norm f32 accumulate 3",
    "norm a8 strict",
    "norm a16 strict",
    "quantize a8 strict",
    "quantize a16 strict",
    "glu silu small f32",
    "glu silu strict a8",
    "glu silu strict a16",
    "glu relu2 norm strict a8",
    "glu gelu_tanh strict a8",
    "position small piece",
    "activate silu small f32",
    "activate relu strict a8",
    "activate gelu_tanh strict a8",
    "norm a8 strict 72 wide",
    "norm a16 strict 72 wide",
    "quantize a8 strict 72 wide",
    "glu silu a8 strict 72 wide",
    "glu relu2 norm a8 strict 72 wide",
    "linear_ternary a8 7x65",
    "linear_ternary a16 7x65",
    "linear_ternary a8 group 64 130 powers",
    "linear_ternary accumulate",
    "tiled a8 3x68 T5",
    "tiled a16 3x68 T5",
    "tiled a8 group 64",
    "linear_ternary a8 few group",
    "linear_ternary small few 8",
    "narrow 3x68 T2",
    "norm_linear a8 5x64",
    "norm_linear small bias",
    "norm_linear small group",
    "quantize_linear small",
    "quantize_linear small bias",
    "quantize_linear small group",
    "glu_linear small",
    "glu_linear small bias",
    "glu_linear small group",
    "merge_linear a16 at 0",
    "merge_linear small bias",
    "merge_linear small group",
    "linear_ternary a8 7x65 rows",
    "linear_ternary a16 7x65 rows",
    "linear_ternary tiny few 4 rows",
    "norm_linear a8 5x64 rows",
    "quantize_linear small rows",
    "glu_linear small rows",
    "merge_linear a16 at 0 rows",
    "linear_float ternary 3x36",
    "linear_float q8 3x36",
    "linear_float q4 3x36",
    "linear_float q4a 3x36",
    "linear_float nvfp4 3x36",
    "linear_float mxfp4 3x36",
    "linear_float f32 3x36",
    "linear_float small few 2",
    "linear_float small few 8",
    "linear_float f16 5x61",
    "linear_float q8 5x61",
    "linear_float T1 bias accumulate",
    "float tiled q8 1x3 T2",
    "tiled bias accumulate last rows",
    "rope_append f32 dyadic",
    "rope_append f16 dyadic",
    "rope_append q8 dyadic",
    "rope_append q8 gains 3/1x4",
    "attention f32 2/1x4 at 66",
    "attention f16 2/1x4 at 66",
    "attention q8 2/1x4 at 66",
    "attention f32 2/1x16 at 3",
    "attention f16 2/1x16 at 3",
    "attention q8 2/1x16 at 3",
    "rope_attention f32 2/1x16 T2 at 3",
    "rope_attention f16 2/1x16 T2 at 3",
    "rope_attention q8 2/1x16 T2 at 3",
    "rope_attention q8 gains 2/1x16 T1 at 0",
    "rope_attention f16 2/1x16 T2 at 3 window 2",
    "attention_merge 2x16 T2 at 127",
    "argmax 257",
    "argmax small nan",
    "argmax small rows",
    "weigh exact",
    "sample small all",
    "accept small ring",
    "accept small ring nan",
    "read_bandwidth 37",
)
_DTYPES = {"u32": "<u4", "i32": "<i4", "f32": "<f4"}


def build() -> str:
    """The text of ``selfcheck.json``."""
    cases = {case.name: case for case in all_cases()}
    entries = ",\n".join(json.dumps(_entry(cases[name]), sort_keys=True, separators=(",", ":")) for name in NAMES)
    return f'{{"version": {VERSION}, "cases": [\n{entries}\n]}}\n'


def _entry(case: Case) -> dict[str, Any]:
    entry = case.as_json()
    for name, output in entry["outputs"].items():
        close = case.checks[name].close()
        if close is None:
            raise ValueError(f"case {case.name}: {name} has no single tolerance; choose another case")
        # Upwards, and short.
        output["close"] = float(f"{close * 1.01:.2e}")
    return entry | {"expected": {name: to_base64(data) for name, data in case.expected.items()}}


@cache
def stored_cases() -> tuple[Case, ...]:
    """The cases of ``selfcheck.json``, ready to be run and checked."""
    return stored_from(FILE.read_text(encoding="utf-8"))


def stored_from(text: str) -> tuple[Case, ...]:
    """The cases of a text of the file."""
    return tuple(_case(entry) for entry in json.loads(text)["cases"])


def _case(entry: dict[str, Any]) -> Case:
    inputs = {name: np.frombuffer(base64.b64decode(text), dtype="<u4") for name, text in entry["inputs"].items()}
    expected, checks = {}, {}
    for name, output in entry["outputs"].items():
        like = np.empty(output["shape"], dtype=_DTYPES[output["dtype"]])
        expected[name] = from_base64(entry["expected"][name], like)
        checks[name] = Close(output["close"]) if output["close"] else Exact()
    return Case(entry["name"], entry["kernel"], entry["symbols"], tuple(entry["step"]), inputs, expected, checks)


def is_current(stored: str, fresh: str) -> bool:
    """Whether two texts of the file agree in all but the last bits that NumPy computes differently on another CPU."""
    old, new = json.loads(stored), json.loads(fresh)
    for one, other in zip(old["cases"], new["cases"], strict=False):
        for name, output in one["outputs"].items():
            expected = other["outputs"].get(name, {}).get("close", -1.0)
            if abs(output["close"] - expected) <= 0.05 * expected:
                output["close"] = expected
    answers = [case.pop("expected") for case in old["cases"]]
    cases = stored_from(json.dumps(new))
    for case in new["cases"]:
        del case["expected"]
    return old == new and not any(
        case.problems(_case(entry | {"expected": answer}).expected)
        for case, entry, answer in zip(cases, new["cases"], answers, strict=True)
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 1 if ``--check`` finds another file."""
    parser = argparse.ArgumentParser(prog="python -m shaders.selfcheck", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(arguments)
    text = build()
    if options.check:
        if not FILE.is_file() or not is_current(FILE.read_text(encoding="utf-8"), text):
            print(f"{FILE.name} is out of date; run python -m shaders.selfcheck", file=sys.stderr)
            return 1
        print(f"{FILE.name} is current: {len(NAMES)} cases, {len(text):,} bytes")
        return 0
    FILE.write_text(text, encoding="utf-8")
    print(f"wrote {FILE.name}: {len(NAMES)} cases, {len(text):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
