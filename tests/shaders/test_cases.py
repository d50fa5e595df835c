"""The case list itself: what it covers, and that its checks can fail."""

from __future__ import annotations

import base64
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from shaders import contract
from shaders.case_kit import Case, from_base64
from shaders.cases import all_cases
from shaders.checks import AsFloats, Between, BlockSums, Close, Exact, Halves, Rows
from shaders.symbols import binding_bytes, constants

KERNELS = {kernel.name: kernel for kernel in contract.kernels()}


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(case.name for case in all_cases()).items() if count > 1] == []


#: Symbols that are 0 or 1 in overrides; all others that are no words are sizes.
SWITCHES = ("has_gain", "has_bias", "has_q_gain", "accumulate", "last_rows")


def used_constants(names: set[str]) -> dict[str, set[float]]:
    """Values of each pipeline constant in the cases of kernels."""
    used: dict[str, set[float]] = {}
    for case in all_cases():
        if case.kernel in names:
            for override, value in constants(KERNELS[case.kernel], case.symbols).items():
                used.setdefault(override, set()).add(value)
    return used


def is_choice(kernel: contract.Kernel, source: contract.Dim) -> bool:
    """Whether an override is a switch or stands for a word. ``scale`` is a number in attention."""
    words = isinstance(source, str) and source in contract.document()["enums"]
    return source in SWITCHES if not words else source not in contract.op_spec(kernel.op).get("numbers", {})


def expected_values(kernel: contract.Kernel, source: str) -> set[int]:
    """Numbers of the words, or of the switch, that an override may take."""
    words = contract.document()["enums"].get(source)
    expected = set(words.values()) if words else {0, 1}
    allowed = kernel.when.get(source)
    if allowed:
        expected = {contract.enum(source, value) for value in allowed} if words else set(allowed)
    if source == "act":
        names = contract.op_spec(kernel.op).get("strings", {}).get("act", ["none"])
        expected = {contract.enum(source, name) for name in names}
    if kernel.name == "quantize" and source == "activation":
        expected = {1, 2}
    if source == "last_rows" and kernel.name in ("quantize", "glu", "activate"):
        expected = {0}  # only norm may take the last rows (program.py)
    return expected


@pytest.mark.parametrize("entry", contract.document()["kernels"], ids=lambda entry: entry["name"])
def test_every_override_value_of_a_kernel_has_a_case(entry: dict[str, Any]) -> None:
    """Kernels of one entry are one source, compiled for other numbers of tokens."""
    kernel = KERNELS[entry["name"]]
    used = used_constants({entry["name"], *(f"{entry['name']}_{tile}" for tile in entry.get("tiles", ()))})
    of_file = used_constants({other.name for other in KERNELS.values() if other.file == kernel.file})
    for override, source in entry.get("overrides", {}).items():
        if isinstance(source, int):
            assert used[override] == {source}, override
        elif is_choice(kernel, source):
            assert expected_values(kernel, source) <= used[override], override
        else:
            assert len(of_file[override]) > 1, f"{override}: a kernel that ignores it would pass"
    assert set(entry.get("tiles", ())) == used.get("TOKENS", set())
    for override, candidates in kernel.tuned.items():
        assert set(candidates) <= used[override], override


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS.values() if "TOKENS" in kernel.overrides])
def test_every_tile_has_a_case_that_fills_it(kernel: contract.Kernel) -> None:
    tokens = {case.symbols["T"] for case in all_cases() if case.kernel == kernel.name}
    assert max(tokens) == kernel.overrides["TOKENS"] == kernel.when["T"][1]
    assert min(tokens) >= kernel.when["T"][0]


@pytest.mark.parametrize("case", all_cases()[::17], ids=lambda case: case.name)
def test_json_form(case: Case) -> None:
    document = json.loads(json.dumps(case.as_json(), allow_nan=False))
    sizes = binding_bytes(KERNELS[case.kernel], case.symbols)
    for name, text in document["inputs"].items():
        assert len(base64.b64decode(text)) == sizes[name]
    for name, data in case.expected.items():
        assert document["outputs"][name]["shape"] == list(data.shape)
        text = base64.b64encode(np.ascontiguousarray(data).tobytes()).decode()
        np.testing.assert_array_equal(from_base64(text, data), data)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_the_reference_passes_and_poison_does_not(case: Case) -> None:
    assert case.problems(case.expected) == []
    for name, data in case.expected.items():
        poison = np.full(data.size, 0x7FC0A5A5, dtype="<u4").view(data.dtype).reshape(data.shape)
        assert (
            case.checks[name].problem(poison, data, dict(case.expected)) or np.isnan(data).all()
            if data.dtype == "<f4"
            else True
        )


def test_checks_fail() -> None:
    """Each kind of check, on a difference just beyond what it allows."""
    numbers = np.array([1.0, -2.0, 0.0], dtype=np.float32)
    assert Exact().problem(np.nextafter(numbers, 9), numbers, {})
    assert Exact().problem(-numbers, numbers, {})
    assert Close(0.1).problem(numbers + 0.11, numbers, {})
    assert Close(0.1).problem(np.array([1, np.nan, 0], dtype=np.float32), numbers, {})
    assert Close(0.1).problem(numbers, np.array([1, np.inf, 0], dtype=np.float32), {})
    assert Close(0.1, nmse=1e-3).problem(numbers + 0.09, numbers, {})
    assert not Close(0.1).problem(numbers + 0.09, numbers, {})
    assert AsFloats(Close(0.1)).problem((numbers + 1).view("<u4"), numbers.view("<u4"), {})
    assert Rows(Exact(), 1, 1).problem(np.array([5.0, -2, 0], dtype=np.float32), numbers, {})
    assert Rows(Exact(), 1, 1).problem(np.array([1.0, 5, 0], dtype=np.float32), numbers, {})
    halves = np.array([1.0, 2.0], dtype=np.float16)
    exact = halves.astype(np.float64)
    assert Halves(exact, np.zeros(2)).problem(
        np.array([1.0, 2.005], dtype=np.float16).view("<u4"), halves.view("<u4"), {}
    )
    assert not Halves(exact, np.zeros(2)).problem(
        np.nextafter(halves, np.float16(9)).view("<u4"), halves.view("<u4"), {}
    )


def test_integer_checks_fail() -> None:
    words = np.zeros((1, 1, 1, 16), dtype="<u4")
    low = np.zeros((1, 5), dtype=np.int32)
    check = Between(low, low + 1, "a8")
    one, two, beyond = words.copy(), words.copy(), words.copy()
    one[0, 0, 0, 0], two[0, 0, 0, 0], beyond[0, 0, 0, 1] = 1, 2, 1 << 8
    assert not check.problem(one, words, {})
    assert "rounding" in check.problem(two, words, {})
    assert "padding" in check.problem(beyond, words, {})
    sums = np.array([[1]], dtype=np.int32)
    assert not BlockSums("q", "a8").problem(sums, sums, {"q": one})
    assert BlockSums("q", "a8").problem(sums, sums, {"q": two})
