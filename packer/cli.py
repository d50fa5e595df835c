"""The command line: export, inspect, verify, generate, chat, eval, compare, plan, bench, serve."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from . import __version__
from .cli_bench import bench_command, plan_command
from .cli_eval import compare_command, eval_command
from .cli_export import export_command
from .cli_generate import chat_command, generate_command
from .cli_inspect import inspect_command, verify_command
from .errors import PackerError

app = typer.Typer(
    name="tercet",
    help="Packs ternary language models for the browser, and runs them here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("export")(export_command)
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.command("eval")(eval_command)
app.command("compare")(compare_command)
app.command("plan")(plan_command)
app.command("bench")(bench_command)


@app.command("serve")
def serve_command(
    packs: Annotated[Path | None, typer.Option(help="Folder with packs; the default model's if left out.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Start the server of the chat page (the same as python -m server)."""
    from server.launch import serve  # late: the packer itself never needs the server

    raise typer.Exit(serve(packs, host, port, open_browser, ()))


def _version(value: bool) -> None:
    if value:
        typer.echo(f"tercet {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of every command."""


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; an error that a person can act on becomes one message and exit status 1."""
    try:
        app(arguments)
    except PackerError as error:
        _fail(str(error))
    except OSError as error:  # a file that cannot be read or written, wherever that shows
        _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")


def _fail(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False)
    sys.exit(1)
