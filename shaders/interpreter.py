"""Runs a program with the NumPy reference: the truth that the GPU executors are held against."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from . import reference, sampling
from .contract import INTEGER_ACTIVATIONS, ExecutionError, constant, op_spec
from .program import check_context, logits_columns
from .weights import WeightTensor

#: Called after each operation with its section, index, the operation and what it wrote.
Observer = Callable[[str, int, Mapping[str, Any], Any], None]


class ReferenceModel:
    """A program with its weights and a KV cache of ``capacity`` tokens.

    program: parsed ``program.json``, already checked. tensors: name -> WeightTensor.
    kv: ``f32``, ``f16`` or ``q8``. Decoded matrices are kept as float32, four bytes a weight. Raises ContractError if
    the model has fewer positions than that.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        tensors: Mapping[str, WeightTensor],
        *,
        capacity: int,
        kv: str = "f32",
    ):
        check_context(program, lambda name: tensors[name].rows, capacity)
        self.program, self.tensors, self.capacity, self.kv = program, tensors, capacity, kv
        self.position = 0
        self.observer: Observer | None = None
        self._dense: dict[tuple[str, bool], np.ndarray] = {}
        self._tables = {
            name: reference.rope_table(np.array(table["inv_freq"]), table["scale"], capacity)
            for name, table in program["tables"].items()
        }
        self._caches = {
            name: np.zeros((capacity, cache["heads"], cache["head_dim"]), dtype=np.float32)
            for name, cache in program["caches"].items()
        }
        self._seen = np.zeros(logits_columns(program), dtype=bool)

    def truncate(self, position: int) -> None:
        """Forget all tokens from ``position`` on."""
        self.position = min(self.position, position)

    def step(self, ids: Sequence[int], rows: int = 1) -> np.ndarray:
        """Append tokens and return the logits of the last ``rows`` of them, f32 ``[rows, V]``.

        Raises ValueError if the cache is full or an id is outside the vocabulary.
        """
        tokens = np.asarray(ids, dtype=np.int64)
        if self.position + len(tokens) > self.capacity:
            raise ValueError(f"{self.position + len(tokens)} tokens do not fit the cache of {self.capacity}")
        if tokens.size == 0 or tokens.min() < 0 or tokens.max() >= len(self._seen):
            raise ValueError(f"token ids must be 0 to {len(self._seen) - 1}, found {list(ids)[:8]}")
        values: dict[str, Any] = {"@ids": tokens}
        for section in ("body", "logits"):
            for index, op in enumerate(self.program[section]):
                self._run(op, values, rows)
                if self.observer:
                    self.observer(section, index, op, values[op["out"]])
        self.position += len(tokens)
        logits: np.ndarray = values[self.program["greedy"][0]["logits"]]
        return logits

    def generate(
        self,
        ids: Sequence[int],
        options: sampling.Sampling,
        max_tokens: int,
        stop: Collection[int] = frozenset(),
        history: Sequence[int] = (),
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield ``(id, logits f32 [V])`` for up to ``max_tokens`` new tokens, the stop token included.

        history: ids that are in the cache already; the repetition penalty counts them too.
        Raises ExecutionError if the greatest logit is NaN or infinite.
        """
        self._seen[:] = False
        self._seen[np.asarray([*history, *ids], dtype=np.int64)] = True
        logits = self.step(ids)[-1]
        for index in range(max_tokens):
            penalized = sampling.penalize(logits, self._seen, options.repetition_penalty)
            token = sampling.sample(penalized, options, self.position)
            if token == constant("invalid_id"):
                raise ExecutionError(
                    f"the greatest logit at position {self.position - 1} is NaN or infinite; "
                    "verify the pack, or export it again"
                )
            yield token, logits
            self._seen[token] = True
            if token in stop or index == max_tokens - 1 or self.position == self.capacity:
                return
            logits = self.step([token])[-1]

    def _run(self, op: Mapping[str, Any], values: dict[str, Any], rows: int) -> None:
        handler = getattr(self, f"_op_{op['op']}")
        result = handler(op, values)
        target = self.program["values"][op["out"]]
        if target["shape"][0] == "R" and op["op"] == "norm":
            result = result[-rows:]
        if op.get("accumulate") and "accumulate" in op_spec(op["op"]).get("flags", ()):
            result = values[op["out"]] + result
        values[op["out"]] = self._store(result, target["dtype"])

    @staticmethod
    def _store(result: np.ndarray, dtype: str) -> Any:
        return reference.quantize(result, dtype) if dtype in INTEGER_ACTIVATIONS else result.astype(np.float32)

    def _vector(self, name: str | None) -> np.ndarray | None:
        return None if name is None else self.tensors[name].data.reshape(-1)

    def _matrix(self, name: str, as_trits: bool) -> np.ndarray:
        if (name, as_trits) not in self._dense:
            weight = self.tensors[name]
            decoded = reference.unpack_trits(weight.data, weight.columns) if as_trits else reference.dequantize(weight)
            self._dense[name, as_trits] = decoded.astype(np.float32, copy=False)
        return self._dense[name, as_trits]

    def _op_embed(self, op: Mapping, values: Mapping) -> np.ndarray:
        return reference.embed(self.tensors[op["w"]], values["@ids"], op.get("multiplier", 1.0))

    def _op_position(self, op: Mapping, values: Mapping) -> np.ndarray:
        return reference.position(self.tensors[op["w"]], self.position, len(values["@ids"]))

    def _op_norm(self, op: Mapping, values: Mapping) -> np.ndarray:
        return reference.norm(values[op["x"]], self.tensors[op["gain"]].data, op["eps"])

    def _op_quantize(self, op: Mapping, values: Mapping[str, np.ndarray]) -> np.ndarray:
        return values[op["x"]]

    def _op_activate(self, op: Mapping, values: Mapping) -> np.ndarray:
        return reference.activate(values[op["x"]], op["act"])

    def _op_glu(self, op: Mapping, values: Mapping) -> np.ndarray:
        return reference.glu(values[op["x"]], op["act"], self._vector(op.get("gain")), op.get("eps", 0.0))

    def _op_linear(self, op: Mapping, values: Mapping) -> np.ndarray:
        x = values[op["x"]]
        dense = self._matrix(op["w"], isinstance(x, reference.Quantized))
        return reference.linear(x, self.tensors[op["w"]], self._vector(op.get("bias")), dense)

    def _op_rope_append(self, op: Mapping, values: Mapping) -> np.ndarray:
        x = values[op["x"]]
        tokens, heads, kv_heads, width = len(x), op["heads"], op["kv_heads"], op["head_dim"]
        span = slice(self.position, self.position + tokens)
        split = x.reshape(tokens, heads + 2 * kv_heads, width)
        turned = split[:, : heads + kv_heads]
        if op.get("q_gain") is not None:
            gains = np.repeat([self._vector(op["q_gain"]), self._vector(op["k_gain"])], [heads, kv_heads], axis=0)
            turned = reference.norm(turned, gains, op.get("eps", 0.0))
        rotated = reference.rope(turned, self._tables[op["rope"]][span])
        self._caches[op["k"]][span] = reference.cache_round_trip(rotated[:, heads:], self.kv)
        self._caches[op["v"]][span] = reference.cache_round_trip(split[:, heads + kv_heads :], self.kv)
        return rotated[:, :heads].reshape(tokens, -1)

    def _op_attention(self, op: Mapping, values: Mapping) -> np.ndarray:
        q = values[op["q"]]
        end = self.position + len(q)
        q = q.reshape(len(q), op["heads"], op["head_dim"])
        k, v = self._caches[op["k"]][:end], self._caches[op["v"]][:end]
        return reference.attention(q, k, v, self.position, op["scale"], op.get("window", 0))
