"""What the tests of mix share: sources of numbered rows, and which of them came."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.streams.runs import plain, saved, write_jsonl
from unbroken.lanes import Lane
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage

NAMES = "abcd"
STOPS = ("first", "all", "repeat")
BEHIND = ["shuffle 1", "shuffle 4", "shuffle 100", "map", "tokenize"]

Rows = dict[str, list[dict[str, str]]]


def ids_of(text: str) -> list[int]:
    """The number of a document, as often as it has tokens."""
    number, length = text.split()
    return [int(number)] * int(length)


def other_ids_of(text: str) -> list[int]:
    return [0, *ids_of(text)]


def same(row: Any) -> Any:
    return row


def kept(row: Any) -> bool:
    return True


def listed(row: Any) -> list[Any]:
    return [row]


def rows_of(sizes: Mapping[str, int], lengths: str = "3") -> Rows:
    """Rows of each source, numbered from 1000 in the first source, 2000 in the second, and so on."""
    return {
        name: [{"text": f"{1000 * NAMES.index(name) + 1000 + n} {lengths[n % len(lengths)]}"} for n in range(size)]
        for name, size in sizes.items()
    }


def streams(folder: Path, rows: Rows, *stages: str) -> dict[str, Stage]:
    return {name: built(read_jsonl(write_jsonl(folder / f"{name}.jsonl", rows[name])), stages) for name in rows}


def built(stream: Stage, stages: Sequence[str]) -> Stage:
    for stage in stages:
        name, _, argument = stage.partition(" ")
        if name == "shuffle":
            stream = stream.shuffle(int(argument), seed=int(argument))
        elif name == "tokenize":
            stream = stream.tokenize(ids_of)
        elif name == "pack":
            stream = stream.pack(int(argument))
        elif name == "best_fit":
            stream = stream.pack(int(argument), "best_fit", window=20)
        else:
            made = {"map": same, "filter": kept, "flat_map": listed}[name]
            stream = getattr(stream, name)(made)
    return stream


def tokens_of(rows: list[Any]) -> Counter[tuple[int, int]]:
    """How often each token came: (number of its document, place in it); of a row of text its number."""
    found: Counter[tuple[int, int]] = Counter()
    for row in rows:
        if "text" in row:
            found[int(row["text"].split()[0]), 0] += 1
        elif "position_ids" in row:
            found.update(pair for pair in zip(row["input_ids"][1], row["position_ids"][1], strict=True) if pair[0])
        else:
            found.update((number, place) for place, number in enumerate(row["input_ids"][1]))
    return found


def names_in(rows: list[Any]) -> str:
    return "".join(NAMES[int(row["text"][0]) - 1] for row in rows)


def taken(stream: Stage, lane: Lane, count: int, state: str | None = None) -> tuple[list[Any], str]:
    """So many rows from a position on, and the position then."""
    rows = stream.open(lane)
    if state is not None:
        rows.load_state_dict(json.loads(state))
    found = [plain(row) for _, row in zip(range(count), rows, strict=False)]
    return found, saved(rows)
