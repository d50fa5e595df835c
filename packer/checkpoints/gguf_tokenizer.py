"""Builds ``tokenizer.json`` and ``tokenizer_config.json`` from a GGUF file's metadata.

What the names mean: llama.cpp ``src/llama-vocab.cpp``. Byte-level BPE (``gpt2``) and SentencePiece BPE
(``llama``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ..errors import CheckpointError
from .base import TokenizerFiles
from .gguf_header import GgufHeader
from .huggingface import json_bytes, read_tokenizer

_ADVICE = "give --tokenizer FOLDER with the model's own tokenizer.json"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes spaces like this

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: ``tokenizer.ggml.pre`` -> how text is cut before merging: GPT-2's rule, GPT-2's with single digits, or an
#: expression.
_PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
}
#: Names whose words are looked up whole before merges are tried.
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}
_ADD_BOS = _IGNORE_MERGES  # the same names, where the file does not say

#: Control tokens that end a turn wherever they occur, for files whose metadata names only one end.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(header: GgufHeader, folder: Path | None) -> TokenizerFiles:
    """The tokenizer of a GGUF file, or that of a folder, which wins.

    Fields that the folder's tokenizer_config.json lacks (such as the chat template) come from the file.
    Raises CheckpointError if the file's tokenizer is damaged or of a kind that cannot be rebuilt faithfully.
    """
    vocabulary = _Vocabulary(header)
    if folder is not None:
        own = read_tokenizer(folder)
        config = (vocabulary.config() if vocabulary.tokens else {}) | json.loads(own.config)
        return TokenizerFiles(own.tokenizer, json_bytes(config))
    return TokenizerFiles(vocabulary.tokenizer_json(), json_bytes(vocabulary.config()))


def special_token_ids(header: GgufHeader, *, required: bool) -> tuple[int | None, list[int]]:
    """(BOS id, end ids: end of text first, then ends of a turn and of a message).

    Raises CheckpointError if required and the file names no end of text, or for ids outside the vocabulary.
    """
    vocabulary = _Vocabulary(header)
    ends = [vocabulary.special(name) for name in ("eos", "eot", "eom")]
    ends += [vocabulary.control_id(token) for token in _TURN_ENDS]
    if required and ends[0] is None:
        raise vocabulary.error("field 'tokenizer.ggml.eos_token_id' is missing, expected the id that ends an answer")
    return vocabulary.special("bos"), list(dict.fromkeys(end for end in ends if end is not None))


class _Vocabulary:
    """The ``tokenizer.*`` metadata of a file."""

    def __init__(self, header: GgufHeader):
        self.path, self._metadata = header.path, header.metadata
        self.model, self.pre = self._name("model"), self._name("pre")
        tokens = self._field("tokens")
        self.tokens: list[str] = tokens if isinstance(tokens, list) else []

    def error(self, message: str) -> CheckpointError:
        """An error that names the file and the way out."""
        return CheckpointError(f"{self.path}: {message}; {_ADVICE}")

    def tokenizer_json(self) -> bytes:
        """The tokenizer that the metadata describes, as the tokenizers library writes it."""
        self._check_tokens()
        if self.model == "gpt2":
            tokenizer = self._byte_level()
        elif self.model == "llama":
            tokenizer = self._sentence_piece()
        else:
            raise self.error(f"field 'tokenizer.ggml.model' is {self.model!r}, expected 'gpt2' or 'llama'")
        self._add_tokens(tokenizer)
        begin, end = self._begin(), self._end()
        if begin is None and end is None:
            return tokenizer.to_str().encode()
        # Set in the JSON: the library's own notation for templates cannot say tokens with a colon.
        whole = json.loads(tokenizer.to_str())
        whole["post_processor"] = self._template(begin, end)
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()

    def config(self) -> dict[str, Any]:
        """``tokenizer_config.json``."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._begin() is not None,
            "add_eos_token": self._end() is not None,
        }
        for name, field in _SPECIAL.items():
            token = self.special(field)
            if token is not None:
                config[name] = self.tokens[token]
        template = self._metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            config["chat_template"] = template
        return config

    def special(self, name: str) -> int | None:
        """The id of a special token. Raises CheckpointError if it lies outside the vocabulary."""
        token = self._field(f"{name}_token_id")
        if token is None and self.model == "llama":
            token = {"unknown": 0, "bos": 1, "eos": 2}.get(name)  # SentencePiece's own order
        if token is None:
            return None
        limit = len(self.tokens) or 1 << 31
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limit:
            raise self.error(f"field 'tokenizer.ggml.{name}_token_id' is {token!r}, expected an id below {limit}")
        return token

    def control_id(self, token: str) -> int | None:
        """The id of a token if it is there as a control token."""
        types = self._field("token_type")
        if token not in self.tokens or not isinstance(types, np.ndarray) or len(types) != len(self.tokens):
            return None
        found = self.tokens.index(token)
        return found if types[found] == TokenType.CONTROL else None

    def _field(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def _name(self, field: str) -> str:
        """A name in lower case: files and their readers disagree about case."""
        value = self._field(field)
        return value.lower() if isinstance(value, str) else ""

    def _flag(self, field: str, default: bool) -> bool:
        value = self._field(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"field 'tokenizer.ggml.{field}' is {value!r}, expected true or false")
        return default if value is None else value

    def _check_tokens(self) -> None:
        if not self.tokens:
            raise self.error("field 'tokenizer.ggml.tokens' is missing, expected the vocabulary as a list of strings")
        if len(set(self.tokens)) != len(self.tokens):
            raise self.error("field 'tokenizer.ggml.tokens' has a token twice; the file is damaged")
        if "" in self.tokens:
            raise self.error("field 'tokenizer.ggml.tokens' has an empty token; the file is damaged")

    def _numbers(self, name: str) -> np.ndarray:
        """One number for each token."""
        values = self._field(name)
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            found = f"has {len(values)} entries" if isinstance(values, np.ndarray) else "is missing"
            raise self.error(
                f"field 'tokenizer.ggml.{name}' {found}, expected a number for each of {len(self.tokens)} tokens"
            )
        return values

    def _types(self) -> list[int]:
        types: list[int] = self._numbers("token_type").tolist()
        return types

    def _begin(self) -> int | None:
        """The token put before a text, if any."""
        wanted = self._flag("add_bos_token", self.model == "llama" or self.pre in _ADD_BOS)
        return self.special("bos") if wanted else None

    def _end(self) -> int | None:
        return self.special("eos") if self._flag("add_eos_token", False) else None

    def _byte_level(self) -> Tokenizer:
        """Byte-level BPE; each token is written in GPT-2's alphabet of 256 letters for bytes."""
        if self.pre not in _PRE_TOKENIZERS:
            found = repr(self.pre) if self.pre else "missing"
            raise self.error(
                f"field 'tokenizer.ggml.pre' is {found}, expected one of "
                f"{', '.join(sorted(_PRE_TOKENIZERS))}: another way of cutting words would give other tokens "
                "than the model was trained with"
            )
        vocabulary = {token: index for index, token in enumerate(self.tokens)}
        tokenizer = self._bpe(vocabulary, self._merges(), ignore_merges=self.pre in _IGNORE_MERGES)
        tokenizer.pre_tokenizer = _pre_tokenizer(_PRE_TOKENIZERS[self.pre])
        if self.pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _bpe(self, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
        try:
            return Tokenizer(BPE(vocab=vocabulary, merges=merges, **options))
        except Exception as error:  # the library raises bare Exception for any fault
            raise self.error(f"field 'tokenizer.ggml.merges' does not fit the vocabulary ({error})") from None

    def _merges(self) -> list[tuple[str, str]]:
        lines = self._field("merges")
        if not isinstance(lines, list):
            raise self.error("field 'tokenizer.ggml.merges' is missing, expected the merges of byte-level BPE")
        merges = []
        for index, line in enumerate(lines):
            cut = line.find(" ", 1)
            if not 0 < cut < len(line) - 1:
                raise self.error(f"field 'tokenizer.ggml.merges' entry {index} is {line!r}, expected two tokens")
            merges.append((line[:cut], line[cut + 1 :]))
        return merges

    def _sentence_piece(self) -> Tokenizer:
        """SentencePiece BPE with byte fallback, as Llama 2's own tokenizer.json has it.

        SentencePiece merges the neighbours whose joint piece has the highest score; as a list of merges:
        every way to cut a piece into two pieces, best score first.
        """
        types = self._types()
        vocabulary = {token: index for index, token in enumerate(self.tokens)}
        unknown = self.special("unknown")
        tokenizer = self._bpe(
            vocabulary,
            self._merges_by_score(vocabulary, types),
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
        replace = normalizers.Replace(" ", _SPACE)
        prefixed = self._flag("add_space_prefix", True)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefixed else replace
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
        return tokenizer

    def _merges_by_score(self, vocabulary: dict[str, int], types: list[int]) -> list[tuple[str, str]]:
        scores = self._numbers("scores").astype(np.float64)
        if not np.isfinite(scores).all():
            raise self.error("field 'tokenizer.ggml.scores' has NaN or infinite scores; the file is damaged")
        reserved = {TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE}
        pieces = {token for token, kind in zip(self.tokens, types, strict=True) if kind not in reserved}
        found = []
        for piece in pieces:
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in pieces and right in pieces:
                    found.append((-scores[vocabulary[piece]], vocabulary[left], vocabulary[right], left, right))
        return [(left, right) for *_, left, right in sorted(found)]

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        """Control tokens are special; user-defined ones are matched whole but belong to the text."""
        special, plain = [], []
        for token, kind in zip(self.tokens, self._types(), strict=True):
            if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
                special.append(AddedToken(token, normalized=False, special=True))
            elif kind == TokenType.USER_DEFINED:
                plain.append(AddedToken(token, normalized=False, special=False))
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(plain)

    def _template(self, begin: int | None, end: int | None) -> dict[str, Any]:
        """A post-processor that puts tokens around one text, or around each of two."""

        def around(sequence: str, kind: int) -> list[dict[str, Any]]:
            parts: list[tuple[str, str | None]] = [
                ("SpecialToken", None if begin is None else self.tokens[begin]),
                ("Sequence", sequence),
                ("SpecialToken", None if end is None else self.tokens[end]),
            ]
            return [{what: {"id": name, "type_id": kind}} for what, name in parts if name is not None]

        added = {self.tokens[token]: token for token in (begin, end) if token is not None}
        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": around("A", 0) + around("B", 1),
            "special_tokens": {name: {"id": name, "ids": [token], "tokens": [name]} for name, token in added.items()},
        }


def _pre_tokenizer(rule: str) -> pre_tokenizers.PreTokenizer:
    if rule == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    split = pre_tokenizers.Split(Regex(rule), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
