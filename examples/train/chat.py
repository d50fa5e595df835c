"""``chat``: talk to a checkpoint in the terminal; its answers come as they are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console

from packer.text import ChatText, TextStream

from .checkpoint import load_model
from .distributed import world
from .errors import TrainError
from .generate import Sampling, generator, steps
from .model import Decoder
from .tokenizer import ChatTokenizer


class Conversation:
    """Turns so far, and a model that adds to them. new_tokens: the longest answer."""

    def __init__(
        self, model: Decoder, tokenizer: ChatTokenizer, sampling: Sampling, new_tokens: int, system: str, seed: int
    ) -> None:
        self.model, self.tokenizer, self.sampling, self.new_tokens = model, tokenizer, sampling, new_tokens
        self.head = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = []
        self.random = generator(model.embedding.weight.device, seed)
        self.forgot = False

    def ask(self, text: str) -> Iterator[str]:
        """The answer to ``text``, piece by piece; both become turns. Raises TrainError if it is too long."""
        self.turns.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
        except TrainError:
            self.turns.pop()
            raise
        # The stream only decodes, which this tokenizer does as a pack's does.
        stream = TextStream(cast(ChatText, self.tokenizer))
        pieces: list[str] = []
        for token in self._tokens(prompt):
            pieces.append(stream.push(token))
            yield pieces[-1]
        pieces.append(stream.finish())
        yield pieces[-1]
        self.turns.append({"role": "assistant", "content": "".join(pieces)})

    def _tokens(self, prompt: list[int]) -> Iterator[int]:
        for tokens in steps(self.model, [prompt], self.new_tokens, self.sampling, self.random):
            token = int(tokens[0])
            if token in self.tokenizer.ends:
                return
            yield token

    def _prompt(self) -> list[int]:
        """The conversation without its oldest exchanges where the context cannot hold all of it."""
        room = self.model.config.max_context - self.new_tokens
        while True:
            prompt = self.tokenizer.prompt([*self.head, *self.turns])
            if len(prompt) <= room:
                return prompt
            if len(self.turns) < 3:
                raise TrainError(
                    f"{len(prompt)} tokens of prompt and {self.new_tokens} of answer do not fit the context of "
                    f"{self.model.config.max_context}; write less, or give a smaller --new-tokens"
                )
            self.turns = self.turns[2:]
            self.forgot = True


def talk(conversation: Conversation, console: Console, ask: Any) -> None:
    """Until the end of input: read a line with ``ask()``, write the answer; ``/new`` forgets, ``/quit`` leaves."""
    while True:
        try:
            text = ask().strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/quit":
            return
        if text == "/new":
            conversation.turns = []
            console.print("[dim]forgotten[/]")
        elif text:
            _answer(conversation, console, text)


def _answer(conversation: Conversation, console: Console, text: str) -> None:
    conversation.forgot = False
    try:
        for piece in conversation.ask(text):
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:  # stops the answer, not the conversation
        conversation.turns = conversation.turns[: len(conversation.turns) // 2 * 2]
    except TrainError as error:
        console.print(f"[red]{error}[/]", highlight=False)
    console.print()
    if conversation.forgot:
        console.print("[dim]the context was full: the oldest turns are forgotten[/]")


def chat_command(
    init: Annotated[Path, typer.Option("--from", help="Folder of the run, or the checkpoint, to talk to.")],
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Smallest set of tokens with this share; 1: off.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Share of the likeliest that a token needs; 0: off.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Likeliest tokens to choose among; 0: off.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="The longest answer.", min=1)] = 128,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    prompt: Annotated[str | None, typer.Option(help="Ask this once and leave.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU if there is one.")] = None,
) -> None:
    """Talk to a checkpoint; /new forgets the conversation, /quit or the end of input leaves."""
    sampling = Sampling(temperature, top_k, top_p, min_p)
    with world(device) as here, torch.no_grad():
        model, found = load_model(init, here.device)
        tokenizer = ChatTokenizer(found.path)
        if tokenizer.vocabulary > found.model.vocab_size:
            raise TrainError(
                f"{found.path}: the tokenizer has {tokenizer.vocabulary} tokens, the model {found.model.vocab_size}; "
                "they do not belong together"
            )
        conversation = Conversation(model.eval(), tokenizer, sampling, new_tokens, system, seed)
        if prompt is not None:
            for piece in conversation.ask(prompt):
                typer.echo(piece, nl=False)
            typer.echo()
            return
        console = Console()
        talk(conversation, console, lambda: console.input("[bold]> [/]"))
