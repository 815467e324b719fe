"""Turns of a source that cannot be read again: made, not delivered yet, and kept in the position until they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import orjson

from unbroken.errors import InvalidState, UnsealableState
from unbroken.made import Made
from unbroken.state import fragment, resealed, seal, unseal, whole

__all__ = ["Held", "held_of_lanes", "held_to_json"]


@final
@dataclass(frozen=True, slots=True)
class Held:
    """A turn as it was made, with its batch; or the end of a lane; or the ``failure`` that came in place of a turn,
    which is raised in its turn and is in no position.
    """

    made: Made
    batch: Any = None
    failure: Exception | None = None


def held_to_json(held: Iterable[Held], lane: int) -> str:
    """Turns of a lane as JSON. Of what was captured the last is enough: nothing is made from the others.

    Raises ``UnsealableState`` where a batch holds what no position can carry.
    """
    turns = [one for one in held if one.failure is None]
    return orjson.dumps([_fields(turn, lane, number, len(turns)) for number, turn in enumerate(turns, 1)]).decode()


def _fields(turn: Held, lane: int, number: int, count: int) -> dict[str, Any]:
    made = turn.made
    fields: dict[str, Any] = {"number": made.number, "digests": made.digests, "entry": made.entry}
    if made.capture is not None and number == count:
        fields["capture"] = made.capture[0], fragment(made.capture[2])
    if made.opened is not None:
        fields["opened"] = fragment(made.opened[1])
    if made.rolled or made.ended:
        fields |= {"rolled": made.rolled, "ended": made.ended, "carry": fragment(made.carry)}
    if made.ended:
        return fields
    try:
        return fields | {"batch": orjson.Fragment(seal(turn.batch, f"batch {number} of lane {lane}"))}
    except UnsealableState as error:
        raise UnsealableState(
            f"{str(error).partition(chr(10))[0]}\n"
            "With save_prefetched=True the batches that were made ahead are part of the position. Return tensors, "
            "arrays, numbers, text, and lists, tuples and dicts of these from the dataset and collate_fn.\n"
            "Nothing is lost: the batch will be delivered in its turn, and the position can be saved after that."
        ) from error


def held_of_lanes(lanes: Iterable[tuple[int, Mapping[str, Any]]], name: str) -> dict[int, deque[Held]]:
    """The turns that the lanes in a leaf hold. Raises ``InvalidState`` where a field is missing or of another type."""
    try:
        found = {number: deque(map(_read, lane.get("prefetched", ()))) for number, lane in lanes}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InvalidState(f"The leaf {name!r} of this position is cut short or changed: {error!r}.") from None
    return {number: held for number, held in found.items() if held}


def _read(fields: Mapping[str, Any]) -> Held:
    made = Made(
        number=whole(fields["number"]),
        digests=[whole(digest) for digest in fields["digests"]],
        entry=None if fields.get("entry") is None else whole(fields["entry"]),
        carry=resealed(fields.get("carry")),
        ended=bool(fields.get("ended")),
        rolled=bool(fields.get("rolled")),
    )
    if "capture" in fields:
        made.capture = whole(fields["capture"][0]), None, resealed(fields["capture"][1])
    if "opened" in fields:
        made.opened = 0, resealed(fields["opened"])
    if made.ended:
        return Held(made)
    if not made.digests:
        raise ValueError("a turn without a digest")
    return Held(made, unseal(orjson.dumps(fields["batch"]).decode()))
