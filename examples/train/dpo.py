"""``dpo``: learning from pairs without a reward model, by one of three losses.

``dpo`` (Rafailov et al., arXiv:2305.18290), ``orpo`` (Hong et al., arXiv:2403.07691; needs no reference) and ``kto``
(Ethayarajh et al., arXiv:2402.01306; sees single answers, each with a verdict). The reference is the model at the
start: its log-probabilities are computed once, for the rows that the run will see, and then it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from .config import TrainConfig
from .distributed import World, world
from .errors import TrainError
from .likelihood import Batch, answer_log_probs, answers, token_log_probs
from .options import Data, From, Out, TrainOptions, training_command
from .reward import Pair, pair_batch, pair_length
from .stage import StagePreset, begin, finish, fitting, stage_run
from .streams import row_batches
from .trainer import Loss, LossFunction, Run, to_device, train

METHODS = ("dpo", "orpo", "kto")


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))), f32 ``[P]``, of whole answers'
    log-probabilities under the policy and the reference."""
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


def orpo_loss(chosen: Tensor, rejected: Tensor, weight: float) -> Tensor:
    """-chosen - weight * log sigmoid(log odds(chosen) - log odds(rejected)), f32 ``[P]``.

    Both are mean log-probabilities a token; odds(p) = p / (1 - p).
    """
    odds = (chosen - rejected) - (_log_rest(chosen) - _log_rest(rejected))
    return -chosen - weight * F.logsigmoid(odds)


def kto_loss(
    good: Tensor, bad: Tensor, ref_good: Tensor, ref_bad: Tensor, baseline: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """1 - sigmoid(beta * (r - z)) of good answers, 1 - sigmoid(beta * (z - r)) of bad ones, each f32 ``[P]``.

    r: log-ratio of policy and reference. baseline: z, a scalar of 0 or more without gradient, the policy's
    distance from the reference.
    """
    good_ratio, bad_ratio = good - ref_good, bad - ref_bad
    return 1 - torch.sigmoid(beta * (good_ratio - baseline)), 1 - torch.sigmoid(beta * (baseline - bad_ratio))


def _log_rest(log_p: Tensor) -> Tensor:
    """log(1 - p) of log p; p is kept just below 1, where the odds would be infinite."""
    return torch.log1p(-torch.exp(log_p.clamp(max=-1e-6)))


def make_loss(method: str, beta: float) -> LossFunction:
    """The loss over batches of ``pair_batches``. beta: for ORPO the weight of the odds ratio. Raises TrainError."""
    if method not in METHODS:
        raise TrainError(f"--method is {method!r}, expected one of {', '.join(METHODS)}")
    return {"dpo": _dpo, "orpo": _orpo, "kto": _kto}[method](beta)


def _dpo(beta: float) -> LossFunction:
    def loss(model: Any, batch: Batch) -> Loss:
        chosen, rejected = answer_log_probs(model, batch).chunk(2)
        ref_chosen, ref_rejected = batch["reference"].chunk(2)
        margin = ((chosen - ref_chosen) - (rejected - ref_rejected)).detach()
        metrics = {"accuracy": (margin > 0).sum(), "margin": beta * margin.sum()}
        return Loss(dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta).sum(), len(chosen), metrics)

    return loss


def _orpo(weight: float) -> LossFunction:
    def loss(model: Any, batch: Batch) -> Loss:
        mask = batch["mask"]
        per_token = token_log_probs(model(batch["tokens"]), batch["tokens"]) * mask
        chosen, rejected = (per_token.sum(dim=-1) / mask.sum(dim=-1)).chunk(2)
        metrics = {"accuracy": (chosen > rejected).sum(), "margin": (chosen - rejected).detach().sum()}
        return Loss(orpo_loss(chosen, rejected, weight).sum(), len(chosen), metrics)

    return loss


def _kto(beta: float) -> LossFunction:
    def loss(model: Any, batch: Batch) -> Loss:
        good, bad = answer_log_probs(model, batch).chunk(2)
        ref_good, ref_bad = batch["reference"].chunk(2)
        strange = {name.removeprefix("strange_"): value for name, value in batch.items() if "strange_" in name}
        with torch.no_grad():
            baseline = (answer_log_probs(model, strange) - strange["reference"]).mean().clamp(min=0)
        losses = torch.cat(kto_loss(good, bad, ref_good, ref_bad, baseline, beta))
        # Each is compared with the baseline, not with its partner.
        right = ((good - ref_good) > baseline).sum() + ((bad - ref_bad) < baseline).sum()
        return Loss(losses.sum(), len(losses), {"accuracy": right, "baseline": baseline * len(losses)})

    return loss


class References:
    """Log-probabilities under the reference of the rows that a run will see; each row's are computed once.

    For KTO also of each prompt with the answer of the row after it, which is how it measures distance.
    """

    def __init__(self, model: Any, pairs: Sequence[Pair], strangers: bool, device: torch.device) -> None:
        self.model, self.pairs, self.strangers, self.device = model, pairs, strangers, device
        self.known: dict[int, list[float]] = {}  # row -> chosen, rejected, stranger's

    @torch.no_grad()
    def learn(self, rows: Sequence[int]) -> None:
        """Compute what is not known yet of these rows."""
        new = [row for row in rows if row not in self.known]
        if new:
            batch = pair_batch([self.pairs[row] for row in new])
            found = [*answer_log_probs(self.model, to_device(batch, self.device)).chunk(2)]
            if self.strangers:
                found.append(answer_log_probs(self.model, to_device(self.strange(new), self.device)))
            for row, *values in zip(new, *(part.tolist() for part in found), strict=True):
                self.known[row] = values

    def strange(self, rows: Sequence[int]) -> Batch:
        """Prompts with the chosen answers of the rows after them."""
        others = [self.pairs[(row + 1) % len(self.pairs)]["chosen"] for row in rows]
        return answers([self.pairs[row]["prompt"] for row in rows], others)

    def batch(self, rows: Sequence[int]) -> Batch:
        """A micro-batch with ``reference`` f32 ``[2P]``; for KTO also a batch of P rows under ``strange_…`` names."""
        batch = pair_batch([self.pairs[row] for row in rows])
        known = torch.tensor([self.known[row] for row in rows])  # [P, 2 or 3]
        batch["reference"] = torch.cat([known[:, 0], known[:, 1]])
        if self.strangers:
            strange = self.strange(rows) | {"reference": known[:, 2]}
            batch |= {f"strange_{name}": value for name, value in strange.items()}
        return batch


def dpo(
    init: Path, data: Path, config: TrainConfig, run: Run, method: str = "dpo", beta: float = 0.1
) -> dict[str, float]:
    """Train the checkpoint in ``init`` on the pairs in ``data``; returns what ``train`` does.

    Two rows of ``sequence`` tokens make a pair. Raises TrainError.
    """
    here = run.world
    loss = make_loss(method, beta)
    model, found, run = begin(init, data, config, run)
    learned, held = (fitting(data, "preferences", s, pair_length, config.sequence, here) for s in ("train", "held"))
    if method == "kto" and len(learned) < 2:
        raise TrainError(f"{data / 'preferences-train.jsonl'}: KTO needs two rows or more; prepare more data")
    pairs = max(config.micro_batch(here.size) // 2, 1)
    looks = [list(range(i, min(i + pairs, len(held)))) for i in range(0, len(held), pairs)][: config.eval_batches]

    def order(start: int) -> Iterator[list[int]]:
        return row_batches(len(learned), pairs, config.seed, start, here.rank, here.size)

    seen = list(islice(order(0), config.steps * config.grad_accum))
    strangers = method == "kto"
    make, make_held = (
        _referred(model, own, chosen, method, strangers, here, config)
        for own, chosen in ((learned, seen), (held, looks))
    )
    return train(
        model,
        found.model,
        lambda start: (make(chosen) for chosen in order(start)),
        loss,
        config,
        run,
        [make_held(chosen) for chosen in looks],
    )


def _referred(
    model: Any,
    pairs: Sequence[Pair],
    chosen: Sequence[Sequence[int]],
    method: str,
    strangers: bool,
    here: World,
    config: TrainConfig,
) -> Callable[[Sequence[int]], Batch]:
    """What makes a micro-batch of row numbers, with the reference's log-probabilities where the method wants them."""
    if method == "orpo":
        return lambda rows: pair_batch([pairs[row] for row in rows])
    references = References(model, pairs, strangers, here.device)
    console = Console(stderr=True)
    hidden = not (here.first and console.is_terminal)
    for rows in track(chosen, "reference", console=console, transient=True, disable=hidden):
        with torch.autocast(here.device.type, torch.bfloat16, enabled=config.amp):
            references.learn(rows)
    return references.batch


@training_command
def dpo_command(
    data: Data,
    init: From,
    out: Out,
    options: TrainOptions,
    preset: StagePreset = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "dpo",
    beta: Annotated[float | None, typer.Option(help="Of DPO and KTO; of ORPO the weight of the odds ratio.")] = None,
) -> None:
    """Learn from preference pairs: DPO, ORPO or KTO."""
    with world(options.device) as here:
        chosen, config, run = stage_run("dpo", init, out, preset, options, here)
        strength = chosen.options("dpo").get("beta", 0.1) if beta is None else beta
        finish(out, here, dpo(init, data, config, run, method, strength))
