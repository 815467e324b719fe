"""``unbroken state show | diff | check | import``."""

from __future__ import annotations

import typer

__all__ = ["state"]

state = typer.Typer(name="state", help="Look into a position that was saved.", no_args_is_help=True)


@state.command()
def show() -> None:
    """Print what is in a position."""
    raise typer.Exit(2)
