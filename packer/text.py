"""Text in and out of a pack: chat template, token ids, and streaming that never splits a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import PackerError
from .pack import Pack
from .tokens import load_tokenizer

Messages = Sequence[dict[str, Any]]
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ChatText:
    """Tokenizer and chat template of a pack."""

    def __init__(self, pack: Pack):
        self.path = pack.path
        self.tokenizer = load_tokenizer((pack.path / "tokenizer.json").read_bytes(), pack.path)
        self.config = json.loads((pack.path / "tokenizer_config.json").read_bytes())
        self.bos_id = pack.manifest["bos_id"]

    @property
    def template(self) -> str | None:
        """The chat template's source, if the pack has one."""
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several named templates: the one for chat is "default"
            template = next((item["template"] for item in template if item.get("name") == "default"), None)
        return template

    def render(self, messages: Messages) -> str:
        """Messages as the text that the model was trained on. Raises PackerError if the template refuses them."""
        if self.template is None:
            raise PackerError(f"{self.path}: the pack has no chat template; use --raw with plain text")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        tokens = {
            name: _content(self.config.get(name))
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        known = {name: token for name, token in tokens.items() if token is not None}
        try:
            return environment.from_string(self.template).render(
                messages=messages, add_generation_prompt=True, **known
            )
        except TemplateError as error:
            raise PackerError(f"{self.path}: the chat template refuses these messages: {error}") from None

    def encode_messages(self, messages: Messages) -> list[int]:
        """Prompt ids of a conversation; the template writes special tokens itself, so none are added."""
        return self.tokenizer.encode(self.render(messages), add_special_tokens=False).ids

    def encode_raw(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the tokenizer adds."""
        return self.tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A decoder for ids that come one by one."""
        return TextStream(self)


class TextStream:
    """Decodes ids as they come; text waits until its last character is complete."""

    def __init__(self, text: ChatText):
        self._text, self._ids, self._start, self._shown = text, [], 0, ""

    def push(self, token: int) -> str:
        """New text after one more id; empty while a character is incomplete."""
        self._ids.append(token)
        whole = self._text.decode(self._ids[self._start :])
        if whole.endswith(_REPLACEMENT):
            return ""
        new = whole[len(self._shown) :]
        self._shown = whole
        if (
            len(self._ids) - self._start > 64
        ):  # keeps a long answer linear; one token of context keeps its spaces
            self._start = len(self._ids) - 1
            self._shown = self._text.decode(self._ids[self._start :])
        return new

    def finish(self) -> str:
        """What is left at the end, complete or not."""
        return self._text.decode(self._ids[self._start :])[len(self._shown) :]


def _refuse(message: str) -> str:
    raise TemplateError(message)


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
