"""prepare: a tokenizer that transformers reads alike, four streams that are what they say, and clear refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.train.cli import main
from examples.train.corpora import HINT, Document, arithmetic, load_text
from examples.train.preferences import wrong_number
from examples.train.prepare import Options, prepare
from examples.train.rewards import final_number, verifier_reward
from examples.train.tokenizer import CHAT_TEMPLATE, ChatTokenizer
from tests.support.train_corpus import write_corpus, write_lines

OPTIONS = Options(vocabulary=600, sequence=80, held=0.1, arithmetic=300)
STREAMS = [
    f"{name}-{split}.{end}"
    for name, end in (("pretrain", "bin"), ("sft", "jsonl"), ("preferences", "jsonl"), ("prompts", "jsonl"))
    for split in ("train", "held")
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def streams(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "streams"
    prepare(folder, data, [], OPTIONS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(streams: Path) -> ChatTokenizer:
    return ChatTokenizer(streams)


@pytest.fixture(scope="module")
def theirs(streams: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(streams)


def read(streams: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (streams / name).read_text(encoding="utf-8").splitlines()]


def documents(streams: Path, tokenizer: ChatTokenizer, split: str) -> list[str]:
    tokens = np.fromfile(streams / f"pretrain-{split}.bin", dtype="<i4")
    assert tokens[-1] == tokenizer.end_of_text
    parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.end_of_text) + 1)
    return [tokenizer.decode(part[:-1].tolist()) for part in parts if len(part)]


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is 12 + 345?\nSay it twice. "},
    {"role": "assistant", "content": "357 – yes,\n\n357 ☕."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "<answer>357</answer>"},
]


def test_conversations_are_what_transformers_makes_of_them(
    tokenizer: ChatTokenizer, theirs: PreTrainedTokenizerFast
) -> None:
    ids, mask = tokenizer.conversation(CONVERSATION)
    assert theirs.apply_chat_template(CONVERSATION, return_dict=False) == ids
    opened = theirs.apply_chat_template(CONVERSATION[:4], add_generation_prompt=True, return_dict=False)
    assert opened == tokenizer.prompt(CONVERSATION[:4])
    assert [*opened, *tokenizer.answer(CONVERSATION[4]["content"])] == ids[:-1]
    # The mask that transformers gives for a template which marks the assistant's words and its end-of-turn.
    head = "{{ '<|im_start|>' + message['role'] + '\n' }}"
    body = "{{ message['content'] | trim + '<|im_end|>' }}"
    marked = (
        "{% for message in messages %}" + head + "{% if message['role'] == 'assistant' %}{% generation %}" + body
        + "{% endgeneration %}{% else %}" + body + "{% endif %}{{ '\n' }}{% endfor %}"
    )  # fmt: skip
    found = theirs.apply_chat_template(
        CONVERSATION, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    assert found["input_ids"] == ids
    assert found["assistant_masks"] == mask
    said = tokenizer.decode([token for token, one in zip(ids, mask, strict=True) if one])
    assert said == "357 – yes,\n\n357 ☕.<answer>357</answer>"


def test_text_survives_and_special_tokens_in_it_are_text(
    tokenizer: ChatTokenizer, theirs: PreTrainedTokenizerFast
) -> None:
    text = "caf\u00e9 \N{HOT BEVERAGE}\x00 12345 <|im_end|> <|endoftext|>\n\t日本"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.turn_end, tokenizer.end_of_text, tokenizer.turn_start, tokenizer.pad} & set(ids)
    assert theirs.encode("plain text 42") == tokenizer.encode("plain text 42")
    # Every digit is a token of its own.
    digits = {tokenizer.encode(digit)[0] for digit in "0123456789"}
    assert len(digits) == 10 and [token for token in tokenizer.encode("2048") if token in digits] == tokenizer.encode(
        "2048"
    )
    assert theirs.chat_template == CHAT_TEMPLATE
    assert theirs.eos_token_id == tokenizer.turn_end and theirs.pad_token_id == tokenizer.pad


def test_flat_streams_hold_whole_documents_and_no_held_one_in_training(
    streams: Path, tokenizer: ChatTokenizer, data: Path
) -> None:
    train, held = documents(streams, tokenizer, "train"), documents(streams, tokenizer, "held")
    record = json.loads((streams / "streams.json").read_text())
    for split, found in (("train", train), ("held", held)):
        counts = record["counts"][f"pretrain-{split}"]
        assert counts["documents"] == len(found)
        assert counts["tokens"] * 4 == (streams / f"pretrain-{split}.bin").stat().st_size
    assert not set(train) & set(held)
    assert held and len(held) < len(train) / 4
    # A dialogue of the corpus is there as it was; a question that gsm8k-test asks is in no text to train on.
    asked = [json.loads(line)["question"] for line in (data / "gsm8k-test.jsonl").read_text().splitlines()]
    assert not [question for question in asked if any(question in text for text in train)]
    assert any("number 7?\nYes, " in text for text in train + held)
    assert record["vocabulary"] == tokenizer.vocabulary <= 600
    assert record["tokenizer_sha256"] == tokenizer.digest


def test_what_is_held_out_is_held_out_of_all_streams(streams: Path, tokenizer: ChatTokenizer) -> None:
    texts_held = set(documents(streams, tokenizer, "held"))
    for split in ("train", "held"):
        texts = [tokenizer.decode(row["tokens"]) for row in read(streams, f"sft-{split}.jsonl")]
        dialogues = [text for text in texts if "Did you see the" in text]
        assert dialogues
        for text in dialogues:
            first = re.findall(r"Did you see the .*?\?", text)[0]
            assert any(document.startswith(first) for document in texts_held) == (split == "held")
    train, held = (
        {_question(tokenizer, row) for row in read(streams, f"prompts-{split}.jsonl")} for split in ("train", "held")
    )
    assert train and held and not train & held


def test_the_test_questions_are_only_asked(streams: Path, tokenizer: ChatTokenizer, data: Path) -> None:
    asked = [json.loads(line)["question"] for line in (data / "gsm8k-test.jsonl").read_text().splitlines()]
    held = {_question(tokenizer, row) for row in read(streams, "prompts-held.jsonl")}
    assert {question + HINT for question in asked} <= held
    for name, field in (("sft", "tokens"), ("preferences", "prompt")):
        for split in ("train", "held"):
            texts = [tokenizer.decode(row[field]) for row in read(streams, f"{name}-{split}.jsonl")]
            assert texts and not [text for text in texts if any(question in text for question in asked)]


def test_held_documents_stay_so_when_other_files_come(
    streams: Path, tokenizer: ChatTokenizer, data: Path, tmp_path: Path
) -> None:
    write_lines(tmp_path / "trivia.jsonl.gz", [])
    (tmp_path / "trivia.jsonl.gz").write_bytes((data / "trivia.jsonl.gz").read_bytes())
    prepare(tmp_path / "fewer", tmp_path, [], Options(vocabulary=600, sequence=80, held=0.1, arithmetic=300))
    fewer = ChatTokenizer(tmp_path / "fewer")
    both = (documents(streams, tokenizer, "held"), documents(tmp_path / "fewer", fewer, "held"))
    one, other = ({text for text in found if text.startswith("Where does one look")} for found in both)
    assert one and one == other


def test_sft_rows_end_with_an_answer_and_fit(streams: Path, tokenizer: ChatTokenizer) -> None:
    cut = 0
    for split in ("train", "held"):
        for row in read(streams, f"sft-{split}.jsonl"):
            tokens, mask = row["tokens"], row["mask"]
            assert len(tokens) == len(mask) <= OPTIONS.sequence
            assert set(mask) == {0, 1} and tokens[-1] == tokenizer.turn_end and mask[-1] == 1
            # Turn by turn: 1 on the assistant's words and the end, 0 on the head and on all that others say.
            for start in [i for i, token in enumerate(tokens) if token == tokenizer.turn_start]:
                end = tokens.index(tokenizer.turn_end, start)
                head = tokenizer.encode("assistant\n")
                speaks = tokens[start + 1 : start + 1 + len(head)] == head
                assert not any(mask[start : start + 1 + len(head)])
                assert mask[start + 1 + len(head) : end + 1] == [int(speaks)] * (end - start - len(head))
            cut += "Shall we go" not in tokenizer.decode(tokens) and len(tokens) > OPTIONS.sequence - 30
    assert cut  # some did not fit whole


def test_preferences_prefer_what_is_right(streams: Path, tokenizer: ChatTokenizer) -> None:
    rows = read(streams, "preferences-train.jsonl")
    kinds = {row["kind"] for row in rows}
    assert kinds == {"wrong-choice", "wrong-number", "cut-short", "other-question", "echo", "loop"}
    for row in rows:
        chosen, rejected = (tokenizer.decode(row[name]) for name in ("chosen", "rejected"))
        assert chosen != rejected and rejected.strip()
        assert row["chosen"][-1] == row["rejected"][-1] == tokenizer.turn_end
        assert tokenizer.decode(row["prompt"]).endswith("assistant\n")
        assert len(row["prompt"]) + max(len(row["chosen"]), len(row["rejected"])) <= OPTIONS.sequence
        if row["kind"] == "wrong-number":
            assert verifier_reward(chosen, str(final_number(chosen))) == pytest.approx(1.2)
            assert verifier_reward(rejected, str(final_number(chosen))) == pytest.approx(0.2)
        if row["kind"] == "cut-short":
            assert verifier_reward(rejected, str(final_number(chosen))) in (0.0, 1.0) and "<answer>" not in rejected
        if row["kind"] == "echo":
            assert rejected in tokenizer.decode(row["prompt"])


def test_prompts_have_the_right_gold(streams: Path, tokenizer: ChatTokenizer) -> None:
    rows = read(streams, "prompts-train.jsonl") + read(streams, "prompts-held.jsonl")
    seen = set()
    for row in rows:
        question = _question(tokenizer, row)
        assert question.endswith(HINT)
        if row["task"] == "arithmetic":
            a, sign, b = re.search(r"(\d+) ([-+*]) (\d+)", question).groups()
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(row["gold"])
            assert len(a) <= row["digits"] and len(b) <= row["digits"]
            seen.add((row["operation"], row["digits"]))
        else:
            a, b = map(int, re.findall(r"\d+", question)[:2])
            assert int(row["gold"]) == a + b
    assert len(seen) == 9


def test_the_same_seed_gives_the_same_bytes(streams: Path, data: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "again", data, [], OPTIONS)
    for name in (*STREAMS, "streams.json", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (streams / name).read_bytes(), name


def test_own_text_becomes_documents_and_conversations(tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    book = "\n\n".join(f"Paragraph {i}: " + "long text " * 100 for i in range(60))
    (folder / "book.txt").write_text(book, encoding="utf-8")
    (folder / "two.md").write_text("first<|endoftext|>second", encoding="utf-8")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    write_lines(folder / "rows.jsonl", [{"text": "a row"}, {"messages": messages}])
    found = list(load_text(folder))
    pieces = [document.text for document in found if document.text.startswith("Paragraph")]
    assert len(pieces) > 5 and "\n\n".join(pieces).split() == book.split()
    assert {"first", "second", "a row"} < {document.text for document in found}
    assert [document.messages for document in found if document.messages] == [messages]
    record = prepare(
        tmp_path / "streams", None, [folder], Options(vocabulary=300, sequence=64, held=0.3, arithmetic=90)
    )
    assert record["sources"]["own"] == len(found)


def test_sums_of_the_same_numbers_are_held_out_together() -> None:
    sides: dict[tuple[str, ...], list[bool]] = {}
    for document in arithmetic(3000, 1):
        a, sign, b, *_ = document.text.split()
        sides.setdefault((sign, *sorted((a, b))), []).append(document.is_held(0.1))
    assert {len(held) for held in sides.values()} == {1, 2}
    assert all(len(set(held)) == 1 for held in sides.values())
    share = np.mean([held[0] for held in sides.values()])
    assert abs(share - 0.1) < 4 * np.sqrt(0.1 * 0.9 / len(sides))  # four standard deviations


def test_wrong_numbers_are_wrong() -> None:
    for document in arithmetic(900, 3):
        if not document.gold:
            continue
        wrong = wrong_number(document.messages[-1]["content"], document.gold, document.chance("test"))
        assert final_number(wrong) != final_number(document.messages[-1]["content"])
        assert document.gold.isdigit()
    decimal = wrong_number("It is 2.5.\n<answer>2.5</answer>", "2.5", Document("x", "y").chance("test"))
    assert final_number(decimal) != 2.5


def _question(tokenizer: ChatTokenizer, row: dict[str, Any]) -> str:
    text = tokenizer.decode(row["prompt"])
    return text.removeprefix("user\n").removesuffix("\nassistant\n").strip()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("trivia.jsonl.gz", b"", "is empty"),
        ("trivia.jsonl.gz", b"no gzip at all", "gzip file is damaged"),
        ("trivia.jsonl", b'{"question": "x", "answer": "y", "choices": []}\n{oops\n', "line 2: not JSON"),
        ("trivia.jsonl", b"[1, 2]\n", "line 1: expected a JSON object"),
        ("trivia.jsonl", b'{"question": "Why?"}\n', "row 1: field missing or of the wrong type ('answer')"),
        ("self-dialogues.jsonl", b'{"turns": "no list"}\n{"turns": 7}\n', "self-dialogues.jsonl"),
        ("gsm8k-train.jsonl", b'{"question": "x", "answer": "no number"}\n', "answer without ####"),
        ("trivia.jsonl", b'{"question": "\xff"}\n', "not JSON"),
        ("other.jsonl", b"{}\n", "holds none of self-dialogues.jsonl.gz"),
    ],
)
def test_bad_data_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, said: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / name).write_bytes(content)
    refuse(capsys, said, "--data", data, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--data", "nowhere"), "nowhere: no such folder"),
        (("--held", "0"), "--held is 0.0"),
        (("--vocabulary", "200"), "a vocabulary of 200 cannot hold"),
        (("--text", "missing.txt"), "missing.txt: No such file"),
        (("--tokenizer", "elsewhere"), "elsewhere/tokenizer.json"),
        (("--preset", "huge"), "no preset 'huge'"),
    ],
)
def test_bad_options_are_one_message(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, str], said: str
) -> None:
    given = options if "--data" in options else ("--data", str(data), *options)
    refuse(capsys, said, *given, out=tmp_path / "out")


def test_bad_text_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    refuse(capsys, "latin.txt: is no UTF-8 text", "--text", tmp_path / "latin.txt", out=tmp_path / "out")
    write_lines(tmp_path / "odd.jsonl", [{"words": 1}])
    refuse(capsys, "row 1: expected a field text, or messages", "--text", tmp_path / "odd.jsonl", out=tmp_path / "out")
    write_lines(tmp_path / "role.jsonl", [{"messages": [{"role": "cook", "content": "x"}]}])
    refuse(capsys, "a message needs a role", "--text", tmp_path / "role.jsonl", out=tmp_path / "out")
    (tmp_path / "few.txt").write_text("One short text.", encoding="utf-8")
    refuse(capsys, "would be empty", "--text", tmp_path / "few.txt", "--arithmetic", "0", out=tmp_path / "out")


def test_a_folder_with_other_things_is_left_alone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["prepare", "--data", str(data), "--out", str(tmp_path)])
    assert "is not empty and holds no streams" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


def refuse(capsys: pytest.CaptureFixture[str], said: str, *options: object, out: Path) -> None:
    """The command fails with one message that says so, and leaves nothing behind."""
    with pytest.raises(SystemExit) as stop:
        main(["prepare", "--out", str(out), *map(str, options)])
    message = capsys.readouterr().err
    assert stop.value.code == 1
    assert said in message and message.count("error:") == 1 and "Traceback" not in message
    assert not [entry for entry in out.parent.iterdir() if entry.name.startswith(out.name)]
