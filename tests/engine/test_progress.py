"""Telling the user that samples are being made again, where that takes more than a moment."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any

import pytest

from unbroken.engine import progress
from unbroken.engine.progress import Remaking


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "monotonic", clock)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(remaking: Remaking, clock: Clock, seconds: float, what: str = "lane 0") -> None:
    """Reports for so many seconds, ten a second."""
    for step in range(round(seconds * 10) + 1):
        remaking.report(what, 10 * step, 500)
        clock.now += 0.1


def test_a_moment_is_not_worth_a_word(clock: Clock) -> None:
    remaking = Remaking()
    report(remaking, clock, 1.5)
    remaking.end()


def test_two_seconds_are_told_with_the_number_and_the_remedy(clock: Clock) -> None:
    """Case 10."""
    with pytest.warns(UserWarning) as caught:
        report(Remaking(), clock, 3)
    (warning,) = caught
    assert str(warning.message) == (
        "Resuming makes 500 samples of lane 0 again, because the dataset has no state that leads closer.\n"
        "Give it (or its iterator) state_dict and load_state_dict, or save with a smaller snapshot_every_n_steps, "
        "to start at once."
    )


def test_it_is_told_once_for_all_lanes_and_resumes(clock: Clock) -> None:
    """Case 10: told once."""
    remaking = Remaking()
    with pytest.warns(UserWarning) as caught:
        for lane in range(3):
            report(remaking, clock, 3, f"lane {lane}")
        remaking.end()
        report(remaking, clock, 3)
    assert len(caught) == 1


def test_the_two_seconds_begin_anew_after_a_batch(clock: Clock) -> None:
    remaking = Remaking()
    for _ in range(5):
        report(remaking, clock, 1.5)
        remaking.end()


def test_a_terminal_sees_a_bar_for_each_lane_until_a_batch_comes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 10: with progress."""
    rich = pytest.importorskip("rich.progress")
    shown: list[Any] = []

    class Bar(rich.Progress):  # type: ignore[misc,name-defined]
        def start(self) -> None:
            shown.append("started")

        def stop(self) -> None:
            shown.append("stopped")

        def update(self, task: Any, **fields: Any) -> None:
            shown.append((self.tasks[task].description, self.tasks[task].total, fields["completed"]))

    monkeypatch.setattr(rich, "Progress", Bar)
    monkeypatch.setattr(sys, "stderr", Terminal())
    remaking = Remaking()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report(remaking, clock, 2.5)
        report(remaking, clock, 0.1, "lane 1")
    remaking.end()
    remaking.end()
    assert shown[0] == "started"
    assert shown[-1] == "stopped"
    assert shown.count("started") == shown.count("stopped") == 1
    assert ("making again, lane 0", 500, 250) in shown
    assert ("making again, lane 1", 500, 0) in shown


def test_without_a_terminal_nothing_is_drawn(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remaking = Remaking()
    with pytest.warns(UserWarning):
        report(remaking, clock, 3)
    remaking.end()
    assert capsys.readouterr() == ("", "")
