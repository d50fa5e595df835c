"""/api/models: what the page shows of each pack before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from server.packs import Pack


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
    default: bool


def model_cards(packs: Iterable[Pack]) -> list[ModelCard]:
    """A card for each pack, in the given order; the smallest download is the default."""
    packs = list(packs)
    default = min(packs, key=lambda pack: (pack.bytes, pack.id), default=None)
    return [_card(pack, pack is default) for pack in packs]


def _card(pack: Pack, default: bool) -> ModelCard:
    own = {
        "id": pack.id,
        "url": pack.url,
        "bytes": pack.bytes,
        "context": pack.manifest["context_length"],
        "default": default,
    }
    # All other fields have the same name in pack.json, which is checked.
    return ModelCard.model_validate(pack.manifest | own)
