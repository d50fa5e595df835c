"""The case list itself: what it covers, and that its checks can fail."""

from __future__ import annotations

import base64
import json
from collections import Counter

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


@pytest.mark.parametrize("name", KERNELS)
def test_every_override_value_of_a_kernel_has_a_case(name: str) -> None:
    kernel = KERNELS[name]
    used: dict[str, set[int]] = {}
    for case in all_cases():
        if case.kernel == name:
            for override, value in constants(kernel, case.symbols).items():
                used.setdefault(override, set()).add(value)
    for override, source in kernel.overrides.items():
        if isinstance(source, int):
            expected = {source}
        else:
            expected = set(contract.document()["enums"].get(source, {"no": 0, "yes": 1}).values())
            allowed = kernel.when.get(source)
            if allowed:
                expected = {contract.enum(source, value) for value in allowed}
            if source == "act":
                expected = {0} if kernel.op != "glu" else expected - {0}
            if name == "quantize" and source == "activation":
                expected = {1, 2}
            if source == "last_rows" and name in ("quantize", "glu"):
                expected = {0}  # only norm may take the last rows (program.py)
        assert expected <= used[override], f"{name}: {override}"
    for override, candidates in kernel.tuned.items():
        assert set(candidates) <= used[override], f"{name}: {override}"


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
