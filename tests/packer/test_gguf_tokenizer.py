"""Tokenizers rebuilt from GGUF metadata give the ids that transformers and the models' own files give."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import TokenType
from tokenizers import Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from packer.checkpoints.gguf import open_gguf
from packer.checkpoints.gguf_header import GgufHeader, read_header
from packer.checkpoints.gguf_tokenizer import special_token_ids, tokenizer_files
from packer.errors import CheckpointError
from tests.packer.gguf_files import TEXT, byte_level_vocabulary, merges_of, smollm_path, write_model

STRINGS = [
    "",
    "Hello, world!",
    "The quick brown fox can't jump; THEY'VE slept, I'LL see",
    "12345 67 x8y 2024-01-02 3.14159 1,000,000",
    "a  b   c    d\n\n\n\te \r\n\r\n \t ",
    "   leading and trailing   ",
    "\u00a0\u2003no-break \u200b zero width",
    "日本語のテキスト кириллица العربية ñandú façade naïve",
    "n\u0303 combining, \ufb01 ligature, \N{ANGSTROM SIGN}ngstr\u00f6m",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \N{GRINNING FACE}\U0001f44d\U0001f3fe",
    "def main(argv):\n    if argv:\n\t\treturn [x ** 2 for x in range(10)]\n",
    "HTTPServer ABCdef McDonald's dž Ǆ ß",
    "<|im_start|>user\nhi <|im_end|>\n<think>hm</think><|endoftext|>",
    "<|im_start <|im_end |>",
    "\x00\x01\x7f control",
    "x" * 200,
]
#: Ids that the tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct gives.
SMOLLM_IDS = [
    ("The capital of France is", [504, 3575, 282, 4649, 314]),
    ("12345 67 x8y", [33, 34, 35, 36, 37, 216, 38, 39, 1792, 40, 105]),
    ("a  b   c\n\n\n\td \r\n", [81, 216, 278, 256, 265, 16506, 197, 84, 216, 2738]),
    ("don't DON'T I'll we've", [12420, 982, 422, 2154, 23, 68, 339, 3060, 392, 3543]),
    (
        "\U0001f469\u200d\U0001f467 \N{GRINNING FACE}",
        [10813, 235, 119, 321, 231, 10813, 235, 117, 40303, 218],
    ),
    ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
    (
        "①½ ٣٤",
        [173, 235, 250, 16738, 216, 164, 113, 164, 114],
    ),  # digits are single, also those of other scripts
    ("\u00a0\u2003x <|im_start", [15442, 321, 221, 104, 2067, 108, 306, 79, 3738]),
]
#: SHA-256 of [vocabulary, merges] of that file, as JSON with sorted keys.
SMOLLM_VOCABULARY = "3c2bde670cdd0007c5c9ac0e41010f65a9c024ca0b4238474f1f97944a3523c1"

Fields = dict[str, Any]


def header(**fields: Any) -> GgufHeader:
    """A head with a byte-level vocabulary and these fields of the tokenizer; None leaves a field out."""
    tokens, merges, types = byte_level_vocabulary()
    found: Fields = {
        "model": "gpt2", "pre": "gpt-2", "tokens": list(tokens), "merges": list(merges),
        "token_type": np.array(types, np.int32), "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    found |= fields
    metadata = {f"tokenizer.ggml.{name}": value for name, value in found.items() if value is not None}
    return GgufHeader(Path("model.gguf"), metadata, {})


def tokenizer_of(head: GgufHeader) -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_files(head, None).tokenizer)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def from_transformers(folder: Path, **fields: Any):
    """The tokenizer that transformers makes of a GGUF file with these fields."""

    def change(metadata: Fields, _tensors: dict) -> None:
        for name, value in fields.items():
            metadata[f"tokenizer.ggml.{name}"] = value.tolist() if isinstance(value, np.ndarray) else value
            if value is None:
                del metadata[f"tokenizer.ggml.{name}"]

    path = write_model(folder / "model.gguf", change=change)
    return AutoTokenizer.from_pretrained(folder, gguf_file=path.name)


@pytest.fixture(scope="module")
def smollm() -> GgufHeader:
    return read_header(smollm_path())


def test_real_tokenizer_is_the_models_own(smollm: GgufHeader) -> None:
    files = tokenizer_files(smollm, None)
    tokenizer = Tokenizer.from_buffer(files.tokenizer)
    for text, expected in SMOLLM_IDS:
        assert ids(tokenizer, text) == expected, text
    whole = json.loads(files.tokenizer)
    merges = [" ".join(pair) for pair in merges_of(tokenizer)]
    content = json.dumps([whole["model"]["vocab"], merges], sort_keys=True).encode()
    assert hashlib.sha256(content).hexdigest() == SMOLLM_VOCABULARY
    assert [(token["id"], token["special"]) for token in whole["added_tokens"]] == [(i, True) for i in range(17)]
    config = json.loads(files.config)
    template = config.pop("chat_template")
    assert template.startswith("{% for message in messages %}")
    assert config == {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "add_bos_token": False, "add_eos_token": False,
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
    }  # fmt: skip


def test_real_tokenizer_and_template_in_transformers(smollm: GgufHeader, tmp_path: Path) -> None:
    """Our two files are what transformers needs, and give what it makes of the GGUF file itself."""
    files = tokenizer_files(smollm, None)
    (tmp_path / "tokenizer.json").write_bytes(files.tokenizer)
    (tmp_path / "tokenizer_config.json").write_bytes(files.config)
    ours = AutoTokenizer.from_pretrained(tmp_path)
    # Not AutoTokenizer, which takes many seconds to read the config of a large vocabulary.
    theirs = PreTrainedTokenizerFast.from_pretrained(smollm.path.parent, gguf_file=smollm.path.name)
    for text in STRINGS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)), text
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(messages, **options) == theirs.apply_chat_template(messages, **options)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


#: Where transformers cuts words as the name says.
KNOWN_TO_TRANSFORMERS = (
    "default", "gpt-2", "llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe",
    "tekken",
)  # fmt: skip


@pytest.mark.parametrize("pre", KNOWN_TO_TRANSFORMERS)
def test_pre_tokenizers(tmp_path: Path, pre: str) -> None:
    theirs = from_transformers(tmp_path, pre=pre)
    ours = tokenizer_of(header(pre=pre))
    for text in STRINGS:
        assert ids(ours, text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids(ours, text)) == theirs.decode(ids(ours, text), skip_special_tokens=True), text


def test_pre_tokenizer_of_qwen2() -> None:
    """Qwen 2 also composes characters, which transformers' GGUF reader leaves out."""
    tokens, merges, _ = byte_level_vocabulary()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(line.split(" ")) for line in merges])
    ours = tokenizer_of(header(pre="qwen2", token_type=np.ones(len(tokens), np.int32)))
    for text in STRINGS:
        if "<|" not in text:  # its class brings special tokens of its own
            assert ids(ours, text) == theirs.encode(text, add_special_tokens=False), text
    assert ids(ours, "n\u0303") == ids(ours, "\u00f1")


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact"])
def test_single_digits(pre: str) -> None:
    tokens, _, _ = byte_level_vocabulary()
    assert ids(tokenizer_of(header(pre="gpt-2")), "12") == [tokens.index("12")]
    assert ids(tokenizer_of(header(pre=pre)), "12") == [tokens.index("1"), tokens.index("2")]


def test_names_are_compared_without_case() -> None:
    plain, loud = header(pre="llama-bpe"), header(model="GPT2", pre="Llama-BPE")
    assert tokenizer_files(loud, None) == tokenizer_files(plain, None)


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("dbrx", False), ("gpt-2", False)])
def test_words_of_the_vocabulary_that_no_merge_reaches(pre: str, whole: bool) -> None:
    """llama.cpp's ``ignore_merges``, as in the tokenizer.json of Llama 3."""
    tokens, _, types = byte_level_vocabulary()
    head = header(pre=pre, tokens=[*tokens, "zqzqz"], token_type=np.array([*types, 1], np.int32))
    assert (ids(tokenizer_of(head), "zqzqz") == [len(tokens)]) is whole


def test_special_and_user_defined_tokens() -> None:
    tokens, _, _ = byte_level_vocabulary()
    tokenizer = tokenizer_of(header())
    found = ids(tokenizer, "<|im_start|>a<think><|im_end|>")
    assert found == [1, tokens.index("a"), tokens.index("<think>"), 2]
    assert tokenizer.decode(found) == "a<think>"  # control tokens are no part of the text, user-defined ones are


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"add_bos_token": True}, [1, 7]),
        ({"add_bos_token": False, "pre": "llama-bpe"}, [7]),
        ({"pre": "llama-bpe"}, [1, 7]),  # llama.cpp's default for this name
        ({"add_eos_token": True}, [7, 2]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 7, 2]),
        ({"add_bos_token": True, "bos_token_id": None}, [7]),
        ({}, [7]),
    ],
)
def test_tokens_around_a_text(fields: Fields, expected: list[int]) -> None:
    tokens, _, _ = byte_level_vocabulary()
    files = tokenizer_files(header(**fields), None)
    tokenizer = Tokenizer.from_buffer(files.tokenizer)
    text = tokenizer.decode([7])
    assert tokenizer.encode(text).ids == expected
    assert tokenizer.encode(text, text).ids == expected * 2
    config = json.loads(files.config)
    assert (config["add_bos_token"], config["add_eos_token"]) == (expected[0] == 1, expected[-1] == 2)


def test_a_token_with_a_colon_can_begin_a_text() -> None:
    tokens, _, types = byte_level_vocabulary()
    head = header(
        tokens=[*tokens, "<|a:b|>"], token_type=np.array([*types, 3], np.int32),
        bos_token_id=len(tokens), add_bos_token=True,
    )  # fmt: skip
    assert tokenizer_of(head).encode("").ids == [len(tokens)]


@cache
def sentence_piece() -> Fields:
    """Fields of a small SentencePiece vocabulary; the scores say in which order pieces were merged."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True, prepend_scheme="never")
    reserved = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=620, special_tokens=reserved, show_progress=False)
    tokenizer.train_from_iterator([text.replace("日本語", "") for text in TEXT], trainer)
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    types += [TokenType.NORMAL] * (len(tokens) - len(types))
    scores = [0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)]
    return {
        "model": "llama", "pre": "default", "tokens": tokens, "token_type": np.array(types, np.int32),
        "scores": np.array(scores, np.float32), "merges": None, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def test_sentence_piece(tmp_path: Path) -> None:
    """The ids of transformers' conversion for texts that begin with a letter.

    That conversion puts no space before a text that has one already, while SentencePiece, llama.cpp and the
    tokenizer.json of Llama 2 do; the next test is about that.
    """
    theirs = from_transformers(tmp_path, **sentence_piece())
    ours = tokenizer_of(header(**sentence_piece()))
    for text in STRINGS:
        if not text[:1].isspace():
            found = ids(ours, text)
            assert found == theirs.encode(text, add_special_tokens=False), text
            assert ours.decode(found) == text
    assert ours.encode("a").ids[0] == 1  # BEGIN is added unless the file says otherwise


def test_sentence_piece_spaces() -> None:
    """As SentencePiece does it: one space more in front, also of a text that begins with spaces."""
    tokens = sentence_piece()["tokens"]
    ours = tokenizer_of(header(**sentence_piece()))
    for text in (" hi", "   hi", "hi"):
        found = ids(ours, text)
        assert "".join(tokens[token] for token in found) == "▁" + text.replace(" ", "▁")
        assert ours.decode(found) == text
    plain = tokenizer_of(header(**sentence_piece(), add_space_prefix=False))
    assert "".join(tokens[token] for token in ids(plain, "hi a")) == "hi▁a"
    assert plain.decode(ids(plain, " hi a")) == " hi a"


def test_sentence_piece_bytes() -> None:
    """Characters outside the vocabulary become their UTF-8 bytes and come back."""
    tokens = sentence_piece()["tokens"]
    ours = tokenizer_of(header(**sentence_piece(), add_space_prefix=False))
    found = ids(ours, "\N{SNOWMAN}")
    assert [tokens[token] for token in found] == [f"<0x{byte:02X}>" for byte in "\N{SNOWMAN}".encode()]
    assert ours.decode(found) == "\N{SNOWMAN}"


def test_ends_are_all_collected() -> None:
    tokens, _, types = byte_level_vocabulary()
    n = len(tokens)
    more = {
        "tokens": [*tokens, "<|eot_id|>", "<end_of_turn>"],
        "token_type": np.array([*types, 3, 1], np.int32),
    }
    assert special_token_ids(header(), required=True) == (1, [2])
    assert special_token_ids(header(eot_token_id=5, eom_token_id=6), required=True) == (1, [2, 5, 6])
    # By name only where it is a control token.
    assert special_token_ids(header(**more), required=True) == (1, [2, n])
    assert special_token_ids(header(eos_token_id=0), required=True) == (1, [0, 2])
    assert special_token_ids(header(eos_token_id=None, bos_token_id=None), required=False) == (None, [2])
    with pytest.raises(CheckpointError, match=r"model\.gguf: field 'tokenizer\.ggml\.eos_token_id' is missing"):
        special_token_ids(header(eos_token_id=None), required=True)


def test_config_of_the_checkpoint_has_all_ends(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model.gguf", change=lambda fields, _: fields.update({"tokenizer.ggml.eot_token_id": 5})
    )
    config = open_gguf(path).info.config
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [2, 5])


def test_a_folder_wins(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    own = tokenizer_files(header(pre="llama-bpe"), None)
    (folder / "tokenizer.json").write_bytes(own.tokenizer)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    # The file's own tokenizer cannot be rebuilt, which does not matter then.
    head = header(pre=None, merges=None)
    head.metadata["tokenizer.chat_template"] = "{{ messages }}"
    files = tokenizer_files(head, folder)
    config = json.loads(files.config)
    assert files.tokenizer == own.tokenizer
    assert (config["eos_token"], config["bos_token"]) == ("<|endoftext|>", "<|im_start|>")
    assert config["chat_template"] == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("{{ 'own' }}")
    assert json.loads(tokenizer_files(head, folder).config)["chat_template"] == "{{ 'own' }}"
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        tokenizer_files(head, tmp_path)


BAD: dict[str, tuple[Fields, str]] = {
    "unknown model": ({"model": "t5"}, r"'tokenizer\.ggml\.model' is 't5', expected 'gpt2' or 'llama'"),
    "no model": ({"model": None}, r"'tokenizer\.ggml\.model' is ''"),
    "unknown pre-tokenizer": (
        {"pre": "kimi-k2"},
        r"'tokenizer\.ggml\.pre' is 'kimi-k2', expected one of .*llama-bpe",
    ),
    "no pre-tokenizer": ({"pre": None}, r"'tokenizer\.ggml\.pre' is missing"),
    "no tokens": ({"tokens": None}, r"'tokenizer\.ggml\.tokens' is missing"),
    "tokens of another type": ({"tokens": np.arange(5)}, r"'tokenizer\.ggml\.tokens' is missing"),
    "token twice": ({"tokens": ["a"] * 400}, "a token twice"),
    "empty token": ({"tokens": [*"abc", ""], "token_type": np.ones(4)}, "an empty token"),
    "no types": ({"token_type": None}, r"'tokenizer\.ggml\.token_type' is missing"),
    "too few types": (
        {"token_type": np.ones(3)},
        r"token_type' has 3 entries, expected a number for each of 400",
    ),
    "no merges": ({"merges": None}, r"'tokenizer\.ggml\.merges' is missing"),
    "half a merge": ({"merges": ["a b", "ab"]}, "entry 1 is 'ab', expected two tokens"),
    "merge of unknown tokens": ({"merges": ["qqq zzz"]}, "does not fit the vocabulary"),
    "begin outside": ({"bos_token_id": 400}, r"bos_token_id' is 400, expected an id below 400"),
    "end of another type": ({"eos_token_id": "x"}, "eos_token_id' is 'x'"),
    "flag of another type": ({"add_bos_token": 1}, "add_bos_token' is 1, expected true or false"),
    "no scores": ({"model": "llama"}, r"'tokenizer\.ggml\.scores' is missing"),
    "scores that are no numbers": (
        {"model": "llama", "scores": np.full(400, np.nan)},
        "NaN or infinite scores",
    ),
}


@pytest.mark.parametrize(("fields", "message"), BAD.values(), ids=BAD)
def test_bad_metadata_is_named(fields: Fields, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        tokenizer_files(header(**fields), None)
    assert str(error.value).startswith("model.gguf: field 'tokenizer.ggml.")
    assert "--tokenizer FOLDER" in str(error.value)


def test_the_same_file_gives_the_same_bytes() -> None:
    assert tokenizer_files(header(add_bos_token=True), None) == tokenizer_files(header(add_bos_token=True), None)
