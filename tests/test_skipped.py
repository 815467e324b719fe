"""What is kept of samples that were left out, and what is said of too many."""

from __future__ import annotations

import json
import pickle

import pytest

from unbroken.errors import InvalidState, TooManySkipped
from unbroken.made import Made
from unbroken.skipped import Fetched, LeftOut, Skipped, too_many


def left_out(number: int, error: Exception | None = None) -> LeftOut:
    return LeftOut.of(0, number, f"sample {number}", error or ValueError(f"bad {number}"))


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (OSError("a\n  b"), "OSError: a b"),
        (KeyError("x" * 500), f"KeyError: '{'x' * 106}..."),
        (ValueError("half \udc80"), "ValueError: half \\udc80"),
        (Silent(), "Silent: (an exception whose text cannot be told)"),
    ],
)
def test_an_exception_is_told_in_one_short_line_of_plain_text(error: Exception, text: str) -> None:
    assert left_out(3, error) == LeftOut(0, 3, "sample 3", text)
    assert len(text) <= 120


def test_all_are_counted_and_the_last_sixteen_named() -> None:
    skipped = Skipped().plus([left_out(number) for number in range(3)])
    assert skipped == Skipped(3, tuple((f"sample {n}", f"ValueError: bad {n}") for n in range(3)))
    skipped = skipped.plus([left_out(number) for number in range(3, 40)]).plus([left_out(40)])
    assert skipped.count == 41
    assert [where for where, _ in skipped.last] == [f"sample {n}" for n in range(25, 41)]


def test_it_is_read_as_it_was_written() -> None:
    skipped = Skipped().plus([left_out(1), left_out(2)])
    leaf = {"skipped": json.loads(skipped.to_json())}
    assert leaf == {
        "skipped": {"count": 2, "last": [["sample 1", "ValueError: bad 1"], ["sample 2", "ValueError: bad 2"]]}
    }
    assert Skipped.of(leaf, "place") == skipped
    assert Skipped.of({}, "place") == Skipped()
    assert Skipped.of_lanes([(2, leaf), (5, {})], "rank-0000") == {2: skipped}


@pytest.mark.parametrize("changed", [3, {}, {"count": -1, "last": []}, {"count": 1, "last": [["one"]]}, {"count": 1}])
def test_what_was_changed_is_refused(changed: object) -> None:
    with pytest.raises(InvalidState, match="The leaf 'place' of this position is cut short or changed"):
        Skipped.of({"skipped": changed}, "place")


def test_those_of_lanes_are_counted_together_and_named_lane_by_lane() -> None:
    lanes = {4: Skipped().plus([left_out(1)]), 0: Skipped().plus([left_out(7), left_out(8)])}
    assert Skipped.of_position(lanes).count == 3
    assert [where for where, _ in Skipped.of_position(lanes).last] == ["sample 7", "sample 8", "sample 1"]
    assert Skipped.of_position(lanes[4]) is lanes[4]
    assert Skipped.of_position({}) == Skipped()


def test_too_many_are_told_with_the_last_of_them_and_the_cause_of_the_very_last() -> None:
    error = too_many(5, 4, [left_out(number) for number in range(5)])
    assert isinstance(error, TooManySkipped)
    assert str(error).splitlines()[:4] == [
        "5 samples failed, and max_skipped=4 may be left out. The last:",
        "  sample 2: ValueError: bad 2",
        "  sample 3: ValueError: bad 3",
        "  sample 4: ValueError: bad 4",
    ]
    assert str(error.__cause__) == "ValueError: bad 4"


def test_a_turn_takes_what_was_left_out_of_it_along_and_no_bytes_where_that_is_nothing() -> None:
    made = Made(samples=[1, 2], number=2, digests=[7], left_out=[left_out(3)])
    again = pickle.loads(pickle.dumps(made))
    assert (again.number, again.digests, again.left_out, again.samples) == (2, [7], [left_out(3)], [])
    assert pickle.loads(pickle.dumps(Made(number=2))).left_out == ()
    assert b"LeftOut" not in pickle.dumps(Made(number=2))


def test_a_batch_without_a_sample_is_nothing_unless_it_shows_a_shape() -> None:
    assert Fetched([left_out(1)]).nothing
    assert not Fetched([left_out(1)], entry=3).nothing
    assert not Fetched([left_out(1)], shape=True).nothing
