"""Symbols, parameter blocks and dispatch sizes."""

from __future__ import annotations

import struct

import pytest

from shaders import contract
from shaders.case_kit import generator, random_weight
from shaders.native_weights import row_ranges
from shaders.symbols import binding_bytes, constants, op_symbols, params_bytes, weight_symbols, workgroups

KERNELS = {kernel.name: kernel for kernel in contract.kernels()}
VALUES = {
    "h": {"dtype": "f32", "shape": ["T", 100]},
    "a": {"dtype": "a16", "shape": ["T", 100]},
    "hn": {"dtype": "f32", "shape": ["R", 100]},
    "ha": {"dtype": "a8", "shape": ["R", 100]},
}


def test_weight_symbols_of_a_piece() -> None:
    weight = random_weight(generator("piece"), "ternary", 200, 577, group=128)
    symbols = weight_symbols(weight, 64, 65)
    assert symbols == {
        "encoding": "ternary", "scale": "group", "N": 65, "K": 577, "GROUP": 128, "GROUPS": 5, "ROW_WORDS": 40,
        "SCALE_WORDS": 163, "ROW0": 64, "OUT_N": 200, "GROUP_BLOCKS": 2, "K_REST": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("x", "out", "last_rows"),
    [("h", "a", 0), ("h", "hn", 1), ("hn", "ha", 0)],
    ids=["all", "the last of all", "all of the last"],
)
def test_norm_takes_the_last_rows_only_from_more(x: str, out: str, last_rows: int) -> None:
    op = {"op": "norm", "x": x, "gain": "g", "eps": 1e-5, "out": out}
    symbols = op_symbols(op, VALUES, "f16", 8)
    assert (symbols["last_rows"], symbols["activation"]) == (last_rows, VALUES[out]["dtype"])


def test_linear_counts_rows_of_its_output() -> None:
    op = {"op": "linear", "x": "hn", "w": "w", "out": "hn", "accumulate": True}
    symbols = op_symbols(op, VALUES, "f16", 8)
    assert (symbols["last_rows"], symbols["activation"], symbols["accumulate"], symbols["has_bias"]) == (
        1,
        "f32",
        1,
        0,
    )


def test_parameter_block() -> None:
    symbols = {"heads": 9, "kv_heads": 3, "head_dim": 64, "scale": 0.125}
    assert params_bytes(KERNELS["attention"], symbols) == struct.pack("<IIIf", 9, 3, 64, 0.125)


def test_tuned_symbols_replace_defaults() -> None:
    symbols = {
        "activation": "a8",
        "scale": "row",
        "has_bias": 0,
        "accumulate": 0,
        "last_rows": 0,
        "N": 130,
        "T": 17,
    }
    kernel = KERNELS["linear_ternary_narrow"]
    assert (constants(kernel, symbols)["WORKGROUP"], workgroups(kernel, symbols)) == (64, (3, 1, 3))
    assert constants(kernel, symbols | {"WORKGROUP": 128})["WORKGROUP"] == 128
    assert workgroups(kernel, symbols | {"WORKGROUP": 128}) == (2, 1, 3)


@pytest.mark.parametrize(("rows", "grid"), [(65535, (65535, 1, 1)), (65536, (32768, 2, 1)), (151936, (50646, 3, 1))])
def test_many_workgroups_are_folded(rows: int, grid: tuple[int, int, int]) -> None:
    found = workgroups(KERNELS["dequantize"], {"N": rows, "encoding": "q8", "scale": "group"})
    assert found == grid and found[0] * found[1] >= rows


def test_a_dispatch_may_depend_on_a_tuned_number() -> None:
    weight = random_weight(generator("rows"), "ternary", 130, 64)
    symbols = weight_symbols(weight) | {
        "activation": "a8", "has_bias": 0, "accumulate": 0, "last_rows": 0, "T": 1,
    }  # fmt: skip
    assert workgroups(KERNELS["linear_ternary"], symbols) == (9, 1, 1)
    assert workgroups(KERNELS["linear_ternary"], symbols | {"ROWS": 64}) == (3, 1, 1)


def test_symbols_of_an_operation_that_makes_integers_on_the_way() -> None:
    """``via`` is the value that a rewrite took out: its dtype and columns count, ``out`` gives the rest."""
    values = VALUES | {"y": {"dtype": "f32", "shape": ["T", 50]}}
    op = {"op": "norm_linear", "x": "h", "gain": "g", "eps": 1e-5, "via": "a", "w": "w", "out": "y"}
    symbols = op_symbols(op, values, "f16", 8)
    assert (symbols["activation"], symbols["PLANES"], symbols["last_rows"]) == ("a16", 2, 0)
    assert (symbols["Q_VECTORS"], symbols["Q_BYTES"]) == (4 * 2 * 2, 2 * (2 * 64 + 4))
    assert (symbols["has_gain"], symbols["has_bias"], symbols["accumulate"]) == (1, 0, 0)


def test_symbols_of_heads() -> None:
    op = {"op": "rope_attention", "x": "h", "heads": 9, "kv_heads": 3, "head_dim": 40, "scale": 0.5}
    symbols = op_symbols(op, VALUES, "q8", 300)
    names = ("ALL_HEADS", "QKV", "D_REST", "GROUP_HEADS", "GROUP_DIMS", "PART_VECTORS", "KV_WORDS", "S", "scale")
    assert [symbols[name] for name in names] == [15, 600, 8, 3, 120, 11, 10, 300, 0.5]


def test_binding_sizes() -> None:
    symbols = {"T": 3, "X_T": 3, "K": 65, "PLANES": 2}
    assert binding_bytes(KERNELS["norm"], symbols)["q"] == 3 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (10**6, [(0, 200)]),
        (64 * 160 * 2, [(0, 128), (128, 72)]),
        (64 * 160, [(0, 64), (64, 64), (128, 64), (192, 8)]),
    ],
)
def test_row_ranges(limit: int, expected: list[tuple[int, int]]) -> None:
    weight = random_weight(generator("tall"), "ternary", 200, 577)
    assert list(row_ranges(weight, limit)) == expected
