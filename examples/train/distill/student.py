"""The student: the teacher's graph with ternary linears, int8 activations and BitNet's sub-norms.

Each matrix has latents (``latents.py``) and one free scale; the embedding is the teacher's and stays as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import TrainError
from ..precision.ternary import straight_through
from .latents import rounded
from .nets import BF16, Net, compiled, rms, turned
from .teacher import NORMS

SUB_NORMS = {"attention_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
GAINS = (*NORMS, *SUB_NORMS, "norm")


def codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 activations as whole bf16 numbers ``[..., K]``, straight through, and the factor 127 / max|x| ``[..., 1]``.

    transformers ``integrations/bitnet.py``, ``ActQuant``. Whole numbers up to 256 are exact in bf16.
    """
    factor = (127.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)).detach()
    exact = x * factor
    return straight_through(exact, exact.round().clamp(-128, 127)).to(BF16), factor


def product(x: Tensor, trits: Tensor, scale: Tensor) -> Tensor:
    """x f32 ``[..., K]`` . trits bf16 ``[N, K]`` * scale f32 ``[N]``, f32 ``[..., N]``."""
    whole, factor = codes(x)
    return F.linear(whole, trits).float() * scale / factor


class Student(Net):
    """latents: f32 ``[L, N, K]`` by the names of ``LINEARS``. scales: f32 ``[L]`` each. gains: of the norms, f32
    ``[L, n]`` by the names in ``GAINS`` (``norm``: ``[n]``).

    Scales and gains are trained relative to what they are at first: scale = base * exp(parameter), gain = base *
    parameter, with one base a norm; so one learning rate suits them all.
    """

    def __init__(
        self, teacher: Net, latents: dict[str, Tensor], scales: dict[str, Tensor], gains: dict[str, Tensor]
    ) -> None:
        super().__init__(teacher.config, teacher.embedding)
        self.latents = {name: values.clone().requires_grad_(True) for name, values in latents.items()}
        self._scale_bases = {name: values.clone() for name, values in scales.items()}
        self._log_scales = {name: torch.zeros_like(values, requires_grad=True) for name, values in scales.items()}
        self._gain_bases = {name: values.abs().mean(-1, keepdim=True) for name, values in gains.items()}
        self._gains = {
            name: (values / self._gain_bases[name]).clone().requires_grad_(True) for name, values in gains.items()
        }
        self._round = compiled(rounded, self.device)
        self._frozen: list[tuple[Tensor, ...]] | None = None

    def scale(self, name: str) -> Tensor:
        """Scales of a kind of linear, f32 ``[L]``."""
        return self._scale_bases[name] * self._log_scales[name].exp()

    def gain(self, name: str) -> Tensor:
        """Weights of a kind of norm, f32 ``[L, n]`` or ``[n]``."""
        return self._gains[name] * self._gain_bases[name]

    def matrices(self) -> list[Tensor]:
        """Parameters that are latents."""
        return list(self.latents.values())

    def vectors(self) -> list[Tensor]:
        """The other parameters."""
        return [*self._log_scales.values(), *self._gains.values()]

    def layers(self) -> list[tuple[Tensor, ...]]:
        return self._frozen if self._frozen is not None else self._rounded_layers()

    def _rounded_layers(self) -> list[tuple[Tensor, ...]]:
        trits = {name: self._round(values) for name, values in self.latents.items()}

        def joined(*names: str) -> tuple[Tensor, Tensor]:
            columns = [self.scale(name)[:, None].expand(-1, self.latents[name].shape[1]) for name in names]
            return torch.cat([trits[name] for name in names], dim=1), torch.cat(columns, dim=1)

        parts = (
            self.gain("attention_norm"), *joined("q", "k", "v"),
            self.gain("attention_sub_norm"), *joined("o"),
            self.gain("ffn_norm"), *joined("gate", "up"),
            self.gain("ffn_sub_norm"), *joined("down"),
        )  # fmt: skip
        return list(zip(*(part.unbind(0) for part in parts), strict=True))

    @torch.no_grad()
    def freeze(self) -> None:
        """Round now, and use that until ``thaw``: for decoding and for passes without gradients."""
        self._frozen = self._rounded_layers()

    def thaw(self) -> None:
        """Round at each pass again."""
        self._frozen = None

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norm, qkv, scale = weights[:3]
        y = product(rms(x, norm, self.split.eps), qkv, scale)
        return turned(*self.split.qkv(y), cos, sin)

    def _finish(self, x: Tensor, mixed: Tensor, *weights: Tensor) -> Tensor:
        sub_norm, o, o_scale, norm, gate_up, gate_up_scale, ffn_sub_norm, down, down_scale = weights[3:]
        eps = self.split.eps
        x = x + product(rms(mixed, sub_norm, eps), o, o_scale)
        gate, up = product(rms(x, norm, eps), gate_up, gate_up_scale).chunk(2, dim=-1)
        return x + product(rms(F.silu(gate) * up, ffn_sub_norm, eps), down, down_scale)

    def last(self, x: Tensor) -> Tensor:
        return rms(x, self.gain("norm"), self.split.eps).to(BF16)

    def state(self) -> dict[str, Tensor]:
        """All parameters and bases, detached copies by name."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """What ``state`` gave. Raises TrainError for the state of another shape."""
        for name, mine in self._tensors().items():
            if name not in state or state[name].shape != mine.shape:
                found = tuple(state[name].shape) if name in state else "missing"
                raise TrainError(
                    f"saved student: {name} is {found}, expected {tuple(mine.shape)}; it is another student's"
                )
            mine.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        groups = {
            "latents": self.latents, "scale_bases": self._scale_bases, "log_scales": self._log_scales,
            "gain_bases": self._gain_bases, "gains": self._gains,
        }  # fmt: skip
        return {f"{group}.{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
