"""Time to the first batch after a resume, against the place, with a fresh start beside it.

The clock runs from before the loader is made until its first batch is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import unbroken
from benchmarks.corpus import END_OF_TEXT, prepare
from benchmarks.datasets import Counted, Mapped, Preloaded, token_rows
from benchmarks.measure import OURS, Line, Repeats, Settings, at_most_times, interleaved, pass_over
from benchmarks.peers import LOADERS

Make = Callable[[], Any]
ROWS, PEERS_ROWS = 10**9, 10**6
FRESH = "fresh start"
SHORT_MS = 50


def positions_at(make: Make, places: Iterable[int]) -> dict[int, Any]:
    """The state of a loader after so many batches."""
    loader, states, place = make(), {}, 0
    with pass_over(loader) as batches:
        for wanted in sorted(places):
            for _ in islice(batches, wanted - place):
                pass
            place, states[wanted] = wanted, loader.state_dict()
    return states


def first_batch(make: Make, state: Any = None) -> float:
    """Milliseconds to the first batch, from a state or from the start.

    A short one is taken several times in a row: that another contender left the caches cold is not what is compared.
    """
    times = [once(make, state)]
    while len(times) < 5 and times[0] < SHORT_MS:
        times.append(once(make, state))
    return median(times)


def once(make: Make, state: Any) -> float:
    """Milliseconds to the first batch, taken once."""
    began = perf_counter()
    loader = make()
    if state is not None:
        loader.load_state_dict(state)
    with pass_over(loader) as batches:
        next(batches)
        took = perf_counter() - began
    return took * 1000


def at_places(
    what: str,
    makers: dict[str, Make],
    states: dict[str, dict[Any, Any]],
    settings: Settings,
    *,
    repeats: int = 5,
    goal: bool = True,
) -> list[Line]:
    """A line for each place of ours, and theirs where a state of them is at hand; the fresh starts are shared."""
    runs: dict[str, Callable[[], float]] = {}
    for name, make in makers.items():
        runs[f"{name} {FRESH}"] = lambda make=make: first_batch(make)
        for place, state in states[name].items():
            runs[f"{name} {place}"] = lambda make=make, state=state: first_batch(make, state)
    times = interleaved(runs, settings.repeats(repeats))
    lines = []
    for place in states[OURS]:
        found: Repeats = {}
        for name in makers:
            if place in states[name]:
                beside = FRESH if name == OURS else f"{name} {FRESH}"
                found |= {name: times[f"{name} {place}"], beside: times[f"{name} {FRESH}"]}
        goals = (at_most_times(found, 1.5, FRESH),) if goal else ()
        where = f"{place:,} batches" if isinstance(place, int) else place
        lines.append(Line(f"resume, {what}: {where}", "ms", found, goals))
    return lines


def mapped(settings: Settings) -> list[Line]:
    """Ours holds 10^9 samples and a seed; torchdata draws a list of all, so it gets 10^6."""
    rows = token_rows()

    def ours(workers: int) -> Any:
        return unbroken.StatefulDataLoader(Mapped(rows, ROWS), 8, shuffle=True, seed=0, num_workers=workers)

    def theirs(workers: int) -> Any:
        return LOADERS["torchdata"](Mapped(rows, PEERS_ROWS), 8, shuffle=True, num_workers=workers)

    far = settings.batches(100_000)
    places = positions_at(lambda: ours(0), (1000, 10_000, far))
    # A position of torchdata fits the number of workers it was taken with.
    near = positions_at(lambda: theirs(1), (1000,) if settings.quick else (1000, 10_000))
    inline = positions_at(lambda: theirs(0), (far,))
    at_one = {OURS: lambda: ours(1), "torchdata": lambda: theirs(1)}
    at_none = {OURS: lambda: ours(0), "torchdata": lambda: theirs(0)}
    return [
        *at_places("map-style shuffled, 1 worker", at_one, {OURS: places, "torchdata": near}, settings),
        *at_places("map-style shuffled, inline", at_none, {OURS: {far: places[far]}, "torchdata": inline}, settings),
    ]


def stateful(settings: Settings) -> list[Line]:
    rows = token_rows()

    def ours(workers: int) -> Any:
        return unbroken.StatefulDataLoader(Counted(rows), 8, num_workers=workers)

    places = positions_at(lambda: ours(0), (1000, 10_000, settings.batches(100_000)))
    lines = []
    for workers, how in ((1, "1 worker"), (0, "inline")):
        makers = {OURS: lambda workers=workers: ours(workers)}
        lines += at_places(f"stateful iterable, {how}", makers, {OURS: places}, settings)
    return lines


def stateless(settings: Settings) -> list[Line]:
    """Nobody can be flat here: without a state, everything before the place has to be made again."""
    rows = token_rows()
    makers = {
        name: lambda kind=LOADERS[name]: kind(Preloaded(rows), batch_size=8, num_workers=1)
        for name in (OURS, "torchdata")
    }
    places = (100, 1000) if settings.quick else (1000, 10_000)
    states = {name: positions_at(make, places) for name, make in makers.items()}
    return at_places("stateless iterable (replayed), 1 worker", makers, states, settings, repeats=3, goal=False)


def text(settings: Settings) -> list[Line]:
    corpus, tokenizer = prepare(settings)
    stream = unbroken.read_jsonl(corpus).shuffle(1000, seed=0).tokenize(tokenizer, append=END_OF_TEXT).pack(256)

    def ours(workers: int) -> Any:
        return unbroken.StatefulDataLoader(stream, batch_size=8, num_workers=workers)

    with pass_over(ours(0)) as batches:
        total = sum(1 for _ in batches)
    found = positions_at(lambda: ours(0), (5, total * 9 // 10))
    places = {"5 batches": found[5], "90 % of the epoch": found[total * 9 // 10]}
    lines = []
    for workers, how in ((1, "1 worker"), (0, "inline")):
        makers = {OURS: lambda workers=workers: ours(workers)}
        lines += at_places(f"text stream, {how}", makers, {OURS: places}, settings)
    return lines


def run(settings: Settings) -> list[Line]:
    return [*mapped(settings), *stateful(settings), *text(settings), *stateless(settings)]
