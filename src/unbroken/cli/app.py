"""The command `unbroken`, and its commands."""

from __future__ import annotations

import traceback
from importlib import metadata
from typing import Annotated

import typer

from unbroken.cli.audit import audit
from unbroken.cli.demo import demo
from unbroken.cli.replay import replay
from unbroken.cli.state import state

__all__ = ["app", "main"]

app = typer.Typer(
    name="unbroken",
    help="A data loader for PyTorch that never loses its place.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version() -> str:
    try:
        return metadata.version("unbroken")
    except metadata.PackageNotFoundError:
        return "unknown (the package is not installed, only found on the path)"


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"unbroken {_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A data loader for PyTorch that never loses its place."""


app.command()(demo)
app.command()(audit)
app.command()(replay)
app.add_typer(state)


def main() -> None:
    """The entry point of the ``unbroken`` command. What nobody has thought of ends it with exit code 2, for 1 is a
    verdict.
    """
    try:
        app()
    except Exception:
        traceback.print_exc()
        raise SystemExit(2) from None
