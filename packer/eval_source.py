"""What a pack is compared with: a checkpoint or another pack as a program with weights that are read when wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from shaders.weights import WeightTensor

from .checkpoints import Checkpoint, name_of, open_checkpoint
from .errors import CheckpointError, PackerError
from .linears import BitNetScheme, bitnet_scheme, read_ternary
from .manifest import TensorEntry
from .models import Matrix, Vector, build_model
from .pack import Pack
from .tensors import TensorEncoder, TensorReport, require_sources
from .tokens import load_tokenizer
from .writer import PackWriter


@dataclass(frozen=True)
class Subject:
    """A model to be run: its program, its weights read one by one, and what has to agree between two of them.

    name: for people, without a path. activations: of the ternary products.
    """

    name: str
    kind: str
    where: Path
    program: Mapping[str, Any]
    tensors: Mapping[str, WeightTensor]
    activations: str
    context: int
    vocabulary: int
    tokenizer: Tokenizer


class LazyTensors(Mapping[str, WeightTensor]):
    """Weight tensors by name, each read anew whenever it is asked for."""

    def __init__(self, names: list[str], read: Callable[[str], WeightTensor]):
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> WeightTensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:  # the inherited one would read the tensor
        return name in self._names


def subject_of_pack(pack: Pack) -> Subject:
    """A pack as it stands."""
    manifest = pack.manifest
    return Subject(
        name=manifest["name"],
        kind="pack",
        where=pack.path,
        program=pack.program,
        tensors=LazyTensors(list(pack.entries), pack.tensor),
        activations=manifest["activations"],
        context=manifest["context_length"],
        vocabulary=manifest["vocab_size"],
        tokenizer=load_tokenizer((pack.path / "tokenizer.json").read_bytes(), pack.path),
    )


def open_source(source: Path) -> Subject:
    """A pack, a checkpoint folder, a GGUF file or ``hf:OWNER/NAME``. Raises PackerError."""
    if (source / "pack.json").is_file():
        return subject_of_pack(Pack(source))
    return subject_of_checkpoint(open_checkpoint(source))


def subject_of_checkpoint(checkpoint: Checkpoint) -> Subject:
    """A checkpoint as it defines its model, in float32. Raises CheckpointError.

    Ternary linears are their trits and scales, all else is float32 (float16 where that loses nothing). Activations are
    float32, unless the model itself rounds them, as BitNet does: then they are a8.
    """
    info = checkpoint.info
    model = build_model(info.config, checkpoint.path, checkpoint.names())
    scheme = bitnet_scheme(info.config, f"{checkpoint.path}: config")
    tensors = {tensor.name: tensor for tensor in model.tensors()}
    require_sources(checkpoint, list(tensors.values()))
    kind = "f32" if scheme is None else "ternary"  # without integer activations a program does not depend on encodings
    encodings = {
        name: "f32" if isinstance(tensor, Vector) or tensor.is_embedding else kind for name, tensor in tensors.items()
    }
    activations = "f32" if scheme is None else "a8"
    return Subject(
        name=name_of(checkpoint),
        kind="checkpoint",
        where=checkpoint.path,
        program=model.program(encodings, activations),
        tensors=LazyTensors(list(tensors), lambda name: _encode(checkpoint, tensors[name], scheme)),
        activations=activations,
        context=model.context,
        vocabulary=model.vocabulary,
        tokenizer=load_tokenizer(info.tokenizer.tokenizer, checkpoint.path),
    )


class _Memory:
    """Stands in for a PackWriter: keeps one tensor's arrays instead of writing shards."""

    shard_bytes = 1 << 62

    def __init__(self) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def add(self, key: str, array: np.ndarray) -> None:
        self.arrays[key] = array


def _encode(checkpoint: Checkpoint, tensor: Matrix | Vector, scheme: BitNetScheme | None) -> WeightTensor:
    if isinstance(tensor, Vector):
        return _encoded(checkpoint, tensor.name, lambda encoder: encoder.vector(tensor))[0]
    parts = [
        None if tensor.is_embedding else read_ternary(checkpoint, name, (rows, tensor.columns), scheme)
        for name, rows in tensor.sources
    ]
    ternary = [part for part in parts if part is not None]
    if len(ternary) == len(parts):
        return _encoded(checkpoint, tensor.name, lambda encoder: encoder.ternary(tensor, ternary))[0]
    try:
        halves, report = _encoded(checkpoint, tensor.name, lambda encoder: encoder.floats(tensor, "f16", parts))
        if report.exact:
            return halves
    except CheckpointError:  # beyond the range of f16
        pass
    return _encoded(checkpoint, tensor.name, lambda encoder: encoder.floats(tensor, "f32", parts))[0]


def _encoded(
    checkpoint: Checkpoint, name: str, write: Callable[[TensorEncoder], None]
) -> tuple[WeightTensor, TensorReport]:
    """What the exporter would write of one tensor, and what it says of it."""
    memory = _Memory()
    encoder = TensorEncoder(checkpoint, cast(PackWriter, memory))
    write(encoder)
    entry, scales = memory.entries[name], [array for key, array in memory.arrays.items() if ".scale" in key]
    weight = WeightTensor(
        name,
        entry.encoding,
        entry.shape,
        memory.arrays[f"{name}.data.0"],
        scales[0] if scales else None,
        entry.scale,
        entry.parts,
        entry.group,
    )
    return weight, encoder.reports[0]


def require_same_vocabulary(source: Subject, pack: Subject, text: str) -> list[int]:
    """Ids of the text, which both must give. Raises PackerError if the models do not share a vocabulary."""
    if source.vocabulary != pack.vocabulary:
        raise PackerError(
            f"{source.where}: a vocabulary of {source.vocabulary}, {pack.where} has {pack.vocabulary}; "
            "only models of the same vocabulary can be compared: give the checkpoint that the pack was made from"
        )
    ids, others = (list(one.tokenizer.encode(text, add_special_tokens=False).ids) for one in (pack, source))
    if ids != others:
        raise PackerError(
            f"{source.where}: its tokenizer gives other ids than the one of {pack.where}; "
            "only models of the same vocabulary can be compared: give the checkpoint that the pack was made from"
        )
    highest = max(ids, default=0)
    if highest >= pack.vocabulary:
        raise PackerError(f"{pack.where}: the tokenizer gives id {highest}, the vocabulary has {pack.vocabulary}")
    return ids
