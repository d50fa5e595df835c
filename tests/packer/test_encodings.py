"""Weight encodings: every code word, odd sizes, round trips, error bounds, and quality beside gguf's."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from packer import encodings
from packer.errors import CheckpointError
from packer.manifest import data_layout, scale_layout
from shaders.float4 import E2M1, e4m3, e8m0
from shaders.reference import dequantize, unpack_trits
from shaders.weights import WeightTensor

#: Below, at and above the blocks of 4, 5, 20, 32 and 64, and the sizes of real models.
SIZES = [1, 2, 3, 4, 5, 6, 19, 20, 21, 31, 32, 33, 63, 64, 65, 576, 1536, 2560, 6912, 3200, 8640]
ROWS = [1, 2, 3, 5, 20, 21, 65]


#: Columns that share a scale.
GROUPS = {"q4a": 32, "nvfp4": 16, "mxfp4": 32}


def decode(
    encoding: str, data: np.ndarray, scales: np.ndarray | None, columns: int, own: float | None = None
) -> np.ndarray:
    group = GROUPS.get(encoding, encodings.GROUP) if scales is not None else 0
    return dequantize(WeightTensor("w", encoding, (len(data), columns), data, scales, None, (), group, own))


def round_trip(encoding: str, values: np.ndarray) -> np.ndarray:
    if encoding == "nvfp4":
        own = encodings.nvfp4_tensor_scale(float(np.abs(values).max()))
        return decode(encoding, *encodings.encode_nvfp4(values, own), values.shape[1], float(own))
    data, scales = encodings.encode(values, encoding)
    return decode(encoding, data, scales, values.shape[1])


def gaussian(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


# --- ternary ------------------------------------------------------------------------------------------------


def all_words() -> np.ndarray:
    """All 243 words of five trits, most significant first, int8 ``[243, 5]``."""
    return np.stack(np.meshgrid(*[[-1, 0, 1]] * 5, indexing="ij"), axis=-1).reshape(-1, 5).astype(np.int8)


def test_every_word_of_five_trits() -> None:
    words = all_words()
    packed = encodings.encode_trits(words)
    assert packed.shape == (243, 4)
    for number, byte in enumerate(packed[:, 0].tolist()):
        assert byte == -(-number * 256 // 243)  # ceil(v * 256 / 243), FORMAT.md
        digits = [(((byte * 3**n) & 255) * 3) >> 8 for n in range(5)]
        assert digits == [number // 3 ** (4 - n) % 3 for n in range(5)]
    assert len(set(packed[:, 0].tolist())) == 243
    assert (packed[:, 1:] == 128).all()  # 128 is the word of five zeros: padding to whole u32 words
    np.testing.assert_array_equal(unpack_trits(packed, 5), words)


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 21])
def test_ternary_round_trip(rows: int, columns: int) -> None:
    trits = np.random.default_rng(columns).integers(-1, 2, size=(rows, columns)).astype(np.int8)
    packed = encodings.encode_trits(trits)
    assert packed.dtype == np.uint8 and packed.shape == (rows, 4 * -(-columns // 20))
    np.testing.assert_array_equal(unpack_trits(packed, columns), trits)
    beyond = unpack_trits(packed, packed.shape[1] * 5)[:, columns:]
    assert not beyond.any()


# --- f16 and f32 --------------------------------------------------------------------------------------------


def all_finite_halves() -> np.ndarray:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    return halves[np.isfinite(halves)]


def test_every_half_comes_back_bit_for_bit() -> None:
    """Subnormals and the sign of zero too."""
    halves = all_finite_halves()
    assert len(halves) == 63488
    values = halves.astype(np.float32)[None]
    data = encodings.encode_f16(values)
    found = decode("f16", data, None, len(halves))
    np.testing.assert_array_equal(data.view(np.uint16)[0, : len(halves)], halves.view(np.uint16))
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("encoding", ["f16", "f32"])
def test_float_round_trip(encoding: str, columns: int) -> None:
    values = gaussian(3, columns)
    found = round_trip(encoding, values)
    expected = values.astype(np.float16).astype(np.float32) if encoding == "f16" else values
    np.testing.assert_array_equal(found, expected)


def test_f16_refuses_what_does_not_fit() -> None:
    np.testing.assert_array_equal(round_trip("f16", np.float32([[65504, -65504]])), [[65504, -65504]])
    for value in (65505.0, -1e6, 3e38):
        with pytest.raises(CheckpointError, match="f16"):
            encodings.encode_f16(np.float32([[0, value]]))


# --- q8 and q4 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "low", "high"), [("q8", -127, 127), ("q4", -8, 7)])
def test_every_code_decodes_to_itself_times_the_scale(encoding: str, low: int, high: int) -> None:
    """Built by hand, so that the layout is FORMAT.md's and not the encoder's."""
    codes = np.arange(low, high + 1)
    codes = np.concatenate([codes, np.zeros(-len(codes) % 32, dtype=int)])
    scales = np.linspace(0.25, 4, len(codes) // 32).astype(np.float16)[None]
    if encoding == "q8":
        data = codes.astype(np.int8)[None]
    else:
        pairs = [(codes[2 * j] + 8) | (codes[2 * j + 1] + 8) << 4 for j in range(len(codes) // 2)]
        data = np.array([pairs], dtype=np.uint8)
    expected = codes * np.repeat(scales.astype(np.float32), 32)
    np.testing.assert_array_equal(decode(encoding, data, scales, len(codes))[0], expected)


@pytest.mark.parametrize(("encoding", "low", "high"), [("q8", -127, 127), ("q4", -8, 7)])
def test_decoded_values_are_found_again(encoding: str, low: int, high: int) -> None:
    """A group that uses the lowest code has one best fit, the one it came from: what a Q8_0 source needs."""
    random = np.random.default_rng(4)
    codes = random.integers(low, high + 1, size=(200, 32))
    codes[np.arange(200), random.integers(0, 32, size=200)] = low
    scales = (2.0 ** random.integers(-14, 5, size=(200, 1)) * random.uniform(1, 2, (200, 1))).astype(np.float16)
    values = codes.astype(np.float32) * scales.astype(np.float32)
    np.testing.assert_array_equal(round_trip(encoding, values), values)


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("encoding", ["q8", "q4"])
def test_quantized_error_is_within_its_bound(encoding: str, columns: int) -> None:
    values = gaussian(5, columns, seed=columns) * np.float32([[1], [1e-3], [50], [0], [1e-6]])
    found = round_trip(encoding, values)
    padded = np.pad(values, ((0, 0), (0, -columns % 32))).reshape(5, -1, 32)
    greatest = np.repeat(np.abs(padded).max(axis=-1), 32, axis=1)[:, :columns]
    # A code is off by at most half a step, and the greatest value by what rounding the scale to f16 costs:
    # 2^-11 of it, or 2^-25 a code where the scale is subnormal. q4 reaches from -8 to 7: with the greatest at
    # -8 steps, a value of the other sign as great clips by a whole step. Another scale is taken only if
    # the sum of squares over the group gets smaller, so that sum is what is bounded.
    levels, steps = (127, 0.5) if encoding == "q8" else (8, 1.0)
    bound = greatest * (steps / levels + 2**-11) + levels * 2.0**-25
    error = np.pad(np.abs(found - values), ((0, 0), (0, -columns % 32))).reshape(5, -1, 32)
    limit = np.pad(bound, ((0, 0), (0, -columns % 32))).reshape(5, -1, 32)
    assert (np.square(error).sum(-1) <= np.square(limit).sum(-1) * (1 + 1e-5)).all()
    assert (found[3] == 0).all()


@pytest.mark.parametrize("columns", SIZES)
def test_padding_columns_are_zero_codes(columns: int) -> None:
    values = gaussian(2, columns)
    q8, scales = encodings.encode_q8(values)
    assert q8.dtype == np.int8 and q8.shape == (2, data_layout("q8", columns)[1])
    assert scales.dtype == np.float16 and scales.shape == (2, -(-columns // 32))
    assert not q8[:, columns:].any()
    q4, scales = encodings.encode_q4(values)
    assert q4.dtype == np.uint8 and q4.shape == (2, data_layout("q4", columns)[1])
    nibbles = np.stack([q4 & 15, q4 >> 4], axis=-1).reshape(2, -1)
    assert (nibbles[:, columns:] == 8).all()
    for data in (encodings.encode_f16(values), encodings.encode_f32(values)):
        assert data.shape == (2, -(-columns // 4) * 4) and not data[:, columns:].any()


DISTRIBUTIONS = {
    "gaussian": lambda random: random.standard_normal((64, 256)),
    "small": lambda random: 1e-3 * random.standard_normal((64, 256)),
    "tiny": lambda random: 1e-6 * random.standard_normal((64, 256)),
    "heavy tails": lambda random: random.standard_t(2, (64, 256)),
    "uniform": lambda random: random.uniform(-1, 1, (64, 256)),
    "one sign": lambda random: random.uniform(0, 1, (64, 256)),
    "offset": lambda random: 5 + random.standard_normal((64, 256)),
    "sparse": lambda random: random.standard_normal((64, 256)) * (random.random((64, 256)) < 0.1),
    "symmetric extremes": lambda random: np.sign(random.standard_normal((64, 256))),
    "ternary": lambda random: 0.037 * random.integers(-1, 2, (64, 256)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("encoding", "kind"), [("q8", "Q8_0"), ("q4", "Q4_0")])
def test_quality_is_never_below_that_of_gguf(encoding: str, kind: str, name: str) -> None:
    """Group by group, since each of ours starts from gguf's scale and keeps a fit only if it is better."""
    values = DISTRIBUTIONS[name](np.random.default_rng(1)).astype(np.float32)
    quant = gguf.GGMLQuantizationType[kind]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant)
    assert_no_worse(values, round_trip(encoding, values), theirs)


def assert_no_worse(values: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> None:
    def squares(found: np.ndarray) -> np.ndarray:
        return np.square(found.astype(np.float64) - values).reshape(-1, 32).sum(axis=-1)

    # The fit compares sums of squares in float32: a part in 10^5 is its noise.
    assert (squares(ours) <= squares(theirs) * (1 + 1e-5) + 1e-30).all()


FLOATS = st.floats(-1000, 1000, width=32)


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(np.float32, (2, 64), elements=FLOATS))
def test_quality_is_never_below_that_of_gguf_on_any_values(values: np.ndarray) -> None:
    for encoding, kind in (("q8", "Q8_0"), ("q4", "Q4_0")):
        quant = gguf.GGMLQuantizationType[kind]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            theirs = gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant)
        assert_no_worse(values, round_trip(encoding, values), theirs)


@settings(max_examples=60, deadline=None)
@given(
    arrays.arrays(np.int8, st.tuples(st.integers(1, 4), st.integers(1, 70)), elements=st.integers(-1, 1)),
    st.sampled_from(["q8", "q4"]),
    st.floats(2.0**-6, 100, width=16),  # below, q8 scales are subnormal halves and coarser
)
def test_ternary_values_survive_any_encoding(trits: np.ndarray, encoding: str, scale: float) -> None:
    """One magnitude a group has an exact code: the greatest times a scale that f16 holds, or nearly."""
    values = trits.astype(np.float32) * np.float32(scale)
    np.testing.assert_allclose(round_trip(encoding, values), values, rtol=2**-11)


def test_scales_beyond_f16_are_refused() -> None:
    with pytest.raises(CheckpointError, match="f16"):
        encodings.encode_q8(np.float32([[1e9]]))
    with pytest.raises(CheckpointError, match="f16"):
        encodings.encode_q4(np.float32([[1e9]]))


@pytest.mark.parametrize("encoding", ["q8", "q4", "q4a", "mxfp4", "f16", "f32"])
def test_rows_are_encoded_on_their_own(encoding: str) -> None:
    """Rows in pieces give the bytes of the whole: what lets large tensors pass through little memory."""
    values = gaussian(7, 50)
    whole = round_trip(encoding, values)
    pieces = [round_trip(encoding, values[start : start + 3]) for start in range(0, 7, 3)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


# --- q4a: a scale and a minimum ------------------------------------------------------------------------------


def q4_1(values: np.ndarray) -> np.ndarray:
    """What gguf's Q4_1 makes of values."""
    quant = gguf.GGMLQuantizationType.Q4_1
    decoded: np.ndarray = gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant)
    return decoded


def q4_1_bytes(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Blocks of Q4_1 as ggml lays them out: f16 scale, f16 minimum, elements i and i + 16 in byte i."""
    pairs = np.stack([scales, minima], axis=-1).astype(np.float16).view(np.uint8)
    return np.concatenate([pairs, codes[:, :16] | codes[:, 16:] << 4], axis=1).astype(np.uint8)


def test_q4a_decodes_as_q4_1_of_gguf() -> None:
    """Every code, scales and minima of both signs and subnormal ones, from the layout of FORMAT.md."""
    random = np.random.default_rng(3)
    codes = np.concatenate([np.arange(32) % 16, random.integers(0, 16, 32 * 199)]).reshape(200, 32).astype(np.uint8)
    pairs = (random.normal(size=(200, 2)) * np.exp2(random.integers(-22, 8, (200, 2)))).astype(np.float16)
    expected = gguf.quants.dequantize(q4_1_bytes(codes, pairs[:, 0], pairs[:, 1]), gguf.GGMLQuantizationType.Q4_1)
    found = decode("q4a", codes[:, 0::2] | codes[:, 1::2] << 4, pairs, 32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_q4a_keeps_q4_1_bit_for_bit(name: str) -> None:
    values = q4_1(DISTRIBUTIONS[name](np.random.default_rng(1)).astype(np.float32))
    np.testing.assert_array_equal(round_trip("q4a", values), values)


def test_q4a_keeps_groups_that_use_some_of_the_codes() -> None:
    """Neither the least nor the greatest weight says what the minimum is, and codes with gaps not what the scale is."""
    random = np.random.default_rng(5)
    codes = np.clip(random.integers(0, 16, (3000, 32)), *np.sort(random.integers(0, 16, (2, 3000, 1)), axis=0))
    codes = np.where(random.random((3000, 1)) < 0.2, codes // 4 * 4, codes).astype(np.uint8)
    scales = (2.0 ** random.integers(-10, 3, 3000) * random.uniform(1, 2, 3000)).astype(np.float16)
    minima = (-scales.astype(np.float32) * random.uniform(0, 15, 3000)).astype(np.float16)
    kind = gguf.GGMLQuantizationType.Q4_1
    values = gguf.quants.dequantize(q4_1_bytes(codes, scales, minima), kind)
    found = round_trip("q4a", values)
    np.testing.assert_allclose(found, values, rtol=2**-11)
    several = np.ptp(codes, axis=1) > 0  # what is constant need not be a number of f16
    np.testing.assert_array_equal(found[several], values[several])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_q4a_is_never_below_q4_1(name: str) -> None:
    values = DISTRIBUTIONS[name](np.random.default_rng(2)).astype(np.float32)
    found = round_trip("q4a", values)
    assert_no_worse(values, found, q4_1(values))
    if name in ("gaussian", "uniform", "offset", "heavy tails"):
        errors = [np.square(decoded - values).sum() for decoded in (found, q4_1(values), round_trip("q4", values))]
        assert errors[0] < min(errors[1:]) * 0.97


def test_q4a_refuses_what_no_minimum_holds() -> None:
    for value in (65505.0, -1e6, 3e38):
        with pytest.raises(CheckpointError, match="f16"):
            encodings.encode_q4a(np.float32([[0, value]]))
    values = np.float32([[65504, -65504, 0, 1]])
    assert np.isfinite(encodings.encode_q4a(values)[1]).all()


# --- floats of four bits -------------------------------------------------------------------------------------


def test_every_code_of_small_floats_is_that_of_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(E2M1.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(e4m3(codes[:128]), codes[:128].view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_array_equal(e8m0(codes), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def small_floats(rows: int, columns: int, encoding: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(data, scales, values from ml_dtypes) of random codes."""
    random = np.random.default_rng(columns)
    group = GROUPS[encoding]
    width = 32 * -(-columns // 32)
    codes = random.integers(0, 16, (rows, width)).astype(np.uint8)
    codes[:, columns:] = 0
    most = 0x7F if encoding == "nvfp4" else 253
    scales = random.integers(0, most, (rows, -(-columns // group))).astype(np.uint8)
    kind = ml_dtypes.float8_e4m3fn if encoding == "nvfp4" else ml_dtypes.float8_e8m0fnu
    wide = np.repeat(scales.view(kind).astype(np.float32), group, axis=1)[:, :columns]
    values = codes[:, :columns].view(ml_dtypes.float4_e2m1fn).astype(np.float32) * wide
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, values


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 33, 48, 576])
@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4"])
def test_small_floats_decode_as_in_ml_dtypes(encoding: str, columns: int) -> None:
    data, scales, values = small_floats(5, columns, encoding)
    own = 0.37 if encoding == "nvfp4" else None
    found = decode(encoding, data, scales, columns, own)
    np.testing.assert_array_equal(found, values * np.float32(own or 1))


def test_mxfp4_decodes_as_in_gguf() -> None:
    """ggml's block: the scale, then elements i and i + 16 in byte i."""
    data, scales, _ = small_floats(500, 32, "mxfp4")
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(500, 32)
    blocks = np.concatenate([scales, codes[:, :16] | codes[:, 16:] << 4], axis=1)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(decode("mxfp4", data, scales, 32), expected)


@pytest.mark.parametrize("columns", [16, 33, 576])
@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4"])
def test_small_floats_are_found_again(encoding: str, columns: int) -> None:
    """Blocks with a 6 in them, which says what their scale is."""
    random = np.random.default_rng(columns)
    group, blocks = GROUPS[encoding], -(-columns // GROUPS[encoding])
    codes = random.integers(0, 16, (50, columns))
    codes[:, ::group] = 7
    values = E2M1[codes]
    if encoding == "nvfp4":
        scales = e4m3(random.integers(8, 0x7F, (50, blocks)).astype(np.uint8))
        scales[0, 0] = 448
        scales *= np.float32(2.0**-9)
    else:
        scales = np.exp2(random.integers(-60, 60, (50, blocks))).astype(np.float32)
    values = values * np.repeat(scales, group, axis=1)[:, :columns]
    np.testing.assert_array_equal(round_trip(encoding, values), values)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_mxfp4_is_never_below_that_of_gguf(name: str) -> None:
    values = DISTRIBUTIONS[name](np.random.default_rng(1)).astype(np.float32)
    quant = gguf.GGMLQuantizationType.MXFP4
    assert_no_worse(
        values,
        round_trip("mxfp4", values),
        gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant),
    )


def test_small_floats_take_the_best_of_their_candidates() -> None:
    """Beside a search of every code: nothing is nearer for the scale taken, and neighbours of it are worse."""
    values = gaussian(40, 32, seed=9)
    own = encodings.nvfp4_tensor_scale(float(np.abs(values).max()))
    for encoding, scale_of in (("nvfp4", lambda codes: e4m3(codes) * own), ("mxfp4", e8m0)):
        data, scales = encodings.encode_nvfp4(values, own) if encoding == "nvfp4" else encodings.encode_mxfp4(values)
        groups = values.reshape(40, -1, GROUPS[encoding])
        found = decode(encoding, data, scales, 32, float(own) if encoding == "nvfp4" else None).reshape(groups.shape)
        for step in (-1, 0, 1):
            wide = scale_of((scales.astype(int) + step).clip(0, 0x7E).astype(np.uint8))[..., None, None]
            nearest = np.abs(groups[..., None] - E2M1 * wide).min(axis=-1)
            best = np.square(nearest).sum(axis=-1)
            error = np.square(groups - found).sum(axis=-1)
            if step == 0:
                np.testing.assert_allclose(error, best, rtol=1e-5)
            elif encoding == "nvfp4":
                # A scale may have been taken that lies beside the nearest one, whose other neighbour was not tried.
                assert (error <= best * (1 + 1e-5)).mean() > 0.9
            else:
                assert (error <= best * (1 + 1e-5)).all()


def test_ties_go_to_the_even_code() -> None:
    """Halfway between two of 0, 0.5, 1, 1.5, 2, 3, 4, 6, as IEEE 754 rounds."""
    middles = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = np.concatenate([[6], middles, -middles, np.zeros(17)]).astype(np.float32)[None]
    expected = [0, 1, 1, 2, 2, 4, 4]
    found = decode("mxfp4", *encodings.encode_mxfp4(values), 32)[0]
    np.testing.assert_array_equal(found[1:15], [*expected, *(-value for value in expected)])


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("encoding", ["q4a", "nvfp4", "mxfp4"])
def test_layout_of_four_bits(encoding: str, columns: int) -> None:
    values = gaussian(2, columns)
    own = encodings.nvfp4_tensor_scale(4)
    data, scales = encodings.encode_nvfp4(values, own) if encoding == "nvfp4" else encodings.encode(values, encoding)
    assert data.dtype == np.uint8 and data.shape == (2, data_layout(encoding, columns)[1])
    dtype, width = scale_layout(encoding, columns, GROUPS[encoding])
    assert scales.shape == (2, width) and scales.dtype == {"F16": np.float16, "U8": np.uint8}[dtype]
    nibbles = np.stack([data & 15, data >> 4], axis=-1).reshape(2, -1)
    assert not nibbles[:, columns:].any()


@pytest.mark.parametrize("encoding", ["q4a", "nvfp4", "mxfp4"])
def test_nothing_but_zeros_and_the_smallest_numbers(encoding: str) -> None:
    zeros = np.zeros((2, 40), dtype=np.float32)
    np.testing.assert_array_equal(round_trip(encoding, zeros), zeros)
    tiny = np.full((2, 40), 1e-42, dtype=np.float32)
    assert np.abs(round_trip(encoding, tiny)).max() <= 2e-38
