"""selfcheck.json is current, small, covers every kernel, and notices a wrong device."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shaders import contract, selfcheck
from shaders.checks import Exact
from shaders.native_cases import run_case
from shaders.native_device import shared_device


def test_it_is_current() -> None:
    assert selfcheck.main(["--check"]) == 0


def test_a_changed_file_is_not_current() -> None:
    text = selfcheck.FILE.read_text(encoding="utf-8")
    for change in ("name", "kernel"):
        document = json.loads(text)
        document["cases"][3][change] += "?"
        assert not selfcheck.is_current(json.dumps(document), text)
    document = json.loads(text)
    document["cases"][0]["expected"]["codes"] = document["cases"][0]["expected"]["codes"][::-1]
    assert not selfcheck.is_current(json.dumps(document), text)
    document = json.loads(text)
    document["cases"][7]["outputs"]["y"]["close"] *= 2
    assert not selfcheck.is_current(json.dumps(document), text)


def test_it_is_small_and_covers_every_kernel() -> None:
    assert selfcheck.FILE.stat().st_size < selfcheck.MOST_BYTES
    assert {case.kernel for case in selfcheck.stored_cases()} == {kernel.name for kernel in contract.kernels()}


@pytest.mark.parametrize("case", selfcheck.stored_cases(), ids=lambda case: case.name)
def test_the_device_passes_and_another_answer_does_not(case) -> None:
    outputs = run_case(shared_device(), case)
    assert case.problems(outputs) == []
    for name, check in case.checks.items():
        wrong = outputs[name].copy()
        if isinstance(check, Exact):
            wrong.reshape(-1).view("<u4")[-1] ^= 1
        else:
            last_number = np.flatnonzero(np.isfinite(wrong))[-1]
            wrong.reshape(-1)[last_number] += np.float32(2.5 * check.bound)
        assert case.problems({**outputs, name: wrong}), name
