"""What a source counts and times of its rows, by a clock that stands still but where it is moved on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.streams.runs import assert_law, write_jsonl
from unbroken import from_iterable, from_map, read_jsonl
from unbroken.lanes import Lane
from unbroken.meters import BYTES, DECODE, IDLE, MAP, READ, ROWS, STAGES, TOKENS, Meter
from unbroken.streams.gauge import Gauge, timed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def gauge() -> tuple[Gauge, Meter, Clock]:
    clock = Clock()
    meter = Meter(clock=clock)
    return Gauge(meter, "web"), meter, clock


def make(gauge: Gauge, clock: Clock, seconds: float) -> None:
    """A row, as a source makes it."""
    gauge.left -= 1
    if not gauge.left:
        gauge.begin()
    clock.now += seconds
    if gauge.began:
        gauge.end()
    gauge.counts[ROWS] += 1


@pytest.mark.parametrize("seconds", [1e-6, 1e-3])
def test_the_time_of_rows_is_that_of_all_of_them(seconds: float) -> None:
    found, meter, clock = gauge()
    for _ in range(1 + 16 * 20):
        make(found, clock, seconds)
        clock.now += 1.0  # what becomes of the row is no matter of the source
    assert meter.seconds[DECODE] == pytest.approx((1 + 16 * 20) * seconds)
    assert meter.sources() == [("web", [1 + 16 * 20, 0, 0])]


def test_rows_that_come_to_cost_more_are_timed_one_by_one() -> None:
    found, meter, clock = gauge()
    for number in range(1 + 16 + 40):
        make(found, clock, 1e-6 if number < 16 else 1e-3)
    assert meter.seconds[DECODE] == pytest.approx(1e-6 + 16e-3 + 40e-3)


def test_the_first_row_of_a_piece_stands_for_itself_alone() -> None:
    """The work on the whole piece is in it."""
    found, meter, clock = gauge()

    def read() -> Iterator[bytes]:
        for _ in range(20):
            clock.now += 0.25
            yield b"12345"

    for _ in found.pieces(read()):
        clock.now += 0.5  # for the first row
        if found.began:
            found.end()
        clock.now += 3.0
    assert meter.seconds[READ] == pytest.approx(20 * 0.25)
    assert meter.seconds[DECODE] == pytest.approx(20 * 0.5)
    assert meter.sources() == [("web", [0, 0, 100])]


def test_a_call_that_fails_is_not_taken_for_a_long_one() -> None:
    clock = Clock()
    meter = Meter(clock=clock)

    def call(value: int) -> int:
        if value == 3:
            raise ValueError("three")
        clock.now += 1.0
        return value

    of = timed(meter, call)
    for value in range(3):
        assert of(value) == value
    with pytest.raises(ValueError, match="three"):
        of(3)
    clock.now += 1000.0
    assert of(4) == 4
    assert meter.seconds[MAP] == pytest.approx(4.0)


def test_where_nobody_reads_nothing_is_timed(tmp_path: Path) -> None:
    assert timed(IDLE, len) is len
    before = IDLE.seconds.tolist()
    rows = {name: numbers[ROWS] for name, numbers in IDLE.sources() if numbers[ROWS]}  # of other tests
    path = write_jsonl(tmp_path / "rows.jsonl", range(40))
    with read_jsonl(path).open(Lane(0, 1)) as lane:
        assert len(list(lane)) == 40
    assert IDLE.seconds[DECODE] == before[DECODE]
    assert {name: numbers[ROWS] for name, numbers in IDLE.sources() if numbers[ROWS]} == rows


def test_a_lane_counts_into_the_meter_that_it_was_opened_with(tmp_path: Path) -> None:
    meter = Meter()
    path = write_jsonl(tmp_path / "rows.jsonl.gz", [{"text": "ab"}] * 40)
    stream = read_jsonl(path).tokenize(lambda text: [1] * len(text))
    for lane in range(2):
        with stream.open(Lane(lane, 2), meter=meter) as rows:
            list(rows)
    assert meter.sources() == [("read_jsonl", [40, 80, 40 * len('{"text": "ab"}\n')])]
    assert {name for name, seconds in zip(STAGES, meter.seconds, strict=False) if seconds} == {
        "read", "decode", "tokenize",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["from_map", "from_iterable"])
def test_what_the_user_reads_counts_as_the_users(name: str) -> None:
    clock = Clock()
    meter = Meter(clock=clock)

    class Slow:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            if index >= 12:
                raise IndexError
            clock.now += 1.0
            return index

    stream: Any = from_map(Slow()) if name == "from_map" else from_iterable(lambda lane, lanes: Slow())
    with stream.open(Lane(0, 1), meter=meter) as rows:
        assert list(rows) == list(range(12))
    assert meter.seconds[STAGES.index("dataset")] == pytest.approx(12.0)
    assert meter.sources() == [(name, [12, 0, 0])]


def test_a_row_that_is_bad_is_not_counted_and_the_next_is(tmp_path: Path) -> None:
    meter = Meter()
    path = tmp_path / "rows.jsonl"
    path.write_text("1\nno json\n3\n")
    with read_jsonl(path, on_error="skip").open(Lane(0, 1), meter=meter) as rows:
        assert list(rows) == [1, 3]
    (_, numbers), skipped = meter.sources()[0], meter.counts[1]
    assert (numbers[ROWS], numbers[TOKENS], numbers[BYTES] >= 12, skipped) == (2, 0, True, 1)


def test_the_law_holds_with_a_meter(tmp_path: Path) -> None:
    """It is the same iterator, and it keeps nothing that a position would have to hold."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "x" * (row % 5)} for row in range(30)])
    stream = read_jsonl(path).map(dict).shuffle(4).tokenize(lambda text: [1] * len(text), append=0).pack(8)
    expected = assert_law(stream, Lane(0, 1))
    with stream.open(Lane(0, 1), meter=Meter()) as rows, stream.open(Lane(0, 1)) as others:
        for _ in expected:
            assert {k: v.tolist() for k, v in next(rows).items()} == {k: v.tolist() for k, v in next(others).items()}
            assert rows.state_dict() == others.state_dict()
