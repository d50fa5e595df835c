"""The engine's tokenizer and chat template against the libraries that own the formats."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.engine.node import node_json
from tests.support.checkpoints import byte_tokenizer, tokenizer_config
from tests.support.real import real_model

TEXTS = [
    "",
    " ",
    "Hello, world",
    "  two  spaces\tand\ta tab\n\n\nand lines\r\n",
    "2 + 2 = 4; 1234567890 and 3.14159",
    "naïve café, Ångström, ﬁne ﬂags",
    "Привет, мир! Как дела?",
    "你好,世界。日本語のテキストと한국어",
    "مرحبا بالعالم و שלום עולם",
    "हिन्दी में कुछ शब्द और ไทย",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\nwith special tokens<|im_end|>\n",
    "a\u0301 combining, zero\u200bwidth, non\u00a0breaking, \ufeffBOM, \ufffd replacement",
    "I'm you're we'll they've he'd it's CAN'T",
    "mixed: abcабв漢字😀123 -- ...!!! @#$%^&*()",
    "x" * 300,
    "word " * 50,
    "\x00\x01\x7f controls",
    "https://example.org/path?query=1&b=2#frag",
]
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere 😀"}],
    [
        {"role": "user", "content": "  spaces kept  "},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "{{ not a template }} {% nor this %}"},
    ],
]


def random_texts(count: int) -> list[str]:
    """Texts of characters from many scripts, in any order."""
    generator = random.Random(5)
    ranges = [(32, 126), (0xA0, 0x24F), (0x370, 0x4FF), (0x5D0, 0x5EA), (0x900, 0x97F), (0x4E00, 0x4FFF)]
    ranges += [(0xAC00, 0xACFF), (0x1F300, 0x1F64F), (0x2000, 0x206F), (9, 13)]
    return [
        "".join(chr(generator.randint(*generator.choice(ranges))) for _ in range(generator.randint(1, 60)))
        for _ in range(count)
    ]


def write(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer_config(), **config}), encoding="utf-8")
    return folder


def metaspace_tokenizer() -> Tokenizer:
    """As Llama 2 has: words with a mark for the space before them, bytes for all else, BOS in front."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=vocabulary, limit_alphabet=60)
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog ran to the house"] * 5, trainer)
    saved = json.loads(tokenizer.to_str())
    # Bytes are ordinary tokens; only these three are special.
    saved["added_tokens"] = [token for token in saved["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def is_metaspace(folder: Path) -> bool:
    return "ByteFallback" in (folder / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture(params=["smollm2", "bytes", "metaspace"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "smollm2":
        return real_model()
    if request.param == "bytes":
        return write(tmp_path, byte_tokenizer())
    return write(tmp_path, metaspace_tokenizer(), bos_token="<s>", eos_token="</s>")


def test_ids_and_texts_are_those_of_the_tokenizers_library(folder: Path) -> None:
    owner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = TEXTS + random_texts(100)
    plain = [owner.encode(text, add_special_tokens=False).ids for text in texts]
    answer = node_json("tokenizer_answers.mjs", {"folder": str(folder), "texts": texts, "ids": plain})
    for text, ids, found, back in zip(texts, plain, answer["texts"], answer["ids"], strict=True):
        assert found["plain"] == ids, text
        assert found["special"] == owner.encode(text).ids, text
        # The JavaScript library's byte fallback swallows a byte order mark.
        dropped = "\ufeff" if is_metaspace(folder) else ""
        assert back["decoded"] == owner.decode(ids).replace(dropped, ""), text


def test_a_stream_gives_the_same_text_and_never_half_a_character(folder: Path) -> None:
    owner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [text for text in TEXTS + random_texts(100) if "\ufffd" not in text and "\ufeff" not in text]
    ids = [owner.encode(text, add_special_tokens=False).ids for text in texts]
    cut = [one[: max(1, len(one) * 2 // 3)] for one in ids]
    answer = node_json("tokenizer_answers.mjs", {"folder": str(folder), "ids": ids + cut})["ids"]
    for whole, part, found, found_part in zip(ids, cut, answer[: len(ids)], answer[len(ids) :], strict=True):
        text = owner.decode(whole)
        assert "".join(found["pieces"]) == text, whole
        # The library turns a whole run of bytes with half a character at its end into replacement characters.
        shown = "".join(found_part["pieces"])
        assert text.startswith(shown) and len(shown) >= len(owner.decode(part).rstrip("\ufffd")), part
        for piece in found["pieces"] + found_part["pieces"]:
            assert all(letter != "\ufffd" and not 0xD800 <= ord(letter) < 0xE000 for letter in piece)


def test_bytes_that_are_no_text_come_out_as_in_the_library(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_tokenizer())
    owner = byte_tokenizer()
    generator = random.Random(3)
    ids = [[generator.randrange(256) for _ in range(40)] + owner.encode(".").ids for _ in range(50)]
    answer = node_json("tokenizer_answers.mjs", {"folder": str(folder), "ids": ids})["ids"]
    for one, found in zip(ids, answer, strict=True):
        assert "".join(found["pieces"]) == found["decoded"] == owner.decode(one)


def test_a_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    folder = write(tmp_path, metaspace_tokenizer(), bos_token="<s>", eos_token="</s>")
    texts = ["the cat", "<s>the cat", "<s>"]
    found = node_json("tokenizer_answers.mjs", {"folder": str(folder), "texts": texts})["texts"]
    bos = metaspace_tokenizer().token_to_id("<s>")
    assert [one["special"].count(bos) for one in found] == [1, 1, 1]
    assert [one["special"][0] for one in found] == [bos] * 3


def test_prompts_are_those_of_transformers(folder: Path) -> None:
    owner = PreTrainedTokenizerFast.from_pretrained(folder)
    answer = node_json("tokenizer_answers.mjs", {"folder": str(folder), "chats": CHATS})["chats"]
    for messages, found in zip(CHATS, answer, strict=True):
        assert found["text"] == owner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = owner.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert found["ids"] == ids


TEMPLATES = {
    "llama 3": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|' + m['role'] + '|>\n\n' + m['content'] | trim + '<|eot|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n\n' }}{% endif %}"
    ),
    "loops and sets": (
        "{%- set ns = namespace(first=true) %}\n{%- for m in messages %}\n  {%- if m.role == 'system' %}\n"
        "    {%- set ns.first = false %}\n  {%- endif %}\n"
        "  {{- '[' ~ loop.index ~ '] ' ~ m.content | upper }}\n"
        "  {%- if not loop.last %}\n    {{- ' / ' }}\n  {%- endif %}\n{%- endfor %}\n"
        "{%- if ns.first %}{{ ' no system' }}{% endif %}{% if tools %}tools{% endif %}"
    ),
    "json": "{% for m in messages %}{{ {'role': m.role, 'content': m.content} | tojson }}\n{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_other_models(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, byte_tokenizer(), chat_template=TEMPLATES[name])
    owner = PreTrainedTokenizerFast.from_pretrained(folder)
    answer = node_json("tokenizer_answers.mjs", {"folder": str(folder), "chats": CHATS})["chats"]
    for messages, found in zip(CHATS, answer, strict=True):
        assert found["text"] == owner.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def test_the_default_of_several_templates_and_tokens_as_objects(tmp_path: Path) -> None:
    templates = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}yes"},
    ]
    folder = write(tmp_path, byte_tokenizer(), chat_template=templates, bos_token={"content": "<|im_start|>"})
    assert (
        node_json("tokenizer_answers.mjs", {"folder": str(folder), "chats": CHATS[:1]})["chats"][0]["text"]
        == "<|im_start|>yes"
    )


BAD_MESSAGES: list[Any] = [
    None,
    [],
    "Hi",
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "user", "content": 5}],
]
BAD_MESSAGES += [
    [{"role": "", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [None],
]


def test_bad_messages_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_tokenizer())
    answer = node_json("tokenizer_answers.mjs", {"folder": str(folder), "chats": BAD_MESSAGES})["chats"]
    for messages, found in zip(BAD_MESSAGES, answer, strict=True):
        assert found["error"]["code"] == "bad-request", messages


def test_texts_in_parts_are_joined(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_tokenizer())
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]}]
    whole = [{"role": "user", "content": "Hi there"}]
    answer = node_json("tokenizer_answers.mjs", {"folder": str(folder), "chats": [parts, whole]})["chats"]
    assert answer[0] == answer[1]


def test_what_a_template_refuses_is_a_bad_request(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}ok"
    folder = write(tmp_path, byte_tokenizer(), chat_template=template)
    refused, good = node_json("tokenizer_answers.mjs", {"folder": str(folder), "chats": [CHATS[1], CHATS[0]]})["chats"]
    assert refused["error"]["code"] == "bad-request" and "no system role" in refused["error"]["message"]
    assert good["text"] == "ok"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"chat_template": None}, None),
        ({"chat_template": "{% for %}"}, "pack-unsupported"),
        ({"chat_template": 5}, "pack-unsupported"),
    ],
)
def test_packs_without_a_usable_template(change: dict[str, Any], code: str | None, tmp_path: Path) -> None:
    folder = write(tmp_path, byte_tokenizer(), **change)
    answer = node_json("tokenizer_answers.mjs", {"folder": str(folder), "chats": CHATS[:1], "texts": ["a"]})
    if code:
        assert answer["error"]["code"] == code
    else:
        assert answer["chats"][0]["error"]["code"] == "pack-unsupported" and answer["texts"][0]["plain"]


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Mystery"}}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert node_json("tokenizer_answers.mjs", {"folder": str(tmp_path)})["error"]["code"] == "pack-unsupported"


def test_stop_texts_across_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_tokenizer())
    ids = byte_tokenizer().encode("It is 😀 done.\nUser: more").ids
    cases = [
        (["\nUser:"], "It is 😀 done."),
        (["😀"], "It is "),
        (["zzz"], "It is 😀 done.\nUser: more"),
        (["ne.", "is"], "It "),
    ]
    question = {"folder": str(folder), "stops": [{"ids": ids, "stop": stop} for stop, _ in cases]}
    assert node_json("tokenizer_answers.mjs", question)["stops"] == [text for _, text in cases]
