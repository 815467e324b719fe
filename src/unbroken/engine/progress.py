"""Telling the user that samples are being made again after a resume, where that takes more than a moment."""

from __future__ import annotations

import sys
import warnings
from time import monotonic
from typing import Any, final

__all__ = ["Remaking"]

_PATIENCE = 2.0


@final
class Remaking:
    """A progress bar on standard error, shown once remaking has lasted two seconds; the remedy is told once."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._told = False
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}

    def report(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` samples of a lane have been made again."""
        now = monotonic()
        if self._began is None:
            self._began = now
        if now - self._began < _PATIENCE:
            return
        if not self._told:
            self._told = True
            warnings.warn(
                f"Resuming makes {total} samples of {what} again, because the dataset has no state that leads "
                "closer.\n"
                "Give it (or its iterator) state_dict and load_state_dict, or save with a smaller "
                "snapshot_every_n_steps, to start at once.",
                stacklevel=2,
            )
        if self._bar is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
        if self._bar is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(f"making again, {what}", total=total)
            self._bar.update(self._tasks[what], completed=done)

    def end(self) -> None:
        """A batch came: nothing is being made again."""
        self._began = None
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._tasks = None, {}
