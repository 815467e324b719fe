"""``unbroken audit``."""

from __future__ import annotations

import typer

__all__ = ["audit"]


def audit() -> None:
    """Kill a loader at random places, resume it, and hold it against the run that never stopped."""
    raise typer.Exit(2)
