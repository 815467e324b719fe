"""What a cursor made: the samples of a turn, and what there is to count when they are delivered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from unbroken.skipped import LeftOut

__all__ = ["Made", "Turn"]


@final
@dataclass(slots=True)
class Made:
    """One turn of a lane as the cursor made it: its samples, how many, and what was captured on the way.

    ``digests`` are those of the last samples of the turn, one or more: the place is checked by them on a resume.
    ``entry`` is what stands for the turn in the ledger, where that is not the last of them.

    ``capture`` is ``(at, before, after)``: the sealed states before and after sample ``at - 1``; the first is None
    where ``after`` stands alone. ``opened`` is the sealed state at the opening of the epoch, sent once. A turn of an
    exhausted lane has ``ended`` and its ``carry``; one that has gone on with its next epoch, ``rolled`` and the
    ``carry`` into that.
    """

    samples: list[Any] = field(default_factory=list)
    number: int = 0
    digests: list[int] = field(default_factory=list)
    entry: int | None = None
    capture: tuple[int, str | None, str | None] | None = None
    opened: tuple[int, str | None] | None = None
    carry: str | None = None
    ended: bool = False
    unaware: bool = False
    """Whether the dataset never looked at its worker info (told with the first turn)."""
    rolled: bool = False
    origins: Any = None
    """The stored rows behind the last sample, where they were asked for."""
    left_out: Sequence[LeftOut] = ()
    """The samples that failed on the way, and were left out."""

    def __reduce__(self) -> tuple[type[Made], tuple[Any, ...]]:
        """A turn on its way from a worker: its samples travel by themselves."""
        others = self.entry, self.capture, self.opened, self.carry, self.ended, self.unaware, self.rolled, self.origins
        if self.left_out:
            return Made, ([], self.number, self.digests, *others, self.left_out)
        return Made, ([], self.number, self.digests, *others)


@final
class Turn(NamedTuple):
    """A row of a stream that is under way, as the cursor made it: what there is to count when it is delivered.

    ``at`` is its number in the epoch, from 1; ``digest`` its own, ``state`` the sealed state after it; ``origins`` the
    stored rows behind it, where they were asked for. Whatever else is to be told makes it a ``Made``.
    """

    at: int
    digest: int
    state: str | None
    origins: Any = None
