"""A close look at a dataset with a state of its own, without a loader around it: what does its state describe?"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any, Final

from unbroken.audit.records import digest_of
from unbroken.audit.subject import Subject, state_methods

__all__ = ["probe"]

_ROWS: Final = 12
_OPENED_AT: Final = (3, 6, 8)  # numbers of rows after which the state is taken that a new dataset is opened at


def probe(make: Callable[[], Subject]) -> dict[str, Any]:
    """What rows the dataset gives when it is opened at states of its own.

    ``make`` makes the loader anew, under the same seeds. Found are: ``dataset`` (its class), ``asked`` (how many states
    were tried), ``late`` (so many led back to the row before the place), ``start`` (so many had no effect), ``live``
    (the number of rows after which a state was taken that changed later, or None). Empty without such a dataset.
    """
    dataset = _dataset(make())
    methods = state_methods(dataset)
    if methods is None or not callable(getattr(type(dataset), "__iter__", None)):
        return {}
    rows, taken, live = [], {}, None
    for number, row in enumerate(itertools.islice(iter(dataset), _ROWS), 1):
        rows.append(digest_of(row))
        state = methods[0]()
        taken[number] = state, digest_of(state), pickle.dumps(state)
    for number, (state, digest, _) in taken.items():
        if live is None and digest_of(state) != digest:
            live = number
    found: dict[str, Any] = {"dataset": type(dataset).__qualname__, "asked": 0, "late": 0, "start": 0, "live": live}
    for number in _OPENED_AT:
        # Rows that look alike tell no place from another.
        if number >= len(rows) or len({rows[0], rows[number - 1], rows[number]}) < 3:
            continue
        again = _dataset(make())
        put = state_methods(again)
        if put is None:
            continue
        put[1](pickle.loads(taken[number][2]))
        first = next(map(digest_of, iter(again)), None)
        found["asked"] += 1
        found["late"] += first == rows[number - 1]
        found["start"] += first == rows[0]
    return found


def _dataset(subject: Subject) -> Any:
    return getattr(subject.loader, "dataset", subject.loader)
