"""Special token ids of a checkpoint: where an answer begins and where it ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .checkpoints.base import CheckpointInfo
from .errors import CheckpointError


def load_tokenizer(data: bytes, where: Path | str) -> Tokenizer:
    """The tokenizer. Raises CheckpointError if the tokenizers library cannot read it."""
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception for any fault
        raise CheckpointError(f"{where}: tokenizer.json cannot be read ({error}); use the model's own file") from None


def special_ids(info: CheckpointInfo, vocabulary: int, path: Path) -> dict[str, Any]:
    """``bos_id`` and ``eos_ids`` of the pack.

    EOS is the union of config, generation config and tokenizer config, since files disagree in practice.
    Raises CheckpointError if there is none or an id lies outside the vocabulary.
    """
    tokenizer = load_tokenizer(info.tokenizer.tokenizer, path)
    config = json.loads(info.tokenizer.config)
    named = _token_id(tokenizer, config.get("eos_token"))
    eos = {
        *_ids(info.config, "eos_token_id"),
        *_ids(info.generation, "eos_token_id"),
        *([] if named is None else [named]),
    }
    if not eos:
        raise CheckpointError(
            f"{path}: no end-of-text token in config.json, generation_config.json or tokenizer_config.json"
        )
    outside = sorted(token for token in eos if not 0 <= token < vocabulary)
    if outside:
        raise CheckpointError(f"{path}: eos_token_id {outside[0]} is outside the vocabulary of {vocabulary}")
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocabulary:
        raise CheckpointError(
            f"{path}: the tokenizer has ids up to {highest}, the embedding only {vocabulary} rows; "
            "they do not belong together"
        )
    bos = _token_id(tokenizer, config.get("bos_token"))
    if bos is None:
        bos = next((token for token in _ids(info.config, "bos_token_id") if 0 <= token < vocabulary), None)
    return {"bos_id": bos, "eos_ids": sorted(eos)}


def _ids(config: Mapping[str, Any], field: str) -> list[int]:
    value = config.get(field)
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return tokenizer.token_to_id(content) if isinstance(content, str) else None
