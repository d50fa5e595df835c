"""From text to the four streams that the stages read.

    pretrain-{train,held}.bin      flat little-endian int32 tokens, ``<|endoftext|>`` after each document
    sft-{train,held}.jsonl         {"tokens", "mask"}: mask 1 on the assistant's tokens and its end-of-turn only
    preferences-{train,held}.jsonl {"prompt", "chosen", "rejected", "kind"}: token ids; answers with their end-of-turn
    prompts-{train,held}.jsonl     {"prompt", "gold", "task", ...}: token ids up to the answer, and its number as text
    streams.json                   counts, vocabulary, SHA-256 of tokenizer.json, seed, share held out, sources

A document is held out by a hash of what it says, so it is held out of all streams and in every run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from .checkpoint import TOKENIZER_FILES
from .config import load_preset
from .corpora import FILES, Document, arithmetic, find, load_source, load_text, unique
from .errors import TrainError
from .options import PresetName
from .preferences import pairs
from .tokenizer import ChatTokenizer, train_tokenizer

SPLITS = ("train", "held")
#: Few sums of small numbers exist, so more of them are held out than of other documents.
ARITHMETIC_HELD = 0.1
#: Characters that the tokenizer is trained on: more changes little and takes long.
TOKENIZER_CHARACTERS = 40_000_000
_CHUNK = 1_000


@dataclass(frozen=True)
class Options:
    """How streams are made.

    vocabulary: tokens of the BPE. sequence: the longest row, in tokens. held: share of documents held out.
    arithmetic: about how many questions are made. limit: documents of each source, 0 for all. seed: order of documents
    and the questions.
    """

    vocabulary: int = 4096
    sequence: int = 512
    held: float = 0.01
    arithmetic: int = 20_000
    limit: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.held < 1:
            raise TrainError(f"--held is {self.held}, expected a share between 0 and 1, such as 0.01")
        for name, least in (("sequence", 16), ("arithmetic", 0), ("limit", 0)):
            if getattr(self, name) < least:
                raise TrainError(f"--{name} is {getattr(self, name)}, expected {least} or more")


def default_data() -> Path:
    """Folder of the data: ``$TERCET_SHARED/data`` or ``../shared/data``."""
    return Path(os.environ.get("TERCET_SHARED", "../shared")) / "data"


def prepare(
    folder: Path,
    data: Path | None,
    texts: Sequence[Path],
    options: Options,
    tokenizer: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Write the streams into ``folder``; returns what ``streams.json`` says.

    data: folder with files of ``corpora.FILES``, or None. texts: a person's own files and folders. tokenizer: folder of
    an existing one, instead of training one. The folder is written beside and renamed; one that holds other things is
    not touched. Raises TrainError.
    """
    console = console or Console(stderr=True)
    if folder.exists() and not (folder / "streams.json").is_file() and any(folder.iterdir()):
        raise TrainError(f"{folder}: is not empty and holds no streams; name a new folder")
    if tokenizer is not None:
        ChatTokenizer(tokenizer)  # refuses what is no tokenizer of ours, before the long work
    documents, sources = _collect(data, texts, options, console)
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        if tokenizer is None:
            with console.status("training the tokenizer"):
                train_tokenizer(_sample(documents["train"]), options.vocabulary, fresh)
        else:
            for name in TOKENIZER_FILES:
                if (tokenizer / name).is_file():
                    shutil.copyfile(tokenizer / name, fresh / name)
        record = _write(fresh, documents, ChatTokenizer(fresh), options, console) | {"sources": sources}
        (fresh / "streams.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return record


def _collect(
    data: Path | None, texts: Sequence[Path], options: Options, console: Console
) -> tuple[dict[str, list[Document]], dict[str, int]]:
    """Documents of each split in their order, and how many each source gave. Raises TrainError if a split has none."""
    streams: dict[str, Iterator[Document]] = {}
    if data is not None:
        if not data.is_dir():
            raise TrainError(f"{data}: no such folder; --data names the one with {FILES[0]}.jsonl.gz and the others")
        found = {name: path for name in FILES if (path := find(data, name)) is not None}
        if not found and not texts:
            raise TrainError(f"{data}: holds none of {', '.join(f'{name}.jsonl.gz' for name in FILES)}; or give --text")
        streams |= {name: load_source(path, name) for name, path in found.items()}
        for name in FILES:
            if name not in found:
                console.print(f"{data / name}.jsonl.gz: not there, left out", highlight=False, soft_wrap=True)
    streams |= {str(path): load_text(path) for path in texts}
    sources: dict[str, int] = {}
    whole: list[Document] = []
    for name, stream in streams.items():
        own = list(unique(islice(stream, options.limit or None)))
        if not own:
            raise TrainError(f"{name}: is empty; there is nothing to train on")
        sources[Path(name).name] = len(own)
        whole += own
    made = list(unique(arithmetic(options.arithmetic, options.seed))) if options.arithmetic else []
    sources["arithmetic"] = len(made)
    whole += made
    random.Random(f"order {options.seed}").shuffle(whole)
    split: dict[str, list[Document]] = {name: [] for name in SPLITS}
    for document in whole:
        share = max(options.held, ARITHMETIC_HELD) if document.kind == "arithmetic" else options.held
        split["held" if document.is_held(share) else "train"].append(document)
    return split, sources


def _sample(documents: Sequence[Document]) -> Iterator[str]:
    """Text that the tokenizer learns from: what the model will read, up to TOKENIZER_CHARACTERS."""
    seen = 0
    for document in documents:
        for text in (document.text, *(message["content"] for message in document.messages)):
            seen += len(text)
            yield text
        if seen > TOKENIZER_CHARACTERS:
            return


def _write(
    folder: Path,
    documents: Mapping[str, Sequence[Document]],
    tokenizer: ChatTokenizer,
    options: Options,
    console: Console,
) -> dict[str, Any]:
    counts: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        own = documents[split]
        writers = (
            ("pretrain", _pretrain(folder / f"pretrain-{split}.bin", own, tokenizer)),
            ("sft", _rows(folder / f"sft-{split}.jsonl", _sft(own, tokenizer, options.sequence))),
            ("preferences", _rows(folder / f"preferences-{split}.jsonl", _preferences(own, tokenizer, options))),
            ("prompts", _rows(folder / f"prompts-{split}.jsonl", _prompts(own, tokenizer, options))),
        )
        for stream, chunks in writers:
            total = len(own) // _CHUNK + 1
            title, quiet = f"{stream}, {split}", not console.is_terminal
            shown = track(chunks, title, total=total, console=console, transient=True, disable=quiet)
            counts[f"{stream}-{split}"] = count = _sum_up(shown)
            said = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in count.items() if value)
            console.print(f"{title}: {said or 'nothing'}", highlight=False)
    empty = [name for name, count in counts.items() if not any(count.values())]
    needed = [name for name in empty if name.startswith("pretrain") or options.arithmetic]
    if needed:
        raise TrainError(
            f"the stream {needed[0]} would be empty ({len(documents['train'])} documents to train on, "
            f"{len(documents['held'])} held out); give more data, or a greater --held"
        )
    return {
        "format": 1,
        "vocabulary": tokenizer.vocabulary,
        "tokenizer_sha256": tokenizer.digest,
        "sequence": options.sequence,
        "seed": options.seed,
        "held": options.held,
        "limit": options.limit,
        "counts": counts,
    }


def _sum_up(chunks: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for chunk in chunks:
        for name, count in chunk.items():
            total[name] = total.get(name, 0) + count
    return total


def _chunks(items: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(islice(items, _CHUNK)):
        yield chunk


def _pretrain(path: Path, documents: Sequence[Document], tokenizer: ChatTokenizer) -> Iterator[dict[str, int]]:
    with path.open("wb") as file:
        for chunk in _chunks(document.text for document in documents if document.text):
            rows = tokenizer.encode_all(chunk)
            flat = np.array([token for row in rows for token in (*row, tokenizer.end_of_text)], dtype="<i4")
            file.write(flat.tobytes())
            yield {"documents": len(rows), "tokens": len(flat)}


def _rows(path: Path, chunks: Iterator[tuple[list[dict[str, Any]], int]]) -> Iterator[dict[str, int]]:
    """Write rows as JSON lines; each chunk comes with how many of its rows were too long."""
    with path.open("w", encoding="utf-8") as file:
        for rows, dropped in chunks:
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
            yield {"rows": len(rows), "too_long": dropped}


def _sft(
    documents: Sequence[Document], tokenizer: ChatTokenizer, sequence: int
) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """A conversation a row, without the turns that do not fit; without one that fits, no row."""
    for chunk in _chunks(d.messages for d in documents if d.messages and not d.held):
        rows = []
        for ids, mask in tokenizer.conversations(chunk):
            # Cut behind the last end of an answer that fits.
            last = next((i for i in range(min(len(ids), sequence) - 1, -1, -1) if _ends_answer(ids, mask, i)), -1)
            if last >= 0:
                rows.append({"tokens": ids[: last + 1], "mask": mask[: last + 1]})
        yield rows, len(chunk) - len(rows)


def _ends_answer(ids: list[int], mask: list[int], place: int) -> bool:
    return mask[place] == 1 and (place + 1 == len(ids) or mask[place + 1] == 0)


def _preferences(
    documents: Sequence[Document], tokenizer: ChatTokenizer, options: Options
) -> Iterator[tuple[list[dict[str, Any]], int]]:
    for chunk in _chunks(pairs([document for document in documents if not document.held])):
        rows = []
        for pair in chunk:
            prompt = tokenizer.prompt(pair.prompt)
            chosen, rejected = tokenizer.answer(pair.chosen), tokenizer.answer(pair.rejected)
            if len(prompt) + max(len(chosen), len(rejected)) <= options.sequence:
                rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "kind": pair.kind})
        yield rows, len(chunk) - len(rows)


def _prompts(
    documents: Sequence[Document], tokenizer: ChatTokenizer, options: Options
) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Questions with a number for an answer; a prompt may fill three quarters of a row, the rest is for the answer."""
    for chunk in _chunks(document for document in documents if document.gold):
        encoded = [(tokenizer.prompt(document.messages[:-1]), document) for document in chunk]
        rows = [
            {"prompt": prompt, "gold": document.gold, **document.facts}
            for prompt, document in encoded
            if len(prompt) <= options.sequence * 3 // 4
        ]
        yield rows, len(chunk) - len(rows)


def prepare_command(
    out: Annotated[Path, typer.Option(help="Folder for the streams; streams in it are replaced.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder with the data; default, without --text: $TERCET_SHARED/data.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Own text: .txt, .md, .jsonl (text or messages) or a folder; may repeat.")
    ] = None,
    preset: PresetName = "tiny",
    vocabulary: Annotated[int | None, typer.Option(help="Tokens of the BPE; default: the preset's.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of the longest row; default: the preset's.")] = None,
    held: Annotated[float, typer.Option(help="Share of documents held out.")] = Options.held,
    arithmetic: Annotated[int, typer.Option(help="About how many sums to make.")] = Options.arithmetic,
    limit: Annotated[int, typer.Option(help="Documents of each source; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the order, and of the sums.")] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of an existing tokenizer to use instead.")] = None,
) -> None:
    """Write the four streams and the tokenizer that all other commands read."""
    wanted = load_preset(preset).options("prepare") | {
        name: value for name, value in (("vocabulary", vocabulary), ("sequence", sequence)) if value is not None
    }
    options = Options(**wanted, held=held, arithmetic=arithmetic, limit=limit, seed=seed)
    record = prepare(out, data or (None if text else default_data()), text or [], options, tokenizer)
    tokens = record["counts"]["pretrain-train"]["tokens"]
    typer.echo(f"{out}: {tokens:,} tokens to train on, a vocabulary of {record['vocabulary']:,}")
