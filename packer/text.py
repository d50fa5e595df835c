"""Text in and out of a pack: chat template, token ids, and streaming that never splits a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shaders.contract import short

from .errors import PackerError
from .manifest import read_json
from .pack import Pack
from .tokens import load_tokenizer

Messages = Sequence[dict[str, Any]]
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ChatText:
    """Tokenizer and chat template of a pack. Raises PackerError if its files cannot be used."""

    def __init__(self, pack: Pack):
        self.path = pack.path
        self.tokenizer = load_tokenizer((pack.path / "tokenizer.json").read_bytes(), pack.path)
        self.config = read_json(pack.path / "tokenizer_config.json")

    @property
    def template(self) -> str | None:
        """The chat template's source, if the pack has one."""
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several named templates: the one for chat is "default"
            named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
            template = named[0].get("template") if named else None
        if template is not None and not isinstance(template, str):
            raise PackerError(f"{self.path}: tokenizer_config.json: chat_template is {short(template)}, expected text")
        return template

    def render(self, messages: Messages) -> str:
        """Messages as the text that the model was trained on. Raises PackerError if the template refuses them."""
        if self.template is None:
            raise PackerError(f"{self.path}: the pack has no chat template; use --raw with plain text")
        tokens = {name: _content(self.config.get(name)) for name in SPECIAL_TOKENS}
        known = {name: token for name, token in tokens.items() if token is not None}
        try:
            template = _environment().from_string(self.template)
            # What transformers passes too: templates ask whether it is there.
            return template.render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **known)
        except Exception as error:  # a template is a program of the pack's author: anything can go wrong in it
            raise PackerError(f"{self.path}: the chat template refuses these messages: {error}") from None

    def encode_messages(self, messages: Messages) -> list[int]:
        """Prompt ids of a conversation; the template writes special tokens itself, so none are added."""
        return self._encode(self.render(messages), add_special_tokens=False)

    def encode_raw(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the tokenizer adds."""
        return self._encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """A decoder for ids that come one by one."""
        return TextStream(self)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PackerError(f"the prompt is no valid text: {error.reason} at character {error.start}") from None
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


class TextStream:
    """Decodes ids as they come; text waits until its last character is complete."""

    def __init__(self, text: ChatText):
        self._text, self._start, self._shown = text, 0, ""
        self._ids: list[int] = []

    def push(self, token: int) -> str:
        """New text after one more id, without a character that is incomplete."""
        self._ids.append(token)
        whole = self._text.decode(self._ids[self._start :])
        # A character is at most four bytes, so only the last three marks can still become one.
        held = min(3, len(whole) - len(whole.rstrip(_REPLACEMENT)))
        whole = whole[: len(whole) - held]
        new = whole[len(self._shown) :]
        self._shown += new
        if not held and len(self._ids) - self._start > 64:  # keeps a long answer linear; one token keeps its spaces
            self._start = len(self._ids) - 1
            self._shown = self._text.decode(self._ids[self._start :])
        return new

    def finish(self) -> str:
        """What is left at the end, complete or not."""
        return self._text.decode(self._ids[self._start :])[len(self._shown) :]


class _Generation(Extension):
    """``{% generation %}``, with which templates mark the model's own words for training, gives its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it (transformers ``utils/chat_template_utils.py``)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> str:
    raise TemplateError(message)


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
