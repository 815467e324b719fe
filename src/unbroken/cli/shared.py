"""What commands share."""

from __future__ import annotations

import signal
from typing import NoReturn

import typer

__all__ = ["cannot", "end_on_sigterm"]


def _end(number: int, frame: object) -> None:
    # An exit that unwinds the stack, so that the processes that were started are ended too.
    raise SystemExit(128 + number)


def end_on_sigterm() -> None:
    """SIGTERM ends the command as Ctrl-C does: with what it has started."""
    signal.signal(signal.SIGTERM, _end)


def cannot(what: str, error: BaseException) -> NoReturn:
    """End with exit code 2: the command could not be carried out, so that nothing was found."""
    typer.echo(f"{what}\n{error}", err=True)
    raise typer.Exit(2) from None
