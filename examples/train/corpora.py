"""Readers of the data: each file becomes documents, which know how to be text, chat, a preference pair or a prompt.

Known files (JSON lines, gzip or not): ``self-dialogues``, ``persona-chat`` (field ``turns``), ``gsm8k-train``,
``gsm8k-test`` (``question``, ``answer`` that ends in ``#### N``), ``trivia`` (``question``, ``answer``, ``choices``).
Beside them a person's own text: plain files, or JSON lines with ``text`` (a document) or ``messages`` (a conversation,
such as a teacher's samples). Arithmetic is made here.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packer.eval_tasks import OPERATIONS

from .errors import TrainError

DIALOGUES, PERSONA, MATHS, MATHS_TEST, TRIVIA = (
    "self-dialogues",
    "persona-chat",
    "gsm8k-train",
    "gsm8k-test",
    "trivia",
)
FILES = (DIALOGUES, PERSONA, MATHS, MATHS_TEST, TRIVIA)
#: Asks for the form that the verifier reads.
HINT = "\nGive the result in <answer> tags."
PIECE = 8_000
_CALCULATION = re.compile(r"<<[^>]*>>")
_NEEDS_CHOICES = re.compile(r"\b(these|except|following|odd one|which one)\b", re.IGNORECASE)

Message = dict[str, str]


@dataclass(frozen=True)
class Document:
    """One piece of text, whatever it is made of.

    kind: of the source. key: what its held-out split hangs on; documents that say the same thing share it. text: as the
    pretraining stream has it (empty: not in that stream). messages: as a conversation (empty: none). gold: the number
    that answers a question, and facts for its prompt. choices: other answers, wrong ones. held: always held out.
    """

    kind: str
    key: str
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    gold: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    held: bool = False

    def is_held(self, share: float) -> bool:
        """Whether it belongs to the held-out part: by a hash of its key, the same in every run and for every stream."""
        digest = hashlib.sha256(self.key.encode("utf-8", "replace")).digest()
        return self.held or int.from_bytes(digest[:8], "big") < share * 2**64

    def chance(self, purpose: str) -> random.Random:
        """Random numbers that depend on the document alone, so that another file beside it changes nothing."""
        return random.Random(f"{purpose} {self.key}")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON-lines file, gzip if the name ends so. Raises TrainError naming file and line."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007 - the message needs it
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise TrainError(f"{path}, line {number}: expected a JSON object, found {line[:40]!r}")
                    yield row
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TrainError(f"{path}, line {max(1, number)}: not JSON ({error})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TrainError(f"{path}: the gzip file is damaged ({error}); fetch it again") from None
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror or error}") from None


def find(data: Path, name: str) -> Path | None:
    """The file of a source in the data folder, or None."""
    return next((path for end in (".jsonl.gz", ".jsonl") if (path := data / f"{name}{end}").is_file()), None)


def load_source(path: Path, name: str) -> Iterator[Document]:
    """Documents of one of FILES. Raises TrainError for a row that lacks a field."""
    read = {DIALOGUES: _dialogue, PERSONA: _dialogue, MATHS: _maths, MATHS_TEST: _maths_test, TRIVIA: _trivia}[name]
    for number, row in enumerate(read_lines(path), 1):
        try:
            document = read(row)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise TrainError(f"{path}, row {number}: field missing or of the wrong type ({error})") from None
        if document is not None:
            yield document


def load_text(path: Path) -> Iterator[Document]:
    """Documents of a person's own file or folder: text files whole, JSON lines row by row. Raises TrainError."""
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith((".txt", ".md", ".jsonl", ".gz")))
        if not inside:
            raise TrainError(f"{path}: holds no .txt, .md, .jsonl or .jsonl.gz file")
        for entry in inside:
            yield from load_text(entry)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        for number, row in enumerate(read_lines(path), 1):
            yield _own_row(row, f"{path}, row {number}")
    else:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            raise TrainError(f"{path}: is no UTF-8 text") from None
        except OSError as error:
            raise TrainError(f"{path}: {error.strerror}; --text takes text files, .jsonl files and folders") from None
        for part in text.split("<|endoftext|>"):
            yield from (Document("text", piece, text=piece) for piece in _pieces(part))


def _pieces(text: str) -> Iterator[str]:
    """A long text at its blank lines, in pieces of PIECE characters or more: one book is more than one document."""
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text):
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
        if len(piece) >= PIECE:
            yield piece.strip()
            piece = ""
    if piece.strip():
        yield piece.strip()


def arithmetic(count: int, seed: int) -> Iterator[Document]:
    """About ``count`` different questions: sums, differences and products of one to three digits, equally many each.

    With one digit there are only 81 pairs. Differences are never negative.
    """
    chance = random.Random(f"arithmetic {seed}")
    each = max(1, count // (3 * len(OPERATIONS)))
    for name, (sign, compute) in OPERATIONS.items():
        for digits in (1, 2, 3):
            low, high = (1 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
            pairs = dict.fromkeys((chance.randint(low, high), chance.randint(low, high)) for _ in range(2 * each))
            for a, b in list(pairs)[:each]:
                if name == "difference":
                    a, b = max(a, b), min(a, b)
                # 3 + 4 and 4 + 3 are held out together.
                key = f"{min(a, b)} {sign} {max(a, b)}"
                yield _sum(name, digits, f"{a} {sign} {b}", compute(a, b), key)


def _sum(operation: str, digits: int, question: str, answer: int, key: str) -> Document:
    text = f"{question} = {answer}"
    if random.Random(f"plain {key}").random() < 0.25:  # asked as people ask, without the form that the verifier reads
        return Document("arithmetic", key, text, chat(f"What is {question}?", text))
    messages = chat(f"What is {question}?{HINT}", f"{text}\n<answer>{answer}</answer>")
    facts = {"task": "arithmetic", "operation": operation, "digits": digits}
    return Document("arithmetic", key, text, messages, str(answer), facts)


def _dialogue(row: dict[str, Any]) -> Document | None:
    turns = [turn.strip() for turn in row["turns"] if turn.strip()]
    if len(turns) < 2:
        return None
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    text = "\n".join(turns)
    return Document("dialogue", text, text, messages[: len(turns) // 2 * 2])


def _maths(row: dict[str, Any], *, held: bool = False) -> Document:
    question = row["question"].strip()
    steps, mark, gold = _CALCULATION.sub("", row["answer"]).rpartition("####")
    if not mark or not gold.strip():
        raise ValueError("answer without #### and a number")
    steps, gold = steps.strip(), gold.strip()
    messages = chat(f"{question}{HINT}", f"{steps}\n<answer>{gold}</answer>")
    text = "" if held else f"{question}\n{steps}\nThe result is {gold}."
    return Document("maths", question, text, messages, gold, {"task": "gsm8k"}, held=held)


def _maths_test(row: dict[str, Any]) -> Document:
    return _maths(row, held=True)


def _trivia(row: dict[str, Any]) -> Document | None:
    question, answer = row["question"].strip(), row["answer"].strip()
    choices = tuple(dict.fromkeys(choice.strip() for choice in row["choices"]))
    if not question or not answer:
        return None
    document = Document("trivia", question)
    asked = question
    if len(choices) > 1 and (_NEEDS_CHOICES.search(question) or document.chance("choices").random() < 0.5):
        asked = f"{question}\nChoices: {'; '.join(choices)}"
    wrong = tuple(choice for choice in choices if choice and choice != answer)
    text = f"{asked}\nAnswer: {answer}"
    return Document("trivia", question, text, chat(asked, answer), choices=wrong)


def _own_row(row: dict[str, Any], where: str) -> Document:
    if isinstance(row.get("text"), str):
        return Document("text", row["text"].strip(), text=row["text"].strip())
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise TrainError(f"{where}: expected a field text, or messages; found {', '.join(row) or 'nothing'}")
    for message in messages:
        if not (
            isinstance(message, dict)
            and message.get("role") in ("system", "user", "assistant")
            and isinstance(message.get("content"), str)
        ):
            raise TrainError(f"{where}: a message needs a role (system, user, assistant) and content")
    kept = [{"role": message["role"], "content": message["content"].strip()} for message in messages]
    text = "\n".join(message["content"] for message in kept)
    return Document("conversation", text, text, kept)


def chat(question: str, answer: str) -> list[Message]:
    """One question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def unique(documents: Iterable[Document]) -> Iterator[Document]:
    """Documents without those whose kind, key and conversation were there before."""
    seen: set[bytes] = set()
    for document in documents:
        body = json.dumps([document.kind, document.key, document.messages], sort_keys=True)
        digest = hashlib.sha256(body.encode("utf-8", "replace")).digest()[:16]
        if digest not in seen:
            seen.add(digest)
            yield document
