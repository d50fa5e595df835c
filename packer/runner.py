"""Runs a pack on one of the two Python executors: the NumPy reference or the native GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from hashlib import sha256
from typing import Any, Protocol

import numpy as np

from shaders.contract import ContractError, ExecutionError
from shaders.forced import Forced, ForcedError, parse_forced
from shaders.program import check_context
from shaders.sampling import Sampling

from .errors import PackerError
from .pack import Pack


class Model(Protocol):
    """What both executors offer. ``generate`` yields (id, logits f32 [V] or None)."""

    position: int
    capacity: int

    def truncate(self, position: int) -> None:
        """Forget all tokens from ``position`` on."""

    def generate(
        self,
        ids: Sequence[int],
        options: Sampling,
        max_tokens: int,
        stop: Collection[int] = frozenset(),
        history: Sequence[int] = (),
    ) -> Iterator[tuple[int, np.ndarray | None]]:
        """Append ``ids`` to the cache and yield new tokens, the stop token included; ``history`` is cached already."""


def forced_kernels(text: str | None) -> Forced:
    """What ``--kernels`` asks for. Raises PackerError."""
    try:
        return parse_forced(text or "")
    except ForcedError as error:
        raise PackerError(f"--kernels: {error}") from None


def identity_of(pack: Pack) -> str:
    """SHA-256 of pack.json, which holds those of all other files."""
    return sha256((pack.path / "pack.json").read_bytes()).hexdigest()


def load_model(
    pack: Pack,
    backend: str,
    capacity: int,
    kv: str,
    *,
    with_logits: bool = False,
    kernels: str | None = None,
    speculate: str = "auto",
) -> Any:
    """The pack on an executor. Raises PackerError if the native one has no usable device, or positions are too few.

    speculate: ``auto``, ``on`` or ``off``, as in NativeModel; the reference guesses nothing.
    """
    try:
        check_context(pack.program, lambda name: pack.entries[name].shape[0], capacity)
    except ContractError as error:
        raise PackerError(f"{pack.path}: {error}; choose a smaller context") from None
    if backend == "reference":
        if kernels is not None:
            raise PackerError("--kernels is for kernels of a GPU, --backend reference has none; leave out one of both")
        if speculate == "on":
            raise PackerError("--speculate on is for a GPU, --backend reference has none; leave out one of both")
        from shaders.interpreter import ReferenceModel

        return ReferenceModel(pack.program, pack.tensors(), capacity=capacity, kv=kv)
    from shaders.native import NativeError, NativeModel  # late: needs a GPU driver

    options: dict[str, Any] = {
        "forced": forced_kernels(kernels),
        "identity": identity_of(pack),
        "keep_logits": with_logits,
        "speculate": speculate,
    }
    try:
        return NativeModel(pack.program, pack.tensors(), capacity=capacity, kv=kv, **options)
    except NativeError as error:
        raise PackerError(f"{pack.path}: {error}; or use --backend reference") from None


def answer_tokens(
    pack: Pack, model: Model, ids: Sequence[int], options: Sampling, max_tokens: int, history: Sequence[int] = ()
) -> Iterator[tuple[int, np.ndarray | None]]:
    """``model.generate`` up to one of the pack's EOS ids. Raises PackerError if the executor cannot go on."""
    try:
        yield from model.generate(ids, options, max_tokens, pack.eos_ids, history)
    except ExecutionError as error:
        raise PackerError(f"{pack.path}: {error}") from None


def fit_context(pack: Pack, prompt: Sequence[int], max_tokens: int, context: int | None) -> int:
    """Cache capacity in tokens. Raises PackerError if the prompt is empty or leaves no room for an answer."""
    if not prompt:
        raise PackerError("the prompt has no tokens; give some text")
    highest, vocabulary = max(prompt), pack.manifest["vocab_size"]
    if min(prompt) < 0 or highest >= vocabulary:
        raise PackerError(
            f"token id {highest if highest >= vocabulary else min(prompt)} is outside the vocabulary of {vocabulary}"
        )
    longest: int = pack.manifest["context_length"]
    capacity = min(context or longest, longest)
    if len(prompt) >= capacity:
        raise PackerError(
            f"the prompt has {len(prompt)} tokens, the context {capacity}; shorten it"
            + (" or raise --context" if capacity < longest else "")
        )
    return min(capacity, len(prompt) + max_tokens)
