"""`python -m server`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.launch import serve

app = typer.Typer(add_completion=False)


@app.command()
def main(
    packs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of packs, or one pack.", show_default="examples/packs"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also answer to this Host name; may be repeated."),
    ] = None,
) -> None:
    """Serve the chat page and the packs on this machine."""
    raise typer.Exit(serve(packs, host, port, open_browser, allow_host or ()))


if __name__ == "__main__":
    app(prog_name="python -m server")
