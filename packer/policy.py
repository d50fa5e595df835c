"""Which encoding each matrix gets: what ``--policy`` says, and what ``--keep GLOB=ENCODING`` says of single ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from .errors import PackerError
from .models import Matrix
from .planes import MOST_PLANES

POLICIES = ("ternary", "q4km", "q8", "all-fp4")
#: From the narrowest to the widest, which is what a pack matrix of several linears takes if they differ.
KEEP_ENCODINGS = ("ternary", "mxfp4", "nvfp4", "q4", "q4a", "q8", "f16")
_EXAMPLES = "'lm_head=q8', 'layers.[01].*=q8', 'layers.*.down_proj=q4', '*=mxfp4'"


@dataclass(frozen=True)
class Choice:
    """What a matrix gets. encoding: None if nobody said. kept: a ``--keep`` said so. why: in words, for the report."""

    encoding: str | None
    kept: bool
    why: str


class Policy:
    """The choices of one export.

    policy: one of ``POLICIES``, or None: only ``keep`` has a say. keep: ``GLOB=ENCODING``, the last that
    matches counts. matrices: all of the model. layers: how many it has. tied: whether its embedding is the head too.
    Raises PackerError for a rule of another form, an unknown encoding, or a glob that matches nothing.
    """

    def __init__(self, policy: str | None, keep: Sequence[str], matrices: Sequence[Matrix], layers: int, tied: bool):
        self.policy, self.layers, self.tied = policy, layers, tied
        self.rules = [(rule, *_parse(rule)) for rule in keep]
        self.names = {matrix.name: names_of(matrix, tied) for matrix in matrices}
        for rule, glob, _ in self.rules:
            parts = [names for matrix in self.names.values() for names in matrix]
            if not any(fnmatchcase(name, glob) for names in parts for name in names):
                shown = ", ".join(names[0] for names in [*parts[:4], parts[-1]])
                raise PackerError(
                    f"--keep {rule}: no linear and no embedding has such a name; names are like {shown}, or as the "
                    f"checkpoint has them, like {parts[-1][-1]}"
                )

    @property
    def wants_planes(self) -> bool:
        """Whether something may become ternary planes."""
        return self.policy == "ternary" or any(encoding == "ternary" for _, _, encoding in self.rules)

    def check_planes(self, planes: int | None, compensate: bool, calibration: Path | None) -> None:
        """Refuse options of ternary planes that would have no effect. Raises PackerError."""
        if planes is not None and not 1 <= planes <= MOST_PLANES:
            raise PackerError(f"--ternary-planes {planes}: expected 1 to {MOST_PLANES}")
        for option, given in (("--ternary-planes", planes is not None), ("--compensate", compensate)):
            if given and not self.wants_planes:
                raise PackerError(f"{option} is for linears that become ternary; add --policy ternary, or leave it out")
        if calibration is not None and not compensate:
            raise PackerError("--calibration is the text for --compensate; add that, or leave it out")

    def linears(self, matrix: Matrix) -> list[Choice]:
        """A choice for each source of a matrix, which is what it gets unless it is exactly ternary and not kept."""
        return [self._kept(names) or self._of_policy(matrix) for names in self.names[matrix.name]]

    def embedding(self, matrix: Matrix) -> Choice:
        """The choice for the embedding or the output head."""
        return self._kept(self.names[matrix.name][0]) or self._of_policy(matrix)

    def _kept(self, names: Sequence[str]) -> Choice | None:
        for rule, glob, encoding in reversed(self.rules):
            if any(fnmatchcase(name, glob) for name in names):
                return Choice(encoding, True, f"--keep {rule}")
        return None

    def _of_policy(self, matrix: Matrix) -> Choice:
        why = f"--policy {self.policy}"
        if self.policy is None:
            return Choice(None, False, "")
        if self.policy == "q4km":
            wide = self._is_wide(matrix)
            return Choice("q8" if wide else "q4a", False, f"{why}: wide" if wide else why)
        if self.policy == "all-fp4":
            return Choice("nvfp4", False, why)
        if self.policy == "q8":
            return Choice("q8", False, why)
        return Choice(None if matrix.is_embedding else "ternary", False, why)

    def _is_wide(self, matrix: Matrix) -> bool:
        """What llama.cpp's Q4_K_M keeps in 6 bits: output head, and attn_v and ffn_down of some layers."""
        if matrix.is_embedding:
            return self.tied or matrix.name == "lm_head"
        layer = re.match(r"layers\.(\d+)\.", matrix.name)
        sensitive = any(name.endswith((".v_proj.weight", ".down_proj.weight")) for name, _ in matrix.sources)
        return sensitive and layer is not None and use_more_bits(int(layer[1]), self.layers)


def use_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's ``use_more_bits``: the first and last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def not_ternary(path: Path, name: str) -> str:
    """Why a model whose linear ``name`` is not ternary is refused, and what there is to do."""
    return (
        f"{path}: tensor {name} is not ternary. Rounding a model that was not trained ternary to -1, 0, +1 destroys it "
        "(SmolLM2-135M: perplexity from 10.0 to 3.5 million). Use --policy q8 (8.5 bits a weight, nearly lossless), "
        "--policy q4km (about 6 bits), --policy ternary --ternary-planes 3 --compensate (about 6 bits too), or "
        "--keep 'layers.*=q4' (4.5 bits), or train the model ternary"
    )


def widest(choices: Sequence[Choice]) -> Choice:
    """The choice of a matrix whose linears got these; encodings must be known."""
    best = max(choices, key=lambda choice: KEEP_ENCODINGS.index(str(choice.encoding)))
    if len({choice.encoding for choice in choices}) == 1:
        return best
    return Choice(best.encoding, best.kept, f"{best.why}; the widest of {', '.join(str(c.encoding) for c in choices)}")


def names_of(matrix: Matrix, tied: bool) -> list[list[str]]:
    """For each source the names that a glob may match, the shortest first.

    Of ``model.layers.0.self_attn.q_proj.weight`` these are ``layers.0.q_proj``, the pack's ``layers.0.qkv``, and itself
    without ``model.`` and ``.weight``, without ``.weight``, and whole.
    """
    return [_names(name, matrix, tied) for name, _ in matrix.sources]


def _names(source: str, matrix: Matrix, tied: bool) -> list[str]:
    bare = source.removesuffix(".weight")
    plain = bare.removeprefix("model.")
    layer, _, _ = matrix.name.rpartition(".")
    short = f"{layer}.{plain.rpartition('.')[2]}" if layer else matrix.name
    head = ["lm_head", "lm_head.weight"] if tied and matrix.name == "embed" else []
    return [short, matrix.name, plain, bare, source, *head]


def _parse(rule: str) -> tuple[str, str]:
    glob, equals, encoding = rule.rpartition("=")
    if not equals or not glob:
        raise PackerError(f"--keep {rule}: expected GLOB=ENCODING, such as {_EXAMPLES}")
    if encoding not in KEEP_ENCODINGS:
        raise PackerError(
            f"--keep {rule}: {encoding or 'nothing'} is no encoding, expected one of {', '.join(KEEP_ENCODINGS)}, "
            f"such as {_EXAMPLES}"
        )
    return glob, encoding
