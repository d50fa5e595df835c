"""Every kernel case on the native GPU: over poisoned outputs, between guards."""

from __future__ import annotations

import pytest

from shaders.case_kit import Case
from shaders.cases import all_cases
from shaders.native_cases import run_case
from shaders.native_device import shared_device


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    assert case.problems(run_case(shared_device(), case)) == []
