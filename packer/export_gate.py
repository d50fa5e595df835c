"""The gate of ``export``: a pack with approximated linears is evaluated before it appears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoints import Checkpoint
from .eval import EvalOptions, Progress, evaluate
from .eval_html import page
from .eval_source import subject_of_checkpoint
from .pack import Pack
from .quality import require_acceptable, stamp

#: Much less than ``eval`` does: mean KL over 400 tokens tells the grades apart, and sums cost minutes without a GPU.
GATE = EvalOptions(tokens=400, sums=0, prompts=0, run_tokens=0)


def grade_new_pack(
    folder: Path, target: Path, checkpoint: Checkpoint, *, accept_damage: bool, progress: Progress
) -> dict[str, Any]:
    """Evaluate the pack in ``folder``, write report and grade into it, and return its ``quality``.

    target: where the pack will be, for messages. Raises PackerError if it is BROKEN and that is not accepted.
    """
    pack = Pack(folder)
    report = evaluate(pack, subject_of_checkpoint(checkpoint), GATE, progress)
    quality: dict[str, Any] = report["quality"]
    require_acceptable(quality["grade"], quality["kl"]["mean"], target, accept_damage=accept_damage)
    stamp(folder, report, quality["grade"], page(report, pack.manifest))
    return quality
