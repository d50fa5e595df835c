"""``python -m examples.train``: registers the commands; each lives in its own module."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec

import typer
from rich.console import Console
from rich.markup import escape

from packer.errors import PackerError

#: command -> module and function, in the order in which a model is made
COMMANDS = {
    "prepare": ("prepare", "prepare_command"),
    "pretrain": ("pretrain", "pretrain_command"),
    "sft": ("sft", "sft_command"),
    "reward": ("reward", "reward_command"),
    "dpo": ("dpo", "dpo_command"),
    "ppo": ("ppo", "ppo_command"),
    "grpo": ("grpo", "grpo_command"),
    "evaluate": ("evaluate", "evaluate_command"),
    "chat": ("chat", "chat_command"),
    "export": ("export", "export_command"),
    "import-recipe": ("import_recipe", "import_recipe_command"),
    "fp4-gap": ("fp4_gap", "fp4_gap_command"),
}


def build(only: str | None = None) -> typer.Typer:
    """The program with all commands, or with one: another one's imports are then spared."""
    app = typer.Typer(
        name="python -m examples.train",
        help="From raw text to a ternary model that chats in the page.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_common)
    for name, (module, function) in COMMANDS.items():
        if only in (None, name) and find_spec(f"{__package__}.{module}"):
            app.command(name)(getattr(import_module(f"{__package__}.{module}"), function))
    if only in (None, "distill") and find_spec(f"{__package__}.distill.cli"):
        app.add_typer(import_module(f"{__package__}.distill.cli").app, name="distill")
    return app


def _common() -> None:
    """From raw text to a ternary model that chats in the page."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command; an error that a person can act on becomes one message and exit status 1."""
    given = sys.argv[1:] if arguments is None else arguments
    first = given[0] if given and given[0] in (*COMMANDS, "distill") else None
    try:
        build(first)(given)
    except PackerError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")


def _fail(message: str) -> None:
    rank = os.environ.get("RANK")  # several processes tell several errors
    who = f" process {rank}:" if rank else ""
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/]{who} {escape(message)}", highlight=False)
    sys.exit(1)
