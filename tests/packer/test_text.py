"""Text in and out: the chat template against transformers, and streams that never split a character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from packer.errors import PackerError
from packer.pack import Pack
from packer.text import ChatText
from tests.support.checkpoints import CHATML, END_OF_TEXT, IM_END, IM_START, change_json
from tests.support.packs import change_manifest, relist, tiny_pack
from tests.support.real import golden, real_model, real_pack

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n\n there "}],
    [
        {"role": "user", "content": "1 < 2 & \"3\" 'four' <|im_end|>?"},
        {"role": "assistant", "content": "Ja, natürlich. 日本語 🙂"},
        {"role": "user", "content": ""},
    ],
]

TEMPLATES = {
    "chatml": CHATML,
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "tools are none": "{% if tools is none %}none{% endif %}{% if documents is none %}, none{% endif %}",
    "tools are defined": "{% if not tools is defined %}undefined{% endif %}{{ bos_token }}{{ eos_token }}",
    "trimmed blocks": "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "prompt": "{% if add_generation_prompt %}yes{% endif %}",
    "strip": "{{ messages[-1]['content'].strip() | upper }}{{ messages[0]['role'].title() }}",
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pack(tmp_path_factory.mktemp("text"))


def text_of(pack: Path, template: Any) -> ChatText:
    """The pack's text with another chat template, in memory."""
    text = ChatText(Pack(pack))
    text.config = {**text.config, "chat_template": template}
    return text


# --- chat template ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, pack: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(pack / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    for messages in CONVERSATIONS:
        expected = tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
        )
        assert text_of(pack, TEMPLATES[name]).render(messages) == expected


def test_the_real_template_gives_the_ids_of_transformers() -> None:
    from transformers import AutoTokenizer

    tokenizer, text = AutoTokenizer.from_pretrained(real_model()), ChatText(Pack(real_pack("q8")))
    for messages in CONVERSATIONS:
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert text.encode_messages(messages) == list(expected)
    for answer in golden():
        assert text.encode_messages([{"role": "user", "content": answer["prompt"]}]) == answer["prompt_ids"]
        assert text.decode(answer["greedy_ids"]) == answer["greedy_text"].replace("<|im_end|>", "")


def test_special_tokens_are_not_added_twice(pack: Path) -> None:
    """The template writes BOS; the tokenizer's own post-processor must not write a second one (pitfall 13)."""
    text = ChatText(Pack(pack))
    text.tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)]
    )
    ids = text.encode_messages([{"role": "user", "content": "x"}])
    assert ids[0] == IM_START and ids[1] != IM_START
    assert text.encode_raw("x")[0] == IM_START and len(text.encode_raw("x")) == 2


def test_the_default_of_several_templates_is_taken(pack: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert text_of(pack, named).render(CONVERSATIONS[0]) == "default"
    with pytest.raises(PackerError, match="no chat template"):
        text_of(pack, named[:1]).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "refuses"),
        ("{{ messages[7]['content'] + 1 }}", "refuses"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages + 3 }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{% include 'x' %}", "refuses"),
        (None, "no chat template"),
        ({"name": "x"}, "chat_template"),
        (7, "chat_template"),
        ([3, {"name": "default", "template": 5}], "chat_template"),
    ],
)
def test_a_template_that_fails_is_one_error(template: Any, words: str, pack: Path) -> None:
    with pytest.raises(PackerError, match=words) as caught:
        text_of(pack, template).render(CONVERSATIONS[0])
    assert str(pack) in str(caught.value)


def test_half_a_surrogate_pair_is_one_error(pack: Path) -> None:
    text = ChatText(Pack(pack))
    for encode in (text.encode_raw, lambda bad: text.encode_messages([{"role": "user", "content": bad}])):
        with pytest.raises(PackerError, match="surrogate"):
            encode("a\ud83d")


@pytest.mark.parametrize("content", ["[]", "nonsense", "\xff", '{"bos_token": NaN}'])
def test_a_bad_tokenizer_config_is_one_error(content: str, tmp_path: Path) -> None:
    pack = tiny_pack(tmp_path)
    (pack / "tokenizer_config.json").write_bytes(content.encode("latin-1"))
    relist(pack)
    with pytest.raises(PackerError, match=r"tokenizer_config\.json"):
        ChatText(Pack(pack))


def test_a_bad_tokenizer_is_one_error(tmp_path: Path) -> None:
    pack = tiny_pack(tmp_path)
    (pack / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unknown"}}))
    relist(pack)
    with pytest.raises(PackerError, match=r"tokenizer\.json"):
        ChatText(Pack(pack))


# --- streaming --------------------------------------------------------------------------------------------------------

HARD = [
    "Plain words, then more.",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 end",  # joined sequences of many code points
    "देवनागरी लिपि में लिखा हुआ",
    "日本語と中文和한국어",
    "🙂" * 60,  # each character four tokens, over the window of the stream
    "mixed: é ü 𝔘𝔫𝔦 ∑ \u200b\u0301 tab\tnew\nline",
    " leading and trailing ",
]


def streamed(text: ChatText, ids: list[int]) -> list[str]:
    stream = text.stream()
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("content", HARD)
def test_streams_never_split_a_character(content: str, pack: Path) -> None:
    """With the byte tokenizer every byte is a token of its own: the worst case."""
    text = ChatText(Pack(pack))
    ids = text.encode_raw(content)
    assert len(ids) == len(content.encode())
    parts = streamed(text, ids)
    assert "".join(parts) == text.decode(ids) == content
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert all(len(part) <= 1 for part in parts)  # as soon as a character is complete


@pytest.mark.parametrize("content", HARD)
def test_streams_of_the_real_tokenizer(content: str) -> None:
    text = ChatText(Pack(real_pack("q8")))
    ids = text.encode_raw(content)
    parts = streamed(text, ids)
    assert "".join(parts) == text.decode(ids) == content
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 260), max_size=300))
def test_streams_of_any_ids_are_the_whole_text(pack: Path, ids: list[int]) -> None:
    """Broken bytes and special tokens too; ids beyond the tokenizer (padding of the vocabulary) give nothing."""
    text = ChatText(Pack(pack))
    assert "".join(streamed(text, ids)) == text.decode(ids)


def test_broken_bytes_do_not_hold_up_the_stream(pack: Path) -> None:
    """A byte that begins no character shows as U+FFFD once the next text shows that it will not become one."""
    text = ChatText(Pack(pack))
    continuation = text.encode_raw("é")[1]
    parts = streamed(text, [continuation, *text.encode_raw("ab")])
    assert parts == ["", "\N{REPLACEMENT CHARACTER}a", "b", ""]
    assert "".join(streamed(text, [continuation] * 100)[:-1]) == "\N{REPLACEMENT CHARACTER}" * 97


def test_what_is_left_comes_at_the_end(pack: Path) -> None:
    text = ChatText(Pack(pack))
    assert streamed(text, text.encode_raw("a🙂")[:-1]) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_not_text(pack: Path) -> None:
    text = ChatText(Pack(pack))
    assert "".join(streamed(text, [IM_START, *text.encode_raw("hi"), IM_END, END_OF_TEXT])) == "hi"


def test_spaces_of_sentencepiece_tokenizers_survive(pack: Path) -> None:
    """Llama 2's decoder strips the space before the first word of a text: a stream must not strip it before others."""
    letters = {letter: index for index, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="▁"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", left=1, right=0)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    text = ChatText(Pack(pack))
    text.tokenizer = tokenizer
    content = "the quick brown fox " * 12 + "ends"
    ids = text.encode_raw(content)
    assert "".join(streamed(text, ids)) == text.decode(ids) == content


def test_long_streams_stay_quick(pack: Path) -> None:
    """Each push decodes a bounded number of ids, whatever came before."""
    text = ChatText(Pack(pack))
    longest = 0
    decode = text.decode

    def counting(ids: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    text.decode = counting  # type: ignore[method-assign]
    ids = text.encode_raw("word " * 400)
    assert "".join(streamed(text, ids)) == "word " * 400
    assert longest < 100


def test_eos_ids_come_from_the_manifest(tmp_path: Path) -> None:
    pack = tiny_pack(tmp_path)
    change_manifest(pack, lambda manifest: manifest.update(eos_ids=[5, 9]))
    assert Pack(pack).eos_ids == {5, 9}
    change_json(pack / "pack.json", eos_ids=[IM_END])
    assert Pack(pack).eos_ids == {IM_END}
