"""A sampler of the user's, run through the same cursor as a dataset, in the training process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

from unbroken.engine.cursor import Cursor, Rules
from unbroken.engine.opening import TorchOpening
from unbroken.made import Made
from unbroken.position import MapPosition
from unbroken.seeding import alone, put_back_globals, read_globals, take_globals
from unbroken.state import seal, unseal

__all__ = ["SamplerTurns"]


@final
class SamplerTurns:
    """Makes the turns of a custom sampler (or batch sampler) in one epoch.

    Without a seed, a sampler is opened in epoch 0 on the global generators as they are, as torch does, and what they
    were is kept in the position if it drew from them. Otherwise it has random numbers of its own, by place.
    """

    def __init__(self, sampler: Any, position: MapPosition, rules: Rules, seeded: bool) -> None:
        # A turn of the sampler is no batch of the user's; and ranks have to agree about the position it gives.
        rules = replace(rules, word="sampler", seed_by="batch", capture_every=1, skipping=None)
        opening = TorchOpening(
            sampler, use_state=rules.resume != "replay", what=f"the state_dict() of {type(sampler).__qualname__}"
        )
        saved = None if position.sampler is None else unseal(position.sampler["globals"])
        self._live = not seeded and position.epoch == 0 and position.rows == 0 and saved is None
        self._before = read_globals() if self._live else None
        self._position = position
        self._cursor = Cursor(
            opening, 0, replace(position.cursor), rules, report=_silent, opening_globals=self._before or saved
        )
        self.last: Made | None = None

    def make(self, size: int) -> Made:
        """The next ``size`` indices (or batches of them)."""
        if self._live and self._before is not None:
            self._live = False
            self.last = self._cursor.make(size)
            before, after = seal(self._before), seal(read_globals())
            if before != after:
                self._position.sampler = {"globals": before}
            return self.last
        with alone():
            aside = take_globals()
            try:
                self.last = self._cursor.make(size)
            finally:
                put_back_globals(aside)
        return self.last


def _silent(what: str, done: int, total: int) -> None:
    """Indices are quick to make again."""
