"""Llama graph (``model_type: llama``): SmolLM2, Llama 3, Falcon3-1.58bit, TriLM and others.

Config fields read: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
head_dim, vocab_size, max_position_embeddings, hidden_act, rms_norm_eps, tie_word_embeddings, attention_bias,
mlp_bias, rope_theta, rope_scaling, rope_parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..errors import CheckpointError
from .fields import Fields
from .refused import refuse_unsupported
from .rope import rope_table
from .transformer import Transformer

_ACTS = {"silu": "silu", "swish": "silu", "relu2": "relu2", "gelu_pytorch_tanh": "gelu_tanh"}


def build(config: Fields) -> Transformer:
    """The decoder that a config describes. Raises CheckpointError for missing or unsupported fields."""
    return decoder(config, "llama", default_theta=10_000.0)


def decoder(
    config: Fields,
    family: str,
    *,
    default_theta: float,
    read: Collection[str] = (),
    act: str = "hidden_act",
    acts: Mapping[str, str] = _ACTS,
) -> Transformer:
    """Common reading of the config of Llama-like families.

    default_theta: as in transformers' config class. read: fields that change the mathematics and that the family reads
    itself. act: the field that names the activation. acts: those that the family has. Raises CheckpointError for
    missing or unsupported fields.
    """
    refuse_unsupported(config, read)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    kv_heads = config.integer("num_key_value_heads", heads)
    head_dim = config.integer("head_dim", hidden // heads)
    _check_heads(config, heads, kv_heads, head_dim)
    biased = config.flag("attention_bias", False)
    return Transformer(
        family=family,
        hidden=hidden,
        ffn=config.integer("intermediate_size"),
        layers=config.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=config.integer("vocab_size"),
        context=config.integer("max_position_embeddings"),
        act=_act(config, act, acts),
        eps=config.positive("rms_norm_eps"),
        tied=config.flag("tie_word_embeddings", False),
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=config.flag("mlp_bias", False),
        rope=rope_table(config, head_dim, default_theta),
    )


def _act(config: Fields, field: str, acts: Mapping[str, str]) -> str:
    name = config.get(field)
    if not isinstance(name, str) or name not in acts:
        raise CheckpointError(f"{config.where}: {field} is {name!r}, expected one of {', '.join(acts)}")
    return acts[name]


def _check_heads(config: Fields, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 4 or head_dim > 256:
        raise CheckpointError(f"{config.where}: head_dim is {head_dim}, expected a multiple of 4 up to 256")
