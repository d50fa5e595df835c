"""Which constants kernels run with: timed at load on the pack's own weights, remembered for the adapter and the pack.

Only ``timed`` constants and ``rival`` kernels of ``kernels.json`` are chosen so: they change no bit of a result. The
JavaScript twin is ``web/engine/tuning.js``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from .contract import KERNELS_FILE, Kernel, fitting, kernels, select
from .forced import Forced

#: All measuring of a load stays below 300 ms; what did not get its turn keeps its default until the next load.
BUDGET_MS = 280.0
#: Of one measurement: long enough to drown what a submit costs.
_TARGET_MS = 3.0
_REPEATS = 3
_MOST_ROUNDS = 64
#: What is slower than the best by this factor is not timed again.
_HOPELESS = 1.25
#: A candidate must be faster than the default by this share.
_MARGIN = 0.03
#: Of a kernel: each is compiled.
_MOST_SETTINGS = 4
_FORMAT = 1


@dataclass(frozen=True)
class Setting:
    """A kernel with its timed constants."""

    kernel: str
    tuned: Mapping[str, int]


def kind_of(kernel: Kernel, symbols: Mapping[str, Any]) -> str:
    """Name of the operations that a kernel runs on matrices of one shape."""
    return f"{kernel.name} {symbols['OUT_N']}x{symbols['K']}" if "ROW_WORDS" in symbols else kernel.name


def settings_of(kernel: Kernel) -> list[Setting]:
    """What to try of a kernel, the default first."""
    values = product(*(kernel.tuned[name] for name in kernel.timed))
    made = [Setting(kernel.name, dict(zip(kernel.timed, some, strict=True))) for some in values]
    return made[:_MOST_SETTINGS]


@dataclass
class Choices:
    """Chooses the kernel of an operation and its constants. features: of the device. chosen: kind -> setting."""

    forced: Forced = field(default_factory=Forced)
    features: frozenset[str] = frozenset()
    chosen: dict[str, Setting] = field(default_factory=dict)

    def first(self, op: str, symbols: Mapping[str, Any]) -> Kernel:
        """The kernel that runs an operation where nothing was timed. Raises ContractError."""
        return select(op, symbols, self.features, self.forced.off)

    def choose(self, op: str, symbols: Mapping[str, Any]) -> tuple[Kernel, Mapping[str, int]]:
        """(kernel, constants other than the device's defaults) of an operation. Raises ContractError."""
        kernel = self.first(op, symbols)
        if kernel.name in self.forced.tuned:
            return kernel, self.forced.tuned[kernel.name]
        setting = self.chosen.get(kind_of(kernel, symbols))
        if setting is None:
            return kernel, {}
        for other in fitting(op, symbols, self.features):
            if other.name == setting.kernel:
                return other, setting.tuned
        return kernel, {}

    def settings(self, op: str, symbols: Mapping[str, Any]) -> list[Setting]:
        """What may be tried for an operation, the default first; empty if that is forced."""
        kernel = self.first(op, symbols)
        if self.forced.defaults or kernel.name in self.forced.tuned:
            return []
        rivals = [
            other
            for other in fitting(op, symbols, self.features)
            if other.rival
            and other.name != kernel.name
            and other.name not in self.forced.off
            and other.name not in self.forced.tuned
        ]
        # Each is compiled: of a rival only its default.
        return [*settings_of(kernel), *(settings_of(rival)[0] for rival in rivals)]


def choose_fastest(
    kinds: Sequence[tuple[str, int]],
    time: Callable[[int, int, float], float],
    now: Callable[[], float],
    budget_ms: float = BUDGET_MS,
) -> dict[str, int]:
    """Decide, within a budget, which setting of each kind is the fastest; first for the kinds that take the most time.

    kinds: (key, number of settings). time: ms of some rounds of a kind with a setting, or of a part of a round; 0: of
    one operation. now: ms. Returns the settings of the kinds that had their turn.
    """
    end = now() + budget_ms
    took = {}
    for kind in range(len(kinds)):
        if now() < end:
            took[kind] = time(kind, 0, 1)
    chosen = {}
    for kind in sorted(took, key=lambda kind: -took[kind]):
        key, count = kinds[kind]
        best = _race(count, took[kind], partial(time, kind), lambda wanted: now() + wanted < end)
        if best:
            fastest = best.index(min(best))
            chosen[key] = fastest if best[fastest] < (1 - _MARGIN) * best[0] else 0
    return chosen


def _race(
    count: int, took: float, time: Callable[[int, float], float], has_time: Callable[[float], bool]
) -> list[float] | None:
    """The best time of each of ``count`` settings; None if the time did not suffice. took: ms of a round."""
    rounds = min(_MOST_ROUNDS, _TARGET_MS / max(took, 1e-9))
    best = [float("inf")] * count
    longest = took * rounds
    # Turn by turn, so that a clock that rises meanwhile serves all alike; the first turn warms up.
    for turn in range(_REPEATS + 1):
        for setting in range(count):
            if turn > 1 and best[setting] > _HOPELESS * min(best):
                continue
            if not has_time(longest):
                return None
            found = time(setting, rounds if turn else 0)
            if turn:
                best[setting] = min(best[setting], found)
                longest = max(longest, found)
    return best


# --- what earlier loads chose --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """A file for an adapter and a pack. version: of the kernels."""

    file: Path
    version: str

    def recall(self, kinds: Mapping[str, Sequence[Setting]]) -> dict[str, Setting]:
        """The setting of each kind that is known; of a broken file, or one of other kernels, nothing."""
        try:
            kept = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(kept, dict) or kept.get("format") != _FORMAT or kept.get("version") != self.version:
            return {}
        choices = kept.get("choices")
        if not isinstance(choices, dict):
            return {}
        written = {key: [_written(setting) for setting in settings] for key, settings in kinds.items()}
        return {
            key: kinds[key][settings.index(choices[key])]
            for key, settings in written.items()
            if key in choices and choices[key] in settings
        }

    def remember(self, chosen: Mapping[str, Setting]) -> None:
        """Write the file, whole or not at all; what cannot be kept is measured again."""
        choices = {key: _written(setting) for key, setting in chosen.items()}
        text = json.dumps({"format": _FORMAT, "version": self.version, "choices": choices})
        part = self.file.with_name(f".{self.file.name}.partial-{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            part.replace(self.file)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def _written(setting: Setting) -> dict[str, Any]:
    return {"kernel": setting.kernel, "tuned": dict(setting.tuned)}


def open_memory(adapter: Mapping[str, Any], pack: str) -> Memory | None:
    """Where choices for an adapter and a pack are kept. None: nowhere."""
    folder = cache_folder()
    if folder is None:
        return None
    name = hashlib.sha256(json.dumps([sorted(map(str, adapter.items())), pack]).encode()).hexdigest()
    return Memory(folder / "kernels" / f"{name[:32]}.json", _version())


def _version() -> str:
    """A hash of kernels.json and the files of all kernels that may be timed."""
    files = sorted({kernel.file for kernel in kernels() if kernel.timed or kernel.rival})
    found = hashlib.sha256()
    for path in (KERNELS_FILE, *(KERNELS_FILE.parent / file for file in files)):
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def cache_folder() -> Path | None:
    """``TERCET_CACHE``, else the platform's folder for caches. None for ``off``, or if there is no such folder."""
    given = os.environ.get("TERCET_CACHE")
    if given:
        return None if given == "off" else Path(given)
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        return _first(os.environ.get("LOCALAPPDATA"), home / "AppData" / "Local") / "tercet"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "tercet"
    return _first(os.environ.get("XDG_CACHE_HOME"), home / ".cache") / "tercet"


def _first(given: str | None, default: Path) -> Path:
    return Path(given) if given else default


def words(constants: Mapping[str, Mapping[str, int]]) -> Iterable[tuple[str, str]]:
    """(kind, constants) for people."""
    for kind, tuned in constants.items():
        yield kind, " ".join(f"{name}={value}" for name, value in tuned.items())
