"""``generate`` and ``chat``."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from shaders.sampling import Sampling

from .cli_inspect import PackArgument
from .errors import PackerError
from .pack import Pack
from .runner import Model, answer_tokens, fit_context, load_model
from .text import ChatText


class Backend(StrEnum):
    """Where the model runs."""

    native = "native"
    reference = "reference"


class CacheKind(StrEnum):
    """Precision of the KV cache."""

    f32 = "f32"
    f16 = "f16"
    q8 = "q8"


class Speculate(StrEnum):
    """Whether tokens are guessed and several verified in a step."""

    auto = "auto"
    on = "on"
    off = "off"


Temperature = Annotated[float, typer.Option(help="0 is greedy; higher is more varied.")]
TopK = Annotated[int, typer.Option(help="Draw from the K most probable tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Draw from the tokens that make up this probability; 1: all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")]
Penalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1: tokens already there become less probable.")
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer; random if left out.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)]
Context = Annotated[int | None, typer.Option(help="Context in tokens; the model's if left out.", min=2)]
Kv = Annotated[CacheKind, typer.Option(help="KV cache precision.")]
Guess = Annotated[
    Speculate,
    typer.Option(
        "--speculate", help="Guess tokens from the text so far, verify them together; auto: while that is faster."
    ),
]
Kernels = Annotated[
    str | None,
    typer.Option(
        help="Force kernels, for debugging: norm_linear.ROWS=32,linear_ternary=off; default: time nothing.",
        metavar="TEXT",
    ),
]


def generate_command(
    path: PackArgument,
    prompt: Annotated[str | None, typer.Option(help="One message of a person.")] = None,
    messages: Annotated[Path | None, typer.Option(help="JSON file: list of {role, content}.")] = None,
    ids: Annotated[Path | None, typer.Option(help="JSON file: list of token ids.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue --prompt as plain text, without chat template.")] = False,
    backend: Annotated[Backend, typer.Option(help="GPU through wgpu, or NumPy.")] = Backend.native,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the most probable token.")] = False,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 256,
    context: Context = None,
    kv: Kv = CacheKind.f16,
    speculate: Guess = Speculate.auto,
    kernels: Kernels = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Ids, text and the five highest logits of each step.")
    ] = False,
) -> None:
    """Answer one prompt."""
    pack = Pack(path)
    text = ChatText(pack)
    prompt_ids = _prompt_ids(text, prompt, messages, ids, raw)
    options = _sampling(0.0 if greedy else temperature, top_k, top_p, min_p, repetition_penalty, seed)
    capacity = fit_context(pack, prompt_ids, max_tokens, context)
    model = load_model(
        pack, backend.value, capacity, kv.value, with_logits=as_json, kernels=kernels, speculate=speculate.value
    )
    generated, steps = [], []
    stream = text.stream()
    room = min(max_tokens, capacity - len(prompt_ids))
    for token, logits in answer_tokens(pack, model, prompt_ids, options, room):
        generated.append(token)
        if as_json:
            steps.append({"top5": [] if logits is None else _top5(logits)})
        elif token not in pack.eos_ids:
            typer.echo(stream.push(token), nl=False)
    if not as_json:
        typer.echo(stream.finish())
        return
    typer.echo(
        json.dumps(
            {
                "prompt_ids": prompt_ids,
                "ids": generated,
                "text": text.decode(generated),
                "steps": steps,
                "finish_reason": "stop" if generated and generated[-1] in pack.eos_ids else "length",
                "seed": options.seed,
            },
            ensure_ascii=False,
        )
    )


def _top5(logits: np.ndarray) -> list[list[Any]]:
    best = np.argsort(-logits, kind="stable")[:5]
    return [[int(token), float(logits[token])] for token in best]


def _prompt_ids(text: ChatText, prompt: str | None, messages: Path | None, ids: Path | None, raw: bool) -> list[int]:
    if sum(given is not None for given in (prompt, messages, ids)) != 1:
        raise PackerError("give exactly one of --prompt, --messages and --ids")
    if ids is not None:
        return _json_list(ids, "token ids", lambda item: isinstance(item, int) and not isinstance(item, bool))
    if messages is not None:
        return text.encode_messages(_json_list(messages, "messages {role, content}", _is_message))
    assert prompt is not None
    if raw:
        return text.encode_raw(prompt)
    return text.encode_messages([{"role": "user", "content": prompt}])


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def _json_list(path: Path, what: str, check: Any) -> list:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PackerError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise PackerError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, list) or not all(check(item) for item in value):
        raise PackerError(f"{path}: expected a JSON list of {what}")
    return value


def _sampling(temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, seed: int | None) -> Sampling:
    try:
        return Sampling(temperature, top_k, top_p, min_p, penalty, secrets.randbits(32) if seed is None else seed)
    except ValueError as error:
        raise PackerError(str(error)) from None


def chat_command(
    path: PackArgument,
    system: Annotated[str | None, typer.Option(help="System prompt; the template's own if left out.")] = None,
    backend: Annotated[Backend, typer.Option(help="GPU through wgpu, or NumPy.")] = Backend.native,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.15,
    seed: Seed = None,
    max_tokens: MaxTokens = 512,
    context: Context = 2048,
    kv: Kv = CacheKind.f16,
    speculate: Guess = Speculate.auto,
    kernels: Kernels = None,
) -> None:
    """Chat in the terminal. Empty line or Ctrl-D ends, /new starts over, Ctrl-C stops an answer."""
    pack = Pack(path)
    options = _sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    capacity = min(context or pack.manifest["context_length"], pack.manifest["context_length"])
    console = Console()
    with console.status(f"loading {escape(pack.manifest['name'])}"):
        model = load_model(pack, backend.value, capacity, kv.value, kernels=kernels, speculate=speculate.value)
    console.print(
        f"[bold]{escape(pack.manifest['name'])}[/], context {capacity} tokens. Empty line ends, /new starts over.",
        highlight=False,
    )
    _Conversation(pack, ChatText(pack), model, options, system, max_tokens, console).run()


class _Conversation:
    """Turns of a terminal chat; the KV cache of the common prefix is kept from turn to turn."""

    def __init__(
        self,
        pack: Pack,
        text: ChatText,
        model: Model,
        options: Sampling,
        system: str | None,
        max_tokens: int,
        console: Console,
    ):
        self.pack, self.text, self.model, self.options = pack, text, model, options
        self.max_tokens, self.console = max_tokens, console
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)
        self.cached: list[int] = []

    def run(self) -> None:
        while True:
            try:
                line = self.console.input("[bold cyan]you:[/] ").strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            if not line:
                return
            if line == "/new":
                self.messages = list(self.opening)
                continue
            self._turn(line)

    def _turn(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        ids = self.text.encode_messages(self.messages)
        room = self.model.capacity - len(ids)
        if room <= 0:
            self.messages.pop()
            self.console.print(f"[yellow]the context of {self.model.capacity} tokens is full; /new starts over[/]")
            return
        answer = self._answer(ids, min(self.max_tokens, room))
        self.messages.append({"role": "assistant", "content": answer})

    def _answer(self, ids: list[int], room: int) -> str:
        shared = _common_prefix(self.cached, ids[:-1])
        self.model.truncate(shared)
        stream, parts, count, started = self.text.stream(), [], 0, time.monotonic()
        first = None
        generated: list[int] = []
        try:
            for token in self._tokens(ids, shared, room):
                first = first or time.monotonic()
                generated.append(token)
                if token not in self.pack.eos_ids:
                    parts.append(stream.push(token))
                    self.console.out(parts[-1], end="", highlight=False)
                    count += 1
        except KeyboardInterrupt:
            self.console.print("[dim] (stopped)[/]", end="")
        parts.append(stream.finish())
        self.console.out(parts[-1], highlight=False)
        self.cached = (ids + generated)[: self.model.position]
        seconds = time.monotonic() - (first or started)
        rate = f"{(count - 1) / seconds:.0f} tok/s, " if count > 1 and seconds > 0 else ""
        self.console.print(f"[dim]{rate}{len(ids) + count} of {self.model.capacity} tokens[/]", highlight=False)
        return "".join(parts)

    def _tokens(self, ids: list[int], cached: int, room: int) -> Iterator[int]:
        fresh, history = ids[cached:], ids[:cached]
        for token, _ in answer_tokens(self.pack, self.model, fresh, self.options, room, history):
            yield token


def _common_prefix(one: list[int], other: list[int]) -> int:
    length = min(len(one), len(other))
    return next((index for index in range(length) if one[index] != other[index]), length)
