"""How loaders are getting on, shown live: one line each at the bottom of a terminal.

Whoever takes a batch draws, at most four times a second; there is no thread for it. Where standard error is no terminal
it is told to the logger ``unbroken`` instead (level INFO), at most every 30 seconds, and once more when a pass ends.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, final

from unbroken.locks import new_lock
from unbroken.options import distributed_rank
from unbroken.stats import View

__all__ = ["LoaderView", "fitted", "is_shown", "parts_of", "total_of"]

_TERMINAL_SECONDS, _LOG_SECONDS, _RATE_SECONDS = 0.25, 30.0, 2.0
_BETWEEN = " · "
_log = logging.getLogger("unbroken")

Numbers = Mapping[str, float]


def is_shown(rank: int) -> bool:
    """Whether a loader of this data-parallel rank is one to show: that of one process is enough."""
    return rank == 0 and distributed_rank()[0] == 0


def parts_of(now: Numbers, before: Numbers, seconds: float, length: int | None) -> list[str]:
    """What there is to say ``now``, so many ``seconds`` after ``before`` (for what is a rate), what matters first."""
    of = "" if length is None else f" of {length:,}"
    parts = [f"epoch {now['epoch']}, batch {now['step_in_epoch']:,}{of}"]
    if now["batches"] > 1:  # before that nobody can tell
        parts.append(f"waiting {now['wait_share']:.0%}")
    if now["prefetch"]:
        parts.append(f"{now['queue_depth']} of {now['prefetch']} ready")
    parts += _rates(now, before, seconds, "batches")
    if restarts := now["restarts"]:
        parts.append(f"{restarts:,} restart{'s' * (restarts > 1)}")
    if now["skipped"]:
        parts.append(f"{now['skipped']:,} skipped")
    parts += _rates(now, before, seconds, "tokens", "rows")
    if now["step"] != now["step_in_epoch"]:
        parts.append(f"step {now['step']:,}")
    return parts


def total_of(now: Numbers, first: Numbers, seconds: float) -> list[str]:
    """What there is to say of a pass that is over ``now``; its ``first`` batch came so many ``seconds`` before."""
    batches = now["batches"] - first["batches"] + 1
    parts = [f"epoch {first['epoch']}, {batches:,} batches in {seconds:.1f} s"]
    if seconds > 0:
        parts.append(f"waiting {min(1.0, (now['wait_seconds'] - first['wait_seconds']) / seconds):.0%}")
    return parts + _rates(now, first, seconds, "batches", "tokens", "rows")


def _rates(now: Numbers, before: Numbers, seconds: float, *names: str) -> list[str]:
    more = {name: now[name] - before.get(name, 0) for name in names}
    return [f"{_short(more[name] / seconds)} {name}/s" for name in names if more[name] > 0 and seconds > 0]


def fitted(parts: Sequence[str], width: int | None = None) -> str:
    """A line of parts, without the last ones where it would be wider. The first one stays."""
    count = len(parts)
    while width is not None and count > 1 and len(_BETWEEN.join(parts[:count])) > width:
        count -= 1
    return _BETWEEN.join(parts[:count])


def _short(rate: float) -> str:
    """Three digits."""
    power = 0 if rate < 1000 else min(3, int(math.log10(rate)) // 3)
    rate /= 1000**power
    return f"{rate:.{2 if rate < 10 else 1 if rate < 100 else 0}f}{'kMG'[power - 1] if power else ''}"


@final
class LoaderView(View):
    """One loader. ``stats`` leads to what gives its numbers, as long as it lives; ``length`` is the batches of an
    epoch, where that is known; ``screen`` is where it is drawn.
    """

    def __init__(
        self, stats: Callable[[], Callable[[], Numbers] | None], length: int | None, screen: Screen | None = None
    ) -> None:
        self._stats = stats
        self._length = length
        self._screen = _screen if screen is None else screen
        self._before: deque[tuple[float, Numbers]] = deque()
        self._first: _First | None = None

    def show(self, now: float) -> float:
        """See ``View``. Rates are those of the last two seconds, or since it was shown last."""
        found = self._stats()
        if found is None:
            return math.inf
        numbers = found()
        if self._first is None:
            self._first = _First(numbers)
        self._before.append((now, numbers))
        while len(self._before) > 2 and self._before[1][0] <= now - _RATE_SECONDS:
            self._before.popleft()
        began, before = self._before[0]
        self._screen.draw(self, parts_of(numbers, before, now - began, self._length))
        return now + self._screen.seconds

    def pause(self) -> None:
        self._before.clear()
        self._screen.remove(self)
        first, self._first = self._first, None
        if first is None or not first.is_of_this_process or (found := self._stats()) is None:
            return
        with suppress(Exception):  # a handler of the log, say: what is shown is no reason to stop
            numbers = found()
            if numbers["batches"] > first.numbers["batches"]:
                self._screen.end(total_of(numbers, first.numbers, perf_counter() - first.time))


@final
class _First:
    """The numbers of a loader at the first batch of a pass."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.time = perf_counter()
        self._process = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """A forked process lets go of what its parent iterates."""
        return self._process == os.getpid()


@final
class Screen:
    """The terminal, with a line for each loader that is being iterated; or the log.

    ``console`` is rich's, by default that of standard error. What is printed meanwhile goes above the lines.
    """

    def __init__(self, console: Any = None) -> None:
        self._console = console
        self._lines: dict[LoaderView, Sequence[str]] = {}
        self._live: Any = None
        self._lock = new_lock()

    @property
    def seconds(self) -> float:
        """How often to draw."""
        return _TERMINAL_SECONDS if self._is_terminal() else _LOG_SECONDS

    def _is_terminal(self) -> bool:
        return bool(self._console.is_terminal) if self._console is not None else _is_terminal(sys.stderr)

    def draw(self, view: LoaderView, parts: Sequence[str]) -> None:
        """Put a line in the place of the last one of this view."""
        if not self._is_terminal():
            _log.info(fitted(parts))
            return
        with self._lock, suppress(OSError, ValueError):  # the terminal may be gone, and that is no reason to stop
            self._lines[view] = parts
            if self._live is None:
                self._live = self._started()
            self._live.update(self._text(), refresh=True)

    def end(self, parts: Sequence[str]) -> None:
        """Tell of a whole pass: to the log only, for of a terminal nothing is to be left."""
        if not self._is_terminal():
            _log.info(fitted(parts))

    def remove(self, view: LoaderView) -> None:
        """Show it no more; with the last one all is as it was before."""
        if view not in self._lines:
            return
        with self._lock, suppress(OSError, ValueError):
            self._lines.pop(view, None)
            if self._lines or self._live is None:
                return
            live, self._live = self._live, None
            live.stop()

    def leave(self) -> None:
        """In a forked process: the terminal is its parent's to draw on."""
        live, self._live = self._live, None
        self._lines.clear()
        for name in ("stdout", "stderr"):
            if live is not None and hasattr(stream := getattr(sys, name), "rich_proxied_file"):
                setattr(sys, name, stream.rich_proxied_file)

    def _text(self) -> Any:
        from rich.text import Text

        lines = [fitted(parts, self._live.console.width) for parts in self._lines.values()]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def _started(self) -> Any:
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True) if self._console is None else self._console
        shared = self._console is None and _is_terminal(sys.stdout)  # else what is printed belongs elsewhere
        live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=shared,
            redirect_stderr=self._console is None,
        )  # fmt: skip
        live.start()
        return live


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


_screen = Screen()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _screen.leave())
