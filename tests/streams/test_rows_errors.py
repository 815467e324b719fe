"""Map, filter and flat_map where something is wrong: arguments, functions that raise, rows that are gone."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

from tests.streams.runs import resumed, run, saved, write_jsonl
from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.streams.course import Course
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import GONE, Stage, StageIterator


@pytest.fixture
def corpus(tmp_path: Path) -> Stage:
    return read_jsonl(write_jsonl(tmp_path / "a.jsonl", [{"id": n} for n in range(30)]))


def often(row: dict[str, Any]) -> bool:
    return random.random() < 0.6


def same(row: Any) -> Any:
    return row


def drawn(row: Any, rng: np.random.Generator) -> list[float]:
    return [row["id"], float(rng.random())]


def test_an_error_of_the_function_keeps_its_type_and_the_next_row_comes(corpus: Stage) -> None:
    def fail_at_3(row: dict[str, int]) -> dict[str, int]:
        if row["id"] == 3:
            raise KeyError("mine")
        return row

    rows = corpus.map(fail_at_3).open(Lane(0, 1))
    assert [next(rows)["id"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="mine"):
        next(rows)
    assert next(rows)["id"] == 4


@pytest.mark.parametrize("method", ["map", "filter", "flat_map"])
def test_what_is_no_function_fails_at_construction(corpus: Stage, method: str) -> None:
    with pytest.raises(TypeError, match=rf"{method}: fn must be a function of one row, but got 3 \(int\)"):
        getattr(corpus, method)(3)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"rng": 1}, TypeError, "rng must be True or False, but got 1"),
        ({"batched": 0}, ValueError, "batched must be at least 1, but got 0"),
        ({"batched": True}, TypeError, "batched must be a whole number, but got True"),
        ({"batched": "8"}, TypeError, "batched must be a whole number, but got '8'"),
    ],
)
@pytest.mark.parametrize("method", ["map", "filter", "flat_map"])
def test_what_cannot_be_meant_fails_at_construction(
    corpus: Stage, method: str, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"{method}: {text}"):
        getattr(corpus, method)(often, **given)


@pytest.mark.parametrize(
    ("fn", "given", "text"),
    [
        (often, {"rng": True}, "must take two arguments, the row and a numpy.random.Generator, but often"),
        (often, {"rng": True}, "rng=True passes two arguments"),
        (often, {"rng": True, "batched": 2}, "must take two arguments, a list of rows and a numpy.random.Generator"),
        (drawn, {}, r"must take one argument, the row, but drawn\(.*\) cannot be called so.\nPass rng=True to get"),
        (drawn, {"batched": 2}, "must take one argument, a list of rows, but drawn"),
        (lambda: 1, {}, "must take one argument"),
        (lambda row, *, other: 1, {}, "must take one argument"),
    ],
)
def test_a_function_of_other_arguments_fails_at_construction(
    corpus: Stage, fn: Any, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=text):
        corpus.map(fn, **given)


def test_whatever_can_be_called_with_a_row_is_a_function(corpus: Stage) -> None:
    @functools.wraps(drawn)
    def wrapped(row: Any) -> Any:
        return drawn(row, np.random.default_rng(0))[0]

    class Ids:
        def __call__(self, row: Any, field: str = "id") -> Any:
            return row[field]

    functions: list[Any] = [
        wrapped,
        Ids(),
        Ids().__call__,
        lambda *rows: rows[0]["id"],
        functools.partial(Ids(), field="id"),
    ]
    for fn in functions:
        assert run(corpus.map(fn)) == [*range(30)]
    assert run(corpus.map(len)) == [1] * 30


STAGES: dict[str, Callable[[Stage], Stage]] = {
    "map": lambda rows: rows.map(same),
    "filter": lambda rows: rows.filter(often),
    "flat_map": lambda rows: rows.flat_map(lambda row: [row, row]),
    "map, batched": lambda rows: rows.map(list, batched=4),
}


@pytest.mark.parametrize("name", STAGES)
def test_what_is_no_position_is_refused(corpus: Stage, name: str) -> None:
    """Case 27."""
    rows = STAGES[name](corpus).open(Lane(0, 1))
    before = saved(rows)
    states: list[dict[str, Any]] = [{}, {**rows.state_dict(), "rows": None}, {**rows.state_dict(), "source": {}}]
    if "size" in rows.state_dict():
        states += [{**rows.state_dict(), "size": 0}, {**rows.state_dict(), "taken": -1}]
    for state in [*states, {"source": {}, "rows": 0}]:
        with pytest.raises(InvalidState, match=r"in a position must be|a position has the keys"):
            rows.load_state_dict(state)
        assert saved(rows) == before


def test_a_batch_that_cannot_be_made_again_is_refused(corpus: Stage) -> None:
    rows = corpus.flat_map(lambda rows: rows, batched=10).open(Lane(0, 1))
    for _ in range(8):
        next(rows)
    again = resumed(corpus.flat_map(lambda rows: rows[:8], batched=10), Lane(0, 1), saved(rows))
    for _ in range(2):
        with pytest.raises(
            InvalidState, match="flat_map: 8 rows were delivered of what fn made of 10 rows, but now it"
        ):
            next(again)


# ---- functions that raise


class Failing:
    """A function of one row or of several that raises at a row: the first ``times`` times that it gets it."""

    def __init__(self, at: int, error: BaseException, times: int = 1 << 30) -> None:
        self.at, self.error, self.times = at, error, times

    def __call__(self, rows: Any) -> Any:
        if self.times and self.at in [row["id"] for row in (rows if isinstance(rows, list) else [rows])]:
            self.times -= 1
            raise self.error
        return rows


def tried_to_the_end(rows: StageIterator, error: type[BaseException]) -> list[Any]:
    """The ids of the rows, and ``"x"`` where it raised."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(rows)["id"])
        except StopIteration:
            return found
        except error:
            found.append("x")


def test_an_error_in_a_batch_keeps_its_type_and_the_next_batch_comes(corpus: Stage) -> None:
    for method in ("map", "flat_map"):
        stream = getattr(corpus, method)(Failing(6, KeyError("mine")), batched=4)
        rows = stream.open(Lane(0, 1))
        assert [next(rows)["id"] for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(KeyError, match="mine"):
            next(rows)
        rest = tried_to_the_end(resumed(stream, Lane(0, 1), saved(rows)), KeyError)
        assert tried_to_the_end(rows, KeyError) == rest == [*range(8, 30)]


def test_an_error_in_the_middle_of_a_generator_is_one_of_the_whole_row(corpus: Stage) -> None:
    def twice(row: dict[str, int]) -> Iterator[dict[str, int]]:
        yield row
        if row["id"] == 6:
            raise KeyError("mine")
        yield row

    rows = corpus.flat_map(twice).open(Lane(0, 1))
    expected = [*sorted([*range(6)] * 2), "x", *sorted([*range(7, 30)] * 2)]
    assert tried_to_the_end(rows, KeyError) == expected


@pytest.mark.parametrize("size", [1, 4, 30])
@pytest.mark.parametrize("at", [0, 6, 29])
def test_an_error_of_what_stands_before_a_batch_loses_nothing(corpus: Stage, size: int, at: int) -> None:
    """A batch is what it stands on here: interrupted once, it goes on with the same row."""
    before = corpus.flat_map(Failing(at, KeyboardInterrupt(), times=1), batched=1)
    rows = before.map(list, batched=size).open(Lane(0, 1))
    found = tried_to_the_end(rows, KeyboardInterrupt)
    assert found.index("x") == at // size * size
    assert [n for n in found if n != "x"] == [*range(30)]


@pytest.mark.parametrize("method", ["map", "flat_map"])
def test_an_interruption_in_a_batch_loses_nothing(corpus: Stage, method: str) -> None:
    stream = getattr(corpus, method)(Failing(6, KeyboardInterrupt(), times=1), batched=4)
    rows = stream.open(Lane(0, 1))
    for _ in range(4):
        next(rows)
    before = saved(rows)
    with pytest.raises(KeyboardInterrupt):
        next(rows)
    assert saved(rows) == before
    assert [row["id"] for row in rows] == [*range(4, 30)]


def test_an_error_while_a_batch_is_made_again_loses_nothing(corpus: Stage) -> None:
    """Its rows came to something before, so that the error will pass."""
    rows = corpus.map(list, batched=4).open(Lane(0, 1))
    for _ in range(6):
        next(rows)
    again = resumed(corpus.map(Failing(6, OSError(), times=2), batched=4), Lane(0, 1), saved(rows))
    assert tried_to_the_end(again, OSError) == ["x", "x", *range(6, 30)]


@pytest.mark.parametrize("given", [{}, {"batched": 3}])
@pytest.mark.parametrize("method", ["map", "filter", "flat_map"])
def test_a_function_does_not_end_the_stream_with_stop_iteration(
    corpus: Stage, method: str, given: dict[str, int]
) -> None:
    rows = getattr(corpus, method)(lambda rows: next(iter(())), **given).open(Lane(0, 1))
    with pytest.raises(RuntimeError, match=rf"^{method}: fn \(.*<lambda>\) raised StopIteration, for .*a.jsonl, byte "):
        next(rows)
    assert next(iter(corpus.filter(lambda row: True)), None) == {"id": 0}


def test_an_iterable_does_not_end_the_stream_with_stop_iteration(corpus: Stage) -> None:
    class Stopping:
        def __iter__(self) -> Any:
            raise StopIteration

    for stream in (corpus.flat_map(lambda row: Stopping()), corpus.map(lambda rows: Stopping(), batched=2)):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(stream.open(Lane(0, 1)))


# ---- functions that return something else


@pytest.mark.parametrize("found", [None, 3, "text", b"text", {"id": 1}, {1, 2}])
def test_what_is_no_list_is_named(corpus: Stage, found: Any) -> None:
    text = rf"must return a list .* but returned a {type(found).__name__}, for .*a.jsonl, byte "
    for stream in (corpus.flat_map(lambda row: found), corpus.map(lambda rows: found, batched=3)):
        with pytest.raises(TypeError, match=text):
            next(stream.open(Lane(0, 1)))


@pytest.mark.parametrize("method", ["map", "filter"])
def test_a_batch_of_another_length_is_named(corpus: Stage, method: str) -> None:
    rows = getattr(corpus, method)(lambda rows: [True] * (len(rows) - 1), batched=3).open(Lane(0, 1))
    with pytest.raises(
        ValueError, match=rf"{method}: with batched=3 .* got 3 rows and returned 2 items, for a batch of"
    ):
        next(rows)


@pytest.mark.parametrize("verdict", [1, None, "yes", np.int64(1)])
def test_a_verdict_that_is_no_bool_is_named(corpus: Stage, verdict: Any) -> None:
    """Not the rows that are kept, and not their numbers."""
    rows = corpus.filter(lambda rows: [True, verdict, False], batched=3).open(Lane(0, 1))
    with pytest.raises(
        TypeError, match=r"filter: with batched=3 .* must return True or False for each row, but returned"
    ):
        next(rows)


def test_a_function_may_empty_the_list_that_it_gets(corpus: Stage) -> None:
    def emptied(rows: list[Any]) -> list[Any]:
        return [rows.pop(0) for _ in range(len(rows))]

    assert run(corpus.map(emptied, batched=4)) == run(corpus)


# ---- rows of a source that was taken out of a mix


@final
@dataclass(frozen=True, repr=False, eq=False)
class Removed(Stage):
    """The rows of a stream, with ``GONE`` in place of some."""

    NAME = "removed"

    source: Stage
    numbers: tuple[int, ...]

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return RemovedIterator(self.source.begin(lane, course), self.numbers)

    def fields(self) -> dict[str, Any]:
        return {}

    def arguments(self) -> str:
        return ""


@final
class RemovedIterator(StageIterator):
    def __init__(self, source: StageIterator, numbers: tuple[int, ...]) -> None:
        self._source, self._numbers, self._row = source, numbers, -1

    def __next__(self) -> Any:
        row, self._row = next(self._source), self._row + 1
        return GONE if self._row in self._numbers else row

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._source.load_state_dict(state)

    def close(self) -> None:
        self._source.close()

    def where(self) -> str:
        return self._source.where()

    def origin(self) -> Any:
        return self._source.origin()


def test_a_map_passes_rows_that_are_gone_and_the_others_keep_their_numbers(corpus: Stage) -> None:
    removed = Removed(corpus, (0, 3)).map(drawn, rng=True).map(lambda row: (row, random.random()))
    whole = Removed(corpus, ()).map(drawn, rng=True).map(lambda row: (row, random.random()))
    found = list(removed.begin(Lane(0, 1), Course()))
    assert [n for n, row in enumerate(found) if row is GONE] == [0, 3]
    assert [row for row in found if row is not GONE] == [row for n, row in enumerate(run(whole)) if n not in (0, 3)]


@pytest.mark.parametrize("name", [name for name in STAGES if name != "map"])
def test_rows_that_are_gone_are_refused_where_it_matters_what_came_of_them(corpus: Stage, name: str) -> None:
    rows = STAGES[name](Removed(corpus, (3,))).begin(Lane(0, 1), Course())
    text = rf"^{name.split(',')[0]}.*: a source was taken out of a mix while .*\nKeep it in the mix with weight 0"
    with pytest.raises(InvalidState, match=text):
        for _ in range(30):
            next(rows)
