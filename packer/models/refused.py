"""Config fields that change what a model computes: a family reads them itself, or they are refused by name.

Fields that say nothing about the forward pass (dropout, initialisation, names) are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import CheckpointError
from .fields import Fields

#: Field -> values that leave the plain graph as it is; a missing field and null always do.
_CHANGES_MATHEMATICS: dict[str, tuple[Any, ...]] = {
    # which keys a token sees
    "sliding_window": (),
    "use_sliding_window": (False,),
    "attention_chunk_size": (),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "cross_attention_layers": ([],),
    "num_kv_shared_layers": (0,),
    # experts and other layers than these
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), (0, 1)),
    "n_shared_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "block_configs": (),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), ()),
    "hidden_size_per_layer_input": (0,),
    # factors and limits
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "attn_scale", "logit_scale"), ()),
    **dict.fromkeys(("residual_multiplier", "embedding_multiplier", "logits_scaling", "lm_head_multiplier"), (1,)),
    **dict.fromkeys(("scale_emb", "scale_depth", "mup_width_scale"), (1,)),
    "dim_model_base": (),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "clip_qkv"), (0,)),
    "attn_temperature_tuning": (False, 0),
    # norms
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "use_post_norm"), (False,)),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "alibi", "use_alibi"), (False,)),
    # rotation of queries and keys; partial_rotary_factor and rope parameters are looked at in rope.py
    "no_rope_layers": (),
    "no_rope_layer_interval": (0,),
    "position_embedding_type": ("rope", "rotary"),
    **dict.fromkeys(("rotary_pct", "rotary_percent"), (1,)),
    **dict.fromkeys(("rope_interleave", "rope_interleaved", "rotary_interleaved"), (False,)),
    "mrope_section": (),
}
_ROTATED = re.compile(r"hadamard|rotat(?!e_half)|quarot|spinquant", re.IGNORECASE)


def refuse_unsupported(config: Fields, read: Collection[str] = ()) -> None:
    """Refuse every field that changes the mathematics and is not among those that the family reads.

    Raises CheckpointError naming the field.
    """
    refuse_rotated(config.values, config.where)
    for field, harmless in _CHANGES_MATHEMATICS.items():
        if field not in read:
            config.refuse(field, harmless)
    kinds = config.get("layer_types")
    if "layer_types" not in read and not (isinstance(kinds, list) and set(map(str, kinds)) <= {"full_attention"}):
        config.refuse("layer_types", ())


def refuse_rotated(config: Mapping[str, Any], where: str) -> None:
    """Refuse a config in which some field, however deep, says that the weights are rotated (Hadamard, QuaRot, …).

    Raises CheckpointError naming the field.
    """
    for name, value in config.items():
        method = name in ("quant_method", "format", "transform", "mode") and _ROTATED.search(str(value))
        if method or (_ROTATED.search(str(name)) and str(value).lower() not in ("none", "false", "0", "", "identity")):
            raise CheckpointError(
                f"{where}: field {name!r} is {str(value)[:80]!r}: the weights are rotated, which is not supported; "
                "without the rotation of its inputs such a model says nothing that makes sense"
            )
        if isinstance(value, Mapping):
            refuse_rotated(value, f"{where}: {name}")


def windows(config: Fields, layers: int, window: int | None, sliding: tuple[bool, ...]) -> tuple[int, ...]:
    """Keys that a token of each layer sees, 0: all before it.

    window: of the sliding layers. sliding: which layers slide where the config has no ``layer_types``.
    Raises CheckpointError for types of layers that are not supported.
    """
    kinds = config.get("layer_types")
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
            raise CheckpointError(
                f"{config.where}: field 'layer_types' is {str(kinds)[:200]}, expected full_attention or "
                f"sliding_attention for each of {layers} layers"
            )
        sliding = tuple(kind == "sliding_attention" for kind in kinds)
    if any(sliding) and window is None:
        raise CheckpointError(
            f"{config.where}: some layers slide, but there is no window (sliding_window, use_sliding_window)"
        )
    return tuple(window if slides and window else 0 for slides in sliding)
