"""Samples of datasets that were left out (``on_error="skip"``): counted, named, and how many may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import orjson

from unbroken.errors import InvalidState, TooManySkipped
from unbroken.state import whole

__all__ = ["MOST_IN_A_ROW", "Fetched", "LeftOut", "Skipped", "Skipping", "gone", "too_many"]

MOST_IN_A_ROW = 10_000
"""So many failures with no sample between them are of a source that is gone, and not of bad samples."""

_MOST_NAMED, _MOST_TOLD, _LONGEST = 16, 3, 120


@final
class LeftOut(NamedTuple):
    """A sample that was left out: the epoch and its number in the lane (or the place in the order of a map-style
    dataset), where that is in words, and what was raised.
    """

    epoch: int
    number: int
    where: str
    error: str

    @staticmethod
    def of(epoch: int, number: int, where: str, error: Exception) -> LeftOut:
        text = " ".join(f"{type(error).__qualname__}: {_said(error)}".split()).rstrip(": ")
        text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
        return LeftOut(epoch, number, _utf8(where), _utf8(text))

    @property
    def why(self) -> tuple[str, str]:
        return self.where, self.error


def _said(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return "(an exception whose text cannot be told)"


def _utf8(text: str) -> str:
    """The text as JSON can have it: without halves of surrogate pairs, as names of files may hold them."""
    return text.encode(errors="backslashreplace").decode()


@final
class Fetched(NamedTuple):
    """A batch of a map-style dataset some samples of which were left out: those, and the entry in the ledger of the
    others, None where there is no other.

    ``shape``: its batch is another row, to show what a batch looks like. ``before``: what was passed over since the
    batch before it, each a step with what was fetched of it.
    """

    left_out: Sequence[LeftOut]
    entry: int | None = None
    shape: bool = False
    before: Sequence[tuple[Any, Any]] = ()

    @property
    def nothing(self) -> bool:
        """Whether there is no batch to deliver."""
        return self.entry is None and not self.shape


@final
@dataclass(frozen=True)
class Skipping:
    """How samples that fail are left out: at ``most`` so many in a run (None: any number).

    ``whole`` says what becomes of a batch of a map-style dataset with no sample left: ``"pass"`` over it; on several
    ranks, which take the same steps, deliver an ``"empty"`` one, or ``"refuse"``.
    """

    most: int | None
    whole: str = "pass"


@final
@dataclass(frozen=True)
class Skipped:
    """What was left out in a run so far: how many samples, and the last of them, ``(where, what was raised)`` each."""

    count: int = 0
    last: tuple[tuple[str, str], ...] = ()

    def plus(self, left_out: Sequence[LeftOut]) -> Skipped:
        """After some more were left out."""
        last = (*self.last, *(each.why for each in left_out[-_MOST_NAMED:]))
        return Skipped(self.count + len(left_out), last[-_MOST_NAMED:])

    def to_json(self) -> str:
        return orjson.dumps({"count": self.count, "last": self.last}).decode()

    @staticmethod
    def of(leaf: Mapping[str, Any], name: str) -> Skipped:
        """What a leaf has of it: nothing, where nothing was left out. Raises ``InvalidState`` where it is changed."""
        if (saved := leaf.get("skipped")) is None:
            return Skipped()
        try:
            return Skipped(whole(saved["count"]), tuple((str(where), str(error)) for where, error in saved["last"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidState(f"The leaf {name!r} of this position is cut short or changed: {error!r}.") from None

    @staticmethod
    def of_lanes(lanes: Iterable[tuple[int, Mapping[str, Any]]], name: str) -> dict[int, Skipped]:
        """The same of those lanes in which something was left out."""
        found = {number: Skipped.of(lane, name) for number, lane in lanes}
        return {number: skipped for number, skipped in found.items() if skipped.count}

    @staticmethod
    def of_position(lanes: Skipped | Mapping[int, Skipped]) -> Skipped:
        """Of all lanes of a rank, with the last of each, lane by lane; or of what has no lanes."""
        if isinstance(lanes, Skipped):
            return lanes
        last = tuple(why for number in sorted(lanes) for why in lanes[number].last)
        return Skipped(sum(skipped.count for skipped in lanes.values()), last)


def too_many(count: int, most: int | None, last: Sequence[LeftOut], reason: str = "") -> TooManySkipped:
    """The error that says so, and names the ``last`` failures; its cause has the text of the very last."""
    named = "".join(f"\n  {each.where}: {each.error}" for each in last[-_MOST_TOLD:])
    found = reason or f"{count} samples failed, and max_skipped={most} may be left out."
    way_out = (
        "Nothing that was delivered is lost: state_dict() still gives the position after the last batch. Mend the "
        "data, or go on from there with a larger max_skipped."
    )
    error = TooManySkipped(f"{found} The last:{named}\n{way_out}")
    error.__cause__ = RuntimeError(last[-1].error)
    return error


def gone(last: Sequence[LeftOut]) -> TooManySkipped:
    """So many failed with no sample between them that it could go on for ever."""
    reason = f"{MOST_IN_A_ROW} samples in a row failed: that is no bad sample, but a source that is gone."
    return too_many(len(last), None, last, reason)
