"""When the state of a dataset is captured, and what of it can be an anchor."""

from __future__ import annotations

from typing import final

__all__ = ["Pace"]

_SHARE = 0.02
_TURNS_TO_FIX = 4


@final
class Pace:
    """When to capture, and what of it can be an anchor. How often: as told, or so that it stays below 2 % of the time
    of making samples.

    ``fixing`` counts down the turns in which neighbouring samples are digested. A state that did not change over one
    sample (a shard number, say) is looked for around each sample of a batch.
    """

    def __init__(self, every: int | None, turns: int) -> None:
        self._every = every
        self._turns = turns
        self._cost = 0.0
        self._spent = 0.0
        self._produced = 0.0
        self._planned = "none"
        self._coarse = False
        self._second = False
        self._trail: list[tuple[int, str | None]] = []
        self.fixing = 0

    def plan(self, size: int) -> str:
        """Capture around no sample of this turn (``none``), the ``last`` two, or ``each``; of single samples, two
        turns.
        """
        self._turns += 1
        if size == 1 and self._planned == "last" and not self._second:
            self._second = True
            return self._planned
        self._second = False
        cheap = self._produced * _SHARE >= self._cost
        due = cheap if self._every is None else self._turns % self._every == 0
        self._planned = ("each" if self._coarse else "last") if due else "none"
        return self._planned

    def spent(self, seconds: float) -> None:
        self._spent += seconds

    def note(self, seconds: float, *, found: bool) -> None:
        self._produced += seconds - self._spent
        if self._planned != "none":
            self._cost = self._spent
            self._coarse = not found
            self._produced = 0.0
        self._spent = 0.0
        self.fixing = _TURNS_TO_FIX if found else self.fixing - 1 if self.fixing else 0

    def has(self, sample: int) -> bool:
        """Whether the state before this sample was taken."""
        return bool(self._trail) and self._trail[-1][0] == sample

    def weigh(self, sample: int, state: str | None) -> tuple[int, str | None, str | None] | None:
        """Note the state before ``sample``; what can be an anchor, judged by three states in a row.

        A state that changed over the sample before it and over the one after it is of a dataset that steps with its
        samples, and stands alone. One that changed over a single sample may mean a shard just entered, or rows read
        ahead of their turn: which one is seen on a resume, and both states are kept for that.
        """
        trail = self._trail
        if trail and trail[-1][0] != sample - 1:
            trail.clear()
        trail.append((sample, state))
        del trail[:-3]
        if len(trail) < 3:
            return None
        first, (at, middle) = trail[0][1], trail[1]
        if first != middle != state:
            return at, None, middle
        if middle != state:
            return sample, middle, state
        return (at, first, middle) if first != middle else None
