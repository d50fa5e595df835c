"""Cases of norm, quantize, glu and activate, which share normalize.wgsl."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from .case_kit import F32, Case, generator, make_case
from .checks import Between, BlockSums, Check, Close, U, rounding_interval
from .contract import INTEGER_ACTIVATIONS, constant
from .reference import Quantized

#: WGSL: exp(x) within 3 + 2 |x| units in the last place, a division within 2.5, inverseSqrt within 2; 1 ulp <= 2 U.
EXP_BASE, EXP_SLOPE, DIVISION, INVERSE_SQRT = 6 * U, 4 * U, 5 * U, 4 * U
OUTPUTS = ("f32", "a8", "a16")


def norm_cases() -> Iterator[Case]:
    """Columns around threads and blocks; zero rows, huge and tiny rows; the last rows of more."""
    for out in OUTPUTS:
        for tokens, columns in ((1, 1), (2, 3), (7, 64), (2, 65), (9, 576), (2, 1026), (2, 2560), (1, 6912)):
            yield row_case(f"norm {out} {tokens}x{columns}", "norm", out, tokens, columns)
        if out in INTEGER_ACTIVATIONS:
            yield strict_case(f"norm {out} strict", "norm", out, 2, 70)
        yield row_case(f"norm {out} last rows", "norm", out, 5, 130, last_rows=2)
        yield row_case(f"norm {out} zeros", "norm", out, 3, 100, zero_row=1)
        yield row_case(f"norm {out} huge", "norm", out, 2, 200, magnitude=1e15)
        yield row_case(f"norm {out} tiny", "norm", out, 2, 200, magnitude=1e-12)
    for columns in (3, 65, 576):
        yield row_case(f"norm f32 accumulate {columns}", "norm", "f32", 3, columns, accumulate=True)
    yield row_case("norm f32 accumulate last rows", "norm", "f32", 5, 130, last_rows=2, accumulate=True)
    yield row_case("norm 64 threads", "norm", "a8", 2, 300, workgroup=64)


def quantize_cases() -> Iterator[Case]:
    """Integers alone, a16 extremes among them; 16449 columns take the block sums through a second round."""
    for out in INTEGER_ACTIVATIONS:
        for tokens, columns in ((1, 2), (3, 63), (2, 576), (1, 2561), (1, 16449)):
            yield row_case(f"quantize {out} {tokens}x{columns}", "quantize", out, tokens, columns)
        yield strict_case(f"quantize {out} strict", "quantize", out, 2, 70)
        yield row_case(f"quantize {out} zeros", "quantize", out, 3, 100, zero_row=2)
        yield row_case(f"quantize {out} huge", "quantize", out, 2, 100, magnitude=1e30)
        yield row_case(f"quantize {out} below the floor", "quantize", out, 2, 100, magnitude=1e-8)
        for broken in (np.nan, np.inf, -np.inf):
            yield row_case(f"quantize {out} {broken}", "quantize", out, 3, 130, broken=broken)
    yield row_case("quantize 64 threads", "quantize", "a16", 2, 300, workgroup=64)


def glu_cases() -> Iterator[Case]:
    """The three activations with and without a norm; relu2 at sizes that would overflow f16."""
    for out in OUTPUTS:
        for act in ("silu", "relu2", "gelu_tanh"):
            yield row_case(f"glu {act} {out}", "glu", out, 3, 131, act=act)
        yield row_case(f"glu relu2 norm {out}", "glu", out, 2, 576, act="relu2", gain=True)
        yield row_case(f"glu relu2 large {out}", "glu", out, 2, 1536, act="relu2", gain=True, magnitude=3e3)
        yield row_case(f"glu silu large {out}", "glu", out, 2, 100, act="silu", magnitude=60.0)
    for out in INTEGER_ACTIVATIONS:
        yield strict_case(f"glu silu strict {out}", "glu", out, 2, 70, act="silu")
        yield strict_case(f"glu relu2 norm strict {out}", "glu", out, 2, 70, act="relu2", gain=True)
        yield strict_case(f"glu gelu_tanh strict {out}", "glu", out, 2, 40, act="gelu_tanh")
    yield row_case("glu silu norm a8", "glu", "a8", 3, 131, act="silu", gain=True)
    yield row_case("glu relu2 norm a8 6912", "glu", "a8", 1, 6912, act="relu2", gain=True)
    yield row_case("glu silu small f32", "glu", "f32", 2, 20, act="silu")
    yield row_case("glu silu a8 1", "glu", "a8", 2, 1, act="silu")
    yield row_case("glu 64 threads", "glu", "f32", 2, 300, act="silu", gain=True, workgroup=64)


def activate_cases() -> Iterator[Case]:
    """The activations without a gate."""
    for out in OUTPUTS:
        for act in ("relu", "silu", "relu2", "gelu_tanh"):
            yield row_case(f"activate {act} {out}", "activate", out, 3, 131, act=act)
        yield row_case(f"activate relu {out} of many", "activate", out, 2, 1537, act="relu", magnitude=1e4)
    yield row_case("activate silu small f32", "activate", "f32", 2, 20, act="silu")
    yield row_case("activate 64 threads", "activate", "f32", 2, 300, act="relu", workgroup=64)
    for out in INTEGER_ACTIVATIONS:
        yield row_case(f"activate relu {out} NaN", "activate", out, 3, 130, act="relu", broken=np.nan)
        yield strict_case(f"activate relu strict {out}", "activate", out, 2, 40, act="relu")
    yield strict_case("activate gelu_tanh strict a8", "activate", "a8", 2, 40, act="gelu_tanh")


def strict_case(name: str, op: str, out: str, tokens: int, columns: int, **options: Any) -> Case:
    """As ``row_case``, with numbers so far from ties that every device must give the same integers."""
    for attempt in range(1000):
        case = row_case(f"{name} {attempt}", op, out, tokens, columns, **options)
        if case.checks["q"].close() == 0:
            return replace(case, name=name)
    raise ValueError(f"case {name}: every attempt has a number near a tie")


def row_case(
    name: str,
    op: str,
    out: str,
    tokens: int,
    columns: int,
    *,
    act: str = "none",
    gain: bool = False,
    last_rows: int = 0,
    zero_row: int | None = None,
    magnitude: float = 1.0,
    broken: float = 0.0,
    eps: float = 1e-5,
    workgroup: int = 0,
    accumulate: bool = False,
) -> Case:
    """One case of normalize.wgsl; what it computes is in that file's header."""
    rng = generator(name)
    shape = (tokens, 2, columns) if op == "glu" else (tokens, columns)
    x = (rng.normal(size=shape) * magnitude).astype(F32)
    if zero_row is not None:
        x[zero_row] = 0
    if broken:
        x[tokens // 2, columns // 2] = broken
    scaled = op == "norm" or gain
    gains = (rng.normal(size=columns) + 1).astype(F32) if scaled else None
    rows = last_rows or tokens
    with np.errstate(invalid="ignore", over="ignore"):
        value, value_error = _gated(_with_gate(x[tokens - rows :].astype(np.float64), op), act)
        result, result_error = normed(value, value_error, gains, eps)
    lead = "R" if last_rows else "T"
    fields: dict[str, Any] = {"op": op, "x": "x", "out": "y"}
    if op in ("norm", "glu"):
        fields |= {"eps": eps, "gain": "gain" if scaled else None}
    if op in ("glu", "activate"):
        fields["act"] = act
    inputs = {"x": x} | ({"gain": gains} if gains is not None else {})
    expected, checks = (
        _float_output(result, result_error) if out == "f32" else integer_output(result, result_error, value_error, out)
    )
    if accumulate:
        fields["accumulate"] = True
        inputs["y"] = rng.normal(size=result.shape).astype(F32)
        total = result + inputs["y"]
        expected = {"y": total.astype(F32)}
        # What is expected is rounded, as the sum is.
        checks = {"y": Close(np.abs(result) * result_error + 2 * U * np.abs(total) + 2.0**-126)}
    case = make_case(
        name,
        fields,
        {"x": {"dtype": "f32", "shape": ["T", x[0].size]}, "y": {"dtype": out, "shape": [lead, columns]}},
        inputs,
        expected,
        checks,
        # A renderer on the CPU takes the kernels that take all columns; cases_wide has the others.
        symbols={"software": 1},
        step=(4, tokens, rows, 0),
    )
    return replace(case, symbols={**case.symbols, "WORKGROUP": workgroup}) if workgroup else case


def _with_gate(x: np.ndarray, op: str) -> np.ndarray:
    """activate is a glu whose second half is 1: that product rounds nothing."""
    return np.stack([x, np.ones_like(x)], axis=1) if op == "activate" else x


def _gated(x: np.ndarray, act: str) -> tuple[np.ndarray, np.ndarray]:
    """(act(gate) * up in f64, relative error of each element in f32)."""
    if act == "none":
        return x, np.zeros_like(x)
    gate, up = x[:, 0], x[:, 1]
    if act == "relu":
        return np.maximum(gate, 0) * up, np.zeros_like(gate)
    if act == "relu2":
        return np.square(np.maximum(gate, 0)) * up, np.full_like(gate, 2 * U)
    z = gate if act == "silu" else np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3)
    raised = np.exp(np.minimum(-z, 87))  # the kernel's bound: the quotient is then 1e-38 of the gate
    # g / (1 + e): an error of e counts with weight e / (1 + e); z of gelu has six roundings of its own, and an
    # error of z changes e by as much.
    share = raised / (1 + raised)
    roundings = 0.0 if act == "silu" else 6 * U * np.abs(z)
    error = share * (EXP_BASE + EXP_SLOPE * np.abs(z) + roundings) + U + DIVISION + U
    return gate / (1 + raised) * up, error


def normed(value: np.ndarray, error: np.ndarray, gain: np.ndarray | None, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """(x / sqrt(mean(x^2) + eps) * gain in f64, relative error of each element in f32)."""
    if gain is None:
        return value, error
    mean = np.square(value).mean(axis=-1, keepdims=True)
    # A thread adds the squares of every 256th four columns, then 16 + 16 partial sums; all terms are positive, so
    # each addition adds at most U. The square root halves what the mean errs by.
    chain = 4 * -(-value.shape[-1] // 1024) + 32 + 3
    mean_error = chain * U + 2 * error.max(axis=-1, keepdims=True, initial=0)
    return value / np.sqrt(mean + eps) * gain, error + mean_error / 2 + INVERSE_SQRT + 2 * U


def _float_output(result: np.ndarray, error: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, Check]]:
    # The second term: a device may flush what f32 holds as a subnormal.
    return {"y": result.astype(F32)}, {"y": Close(np.abs(result) * error + 2.0**-126)}


def integer_output(
    result: np.ndarray, error: np.ndarray, value_error: np.ndarray, out: str
) -> tuple[dict[str, np.ndarray], dict[str, Check]]:
    limit, lowest = constant(f"{out}_max"), -128 if out == "a8" else -constant(f"{out}_max")
    broken = ~np.isfinite(result).all(axis=-1)
    finite = np.where(broken[:, None], 0, result)
    floor = float(F32(constant("absmax_floor")))
    absmax = np.abs(finite).max(axis=-1, keepdims=True)
    exact = finite * limit / np.maximum(absmax, floor)
    # The norm's factor is in both the element and the largest one and cancels, unless the floor takes over. Then
    # two products for the element, two for the largest, a quotient, and the product of the two: 10 U.
    shared = np.where(absmax > floor * 0.999, 0.0, error.max(axis=-1, keepdims=True, initial=0))
    slack = np.abs(exact) * (
        value_error + value_error.max(axis=-1, keepdims=True, initial=0) + shared + 5 * U + DIVISION
    )
    low, high = rounding_interval(exact, slack, lowest, limit)
    # A broken row may hold any integers: its scale says that it is broken.
    low[broken], high[broken] = -32768, 32767
    scale = (np.maximum(absmax[:, 0], floor) / limit).astype(F32)
    scale_bound = np.abs(scale) * (error.max(axis=-1, initial=0) + 2 * DIVISION)
    scale[broken] = np.nan
    q = Quantized(np.rint(np.clip(exact, lowest, limit)).astype(np.int32), scale, out)
    return {"q": q.words, "q_scale": scale, "q_sums": q.sums}, {
        "q": Between(low, high, out),
        "q_scale": Close(np.where(broken, 0, scale_bound)),
        "q_sums": BlockSums("q", out),
    }
