"""Random tiny models by transformers, for expected logits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# transformers compiles parts of its BitNet layers, which would need a C++ compiler. Must come before torch.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from .checkpoints import byte_tokenizer, tiny_config, tiny_tensors, tokenizer_config, write_json  # noqa: E402

# These models are small: a second thread would mostly wait, and on a busy machine burn minutes waiting.
torch.set_num_threads(1)


def transformers_config(family: str, **changes: Any) -> PretrainedConfig:
    """The tiny config as transformers reads it."""
    fields = tiny_config(family, **changes)
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


def random_model(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model whose linears are exactly ternary and whose embeddings are exact in f16."""
    model = AutoModelForCausalLM.from_config(
        transformers_config(family, **changes), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tensors = tiny_tensors(tiny_config(family, **changes), seed)
    load_tensors(model, tensors)
    return model


def load_tensors(model: PreTrainedModel, tensors: Mapping[str, np.ndarray]) -> None:
    """Set all parameters of a model; a missing or superfluous one is an error, a tied head aside."""
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}, strict=False
    )
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(missing) <= tied and not unexpected, (missing, unexpected)


def save_model(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """What ``save_pretrained`` writes, with the byte tokenizer's files beside it."""
    model.save_pretrained(folder, **options)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    return folder


def load_model(folder: Path) -> PreTrainedModel:
    """A checkpoint in float32; transformers leaves the floats of a quantized one as they are stored."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in [*model.parameters(), *model.buffers()]:
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model


def logits(model: PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    """Logits of every position, f32 ``[T, V]``."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].numpy()


def greedy(model: PreTrainedModel, ids: Sequence[int], count: int, near: float = 0.005) -> list[int]:
    """The most probable tokens one after another, up to the first that another came near to (as a share of the range).

    At least a half of them, or the test's model is not one to be asked.
    """
    found: list[int] = []
    while len(found) < count:
        row = logits(model, [*ids, *found])[-1]
        second, first = np.sort(row)[-2:]
        if first - second < near * np.ptp(row):
            break
        found.append(int(row.argmax()))
    assert 2 * len(found) >= count, f"only {len(found)} of {count} tokens are sure: take another seed"
    return found
