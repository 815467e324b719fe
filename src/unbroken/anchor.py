"""An anchor: a saved state from which later samples can be made again, and what shows that it leads to its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from unbroken.state import fragment

__all__ = ["Anchor"]

_WITNESSES = 8


@final
@dataclass(slots=True)
class Anchor:
    """A sealed state at sample ``at`` (or those before and after sample ``at - 1``), and the digests that must come
    again when a resume starts here.

    The first samples made after an opening run under the opening's own random numbers, so witnesses are taken from
    ``wait`` batches later on. Neighbours that differ fix the place: no shift by one matches both. An anchor at 0 is
    the start of the epoch, whose place is known.
    """

    at: int
    before: str | None
    after: str | None
    wait: int = 0
    first_witness: int = 0
    witnesses: list[int] | tuple[()] = ()  # a stream has an anchor a row, without any

    @property
    def fixed(self) -> bool:
        return self.at == 0 or len(set(self.witnesses)) > 1

    def fields(self) -> dict[str, Any]:
        """What of it is saved. Of many witnesses the last are kept: the neighbours that differ came last."""
        kept = self.witnesses[-_WITNESSES:]
        return {
            "at": self.at,
            "before": fragment(self.before),
            "after": fragment(self.after),
            "first_witness": self.first_witness + len(self.witnesses) - len(kept),
            "witnesses": kept,
        }

    def witness(self, first: int, digests: list[int]) -> None:
        """Take note of a delivered batch by the digests of its last samples, the first of which is ``first``.

        Neighbouring samples are what tells a shift: that some pass and others differ need not.
        """
        if self.wait:
            self.wait -= 1
        elif isinstance(self.witnesses, list) and self.first_witness + len(self.witnesses) == first:
            self.witnesses.extend(digests)
        else:
            self.first_witness, self.witnesses = first, list(digests)
