"""Where a student starts: at its teacher's weights, at a ternary checkpoint, or at latents that a run stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from packer.checkpoints import Checkpoint, open_checkpoint
from packer.ternarize import unpack_bitnet

from ..errors import TrainError
from .latents import fitted_scales, inside, mean_magnitude, packed, unpacked
from .nets import BF16, attend, rms
from .student import GAINS, SUB_NORMS, Student
from .teacher import LINEARS, NORMS, Teacher, model_config

VECTORS = "vectors.safetensors"
LATENT_FILES = 4


def from_teacher(teacher: Teacher, tokens: Tensor) -> Student:
    """The teacher's weights as latents. tokens: int ``[B, T]``; on them the new sub-norms are made to change little."""
    weights = {name: teacher.stacked[name] for name in LINEARS}
    latents = {name: values / mean_magnitude(values) for name, values in weights.items()}
    gains = {name: teacher.stacked[name] for name in (*NORMS, "norm")} | _sub_norms(teacher, tokens)
    return Student(teacher, latents, {name: fitted_scales(values) for name, values in weights.items()}, gains)


@torch.no_grad()
def _sub_norms(teacher: Teacher, tokens: Tensor) -> dict[str, Tensor]:
    """Constant gains that give back the usual magnitude of what each sub-norm divides by it."""
    x = teacher.embedding[tokens.long()]
    cos, sin = teacher.cos[: tokens.shape[1]], teacher.sin[: tokens.shape[1]]
    sizes: dict[str, list[Tensor]] = {name: [] for name in SUB_NORMS}
    for weights in teacher.layers():
        mixed = attend(*teacher.project(x, cos, sin, *weights))
        sizes["attention_sub_norm"].append(mixed.float().pow(2).mean(-1).sqrt().mean())
        _, _, o, norm, gate_up, _ = weights
        middle = x + F.linear(mixed, o).float()
        gate, up = F.linear(rms(middle, norm, teacher.split.eps).to(BF16), gate_up).float().chunk(2, dim=-1)
        sizes["ffn_sub_norm"].append((F.silu(gate) * up).pow(2).mean(-1).sqrt().median())
        x = teacher.finish(x, mixed, *weights)
    config = teacher.config
    lengths = {"attention_sub_norm": config.heads * config.head_dim, "ffn_sub_norm": config.ffn_dim}
    return {name: torch.stack(found)[:, None].repeat(1, lengths[name]) for name, found in sizes.items()}


def from_checkpoint(teacher: Teacher, folder: Path) -> Student:
    """A ternary checkpoint (BitNet's packed form), with latents that lie where the teacher's weights do, as far as the
    checkpoint's trits allow. Raises CheckpointError, or TrainError for a model of another shape or form."""
    checkpoint = open_checkpoint(folder)
    _check_shape(teacher, checkpoint)
    latents, scales = {}, {}
    for name, theirs in LINEARS.items():
        found = [
            _ternary(checkpoint, f"model.layers.{layer}.{theirs}.weight") for layer in range(teacher.config.layers)
        ]
        wanted = torch.stack([trits for trits, _ in found]).to(teacher.device)
        latents[name] = inside(teacher.stacked[name], wanted)
        scales[name] = torch.stack([scale for _, scale in found]).to(teacher.device)
    gains = {}
    for name, theirs in (NORMS | SUB_NORMS).items():
        names = [f"model.layers.{layer}.{theirs}.weight" for layer in range(teacher.config.layers)]
        gains[name] = torch.stack([torch.from_numpy(checkpoint.rows(each)) for each in names]).to(teacher.device)
    gains["norm"] = torch.from_numpy(checkpoint.rows("model.norm.weight")).to(teacher.device)
    return Student(teacher, latents, scales, gains)


def _check_shape(teacher: Teacher, checkpoint: Checkpoint) -> None:
    found, wanted = model_config(checkpoint.info.config, checkpoint.path), teacher.config
    for field in ("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "rope_theta"):
        if getattr(found, field) != getattr(wanted, field):
            raise TrainError(
                f"{checkpoint.path}: {field} is {getattr(found, field)}, the teacher's is {getattr(wanted, field)}; "
                "start from a student of this teacher"
            )


def _ternary(checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor]:
    """Trits f32 ``[N, K]`` and scale f32 ``[]`` that multiplies them."""
    if not checkpoint.is_packed(name):
        raise TrainError(f"{checkpoint.path}: tensor {name} is not packed; expected BitNet's two bits a weight")
    stored = checkpoint.rows(name)
    trits = unpack_bitnet(stored, 4 * len(stored))
    scale = checkpoint.rows(f"{name}_scale").reshape(-1)
    return torch.from_numpy(trits.astype(np.float32)), torch.tensor(float(scale[0]))


@torch.no_grad()
def save_compact(student: Student, folder: Path) -> None:
    """Latents in 4 bits and everything else in f32: what a later run can continue from, and what ``export`` takes.

    The latents are divided by layers over ``LATENT_FILES`` files. Each file is written beside its place and renamed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vectors = {f"scale.{name}": student.scale(name) for name in LINEARS} | {f"gain.{n}": student.gain(n) for n in GAINS}
    _write(folder / VECTORS, vectors)
    codes = {name: packed(latents.detach()) for name, latents in student.latents.items()}
    for part, layers in enumerate(np.array_split(np.arange(student.config.layers), LATENT_FILES)):
        if len(layers):
            chosen = {name: values[layers[0] : layers[-1] + 1] for name, values in codes.items()}
            _write(folder / f"latents-{part}.safetensors", chosen)


def from_compact(teacher: Teacher, folder: Path) -> Student:
    """What ``save_compact`` wrote. Raises TrainError for missing or damaged files, or another shape."""
    vectors = _read(folder / VECTORS)
    parts = [_read(path) for path in sorted(folder.glob("latents-*.safetensors"))]
    latents = {}
    for name in LINEARS:
        if not parts or any(name not in part for part in parts):
            raise TrainError(f"{folder}: latents-*.safetensors have no {name} in each; the folder is incomplete")
        codes = torch.cat([part[name] for part in parts])
        wanted = teacher.stacked[name].shape
        if (*codes.shape[:2], 2 * codes.shape[2]) != tuple(wanted):
            raise TrainError(f"{folder}: {name} is {(*codes.shape[:2], 2 * codes.shape[2])}, expected {tuple(wanted)}")
        latents[name] = unpacked(codes.to(teacher.device))
    missing = ({f"scale.{name}" for name in LINEARS} | {f"gain.{name}" for name in GAINS}) - set(vectors)
    if missing:
        raise TrainError(f"{folder / VECTORS}: has no {min(missing)}")
    vectors = {name: values.to(teacher.device) for name, values in vectors.items()}
    scales = {name: vectors[f"scale.{name}"] for name in LINEARS}
    return Student(teacher, latents, scales, {name: vectors[f"gain.{name}"] for name in GAINS})


def start(teacher: Teacher, where: str, tokens: Tensor) -> Student:
    """``teacher``, or the path of a folder of either kind. tokens: as in ``from_teacher``."""
    if where == "teacher":
        return from_teacher(teacher, tokens)
    folder = Path(where)
    return from_compact(teacher, folder) if (folder / VECTORS).exists() else from_checkpoint(teacher, folder)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    beside = path.with_suffix(".tmp")
    save_file({name: values.detach().cpu().contiguous() for name, values in tensors.items()}, beside)
    beside.replace(path)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{path}: cannot be read ({error}); copy the whole folder again") from None
