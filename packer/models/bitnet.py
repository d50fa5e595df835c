"""BitNet b1.58 graph (``model_type: bitnet``): Llama with norms before the o and down projections.

Reads the fields of ``llama.py``. Source of the graph: transformers ``models/bitnet/modeling_bitnet.py``.
"""

from __future__ import annotations

from .fields import Fields
from .llama import decoder
from .transformer import Transformer


def build(config: Fields) -> Transformer:
    """The decoder that a config describes. Raises CheckpointError for missing or unsupported fields."""
    return decoder(config, "bitnet", sub_norms=True, default_theta=500_000.0)
