"""What the state of one lane of a stream says: where its sources stand, which weights held, what was left out.

The states of stages lie in one another, from the last to the first; ``docs/state-format.md`` has their fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from unbroken.state import list_of, whole

__all__ = [
    "LeftOutRows",
    "SourcePlace",
    "Weights",
    "documents_of",
    "left_out_rows",
    "places_of",
    "weights_of",
]

_UNITS = {"read_jsonl": "byte", "read_tar": "byte", "read_tokens": "token", "from_iterable": "row"}


@final
@dataclass(frozen=True)
class SourcePlace:
    """Where one source of a lane stands: the number of its ``chunk`` in the lane and the ``place`` in that.

    ``source`` is its name in a mix, or its number in a concat (``web``, ``web/0``); empty for the only one. What a
    place counts depends on the format (``unit``). ``rows`` and ``tokens`` are those that a mix took from it in this
    epoch. ``anchored`` says that the place is an anchor's: rows are made again from there, and more were read;
    ``counted_early`` the same of the counts.
    """

    source: str = ""
    format: str = ""
    chunk: int | None = None
    place: int | None = None
    rows: int | None = None
    tokens: int | None = None
    passes: int = 0
    ended: bool = False
    owed: int = 0
    anchored: bool = False
    counted_early: bool = False

    @property
    def unit(self) -> str:
        """What ``place`` counts."""
        return _UNITS.get(self.format, "row")


@final
@dataclass(frozen=True)
class Weights:
    """A plan of weights and from which row of the lane it held: ``[row of the global order, weights]`` of each step."""

    mix: str
    epoch: int
    row: int
    plan: list[Any]


@final
@dataclass(frozen=True)
class LeftOutRows:
    """The rows that a source with ``on_error="skip"`` left out in this epoch, and the last by name."""

    source: str
    count: int
    named: list[list[str]]


def _format_of(source: str, fingerprint: Mapping[str, Any]) -> str:
    """The function that reads a source (``read_jsonl``), as far as the fingerprint tells."""
    names = source.split("/") if source else []
    for depth in range(len(names), -1, -1):
        outline = fingerprint.get("".join(f"{name}: " for name in names[:depth]) + "stages")
        if isinstance(outline, str):
            found = re.findall(r"\b(?:read|from)_\w+", outline)
            number = names[depth] if depth < len(names) else "0"
            if len(set(found)) == 1 or (number.isdecimal() and int(number) < len(found)):
                return str(found[int(number) if len(set(found)) > 1 else 0])
            return ""
    return ""


def places_of(state: Any, fingerprint: Mapping[str, Any]) -> list[SourcePlace]:
    """Where each source of a lane stands, by the state of the last stage."""
    found = _places(_rows_of(state), SourcePlace())
    return [replace(place, format=_format_of(place.source, fingerprint)) for place in found]


def documents_of(state: Any) -> int | None:
    """How many documents ``pack`` has read before the one under way, in this epoch; None where nothing is packed."""
    state = _rows_of(state)
    while isinstance(state, Mapping):
        if isinstance(state.get("document"), int):
            return int(state["document"])
        state = state.get("source", state.get("anchor"))
    return None


def weights_of(state: Any) -> list[Weights]:
    """The history of the weights of each mix."""
    return [
        Weights(name.removesuffix("mix").rstrip("/"), whole(entry[0]), whole(entry[1]), _plan_of(entry[2]))
        for name, record in _journal_of(state).items()
        if isinstance(record, Mapping)
        for entry in list_of(record.get("history", []))
    ]


def left_out_rows(state: Any) -> list[LeftOutRows]:
    """What each source left out."""
    return [
        LeftOutRows(
            name.rpartition("/")[0], whole(record["count"]), [[str(where), str(why)] for where, why in record["named"]]
        )
        for name, record in _journal_of(state).items()
        if isinstance(record, Mapping) and record.get("count") and "named" in record
    ]


def _plan_of(saved: Any) -> list[Any]:
    return [[whole(row), {str(name): float(weight) for name, weight in weights.items()}] for row, weights in saved]


def _journal_of(state: Any) -> Mapping[str, Any]:
    journal = state.get("journal") if isinstance(state, Mapping) else None
    return journal if isinstance(journal, Mapping) else {}


def _rows_of(state: Any) -> Any:
    return state["rows"] if isinstance(state, Mapping) and "journal" in state and "rows" in state else state


def _places(state: Any, so_far: SourcePlace) -> Iterator[SourcePlace]:
    if not isinstance(state, Mapping):
        return
    if "chunk" in state and "place" in state:
        place = state["place"]
        yield replace(so_far, chunk=whole(state["chunk"]), place=whole(place[0] if isinstance(place, list) else place))
    elif "witnesses" in state:  # of an iterable with a state of its own
        yield replace(so_far, place=whole(state["rows"]))
    elif isinstance(state.get("sources"), Mapping):
        for name, saved in state["sources"].items():
            yield from _of_mix(f"{so_far.source}/{name}".lstrip("/"), saved, so_far)
    elif "stream" in state:
        yield from _places(
            state.get("source"), replace(so_far, source=f"{so_far.source}/{state['stream']}".lstrip("/"))
        )
    elif "pass" in state:
        yield from _places(state.get("source"), replace(so_far, passes=so_far.passes + whole(state["pass"])))
    elif "source" in state:
        yield from _places(state["source"], so_far)
    elif "anchor" in state:
        yield from _places(state["anchor"], replace(so_far, anchored=True))


def _of_mix(name: str, saved: Mapping[str, Any], so_far: SourcePlace) -> Iterator[SourcePlace]:
    counts = SourcePlace(
        source=name,
        rows=whole(saved["rows"]),
        tokens=whole(saved["tokens"]),
        passes=whole(saved["passes"]),
        ended=bool(saved["ended"]),
        owed=whole(saved["owed"]),
        anchored=so_far.anchored,
        counted_early=so_far.anchored,
    )
    inner = list(_places(_rows_of(saved["position"]), replace(so_far, source=name, passes=counts.passes)))
    if len(inner) == 1 and inner[0].source == name:
        found = inner[0]
        yield replace(counts, chunk=found.chunk, place=found.place, passes=found.passes, anchored=found.anchored)
    else:
        yield counts
        yield from inner
