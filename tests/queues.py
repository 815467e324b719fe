"""Sources that cannot be read again, and loaders over them."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from unbroken import StatefulDataLoader


class FromQueue(IterableDataset):
    """Rows that are gone once they were read. ``None`` is the end of a lane."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        while (row := self.source.get()) is not None:
            yield self.row(row)

    def row(self, row: Any) -> Any:
        return row


class Once:
    """A source in this process, shared by all that read it. After its rows there are as many ends as are asked for."""

    def __init__(self, rows: int) -> None:
        self.rows = deque(range(rows))

    def get(self) -> int | None:
        return self.rows.popleft() if self.rows else None

    def __deepcopy__(self, memo: Any) -> Once:
        return self


def queue_of(rows: int, ends: int, context: str = "fork") -> Any:
    source = multiprocessing.get_context(context).Queue()
    for row in (*range(rows), *(None for _ in range(ends))):
        source.put(row)
    return source


def make(source: Any, **arguments: Any) -> StatefulDataLoader:
    if arguments.get("num_workers"):
        arguments = {"multiprocessing_context": "fork"} | arguments
    dataset = source if isinstance(source, IterableDataset) else FromQueue(source)
    return StatefulDataLoader(dataset, save_prefetched=True, **arguments)


def resumed(state: Any, source: Any, **arguments: Any) -> StatefulDataLoader:
    loader = make(source, **arguments)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def rows_in(batches: Any, most: int | None = None) -> list[int]:
    return [row for batch in itertools.islice(batches, most) for row in batch.reshape(-1).tolist()]


def lanes_of(state: dict[str, str]) -> list[str]:
    return [text for name, text in sorted(state.items()) if name.startswith("lane-")]


def drop(source: Any) -> None:
    source.cancel_join_thread()
    source.close()
