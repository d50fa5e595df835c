"""A byte-level BPE and its chat format: trained once by ``prepare``, then fixed for every checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .errors import TrainError

END_OF_TEXT, TURN_START, TURN_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"
#: Their order is their ids.
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END, PAD)
#: ChatML. Contents are trimmed, so that the line break after the role is always a token of its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SMALLEST = 256 + len(SPECIAL)

Message = Mapping[str, str]


def train_tokenizer(texts: Iterable[str], vocabulary: int, folder: Path) -> Tokenizer:
    """Train a byte-level BPE of at most ``vocabulary`` tokens and write tokenizer.json, tokenizer_config.json and
    chat_template.jinja into ``folder``.

    Every digit is a token: sums of numbers that are split the same way everywhere can be learned. Every byte has a
    token, so no text is unknown. Raises TrainError if the vocabulary is too small to hold all bytes.
    """
    if vocabulary < SMALLEST:
        raise TrainError(f"a vocabulary of {vocabulary} cannot hold 256 bytes and {len(SPECIAL)} special tokens")
    tokenizer = Tokenizer(models.BPE())
    # byte_fallback is not needed: the alphabet of ByteLevel is all 256 bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), indent=1) + "\n", encoding="utf-8")
    return tokenizer


def _config() -> dict[str, object]:
    entries = {
        str(index): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL)
    }
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": entries,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


class ChatTokenizer:
    """Text and conversations to ids and back, for the tokenizer in a folder.

    Raises TrainError if its files are missing, broken or lack a special token.
    """

    def __init__(self, folder: Path):
        data = _read(folder / "tokenizer.json")
        self.folder, self.digest = folder, hashlib.sha256(data).hexdigest()
        try:
            self._tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception for any fault
            raise TrainError(f"{folder / 'tokenizer.json'}: cannot be read ({error}); run prepare again") from None
        # A document that spells out a special token is text, not an end of turn.
        self._tokenizer.encode_special_tokens = True
        self.vocabulary: int = self._tokenizer.get_vocab_size()
        self.end_of_text, self.turn_start, self.turn_end, self.pad = (self._special(token) for token in SPECIAL)
        self._break = self.encode("\n")
        self._roles: dict[str, list[int]] = {}

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end an answer."""
        return frozenset((self.turn_end, self.end_of_text))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens that it spells out are text too. Raises TrainError for no valid text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of many texts at once, on all cores."""
        try:
            return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError):  # lone surrogates
            raise TrainError("a text holds characters that are no valid Unicode") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where the assistant begins to speak; what the chat template renders."""
        ids, _ = self.conversation(messages)
        return [*ids, self.turn_start, *self._role("assistant")]

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Ids of a conversation and their loss mask: 1 on the assistant's tokens and its end-of-turn, else 0."""
        return self.conversations([messages])[0]

    def conversations(self, many: Sequence[Sequence[Message]]) -> list[tuple[list[int], list[int]]]:
        """``conversation`` of many at once, on all cores."""
        bodies = iter(self.encode_all([message["content"].strip() for messages in many for message in messages]))
        found = []
        for messages in many:
            ids: list[int] = []
            mask: list[int] = []
            for message in messages:
                head = [self.turn_start, *self._role(message["role"])]
                body = [*next(bodies), self.turn_end]
                ids += head + body + self._break
                mask += [0] * len(head) + [int(message["role"] == "assistant")] * len(body) + [0] * len(self._break)
            found.append((ids, mask))
        return found

    def _role(self, role: str) -> list[int]:
        if role not in self._roles:
            self._roles[role] = self.encode(role + "\n")
        return self._roles[role]

    def answer(self, text: str) -> list[int]:
        """Ids of an assistant's answer with its end-of-turn."""
        return [*self.encode(text.strip()), self.turn_end]

    def _special(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise TrainError(f"{self.folder / 'tokenizer.json'}: there is no token {token}; use one that prepare wrote")
        return int(found)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror}; `prepare` writes it") from None
