"""The numbers of hosts: what is written is what others read from the same memory."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.meters import BYTES, COLLATE, DONE, PACK, ROWS, SKIPPED, STAGES, TOKENS, Meter, Totals


def shared() -> tuple[Meter, Meter]:
    """A meter, and another that reads it."""
    memory = np.zeros(Meter.SIZE, np.uint8)
    return Meter(memory), Meter(memory)


def test_what_one_writes_the_other_reads() -> None:
    writer, reader = shared()
    writer.seconds[PACK] += 1.5
    writer.counts[DONE] += 3
    writer.source("web")[TOKENS] += 7
    writer.source("code")[BYTES] += 1 << 40
    writer.source("web")[ROWS] += 2
    assert reader.seconds[PACK] == 1.5
    assert reader.counts[DONE] == 3
    assert reader.sources() == [("web", [2, 7, 0]), ("code", [0, 0, 1 << 40])]


@given(st.lists(st.text(st.characters(exclude_characters="\0"), max_size=20), unique=True, max_size=40))
def test_names_are_read_as_they_were_written(names: list[str]) -> None:
    writer, reader = shared()
    for number, name in enumerate(names):
        writer.source(name)[ROWS] = number
    found = [name.encode(errors="replace").decode() for name in names]  # half of a surrogate pair is no text
    assert reader.sources() == [(name, [number, 0, 0]) for number, name in enumerate(found)]


def test_a_name_that_is_too_long_is_cut_off_and_not_its_numbers() -> None:
    writer, reader = shared()
    writer.source("x" * 500)[ROWS] = 4
    writer.source("after")[ROWS] = 5
    assert reader.sources() == [("x" * 104, [4, 0, 0]), ("after", [5, 0, 0])]


def test_the_sources_for_which_there_is_no_record_share_the_last_one() -> None:
    writer, reader = shared()
    for number in range(600):
        writer.source(str(number))[ROWS] += 1
    found = reader.sources()
    assert [name for name, _ in found] == [*map(str, range(477)), "others"]
    assert sum(numbers[ROWS] for _, numbers in found) == 600
    assert found[-1][1][ROWS] == 600 - 477


def test_a_meter_that_has_ended_keeps_its_numbers_and_lets_go_of_the_memory() -> None:
    memory = np.zeros(Meter.SIZE, np.uint8)
    gone = weakref.ref(memory)
    writer, reader = Meter(memory), Meter(memory)
    writer.seconds[COLLATE] = 2.0
    writer.source("web")[ROWS] = 9
    reader.end()
    reader.end()
    del memory, writer
    gc.collect()
    assert gone() is None
    assert reader.ended
    assert (reader.seconds[COLLATE], reader.sources()) == (2.0, [("web", [9, 0, 0])])


def test_totals_add_up_what_hosts_have_and_had() -> None:
    totals, one, other = Totals(), Meter(), Meter()
    one.seconds[PACK], other.seconds[PACK] = 1.0, 2.0
    one.counts[SKIPPED] = 1
    one.source("a")[ROWS], other.source("a")[ROWS], other.source("b")[ROWS] = 1, 2, 3
    totals.add(one)
    both = totals.plus([other])
    assert dict(zip(STAGES, both.seconds, strict=False))["pack"] == 3.0
    assert (both.skipped, both.sources) == (1, {"a": [3, 0, 0], "b": [3, 0, 0]})
    assert totals.sources == {"a": [1, 0, 0]}, "they are not changed by that"


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_seconds_are_added_by_the_clock_of_the_meter(stage: int) -> None:
    ticks = iter([10.0, 12.5])
    meter = Meter(clock=lambda: next(ticks))
    meter.add_seconds(stage, meter.clock())
    assert meter.seconds.tolist() == [2.5 if place == stage else 0.0 for place in range(16)]
