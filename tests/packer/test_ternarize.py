"""Finding ternary weights: what is exactly ternary comes back bit for bit, and nothing else passes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.errors import CheckpointError
from packer.ternarize import Ternary, detect, unpack_bitnet


def trits(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Every row and every group of 64 columns has a value other than 0."""
    found = np.random.default_rng(seed).integers(-1, 2, size=(rows, columns)).astype(np.float32)
    found[:, ::64] = 1
    return found


def halves(shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    """Random scales that f16 holds, f32."""
    return np.random.default_rng(seed).uniform(0.01, 2, shape).astype(np.float16).astype(np.float32)


def whole(weight: np.ndarray) -> Ternary | None:
    """What is found in a matrix, the same whether it comes in one piece or in several."""
    found, pieces = detect([weight]), detect(np.array_split(weight, min(3, len(weight))))
    assert (found is None) == (pieces is None)
    if found is not None and pieces is not None:
        assert (found.scale_kind, found.group) == (pieces.scale_kind, pieces.group)
        np.testing.assert_array_equal(found.trits, pieces.trits)
        np.testing.assert_array_equal(found.scales, pieces.scales)
    return found


def value(found: Ternary) -> np.ndarray:
    """The matrix that trits and scales stand for, f32 ``[N, K]``, asked for in two parts."""
    middle = len(found.trits) // 2
    return np.concatenate([found.values(0, middle), found.values(middle, len(found.trits))])


def assert_found(weight: np.ndarray, kind: str, group: int = 0) -> Ternary:
    found = whole(weight)
    assert found is not None
    assert (found.scale_kind, found.group) == (kind, group)
    assert found.trits.dtype == np.int8 and found.trits.shape == weight.shape
    assert found.scales.dtype == (np.float16 if kind == "group" else np.float32)
    np.testing.assert_array_equal(value(found), weight)
    return found


@pytest.mark.parametrize("columns", [1, 3, 20, 63, 64, 65, 200])
def test_one_scale_a_tensor(columns: int) -> None:
    for scale in (1.0, 0.123456789, 3e-5, 7e4):
        assert_found(trits(6, columns) * np.float32(scale), "parts")


@pytest.mark.parametrize("columns", [1, 3, 20, 63, 64, 65, 200])
def test_one_scale_a_row(columns: int) -> None:
    scales = np.random.default_rng(2).uniform(0.01, 2, (6, 1)).astype(np.float32)
    assert_found(trits(6, columns) * scales, "row")


@pytest.mark.parametrize("columns", [64, 65, 128, 129, 256, 300, 576])
@pytest.mark.parametrize("group", [64, 128, 256])
def test_one_scale_a_group_of_columns(group: int, columns: int) -> None:
    groups = -(-columns // group)
    weight = trits(5, columns) * np.repeat(halves((5, groups)), group, axis=1)[:, :columns]
    if groups == 1:
        assert_found(weight, "row")
    else:
        found = assert_found(weight, "group", group)
        assert found.scales.shape == (5, groups)


def test_group_scales_that_f16_does_not_hold_are_not_rounded() -> None:
    weight = trits(4, 256) * np.repeat(np.float32([[0.1, 0.2]] * 4), 128, axis=1)
    assert whole(weight) is None
    assert whole(weight.astype(np.float16).astype(np.float32)) is not None


def test_zeros_of_either_sign_and_zero_rows() -> None:
    weight = trits(4, 70) * np.float32(0.5)
    weight[1] = 0
    weight[2, :3] = -0.0
    assert_found(weight, "parts")
    weight[3] *= 2
    assert assert_found(weight, "row").scales[1] == 0
    assert assert_found(np.zeros((3, 64), dtype=np.float32), "parts").scales.tolist() == [0]


def test_a_single_odd_value_is_not_ternary() -> None:
    weight = trits(8, 300) * np.float32(0.25)
    assert whole(weight) is not None
    weight[7, 299] = np.nextafter(np.float32(0.25), np.float32(1))
    assert whole(weight) is None


def test_two_magnitudes_are_not_ternary() -> None:
    weight = np.where(trits(4, 256, seed=3) > 0, 0.5, -0.25).astype(np.float32)
    assert whole(weight) is None
    assert whole(np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)) is None


def test_values_that_bf16_holds() -> None:
    """How TriLM and unpacked ternary checkpoints store them."""
    scale = np.float32(np.array(0.0731, dtype=ml_dtypes.bfloat16))
    assert assert_found(trits(4, 80) * scale, "parts").scales[0] == scale


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 300), st.sampled_from(["parts", "row", "group"]), st.integers(0, 2**31))
def test_whatever_is_found_is_exact(rows: int, columns: int, kind: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(-1, 2, size=(rows, columns)).astype(np.float32)
    scales = {
        "parts": halves((1, 1), seed),
        "row": halves((rows, 1), seed),
        "group": np.repeat(halves((rows, -(-columns // 64)), seed), 64, axis=1)[:, :columns],
    }[kind]
    found = whole(codes * scales)
    assert found is not None
    np.testing.assert_array_equal(value(found), codes * scales)


def test_every_packed_byte() -> None:
    packed = np.arange(256, dtype=np.uint8)[None]
    codes = np.stack([(packed[0] >> shift) & 3 for shift in (0, 2, 4, 6)])
    valid = (codes < 3).all(axis=0)
    assert valid.sum() == 81
    np.testing.assert_array_equal(unpack_bitnet(packed[:, valid], 4), codes[:, valid].astype(np.int8) - 1)
    for byte in np.flatnonzero(~valid).tolist():
        with pytest.raises(CheckpointError, match="code of 3"):
            unpack_bitnet(packed[:, byte : byte + 1], 4)
