"""The memory that a model needs on the GPU, and how many tokens and requests a KV cache of a given size holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shaders.weights import WeightTensor

from .errors import PackerError
from .shapes import shape_named, stand_in

GIB = 1 << 30
KV_KINDS = ("f32", "f16", "q8")
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "q8": 1}
#: q8 has an f32 scale for each head of each token.
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """What a pack or shape needs. weights_bytes: on the GPU. caches: (heads, head_dim) of each cache, k and v apart."""

    name: str
    weights_bytes: int
    caches: tuple[tuple[int, int], ...]
    context: int


@dataclass(frozen=True)
class Plan:
    """The figures that ``plan`` prints; None is what was not asked for, or cannot be known without a model.

    kv_bytes: of the whole cache. bytes_per_token: of the cache. tokens: that fit it. requests: of ``context`` tokens
    each, in parallel. weights_bytes: on the GPU. total_bytes: weights and cache.
    """

    name: str | None
    kv: str | None
    bytes_per_token: float
    kv_bytes: int
    tokens: int
    context: int | None
    requests: float | None
    weights_bytes: int | None = None
    total_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Field name -> value."""
        return asdict(self)


def kv_bytes_per_token(caches: Iterable[tuple[int, int]], kv: str) -> int:
    """Bytes of a token in all caches, given as (heads, head_dim)."""
    scale = _SCALE_BYTES if kv == "q8" else 0
    return sum(heads * (head_dim * _ELEMENT_BYTES[kv] + scale) for heads, head_dim in caches)


def memory_of(pack: Path | None, shape: str | None) -> Memory | None:
    """What a pack's folder or a shape's name stands for; None for neither. Raises PackerError."""
    if pack is not None and shape is not None:
        raise PackerError(f"give a pack or --shape, not both; found {pack} and {shape}")
    if shape is not None:
        known = shape_named(shape)
        weights = _weights_bytes(known.tensors())
        return Memory(shape, weights, _caches(known.program()), known.model.context)
    if pack is None:
        return None
    from .pack import Pack  # late: shapes need no pack reader

    opened = Pack(pack)
    context: int = opened.manifest["context_length"]
    weights = _weights_bytes(map(stand_in, opened.entries.values()))
    return Memory(opened.manifest["name"], weights, _caches(opened.program), context)


def _weights_bytes(tensors: Iterable[WeightTensor]) -> int:
    return sum(tensor.resident_bytes for tensor in tensors)


def _caches(program: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    return tuple((cache["heads"], cache["head_dim"]) for cache in program["caches"].values())


def make_plan(
    memory: Memory | None,
    *,
    kv: str = "f16",
    kv_gib: float | None = None,
    tokens: int | None = None,
    context: int | None = None,
) -> Plan:
    """The plan for what is known.

    With a model: the cache of one request of ``context`` tokens; with ``kv_gib`` what fits so many GiB; with
    ``tokens`` what they need. Without one: ``kv_gib`` and ``tokens``, as a server reports them, give the bytes a
    token. context: default the model's. Raises PackerError where something is missing or does not agree.
    """
    _check(kv, kv_gib, tokens, context)
    budget = None if kv_gib is None else int(kv_gib * GIB)
    if memory is None:
        if budget is None or tokens is None:
            raise PackerError("nothing to plan: give a pack or --shape, or both --kv-gib and --tokens")
        return Plan(None, None, budget / tokens, budget, tokens, context, tokens / context if context else None)
    if budget is not None and tokens is not None:
        raise PackerError(
            f"{memory.name} says how many bytes a token needs; give --kv-gib or --tokens, or both without a model"
        )
    if context is not None and context > memory.context:
        raise PackerError(f"{memory.name} was made for {memory.context:,} tokens, found a context of {context:,}")
    each = kv_bytes_per_token(memory.caches, kv)
    length = context or memory.context
    if budget is None:
        fitting = tokens or length
        budget = fitting * each
    else:
        fitting = budget // each
    total = memory.weights_bytes + budget
    return Plan(memory.name, kv, each, budget, fitting, length, fitting / length, memory.weights_bytes, total)


def _check(kv: str, kv_gib: float | None, tokens: int | None, context: int | None) -> None:
    if kv not in KV_KINDS:
        raise PackerError(f"KV cache {kv!r} is unknown, expected one of {', '.join(KV_KINDS)}")
    for option, value, most in (("--kv-gib", kv_gib, 1e6), ("--tokens", tokens, 1e12), ("--context", context, 1e12)):
        if value is not None and not 0 < value <= most:
            raise PackerError(f"{option} is {value}, expected a number above 0 and at most {most:g}")


def plan_lines(plan: Plan) -> list[tuple[str, str]]:
    """(what, how much) for people."""
    lines = [("model", plan.name)] if plan.name else []
    if plan.weights_bytes is not None:
        lines.append(("weights on the GPU", _size(plan.weights_bytes)))
    lines += [
        ("KV cache of a token", f"{round(plan.bytes_per_token):,} bytes{f' in {plan.kv}' if plan.kv else ''}"),
        ("KV cache", _size(plan.kv_bytes)),
        ("tokens that fit", f"{plan.tokens:,}"),
    ]
    if plan.context and plan.requests is not None:
        lines.append((f"requests of {plan.context:,} tokens", f"{plan.requests:.2f}"))
    if plan.total_bytes is not None:
        lines.append(("weights and KV cache", _size(plan.total_bytes)))
    return lines


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB ({n_bytes:,} bytes)"
