"""``kernels.json``: its grammar as Python reads it, and its agreement with packs and programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from packer import encodings
from packer.manifest import ENCODINGS, SCALE_KINDS, data_layout
from shaders import contract
from shaders.contract import ContractError, document, evaluate, kernels, select

SYMBOLS = {"N": 130, "K": 65, "T": 1, "encoding": "q8", "scale": "group"}


@pytest.mark.parametrize(
    ("dim", "expected"),
    [(7, 7), ("N", 130), (["N", 64], 3), (["K", 65], 1), ([["K", 64], 2], 1), (["N", ["K", 64]], 65), ([0, 4], 0)],
)
def test_dimensions_round_up(dim: Any, expected: int) -> None:
    assert evaluate(dim, SYMBOLS) == expected


def test_an_unknown_symbol_is_an_error() -> None:
    with pytest.raises(KeyError, match="M"):
        evaluate(["M", 4], SYMBOLS)


def test_elements_are_the_product() -> None:
    assert contract.element_count(("N", ["K", 64], 4), SYMBOLS) == 130 * 2 * 4
    assert contract.element_count((), SYMBOLS) == 1


@pytest.mark.parametrize(("number", "divisor"), [(0, 4), (1, 4), (4, 4), (5, 4), (10**15 + 1, 10)])
def test_quotients_round_up(number: int, divisor: int) -> None:
    quotient = contract.quotient_up(number, divisor)
    assert (quotient - 1) * divisor < number <= quotient * divisor


def test_messages_stay_short() -> None:
    assert contract.short("x") == "'x'"
    assert len(contract.short(["y" * 10] * 1000)) == 80


def test_every_operation_has_a_kernel_and_every_kernel_an_operation() -> None:
    known = {*document()["ops"], *document()["utilities"]}
    assert {kernel.op for kernel in kernels()} == known


def test_words_of_packs_have_numbers() -> None:
    enums = document()["enums"]
    assert set(enums["encoding"]) == set(ENCODINGS) == set(document()["encodings"])
    assert set(enums["scale"]) == set(SCALE_KINDS)
    assert set(enums["activation"]) == {"f32", *contract.INTEGER_ACTIVATIONS}
    assert set(enums["act"]) - {"none"} == set(document()["ops"]["glu"]["strings"]["act"])
    for kind, values in enums.items():
        if kind != "scale":  # by part and by row are one case to a kernel: both are one scale a row
            assert len(set(values.values())) == len(values), kind


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("columns", [1, 20, 21, 64, 65, 576])
def test_disk_blocks_are_those_of_packs(encoding: str, columns: int) -> None:
    block = contract.encoding(encoding)
    dtype, width = data_layout(encoding, columns)
    words = contract.quotient_up(columns, block["disk_block"]) * block["disk_block_words"]
    assert 4 * words == width * {"U8": 1, "I8": 1, "F16": 2, "F32": 4}[dtype]


def test_groups_of_scales_are_those_of_packs() -> None:
    for encoding in ("q8", "q4"):
        assert contract.encoding(encoding)["block"] == encodings.GROUP


def test_the_first_kernel_that_fits_is_chosen() -> None:
    for kernel in kernels():
        earlier = [other for other in kernels() if other.op == kernel.op]
        assert earlier[0].when or earlier == [kernel], (
            f"{kernel.name} can never be chosen: the first one takes everything"
        )
    symbols = {"T": 1, "encoding": "ternary", "activation": "a8"}
    one, many = select("linear", symbols), select("linear", {**symbols, "T": 64})
    assert one.name != many.name
    assert one.when["T"][1] >= 1 and many.when["T"][0] <= 64 <= many.when["T"][1]
    assert select("linear", {**symbols, "encoding": "q8", "activation": "f32"}).name != one.name


def test_features_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    symbols = {"T": 1, "encoding": "ternary", "activation": "a8"}
    plain = select("linear", symbols)
    fast = dataclasses.replace(plain, name="fast", needs=("subgroups",))
    monkeypatch.setattr(contract, "kernels", lambda: (fast, plain))
    assert select("linear", symbols).name == plain.name
    assert select("linear", symbols, frozenset({"subgroups"})).name == "fast"


def test_no_kernel_is_an_error_with_the_rules_name() -> None:
    with pytest.raises(ContractError, match="fold") as caught:
        select("fold", {})
    assert caught.value.rule == "operation"
    with pytest.raises(ContractError):
        select("linear", {"T": 1, "encoding": "ternary", "activation": "a4"})


def test_overrides_become_numbers() -> None:
    kernel = dataclasses.replace(
        kernels()[0], tuned={"WORKGROUP": [64, 128]}, overrides={"ENCODING": "encoding", "GATHER": 1, "ROWS": "N"}
    )
    assert contract.override_values(kernel, SYMBOLS) == {"WORKGROUP": 64, "ENCODING": 1, "GATHER": 1, "ROWS": 130}


def test_integer_sums_cannot_overflow() -> None:
    """The greatest magnitude of a8 is 128 and of a16 32639; a sum of that many of them still fits an i32."""
    most = contract.document()["ops"]["linear"]["most_columns"]
    for dtype, magnitude in {"a8": contract.constant("a8_max") + 1, "a16": contract.constant("a16_max")}.items():
        assert most[dtype] == (2**31 - 1) // magnitude
