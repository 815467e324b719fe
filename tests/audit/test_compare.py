"""Lost, repeated, reordered, altered: counted in rows, over runs written down by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.audit.compare import judge, ran_beyond
from unbroken.audit.crash import Reference, Run, Step, Stretch
from unbroken.audit.findings import Stop, Trial
from unbroken.audit.plan import TrialPlan
from unbroken.audit.records import brief, digest_of, row_of
from unbroken.audit.stretch import Line


def line(rows: Sequence[Any], epoch: int = 0) -> Line:
    return Line(epoch, digest_of(list(rows)), brief(list(rows)), tuple(map(row_of, rows)))


def steps(rows: Sequence[Any], size: int = 2, epoch: int = 0) -> list[Step]:
    return [(line(rows[at : at + size], epoch),) for at in range(0, len(rows), size)]


def stretch(found: list[Step], start: int = 0, saved: int | None = None) -> Stretch:
    epochs = [[-1 if each is None else each.epoch for each in step] for step in found]
    return Stretch({}, start, found, saved, epochs=epochs)


def judged(
    expected: list[Step],
    *stretches: Stretch,
    batches: int | None = None,
    worlds: Sequence[int] = (1,),
    ended: bool = True,
) -> Trial:
    plan = TrialPlan(2, (), tuple((None, world) for world in worlds))
    run = Run(plan, list(stretches), [Stop(1, 1, "between batches")], ended=ended)
    return judge(Reference(expected, {}, True), run, batches or len(expected))


def counts(trial: Trial) -> tuple[int, int, int, int]:
    return trial.lost, trial.repeated, trial.reordered, trial.altered


ROWS = list(range(12))


def test_the_same_batches_are_exact() -> None:
    trial = judged(steps(ROWS), stretch(steps(ROWS[:6]), saved=2), stretch(steps(ROWS[4:]), start=2))
    assert (trial.verdict, counts(trial), trial.first, trial.unknown) == ("exact", (0, 0, 0, 0), None, ())
    assert trial.number == 3  # the first is 1
    assert trial.counts == bytes([1] * 12)


def test_rows_that_never_come_are_lost() -> None:
    trial = judged(steps(ROWS), stretch(steps(ROWS[:4]), saved=2), stretch(steps(ROWS[6:]), start=2))
    assert (trial.verdict, counts(trial)) == ("inexact", (2, 0, 0, 0))
    assert trial.counts == bytes([1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1])
    assert trial.first is not None
    assert (trial.first.batch, trial.first.expected, trial.first.found) == (2, "[4, 5]", "[6, 7]")


def test_rows_that_come_twice_are_repeated() -> None:
    trial = judged(steps(ROWS), stretch(steps(ROWS[:4]), saved=2), stretch(steps(ROWS[2:]), start=2))
    assert (trial.verdict, counts(trial)) == ("inexact", (0, 2, 0, 0))
    assert trial.counts == bytes([1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1])


def test_rows_in_another_order_are_reordered() -> None:
    trial = judged(steps(ROWS), stretch(steps([*ROWS[:8], 10, 11, 8, 9])))
    assert (trial.verdict, counts(trial)) == ("inexact", (0, 0, 4, 0))


def test_rows_that_nobody_knows_are_altered_and_have_their_places() -> None:
    trial = judged(steps(ROWS), stretch(steps([*ROWS[:8], 80, 90, 10, 11])))
    assert (counts(trial), trial.unknown) == ((0, 0, 0, 2), (8, 9))


@pytest.mark.parametrize(
    ("found", "ended", "beyond"),
    [
        ([*ROWS[:8], 12, 13, 14, 15], False, True),
        ([*ROWS[:8], 12, 13, 14, 15], True, False),
        ([*ROWS[:6], *ROWS[:6]], False, False),
        (ROWS, False, False),
    ],
)
def test_rows_that_may_come_after_the_end_of_a_cut_reference_are_told(
    found: list[int], ended: bool, beyond: bool
) -> None:
    run = Run(TrialPlan(0, (), ((None, 1),)), [stretch(steps(found))])
    assert ran_beyond(Reference(steps(ROWS), {}, ended), run, 6) is beyond


def test_a_row_of_a_whole_epoch_that_nobody_knows_is_altered_wherever_the_reference_ends() -> None:
    expected = [*steps(ROWS), *steps(ROWS[:4], epoch=1)]
    run = Run(TrialPlan(0, (), ((None, 1),)), [stretch([*steps([*ROWS[:11], 90]), *steps(ROWS[:4], epoch=1)])])
    assert not ran_beyond(Reference(expected, {}, False), run, 8)


def test_the_same_rows_in_other_batches_are_inexact() -> None:
    trial = judged(steps(ROWS), stretch(steps(ROWS, size=3)))
    assert (trial.verdict, counts(trial)) == ("inexact", (0, 0, 0, 0))


def test_a_run_that_ends_early_lost_the_rest() -> None:
    trial = judged(steps(ROWS), stretch(steps(ROWS[:8])))
    assert counts(trial) == (4, 0, 0, 0)
    assert trial.first is not None
    assert trial.first.found == "nothing: the data came to its end"


def test_rows_that_are_yet_to_come_are_not_lost() -> None:
    again = [*ROWS[:6], *ROWS[:6]]
    assert counts(judged(steps(ROWS), stretch(steps(again)), ended=False)) == (0, 6, 0, 0)
    assert counts(judged(steps(ROWS), stretch(steps(again)), ended=True)) == (6, 6, 0, 0)


def test_a_row_that_comes_late_is_reordered_and_not_lost() -> None:
    late = [*ROWS[:4], 6, 7, 8, 9, 4, 5, 10, 11]
    trial = judged(steps(ROWS), stretch(steps(late)), batches=4)
    assert (trial.lost, trial.repeated, trial.altered) == (0, 0, 0)
    assert trial.verdict == "inexact"


def test_equal_rows_of_different_epochs_are_different_deliveries() -> None:
    expected = [*steps(ROWS), *steps(ROWS, epoch=1)]
    found = [*steps(ROWS[:10]), *steps(ROWS, epoch=1)]
    assert counts(judged(expected, stretch(found)))[:2] == (2, 0)


def test_batches_after_the_save_must_be_the_same_too() -> None:
    odd = [*steps(ROWS[:4]), *steps([40, 50])]
    trial = judged(steps(ROWS), stretch(odd, saved=2), stretch(steps(ROWS[4:]), start=2))
    assert trial.verdict == "inexact"
    assert trial.first is not None
    assert (trial.first.batch, trial.first.found) == (2, "[40, 50]")


def test_where_batches_look_alike_the_row_that_differs_is_shown() -> None:
    one, other = [list(range(30)), list(range(30))]
    other[20] = 99
    trial = judged(steps(one, size=30), stretch(steps(other, size=30)))
    assert trial.first is not None
    assert (trial.first.expected.splitlines()[1], trial.first.found.splitlines()[1]) == ("row 20: 20", "row 20: 99")


def test_ranks_are_compared_each_with_itself() -> None:
    expected: list[Step] = [(line([0, 1]), line([2, 3]))]
    swapped: list[Step] = [(line([2, 3]), line([0, 1]))]
    trial = judged(expected, stretch(swapped), worlds=(2,))
    assert (trial.verdict, trial.reordered) == ("inexact", 4)
    assert trial.first is not None
    assert trial.first.expected == "rank 0: [0, 1]"


def test_where_ranks_change_the_rows_count_and_not_their_order() -> None:
    two: list[Step] = [(line([4, 5]), line([6, 7])), (line([8, 9]), line([10, 11]))]
    assert (
        judged(steps(ROWS), stretch(steps(ROWS[:4]), saved=2), stretch(two, start=2), worlds=(1, 2)).verdict == "exact"
    )
    torn: list[Step] = [(line([4, 5]), line([4, 5])), (line([8, 9]), line([10, 11]))]
    trial = judged(steps(ROWS), stretch(steps(ROWS[:4]), saved=2), stretch(torn, start=2), worlds=(1, 2))
    assert (trial.verdict, counts(trial)) == ("inexact", (2, 2, 0, 0))
    assert trial.first is not None
    assert (trial.first.batch, trial.first.expected, trial.first.found) == (3, "6", "this row never came")


def test_an_error_is_a_verdict_of_its_own() -> None:
    run = Run(TrialPlan(0, (), ((None, 1),)), [stretch(steps(ROWS[:4]), saved=2)], [], "ValueError: no")
    trial = judge(Reference(steps(ROWS), {}, True), run, 6)
    assert (trial.verdict, trial.error) == ("failed", "ValueError: no")


@given(st.data())
def test_what_was_done_to_rows_is_what_is_counted(data: st.DataObject) -> None:
    """Rows are all different; some are dropped, some come again, some are replaced by rows that nobody knows."""
    rows = list(range(40))
    place = data.draw(st.integers(1, 30))
    fates = data.draw(st.lists(st.sampled_from("....drx"), min_size=40 - place, max_size=40 - place))
    after: list[int] = []
    for row, fate in zip(rows[place:], fates, strict=True):
        after += {".": [row], "d": [], "r": [row, row], "x": [1000 + row]}[fate]
    trial = judged(
        steps(rows, size=1), stretch(steps(rows[:place], 1), saved=place), stretch(steps(after, 1), start=place)
    )
    kept = [*rows[:place], *after]  # all of it: what comes after the end of the data is too many
    known = [row for row in kept if row < 1000]
    assert trial.repeated == len(known) - len(set(known))
    assert trial.altered == len(kept) - len(known)
    assert trial.lost == max(0, len({*rows} - {*rows[:place], *after}) - trial.altered)
    assert (trial.verdict == "exact") == (set(fates) <= {"."})


@pytest.mark.parametrize("repeats", [1, 300])
def test_counts_are_bytes(repeats: int) -> None:
    trial = judged(steps([0, 1], 1), stretch(steps([0] * repeats + [1], 1)))
    assert trial.counts == bytes([min(255, repeats), 1])
