"""``tercet-card.json``: what a model was made from and what it says, for people who choose it.

A checkpoint folder may have one beside its ``config.json``; ``export`` checks it and carries it into the pack, and the
page shows it. All fields but ``trained_on`` may be missing; fields that are not here are dropped.

    trained_on  string: data and method, in sentences
    tokens      integer: tokens that were trained on
    held_out    list of {text, loss, tokens?}: what text, the model's mean loss on it in nats a token, how much of it
    samples     list of {prompt, answer}: answers as they came, not chosen
    sampling    string: how the samples were drawn
    notes       string: what to know before trusting it
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import PackerError

CARD = "tercet-card.json"
MOST_BYTES = 1 << 18  # the page gets it with the list of models
_ENTRIES: dict[str, dict[str, type]] = {
    "held_out": {"text": str, "loss": float},
    "samples": {"prompt": str, "answer": str},
}
_MOST_ENTRIES = 64


def check_card(value: object, where: str) -> dict[str, Any]:
    """The card with the fields that are known. where: the file, for messages. Raises PackerError."""
    if not isinstance(value, Mapping):
        raise PackerError(f"{where}: expected a JSON object, found {type(value).__name__}")
    card: dict[str, Any] = {"trained_on": _field(value, "trained_on", str, where)}
    if value.get("tokens") is not None:
        card["tokens"] = _field(value, "tokens", int, where)
    for name in ("sampling", "notes"):
        if value.get(name) is not None:
            card[name] = _field(value, name, str, where)
    for name, fields in _ENTRIES.items():
        entries = value.get(name, [])
        if not isinstance(entries, list) or len(entries) > _MOST_ENTRIES:
            raise PackerError(f"{where}: {name} must be a list of at most {_MOST_ENTRIES} objects")
        card[name] = [_entry(entry, fields, f"{where}: {name}[{index}]") for index, entry in enumerate(entries)]
    return card


def read_card(path: Path) -> dict[str, Any]:
    """The card in a file. Raises PackerError that names the file and the field."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PackerError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > MOST_BYTES:
        raise PackerError(
            f"{path}: {len(data):,} bytes, expected at most {MOST_BYTES:,}; give fewer or shorter samples"
        )
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PackerError(f"{path}: not valid JSON ({error})") from None
    return check_card(value, str(path))


def _entry(entry: object, fields: Mapping[str, type], where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise PackerError(f"{where} must be an object with {', '.join(fields)}, found {type(entry).__name__}")
    found = {name: _field(entry, name, kind, where) for name, kind in fields.items()}
    if "loss" in fields and entry.get("tokens") is not None:
        found["tokens"] = _field(entry, "tokens", int, where)
    return found


def _field(value: Mapping[Any, Any], name: str, kind: type, where: str) -> Any:
    found = value.get(name)
    if kind is str and isinstance(found, str) and found.strip():
        return found
    if kind is int and isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= 2**53 - 1:
        return found
    if kind is float and isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
        return float(found)
    wanted = {str: "text", int: "a whole number of 0 or more", float: "a finite number"}[kind]
    raise PackerError(f"{where}: {name} must be {wanted}, found {json.dumps(found, default=str)[:60]}")
