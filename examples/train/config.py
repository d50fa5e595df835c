"""What a model and a run are: two frozen dataclasses, and the presets that fill them.

A preset is a TOML file in ``presets/``: a table ``[model]`` with fields of ``ModelConfig``, and a table for each stage
(``[pretrain]``, ``[sft]``, …). Fields of a stage that ``TrainConfig`` has go there, others are the stage's own options.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .errors import TrainError

PRECISIONS = ("fp32", "bf16", "ternary", "nvfp4", "mxfp4")
ACTIVATIONS = ("silu", "relu2")
SCHEDULES = ("cosine", "two-stage", "constant")
#: What can be taken away from, or added to, the recipe of nvfp4 and mxfp4; for ablations.
FP4_OPTIONS = ("no-hadamard", "no-stochastic-rounding", "first-last-bf16", "backward-only", "forward-only")
PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder.

    sub_norms: BitNet's norms before the o and down projections. rope_theta: base of the rotary frequencies.
    max_context: positions that the rotary table has. precision: of the linears in the blocks, one of ``PRECISIONS``.
    fp4_options: of ``FP4_OPTIONS``; only for nvfp4 and mxfp4. Raises TrainError for a shape that cannot be.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    activation: str = "silu"
    sub_norms: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_context: int = 1024
    tie_embedding: bool = True
    precision: str = "bf16"
    fp4_options: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp4_options", tuple(self.fp4_options))  # JSON and TOML give lists
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "max_context"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise TrainError(f"model: {name} is {getattr(self, name)!r}, expected a whole number of 1 or more")
        _one_of("model: precision", self.precision, PRECISIONS)
        _one_of("model: activation", self.activation, ACTIVATIONS)
        for option in self.fp4_options:
            _one_of("model: fp4_options", option, FP4_OPTIONS)
        if self.fp4_options and self.precision not in ("nvfp4", "mxfp4"):
            raise TrainError(f"model: fp4_options {self.fp4_options} are of nvfp4 and mxfp4, not of {self.precision}")
        if self.heads % self.kv_heads:
            raise TrainError(f"model: {self.heads} heads are no multiple of {self.kv_heads} kv_heads")
        if self.head_dim % 2:
            raise TrainError(f"model: head_dim is {self.head_dim}, expected an even number (rotary pairs)")
        if not self.tie_embedding:
            raise TrainError("model: tie_embedding is false, but this decoder's head is its embedding")

    @property
    def label(self) -> str:
        """Precision for people; emulated ones say so."""
        options = f" ({', '.join(self.fp4_options)})" if self.fp4_options else ""
        return f"{self.precision} EMULATED{options}" if self.precision in ("nvfp4", "mxfp4") else self.precision

    def parameters(self) -> int:
        """Numbers that training changes, embedding included, counted once."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        gains = 2 * self.dim + (width + self.ffn_dim if self.sub_norms else 0)
        linears = self.dim * (2 * width + 2 * kv_width + 3 * self.ffn_dim)
        return self.vocab_size * self.dim + self.layers * (linears + gains) + self.dim


@dataclass(frozen=True)
class TrainConfig:
    """How a run goes.

    steps: optimizer steps. batch_tokens: tokens of a step, over all processes and accumulated micro-batches. sequence:
    tokens of a row. lr, min_lr: peak and last learning rate. warmup: steps of linear rise. weight_decay: of matrices.
    schedule: ``cosine``, ``constant``, or BitNet's ``two-stage``. clip: greatest norm of the gradient. amp: bf16
    autocast. compile: ``torch.compile`` of the blocks. *_every: in steps, 0 for never. minutes: after so many the run
    saves and stops, for ``--resume`` to go on; 0 for no limit. Raises TrainError.
    """

    steps: int
    batch_tokens: int = 32_768
    sequence: int = 512
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup: int = 100
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    schedule: str = "cosine"
    amp: bool = False
    compile: bool = False
    grad_checkpointing: bool = False
    grad_accum: int = 1
    log_every: int = 10
    save_every: int = 0
    eval_every: int = 0
    eval_batches: int = 16
    minutes: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        _one_of("training: schedule", self.schedule, SCHEDULES)
        for name in ("steps", "batch_tokens", "sequence", "grad_accum", "log_every", "eval_batches"):
            if getattr(self, name) < 1:
                raise TrainError(f"training: {name} is {getattr(self, name)}, expected 1 or more")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise TrainError(f"training: {name} is {getattr(self, name)}, expected more than 0")

    def micro_batch(self, world: int = 1) -> int:
        """Rows of a micro-batch of one process. Raises TrainError if batch_tokens cannot be divided so."""
        rows, rest = divmod(self.batch_tokens, self.sequence * self.grad_accum * world)
        if rest or not rows:
            raise TrainError(
                f"training: batch_tokens {self.batch_tokens} cannot be divided into rows of {self.sequence} tokens for "
                f"{self.grad_accum} accumulated micro-batches on {world} processes; make it a multiple of "
                f"{self.sequence * self.grad_accum * world}"
            )
        return rows


@dataclass(frozen=True)
class Preset:
    """A model and the stages that make it. tables: the stages' tables of the TOML file."""

    name: str
    model: ModelConfig
    tables: Mapping[str, Mapping[str, Any]]

    def train(self, stage: str, **changes: Any) -> TrainConfig:
        """The run of a stage; changes that are None are left out. Raises TrainError."""
        table = self._table(stage)
        known = {name: value for name, value in table.items() if name in _TRAIN_FIELDS}
        given = {name: value for name, value in changes.items() if value is not None}
        try:
            return TrainConfig(**{**known, **given})
        except TypeError as error:
            raise TrainError(f"preset {self.name}, [{stage}]: {error}") from None

    def options(self, stage: str) -> dict[str, Any]:
        """What the table of a stage says beyond ``TrainConfig``; all of it if the stage has no steps (``prepare``)."""
        table = self._table(stage)
        return {name: value for name, value in table.items() if "steps" not in table or name not in _TRAIN_FIELDS}

    def with_model(self, **changes: Any) -> Preset:
        """The same preset with another model; changes that are None are left out."""
        return replace(self, model=replace(self.model, **{n: v for n, v in changes.items() if v is not None}))

    def _table(self, stage: str) -> Mapping[str, Any]:
        if stage not in self.tables:
            raise TrainError(f"preset {self.name} has no stage {stage}; it has {', '.join(self.tables)}")
        return self.tables[stage]


_TRAIN_FIELDS = {entry.name for entry in fields(TrainConfig)}


def load_preset(name: str) -> Preset:
    """A preset by its name, or by the path of a TOML file. Raises TrainError."""
    path = Path(name) if name.endswith(".toml") else PRESETS / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(entry.stem for entry in PRESETS.glob("*.toml")))
        raise TrainError(f"no preset {name!r}; there are {known}, or give the path of a .toml file")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        return Preset(path.stem, ModelConfig(**tables.pop("model")), tables)
    except KeyError:
        raise TrainError(f"{path}: has no table [model]") from None
    except (tomllib.TOMLDecodeError, TypeError, UnicodeDecodeError) as error:
        raise TrainError(f"{path}: {error}") from None


def _one_of(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise TrainError(f"{what} is {value!r}, expected one of {', '.join(choices)}")
