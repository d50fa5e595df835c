"""Cases of argmax, weigh, draw and accept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import sampling
from .case_kit import F32, Case, generator, make_case
from .cases_draw import Binned, Sums, decided, keys_of, weighed
from .checks import Check
from .contract import constant, document
from .sampling import Sampling

#: Logits of a part of ``pick``, as the rewrite of ``argmax`` has it.
_PART = next(op["part"] for rule in document()["rewrites"] for op in rule["into"] if op["op"] == "pick")


def argmax_cases() -> Iterator[Case]:
    """Sizes around the 256 threads and a part; ties; both zeros; a penalty that changes the winner; broken numbers."""
    for vocabulary in (1, 2, 255, 257, 1024, 1025, 49152):
        yield from _choice(f"argmax {vocabulary}", _logits(f"argmax {vocabulary}", vocabulary), Sampling())
    tied = _logits("tied", 700)
    tied[[5, 260, 261, 699]] = 99.0
    yield from _choice("argmax tie", tied, Sampling())
    zeros = np.full(600, -1.0, dtype=F32)
    zeros[[300, 301]] = -0.0, 0.0
    yield from _choice("argmax zeros tie", zeros, Sampling())
    yield from _choice("argmax negative", np.linspace(-900, -1, 300).astype(F32), Sampling())
    penalized = _logits("penalized", 400)
    penalized[7], penalized[300] = 10.0, 9.5
    yield from _choice("argmax penalty", penalized, Sampling(repetition_penalty=1.3), seen=[7, 12, 399])
    below_zero = np.array([-1.0, -1.1, -5.0], dtype=F32)
    yield from _choice("argmax penalty below zero", below_zero, Sampling(repetition_penalty=2.0), seen=[0])
    rows = np.stack([_logits("a", 300), _logits("b", 300), _logits("c", 300)])
    yield from _choice("argmax rows", rows, Sampling())
    drafts = [int(rows[1].argmax()), int(rows[2].argmax())]
    yield from _choice("argmax drafts penalized", rows, Sampling(repetition_penalty=3.0), drafts=drafts)
    yield from _choice("argmax parts of 70", _logits("parts", 300), Sampling(), part=70)
    yield from _choice("argmax 64 threads", _logits("threads", 1100), Sampling(), threads=64)
    small = np.stack([_logits("d", 70), _logits("e", 70)])
    broken = _logits("broken", 40)
    broken[30] = np.nan
    yield from _choice("argmax small nan", broken, Sampling(), part=25)
    yield from _choice("argmax small rows", small, Sampling(), part=30)
    yield from _broken("argmax", Sampling())


def sample_cases() -> Iterator[Case]:
    """Each filter alone and together, ties at a threshold, small and full vocabularies, several seeds."""
    options = {
        "plain": Sampling(temperature=1.0),
        "cold": Sampling(temperature=0.05),
        "hot": Sampling(temperature=5.0),
        "top-k 1": Sampling(temperature=1.0, top_k=1),
        "top-k 40": Sampling(temperature=1.5, top_k=40),
        "top-k beyond": Sampling(temperature=1.0, top_k=10**6),
        "top-p": Sampling(temperature=1.0, top_p=0.9),
        "top-p least": Sampling(temperature=1.0, top_p=1e-6),
        "min-p": Sampling(temperature=1.0, min_p=0.1),
        "min-p 1": Sampling(temperature=1.0, min_p=1.0),
        "all": Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
    }
    for title, choice in options.items():
        for vocabulary in (300, 1000):
            name = f"sample {title} {vocabulary}"
            yield from _choice(name, _logits(name, vocabulary), choice, seen=[3, 200, 299])
    big = _logits("sample 128256", 128256)
    for title in ("plain", "top-k 40", "min-p", "all"):
        yield from _choice(f"sample {title} 128256", big, options[title], seen=[int(big.argmax())])
    sharp = np.round(_logits("sharp", 128256) * 16).astype(F32) / 8
    yield from _choice("sample top-p 128256", sharp, options["top-p"])
    small = _logits("sample small", 5)
    yield from _choice("sample 5", small, Sampling(temperature=1.0, top_k=3, top_p=0.7))
    yield from _choice("sample 1", small[:1], Sampling(temperature=1.0, top_k=3, top_p=0.7))
    # Steps of a quarter: many logits equal the k-th largest and the one at which the nucleus ends.
    coarse = np.round(_logits("coarse", 600) * 4).astype(F32) / 4
    yield from _choice("sample tie top-k", coarse, Sampling(temperature=1.0, top_k=20))
    yield from _choice("sample tie top-p", coarse, Sampling(temperature=1.0, top_p=0.5))
    yield from _parts_cases(coarse)
    same = np.zeros(1000, dtype=F32)
    for seed in (0, 2**32, 2**64 - 1):
        yield from _choice(f"sample flat seed {seed}", same, Sampling(temperature=1.0, seed=seed), step=(40, 1, 1, 7))
    yield from _choice("sample flat top-k keeps ties", same, Sampling(temperature=1.0, top_k=2), step=(0, 9, 1, 0))
    rows = np.stack([_logits("x", 300), _logits("y", 300)])
    yield from _choice("sample rows", rows, Sampling(temperature=1.0))
    likely = [int(rows[1].argmax())]
    yield from _choice(
        "sample drafts penalized", rows, Sampling(temperature=0.3, repetition_penalty=3.0), drafts=likely
    )
    yield from _broken("sample", Sampling(temperature=1.0, top_k=10, top_p=0.9))


def _parts_cases(coarse: np.ndarray) -> Iterator[Case]:
    """Ties in several parts, more parts than threads, more keys in a bin than workgroup memory has room for."""
    for part in (1, 2, 70):
        for title, options in (
            ("plain", Sampling(temperature=1.0)),
            ("top-k", Sampling(temperature=1.0, top_k=20)),
            ("top-p", Sampling(temperature=1.0, top_p=0.5)),
            ("all", Sampling(temperature=0.8, top_k=50, top_p=0.8, min_p=0.02, repetition_penalty=1.2)),
        ):
            yield from _choice(f"sample {title} parts of {part}", coarse, options, seen=[5, 71], part=part)
    wide: np.ndarray = np.resize(coarse, 3001)
    yield from _choice("sample tie top-k 3001", wide, Sampling(temperature=1.0, top_k=23))
    yield from _choice("sample tie top-p 3001", wide, Sampling(temperature=1.0, top_p=0.5))
    # Within a bin, and around zero, where keys lie far apart.
    close = ((generator("close").random(2500) - 0.5) / 16).astype(F32)
    for top_k in (1, 513, 1000, 2400):
        yield from _choice(f"sample close top-k {top_k}", close, Sampling(temperature=1.0, top_k=top_k))
    # More than threads, but not more than workgroup memory has room for; falling, so that the last threads decide too.
    falling = -np.sort(-close[:400])
    for top_k in (200, 391):
        yield from _choice(f"sample members top-k {top_k}", falling, Sampling(temperature=1.0, top_k=top_k))
    # Two parts a thread, at other places of them.
    for seed in range(6):
        options = Sampling(temperature=1.0, seed=1000 * seed)
        yield from _choice(f"sample runs of parts seed {seed}", np.zeros(700, dtype=F32), options, part=2)
    stairs = (np.round(close * 512) / 512).astype(F32)
    for top_p in (0.001, 0.51, 0.99):
        yield from _choice(f"sample close top-p {top_p}", stairs, Sampling(temperature=1.0, top_p=top_p))
    yield from _choice("sample close top-p distinct", close, Sampling(temperature=1.0, top_p=0.51))
    options = Sampling(temperature=1.0, top_k=1500, top_p=0.7, min_p=0.97)
    yield from _choice("sample close all", stairs, options)
    # Four in bin 16, the first that the second sixteen sums are about; what is before it comes from the first sixteen.
    second = np.array([0] * 10 + [-1.40, -1.42, -1.44, -1.46, -9], dtype=F32)
    for title, options in (
        ("top-k", Sampling(temperature=1.0, top_k=12)),
        ("top-p", Sampling(temperature=1.0, top_p=0.963)),  # in the third of the four
    ):
        yield from _choice(f"sample bin 16 {title}", second, options)
    alike = np.zeros(5000, dtype=F32)
    yield from _choice("sample alike top-p", alike, Sampling(temperature=1.0, top_p=0.9))
    yield from _choice("sample alike top-k", alike, Sampling(temperature=1.0, top_k=7))
    far = _logits("far", 2100)
    far[2077] = 80.0
    alone = np.full(2100, -np.inf, dtype=F32)
    alone[1500] = -3.0
    for title, options in (("plain", Sampling(temperature=1.0)), ("all", Sampling(1.0, 5, 0.9, 0.1))):
        yield from _choice(f"sample dominated {title}", far, options)
        yield from _choice(f"sample alone {title}", alone, options)
    eight = np.stack([_logits(f"row {row}", 1100) for row in range(8)])
    drafts = [int(row.argmax()) for row in eight[1:]]
    for title, options in (
        ("plain", Sampling(temperature=1.0)),
        ("all", Sampling(temperature=1.0, top_k=30, top_p=0.8, min_p=0.02, repetition_penalty=1.5)),
    ):
        yield from _choice(f"sample eight rows {title}", eight, options, drafts=drafts)
    # Weights that no device errs in: of what equals the greatest, and of what is far below.
    steps = np.array([-90, 4, -60, 4, 4, -55], dtype=F32)
    yield from _choice("sample exact", steps, Sampling(temperature=1.0, top_k=5), part=6, exact=True)
    small = _logits("sample small", 45)
    for title, options in (
        ("all", Sampling(temperature=3.0, top_k=30, top_p=0.95, min_p=0.02, repetition_penalty=1.2)),
        ("top-p", Sampling(temperature=3.0, top_p=0.9)),
    ):
        yield from _choice(f"sample small {title}", small, options, seen=[int(small.argmax())], part=45)


def _broken(kernel: str, options: Sampling) -> Iterator[Case]:
    for title, value in (("nan", np.nan), ("inf", np.inf)):
        logits = _logits(title, 520)
        logits[300] = value
        yield from _choice(f"{kernel} {title}", logits, options, seen=[2])
    yield from _choice(f"{kernel} all -inf", np.full(300, -np.inf, dtype=F32), options)


def _logits(name: str, vocabulary: int) -> np.ndarray:
    rng = generator(name)
    return (rng.normal(size=vocabulary) * 3 + (rng.random(vocabulary) < 0.01) * 6).astype(F32)


def _choice(
    name: str,
    logits: np.ndarray,
    options: Sampling,
    *,
    seen: list[int] | None = None,
    step: tuple[int, int, int, int] | None = None,
    drafts: list[int] | None = None,
    part: int = _PART,
    threads: int = 0,
    exact: bool = False,
) -> Iterator[Case]:
    """Logits ``[R, V]``: what each row picks; of a random choice, what it is drawn from as well.

    drafts: the tokens between the rows, which count as seen in the rows after them. part: logits a workgroup.
    threads: of a workgroup, if not as many as by default. exact: whether all weights are the same on every device.
    """
    rows = np.atleast_2d(logits)
    vocabulary = rows.shape[1]
    drafts = drafts or [vocabulary + row for row in range(1, len(rows))]
    step = step or (11, len(rows) + 1, len(rows), 5)
    mask = np.zeros(vocabulary, dtype=bool)
    mask[seen or []] = True
    penalized = _penalized(rows, mask, drafts, options)
    position = step[0] + step[1] - step[2] + 1
    if not options.greedy and np.isfinite(penalized[0].max()):
        options = decided(penalized[0], options, position)
    inputs = {"logits": rows, "sampling": options.words(), "ids": np.array([77, *drafts], dtype=np.uint32)}
    inputs["seen"] = _bits(mask)
    values = {"logits": {"dtype": "f32", "shape": ["R", vocabulary]}}
    symbols = {"WORKGROUP": threads} if threads else None
    op = {"op": "pick", "logits": "logits", "part": part}
    if options.greedy:
        best = np.stack([_best_of_parts(keys_of(own), part) for own in penalized])
        yield make_case(name, op, values, inputs, {"picks": best}, symbols=symbols, step=step)
        return
    yield from _drawn(_Frame(name, op, values, step), inputs, penalized, options, exact)


@dataclass(frozen=True)
class _Frame:
    """What the cases of one choice share."""

    name: str
    op: dict[str, Any]
    values: dict[str, dict[str, Any]]
    step: tuple[int, int, int, int]


def _drawn(
    frame: _Frame, inputs: dict[str, np.ndarray], penalized: list[np.ndarray], options: Sampling, exact: bool
) -> Iterator[Case]:
    """What ``weigh`` leaves of logits whose greatest is a number, and what ``draw`` makes of it."""
    part, position = frame.op["part"], frame.step[0] + frame.step[1] - frame.step[2] + 1
    scaled = [sampling.temper(own, options) for own in penalized]
    sums, keys = (np.stack(planes) for planes in zip(*(weighed(own, options, part) for own in scaled), strict=True))
    inputs["picks"] = np.stack([_best_of_parts(keys_of(own), part) for own in penalized])
    if all(np.isfinite(own.max()) for own in scaled):
        # A kernel leaves what it does not write; with top-k or top-p it writes all sums.
        before = {"keys": np.zeros_like(keys)} | ({} if exact else {"bins": np.zeros_like(sums)})
        checks: dict[str, Check] = {} if exact else {"bins": Sums(), "keys": Binned(sums)}
        name, op = f"weigh {frame.name.removeprefix('sample ')}", frame.op | {"op": "weigh"}
        expected = {"bins": sums, "keys": keys}
        yield make_case(name, op, frame.values, inputs | before, expected, checks, step=frame.step)
    picks = np.zeros_like(inputs["picks"])
    picks[:, 1:, 1] = constant("invalid_id")
    for row, own in enumerate(penalized):
        picks[row, 0] = keys_of(scaled[row]).max(), sampling.sample(own, options, position + row)
    inputs |= {"bins": sums, "keys": keys}
    yield make_case(frame.name, frame.op | {"op": "draw"}, frame.values, inputs, {"picks": picks}, step=frame.step)


def _penalized(rows: np.ndarray, seen: np.ndarray, drafts: list[int], options: Sampling) -> list[np.ndarray]:
    """Logits of each row, in which the drafts before it were seen too."""
    made = []
    for row, own in enumerate(rows):
        known = seen.copy()
        known[[draft for draft in drafts[:row] if draft < len(seen)]] = True
        with np.errstate(invalid="ignore"):
            made.append(sampling.penalize(own, known, options.repetition_penalty))
    return made


def _best_of_parts(keys: np.ndarray, part: int) -> np.ndarray:
    """Key and id of the greatest of each part, u32 ``[PARTS, 2]``."""
    best = [first + int(np.argmax(keys[first : first + part])) for first in range(0, len(keys), part)]
    return np.array([[keys[id_], id_] for id_ in best], dtype=np.uint32)


def accept_cases() -> Iterator[Case]:
    """One row and several; drafts taken, refused, in the last row; ties of parts; broken numbers; the ring's end."""
    sound = 0xC0000000
    yield accept_case("accept one", [[(sound, 7)]], [])
    yield accept_case("accept parts", [[(sound, 7), (sound + 2, 41), (sound + 1, 2)]], [])
    yield accept_case("accept tie", [[(sound, 90), (sound, 41), (sound, 42)]], [], vocabulary=91)
    yield accept_case("accept many parts", [[(sound + (7 * i) % 61, i) for i in range(61)]], [], vocabulary=122)
    yield accept_case("accept drafts", [[(sound, 5)], [(sound, 6)], [(sound, 9)]], [5, 6])
    yield accept_case("accept first refused", [[(sound, 5)], [(sound, 6)], [(sound, 9)]], [4, 6])
    parts = [[(sound, 5), (3, 8)], [(sound, 6), (4, 9)], [(sound, 9), (5, 1)]]
    yield accept_case("accept second refused", parts, [5, 7])
    produced = constant("ring") - 3
    yield accept_case("accept eight", [[(sound, id_)] for id_ in range(8)], list(range(7)), produced=produced)
    yield accept_case("accept small ring", parts, [5, 7], produced=15, ring_size=16)
    yield accept_case("accept small ring nan", [[(sound, 5)], [(0xFFFFFFFF, 6)]], [5], produced=18, ring_size=16)
    for title, key in (("nan", 0xFFFFFFFF), ("inf", 0xFF800000), ("-inf", 0x007FFFFF)):
        yield accept_case(f"accept {title}", [[(sound, 5)], [(key, 6)], [(sound, 9)]], [5, 6])


def accept_case(
    name: str,
    rows: list[list[tuple[int, int]]],
    drafts: list[int],
    *,
    vocabulary: int = 64,
    produced: int = 5,
    ring_size: int = 0,
) -> Case:
    """rows: (key, id) of each part of each row. drafts: the tokens between the rows. ring_size: 0 is the engines'."""
    ring_size = ring_size or constant("ring")
    ring = generator(name).integers(0, 1 << 32, ring_size, dtype=np.uint32)
    seen = generator(name).integers(0, 2, vocabulary) == 1
    step = (20, len(rows) + 2, len(rows), produced)
    inputs = {
        "picks": np.array(rows, dtype=np.uint32),
        "step": np.array(step, dtype=np.uint32),
        "ids": np.array([3, *drafts], dtype=np.uint32),
        "ring": ring,
        "seen": _bits(seen),
    }
    after, known, ids = ring.copy(), seen.copy(), inputs["ids"].copy()
    taken = 0
    for row, parts in enumerate(rows):
        key, best = max(parts, key=lambda part: (part[0], -part[1]))
        token = best if 0x007FFFFF < key < 0xFF800000 else constant("invalid_id")
        after[(produced + taken) % len(ring)] = token
        if token != constant("invalid_id"):
            known[token] = True
        taken += 1
        if row == len(drafts) or token != drafts[row]:
            break
    ids[0] = token
    expected = {
        "step": np.array([step[0] + 2 + taken, 1, 1, produced + taken], dtype=np.uint32),
        "ids": ids,
        "ring": after,
        "seen": _bits(known),
    }
    op = {"op": "accept", "logits": "logits", "part": -(-vocabulary // len(rows[0]))}
    values = {"logits": {"dtype": "f32", "shape": ["R", vocabulary]}}
    return make_case(name, op, values, inputs, expected, symbols={"RING": ring_size}, step=step)


def _bits(mask: np.ndarray) -> np.ndarray:
    return np.packbits(
        np.resize(np.append(mask, np.zeros(-len(mask) % 32, dtype=bool)), -(-len(mask) // 32) * 32), bitorder="little"
    ).view("<u4")
