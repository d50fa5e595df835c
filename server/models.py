"""/api/models: what the page shows of each pack before it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from packer.card import CARD, read_card
from packer.errors import PackerError
from server.packs import Pack

log = logging.getLogger("tercet.server")

#: A download that nobody minds: half a minute at 25 Mbit/s.
QUICK_BYTES = 100_000_000


class KvShape(BaseModel):
    """What decides the size of the KV cache for each token of context."""

    layers: int
    kv_heads: int
    head_dim: int


class ModelCard(BaseModel):
    """One pack, as a person chooses it. Sizes in bytes, `context` in tokens."""

    id: str
    url: str
    name: str
    description: str
    family: str
    license: str
    parameters: int
    bytes: int  # the whole download
    resident_bytes: int  # weights in GPU memory
    kv: KvShape
    context: int
    activations: str
    bits_per_weight: float
    ternary_bits_per_weight: float | None
    grade: str | None  # None: not measured
    about: dict[str, Any] | None  # the pack's card, as packer/card.py describes it; None: it has none
    default: bool


def model_cards(packs: Iterable[Pack]) -> list[ModelCard]:
    """A card for each pack, in the given order, one of them the default."""
    packs = list(packs)
    default = _default(packs)
    return [_card(pack, pack is default) for pack in packs]


def _default(packs: Sequence[Pack]) -> Pack | None:
    """The largest model among those that come quickly and are not BROKEN; without such, the smallest download."""
    quick = [pack for pack in packs if pack.bytes <= QUICK_BYTES and pack.manifest["grade"] != "BROKEN"]
    if quick:
        return max(quick, key=lambda pack: (pack.manifest["parameters"], -pack.bytes, pack.id))
    return min(packs, key=lambda pack: (pack.bytes, pack.id), default=None)


def _card(pack: Pack, default: bool) -> ModelCard:
    own = {
        "id": pack.id,
        "url": pack.url,
        "bytes": pack.bytes,
        "context": pack.manifest["context_length"],
        "about": _about(pack),
        "default": default,
    }
    # All other fields have the same name in pack.json, which is checked.
    return ModelCard.model_validate(pack.manifest | own)


def _about(pack: Pack) -> dict[str, Any] | None:
    """A card that cannot be read costs the page nothing else."""
    if CARD not in pack.files:
        return None
    try:
        return read_card(pack.files[CARD].path)
    except PackerError as error:
        log.warning("pack %s: %s", pack.id, error)
        return None
