"""Cases of argmax, sample and accept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from . import sampling
from .case_kit import F32, Case, generator, make_case
from .contract import constant, document
from .sampling import Sampling

#: Relative error of a weight: exp() of a difference down to -20, where the integer weight becomes zero, errs by at
#: most (3 + 2 * 20) units in the last place; the quotient, the product and the sum of exponentials by a few more.
WEIGHT_ERROR = 1e-5
#: Seeds that are tried for each case.
SEEDS = 300
#: Logits of a part of ``pick``, as the rewrite of ``argmax`` has it.
_PART = next(op["part"] for rule in document()["rewrites"] for op in rule["into"] if op["op"] == "pick")


def argmax_cases() -> Iterator[Case]:
    """Sizes around the 256 threads and a part; ties; both zeros; a penalty that changes the winner; broken numbers."""
    for vocabulary in (1, 2, 255, 257, 1024, 1025, 49152):
        yield _choice(f"argmax {vocabulary}", _logits(f"argmax {vocabulary}", vocabulary), Sampling())
    tied = _logits("tied", 700)
    tied[[5, 260, 261, 699]] = 99.0
    yield _choice("argmax tie", tied, Sampling())
    zeros = np.full(600, -1.0, dtype=F32)
    zeros[[300, 301]] = -0.0, 0.0
    yield _choice("argmax zeros tie", zeros, Sampling())
    yield _choice("argmax negative", np.linspace(-900, -1, 300).astype(F32), Sampling())
    penalized = _logits("penalized", 400)
    penalized[7], penalized[300] = 10.0, 9.5
    yield _choice("argmax penalty", penalized, Sampling(repetition_penalty=1.3), seen=[7, 12, 399])
    below_zero = np.array([-1.0, -1.1, -5.0], dtype=F32)
    yield _choice("argmax penalty below zero", below_zero, Sampling(repetition_penalty=2.0), seen=[0])
    rows = np.stack([_logits("a", 300), _logits("b", 300), _logits("c", 300)])
    yield _choice("argmax rows", rows, Sampling())
    drafts = [int(rows[1].argmax()), int(rows[2].argmax())]
    yield _choice("argmax drafts penalized", rows, Sampling(repetition_penalty=3.0), drafts=drafts)
    yield _choice("argmax parts of 70", _logits("parts", 300), Sampling(), part=70)
    yield _choice("argmax 64 threads", _logits("threads", 1100), Sampling(), threads=64)
    small = np.stack([_logits("d", 70), _logits("e", 70)])
    broken = _logits("broken", 40)
    broken[30] = np.nan
    yield _choice("argmax small nan", broken, Sampling(), part=25)
    yield _choice("argmax small rows", small, Sampling(), part=30)
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
            yield _choice(name, _logits(name, vocabulary), choice, seen=[3, 200, 299])
    big = _logits("sample 49152", 49152)
    for title in ("plain", "all"):
        yield _choice(f"sample {title} 49152", big, options[title], seen=[int(big.argmax())])
    small = _logits("sample small", 5)
    yield _choice("sample 5", small, Sampling(temperature=1.0, top_k=3, top_p=0.7))
    yield _choice("sample 1", small[:1], Sampling(temperature=1.0, top_k=3, top_p=0.7))
    # Steps of a quarter: many logits equal the k-th largest and the one at which the nucleus ends.
    coarse = np.round(_logits("coarse", 600) * 4).astype(F32) / 4
    yield _choice("sample tie top-k", coarse, Sampling(temperature=1.0, top_k=20))
    yield _choice("sample tie top-p", coarse, Sampling(temperature=1.0, top_p=0.5))
    same = np.zeros(1000, dtype=F32)
    for seed in (0, 2**32, 2**64 - 1):
        yield _choice(f"sample flat seed {seed}", same, Sampling(temperature=1.0, seed=seed), step=(40, 1, 1, 7))
    yield _choice("sample flat top-k keeps ties", same, Sampling(temperature=1.0, top_k=2), step=(0, 9, 1, 0))
    rows = np.stack([_logits("x", 300), _logits("y", 300)])
    yield _choice("sample rows", rows, Sampling(temperature=1.0))
    likely = [int(rows[1].argmax())]
    yield _choice("sample drafts penalized", rows, Sampling(temperature=0.3, repetition_penalty=3.0), drafts=likely)
    yield from _broken("sample", Sampling(temperature=1.0, top_k=10, top_p=0.9))


def _broken(kernel: str, options: Sampling) -> Iterator[Case]:
    for title, value in (("nan", np.nan), ("inf", np.inf)):
        logits = _logits(title, 520)
        logits[300] = value
        yield _choice(f"{kernel} {title}", logits, options, seen=[2])
    yield _choice(f"{kernel} all -inf", np.full(300, -np.inf, dtype=F32), options)


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
    part: int = 0,
    threads: int = 0,
) -> Case:
    """Logits ``[R, V]``: what each row picks.

    drafts: the tokens between the rows, which count as seen in the rows after them. part: logits a workgroup.
    threads: of a workgroup, if not as many as by default.
    """
    rows = np.atleast_2d(logits)
    vocabulary = rows.shape[1]
    drafts = drafts or [vocabulary + row for row in range(1, len(rows))]
    step = step or (11, len(rows) + 1, len(rows), 5)
    mask = np.zeros(vocabulary, dtype=bool)
    mask[seen or []] = True
    inputs = {"sampling": options.words(), "ids": np.array([77, *drafts], dtype=np.uint32), "seen": _bits(mask)}
    picks = []
    for row, own in enumerate(rows):
        known = mask.copy()
        known[[draft for draft in drafts[:row] if draft < vocabulary]] = True
        with np.errstate(invalid="ignore"):
            penalized = sampling.penalize(own, known, options.repetition_penalty)
        if options.greedy:
            picks.append(_best_of_parts(_keys(penalized), part or _PART))
            continue
        position = step[0] + step[1] - step[2] + row + 1
        if row == 0 and np.isfinite(penalized.max()):
            options = _decided(penalized, options, position)
            inputs["sampling"] = options.words()
        scaled = (penalized * F32(1.0 / options.temperature)).astype(F32)
        picks.append(np.array([[_keys(scaled).max(), sampling.sample(penalized, options, position)]], dtype=np.uint32))
    op = {"op": "pick" if options.greedy else "draw", "logits": "logits", "part": part or _PART}
    if not options.greedy:
        op["part"] = 0xFFFFFFFF
    return make_case(
        name,
        op,
        {"logits": {"dtype": "f32", "shape": ["R", vocabulary]}},
        {"logits": rows, **inputs},
        {"picks": np.stack(picks)},
        symbols={"WORKGROUP": threads} if threads else None,
        step=step,
    )


def _keys(values: np.ndarray) -> np.ndarray:
    """Unsigned integers in the order of floats; both zeros alike, NaN above all. u32 ``[V]``."""
    bits = (values + F32(0)).view(np.uint32)
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))
    return np.where(np.isnan(values), np.uint32(0xFFFFFFFF), keys).astype(np.uint32)


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


def _decided(penalized: np.ndarray, options: Sampling, position: int) -> Sampling:
    """The options with a seed whose draw depends on the filters, as many as one can, and on no error of a weight.

    exp() differs by a few units in the last place from device to device, so a draw on the border between two ids
    may fall on either. The end of the nucleus must be as clear, which a case's logits have to see to.
    """
    running = np.cumsum(sampling.survivors(penalized, options).astype(np.float64))
    for share in (1 - WEIGHT_ERROR, 1 + WEIGHT_ERROR) if options.top_p < 1 else ():
        other = sampling.survivors(penalized, replace(options, top_p=float(np.clip(options.top_p * share, 1e-6, 1))))
        if ((other > 0) != (np.diff(running, prepend=0) > 0)).any():
            raise ValueError(f"the nucleus of {options} ends too close to a border")
    others = [np.cumsum(sampling.survivors(penalized, one).astype(np.float64)) for one in _neighbours(options)]
    slack = WEIGHT_ERROR * running[-1] + len(running)
    best, most = None, -1
    for seed in range(options.seed, options.seed + SEEDS):
        share = sampling.random_u32(seed & (2**64 - 1), position) / 2**32
        before, after = np.searchsorted(running, share * running[-1] + np.array([-slack, slack]), side="right")
        if before == after:
            different = sum(np.searchsorted(other, share * other[-1], side="right") != after for other in others)
            if different > most:
                best, most = seed & (2**64 - 1), different
    if best is None:
        raise ValueError(f"no seed gives {options} a draw far from a border")
    return replace(options, seed=best)


def _neighbours(options: Sampling) -> Iterator[Sampling]:
    """The options with one filter off, a little narrower, or a little wider."""
    if options.top_k:
        for top_k in (0, options.top_k - 1, options.top_k + 1):
            yield replace(options, top_k=top_k)
    if options.top_p < 1:
        for top_p in (1.0, options.top_p * 0.95, options.top_p * 1.02):
            yield replace(options, top_p=min(max(top_p, 1e-6), 1.0))
    if options.min_p > 0:
        for min_p in (0.0, options.min_p * 0.8, options.min_p * 1.2):
            yield replace(options, min_p=min(min_p, 1.0))
    if options.temperature != 1:
        yield replace(options, temperature=1.0)
