"""The NumPy reference: layouts against formulas written bit by bit, operations against torch and plain Python."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from packer.encodings import encode_f16, encode_f32, encode_q4, encode_q8, encode_trits
from shaders import reference
from shaders.reference import Quantized
from shaders.weights import WeightTensor

COLUMNS = [1, 3, 4, 19, 20, 21, 63, 64, 65, 128, 130, 576]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_trits(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 2, size=(rows, columns)).astype(np.int8)


def ternary(trits: np.ndarray, kind: str = "row", group: int = 0, seed: int = 9) -> WeightTensor:
    rows, columns = trits.shape
    random = np.random.default_rng(seed)
    if kind == "parts":
        parts = (rows - rows // 3, rows // 3) if rows >= 3 else (rows,)
        scales = random.uniform(0.1, 2, len(parts)).astype(np.float32)
        return WeightTensor("w", "ternary", trits.shape, encode_trits(trits), scales, kind, parts)
    if kind == "row":
        scales = random.uniform(0.1, 2, rows).astype(np.float32)
        return WeightTensor("w", "ternary", trits.shape, encode_trits(trits), scales, kind)
    scales = random.uniform(0.1, 2, (rows, -(-columns // group))).astype(np.float16)
    return WeightTensor("w", "ternary", trits.shape, encode_trits(trits), scales, kind, (), group)


# --- layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", COLUMNS)
def test_resident_layout_bit_by_bit(columns: int) -> None:
    """Byte b, slot s (bits 8b+2s) of word j in block i holds code = trit + 1 of column 64i + 16j + 4s + b."""
    trits = random_trits(3, columns)
    weight = ternary(trits)
    words = reference.expand(weight)
    assert words.dtype == np.uint32 and words.shape == (3, -(-columns // 64), 4)
    assert weight.row_words == words.shape[1] * 4
    for row, block, j in np.ndindex(words.shape):
        for b in range(4):
            for s in range(4):
                column = 64 * block + 16 * j + 4 * s + b
                expected = trits[row, column] + 1 if column < columns else 1
                assert (int(words[row, block, j]) >> (8 * b + 2 * s)) & 3 == expected


def test_four_neighbours_lie_in_the_four_bytes() -> None:
    """What the layout is for: (w >> 2s) & 0x03030303 is the codes of columns 4s..4s+3, little-endian."""
    trits = random_trits(2, 64)
    words = reference.resident_codes(trits)
    for s in range(4):
        four = ((words >> np.uint32(2 * s)) & np.uint32(0x03030303)).view(np.uint8).reshape(2, 4, 4)
        np.testing.assert_array_equal(four, (trits + 1).reshape(2, 4, 4, 4)[:, :, s])


def test_every_byte_decodes_as_the_formula_says() -> None:
    """All 256, also those that encode nothing: the GPU reads them by the same formula."""
    packed = np.zeros((256, 4), dtype=np.uint8)
    packed[:, 0] = np.arange(256)
    found = reference.unpack_trits(packed, 5)
    for byte in range(256):
        assert found[byte].tolist() == [((((byte * 3**n) & 255) * 3) >> 8) - 1 for n in range(5)]


@pytest.mark.parametrize("columns", COLUMNS)
def test_integer_activations_bit_by_bit(columns: int) -> None:
    for kind, low, high in (("a8", -128, 127), ("a16", -32639, 32639)):
        q = np.random.default_rng(1).integers(low, high + 1, size=(3, columns)).astype(np.int32)
        q[0, 0], q[1, 0] = low, high
        found = Quantized(q, np.ones(3, np.float32), kind)
        planes = 1 if kind == "a8" else 2
        blocks = -(-columns // 64)
        assert found.words.dtype == np.uint32 and found.words.shape == (3, blocks, planes, 16)
        assert found.sums.dtype == np.int32 and found.sums.shape == (3, blocks)
        for token, block in np.ndindex(3, blocks):
            total = 0
            for element in range(64):
                parts = []
                for plane in range(planes):
                    byte = (int(found.words[token, block, plane, element // 4]) >> (8 * (element % 4))) & 255
                    parts.append(byte - 256 if byte > 127 else byte)
                value = parts[0] if kind == "a8" else 256 * parts[0] + parts[1]
                column = 64 * block + element
                assert value == (q[token, column] if column < columns else 0)
                total += value
            assert found.sums[token, block] == total


@pytest.mark.parametrize("kind", ["a8", "a16"])
def test_every_integer_activation(kind: str) -> None:
    """Both planes of every a16 value are int8, and the value comes back."""
    limit = 127 if kind == "a8" else 32639
    q = np.arange(-limit - (kind == "a8"), limit + 1, dtype=np.int32)
    q = np.concatenate([q, np.zeros(-len(q) % 64, dtype=np.int32)])[None]
    bytes_ = Quantized(q, np.ones(1, np.float32), kind).words.view(np.int8).astype(np.int32)
    planes = bytes_.reshape(-1, 1 if kind == "a8" else 2, 64)
    value = planes[:, 0] if kind == "a8" else 256 * planes[:, 0] + planes[:, 1]
    np.testing.assert_array_equal(value.reshape(-1), q[0])


# --- weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 20, 63, 65, 200])
@pytest.mark.parametrize(("kind", "group"), [("parts", 0), ("row", 0), ("group", 64), ("group", 128)])
def test_dequantize_ternary(kind: str, group: int, columns: int) -> None:
    trits = random_trits(7, columns)
    weight = ternary(trits, kind, group)
    found = reference.dequantize(weight)
    for row, column in np.ndindex(found.shape):
        if kind == "parts":
            scale = weight.scales[0 if row < weight.parts[0] else 1]
        else:
            scale = weight.scales[row] if kind == "row" else weight.scales[row, column // group]
        assert found[row, column] == np.float32(trits[row, column]) * np.float32(scale)


@pytest.mark.parametrize("encoding", ["ternary", "q8", "q4", "f16", "f32"])
def test_chosen_rows_are_rows_of_the_whole(encoding: str) -> None:
    """Embedding look-ups: repeated and unordered ids."""
    values = normal(9, 50)
    if encoding == "ternary":
        weight = ternary(random_trits(9, 50))
    elif encoding in ("q8", "q4"):
        data, scales = {"q8": encode_q8, "q4": encode_q4}[encoding](values)
        weight = WeightTensor("w", encoding, (9, 50), data, scales, None, (), 32)
    else:
        data = {"f16": encode_f16, "f32": encode_f32}[encoding](values)
        weight = WeightTensor("w", encoding, (9, 50), data)
    ids = np.array([8, 0, 0, 3])
    np.testing.assert_array_equal(reference.embed(weight, ids), reference.dequantize(weight)[ids])
    np.testing.assert_array_equal(reference.embed(weight, ids, 2.0), 2 * reference.dequantize(weight)[ids])


def test_sizes_of_the_resident_layout() -> None:
    """Words a row and of scales, as shaders/kernels.json has them."""
    expected = {"ternary": 2 * 4, "q8": 3 * 8, "q4": 3 * 4, "f16": 17 * 2, "f32": 17 * 4}
    for encoding, words in expected.items():
        assert WeightTensor("w", encoding, (5, 65), np.empty(0)).row_words == words
    assert ternary(random_trits(5, 65)).scale_words == 5
    assert ternary(random_trits(5, 65), "parts").scale_words == 5
    assert ternary(random_trits(5, 65), "group", 64).scale_words == 5  # 5 x 2 halves
    assert ternary(random_trits(5, 130), "group", 64).scale_words == 8  # 5 x 3 halves, rounded up
    assert WeightTensor("w", "f32", (65,), np.empty(0)).resident_bytes == 4 * 65
    assert ternary(random_trits(5, 65)).resident_bytes == 4 * (5 * 8 + 5)


# --- activations ------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(arrays.arrays(np.float32, (2, 7), elements=st.floats(-1e6, 1e6, width=32)), st.sampled_from(["a8", "a16"]))
def test_quantization_is_within_half_a_step(x: np.ndarray, kind: str) -> None:
    found = reference.quantize(x, kind)
    limit = 127 if kind == "a8" else 32639
    assert np.abs(found.q).max(initial=0) <= limit
    # Half a step, and the rounding of the scale and of the product: 2 parts in 2^24 of up to `limit` steps.
    slack = 0.5 + limit * 2.0**-22
    assert (np.abs(found.q * found.scale[:, None].astype(np.float64) - x) <= slack * found.scale[:, None]).all()


def test_quantization_rounds_half_to_even() -> None:
    x = np.float32([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert reference.quantize(x, "a8").q.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


def test_tiny_activations_use_the_floor() -> None:
    found = reference.quantize(np.float32([[0, 0], [1e-9, -1e-9], [1e-5, 0]]), "a8")
    assert found.q.tolist() == [[0, 0], [0, 0], [127, 0]]
    np.testing.assert_array_equal(found.scale, np.float32([1e-5] * 3) / np.float32(127))


# --- products ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "low", "high"), [(64, -128, 127), (6912, -128, 127), (576, -32639, 32639)])
def test_integer_sums_are_exact(columns: int, low: int, high: int) -> None:
    random = np.random.default_rng(0)
    trits = random_trits(5, columns)
    q = random.integers(low, high + 1, size=(4, columns)).astype(np.int32)
    q[0], trits[0] = low, 1  # the greatest sum
    q[1], trits[1] = high, -1
    np.testing.assert_array_equal(reference.integer_sums(trits, q), q.astype(np.int64) @ trits.T.astype(np.int64))


def test_integer_sums_are_exact_where_float32_would_not_be() -> None:
    columns = (1 << 24) // 128 + 64
    trits = np.ones((1, columns), dtype=np.int8)
    q = np.full((1, columns), 127, dtype=np.int32)
    q[0, 0] = 126
    assert reference.integer_sums(trits, q)[0, 0] == 127 * columns - 1


@pytest.mark.parametrize("activation", ["a8", "a16"])
@pytest.mark.parametrize(("kind", "group"), [("parts", 0), ("row", 0), ("group", 64)])
def test_ternary_products_round_in_the_stated_order(kind: str, group: int, activation: str) -> None:
    """Row scales: (sum x scale of x) x scale of w. Groups: sum of (group's sum x its scale) x scale of x."""
    trits, x = random_trits(6, 150), reference.quantize(normal(3, 150), activation)
    weight = ternary(trits, kind, group)
    bias = normal(6)
    found = reference.linear(x, weight, bias)
    scales = weight.row_scales()
    for token, row in np.ndindex(3, 6):
        if group:
            y = np.float32(0)
            for index in range(3):
                span = slice(64 * index, 64 * (index + 1))
                total = int((trits[row, span].astype(int) * x.q[token, span]).sum())
                y = np.float32(y + np.float32(total) * scales[row, index])
            y = y * x.scale[token]
        else:
            y = np.float32((trits[row].astype(int) * x.q[token]).sum()) * x.scale[token] * scales[row]
        assert found[token, row] == y + bias[row]


@pytest.mark.parametrize("encoding", ["ternary", "q8", "f32"])
def test_float_products(encoding: str) -> None:
    x, values = normal(3, 70), normal(5, 70, seed=1)
    if encoding == "ternary":
        weight = ternary(random_trits(5, 70))
    elif encoding == "q8":
        data, scales = encode_q8(values)
        weight = WeightTensor("w", "q8", (5, 70), data, scales, None, (), 32)
    else:
        weight = WeightTensor("w", "f32", (5, 70), encode_f32(values))
    dense = reference.dequantize(weight).astype(np.float64)
    expected = x.astype(np.float64) @ dense.T
    # Each float32 sum of 70 products is off by at most 70 roundings of the sum of magnitudes.
    bound = 70 * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(dense).T)
    assert (np.abs(reference.linear(x, weight) - expected) <= bound).all()
    np.testing.assert_array_equal(
        reference.linear(x, weight, np.float32(range(5))), reference.linear(x, weight) + np.float32(range(5))
    )


# --- other operations -------------------------------------------------------------------------------------


def test_norm_is_llamas() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    gain = normal(96)
    for size in (1e-4, 1.0, 1e4):
        x = normal(4, 96) * np.float32(size)
        module = LlamaRMSNorm(96, eps=1e-5)
        module.weight.data = torch.from_numpy(gain)
        expected = module(torch.from_numpy(x)).detach().numpy()
        np.testing.assert_allclose(reference.norm(x, gain, 1e-5), expected, rtol=4e-6)


@pytest.mark.parametrize(("act", "name"), [("silu", "silu"), ("relu2", "relu2"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_activations_are_those_of_transformers(act: str, name: str) -> None:
    from transformers.activations import ACT2FN

    gate = np.concatenate([np.linspace(-30, 30, 500), [-200, 200, 0, 300]]).astype(np.float32)
    up = normal(len(gate))
    expected = (ACT2FN[name](torch.from_numpy(gate)) * torch.from_numpy(up)).numpy()
    found = reference.glu(np.concatenate([gate, up])[None], act)[0]
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_glu_takes_the_gate_first_and_norms_after() -> None:
    x, gain = normal(3, 20), normal(10)
    plain = reference.glu(x, "silu")
    gate, up = x[:, :10].astype(np.float64), x[:, 10:]
    np.testing.assert_allclose(plain, gate / (1 + np.exp(-gate)) * up, rtol=2e-6)
    np.testing.assert_array_equal(reference.glu(x, "silu", gain, 0.5), reference.norm(plain, gain, 0.5))


def test_relu2_keeps_values_beyond_f16() -> None:
    """A gate of 256 squared is past 65504: nothing between here and the sub-norm may be f16 (pitfall 6)."""
    x = np.float32([[300, -300, 1000, 2, 1, 3]])
    np.testing.assert_array_equal(reference.glu(x, "relu2"), [[300**2 * 2, 0, 1000**2 * 3]])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("position", "window"), [(0, 0), (1, 0), (9, 0), (0, 1), (9, 3), (2, 4), (9, 100)])
def test_attention_is_torchs(heads: int, kv_heads: int, position: int, window: int) -> None:
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    tokens, width = 5, 16
    q = normal(tokens, heads, width)
    k, v = (
        normal(position + tokens, kv_heads, width, seed=1),
        normal(position + tokens, kv_heads, width, seed=2),
    )
    sees = sliding_window_causal_mask_function(window) if window else causal_mask_function
    places = torch.arange(position, position + tokens)[:, None], torch.arange(position + tokens)[None]
    mask = sees(torch.tensor(0), torch.tensor(0), *places)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(a.transpose(1, 0, 2)[None].astype(np.float64)) for a in (q, k, v)),
        attn_mask=mask,
        scale=0.3,
        enable_gqa=True,
    )
    found = reference.attention(q, k, v, position, 0.3, window)
    np.testing.assert_allclose(found, expected[0].transpose(0, 1).reshape(tokens, -1).numpy(), atol=2e-6)


def test_attention_survives_great_scores() -> None:
    q, k = np.full((1, 1, 4), 1e3, np.float32), np.stack([np.full((1, 4), 1e3), np.full((1, 4), -1e3)])
    found = reference.attention(q, k.astype(np.float32), np.float32([[[1, 2, 3, 4]], [[5, 6, 7, 8]]]), 1, 1.0)
    np.testing.assert_array_equal(found, [[1, 2, 3, 4]])


def test_rope_table_rounds_the_angle_to_float32() -> None:
    inv_freq = np.float32([1.0, 0.1234567])
    table = reference.rope_table(inv_freq, 1.5, 1000)
    assert table.dtype == np.float32 and table.shape == (1000, 2, 2)
    for position in (0, 1, 999):
        for index in range(2):
            exact = Fraction(position) * Fraction(float(inv_freq[index]))
            angle = float(np.float32(float(exact)))
            assert table[position, index, 0] == np.float32(np.cos(angle) * 1.5)
            assert table[position, index, 1] == np.float32(np.sin(angle) * 1.5)


def test_caches_give_back_what_they_hold() -> None:
    x = normal(5, 3, 8) * np.float32(10)
    x[0, 0] = 0
    x[1, 1, 0] = 1e6
    np.testing.assert_array_equal(reference.cache_round_trip(x, "f32"), x)
    halves = reference.cache_round_trip(x, "f16")
    assert halves[1, 1, 0] == 65504  # clamped, never infinite
    np.testing.assert_array_equal(halves, np.clip(x, -65504, 65504).astype(np.float16))
    scale, q = reference.quantize_cache(x)
    assert scale[0, 0] == 0 and not q[0, 0].any()
    assert np.abs(q).max() == 127 and (q == np.rint(q)).all()
    error = np.abs(reference.cache_round_trip(x, "q8") - x)
    assert (error <= scale[..., None] * np.float32(0.5001)).all()
    assert error.max() > 0
