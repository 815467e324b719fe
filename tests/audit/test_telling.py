"""What is told on a terminal: at its width, of one and of many, and the same numbers as elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from unbroken.audit.findings import Difference, Findings, Stop, Trial
from unbroken.audit.telling import tell, to_json

STOPS = (Stop(56, 58, "between batches"), Stop(130, 131, "in the middle of a fetch"))


def trial(number: int = 1, verdict: Any = "exact", workers: tuple[int, ...] = (2, 0, 2), **changes: Any) -> Trial:
    under = tuple({"num_workers": each, "dp_world_size": each or 1} for each in workers)
    return replace(Trial(number, STOPS, under, verdict), **changes)


def findings(*trials: Trial) -> Findings:
    return Findings("mydata:make_loader", "torchdata.Loader", {}, 20, 80, (0,), trials)


def headings(told: str) -> list[str]:
    return next(line for line in told.splitlines() if line.startswith("trial")).split()


@pytest.mark.parametrize("width", [80, 110])
def test_every_heading_is_whole_however_many_columns_there_are(width: int) -> None:
    whole = trial(12, "inexact", lost=999, repeated=12, reordered=144, altered=7)
    told = tell(findings(whole), width)
    counted = ["lost", "repeated", "reordered", "altered"]
    assert headings(told) == ["trial", "saved", "ended", "how", "workers", "ranks", "verdict", *counted]
    assert "…" not in told
    assert all(len(line) <= width for line in told.splitlines())


def test_what_is_the_same_or_nothing_in_all_trials_has_no_column() -> None:
    told = tell(findings(trial(1, workers=(2, 2, 2)), trial(2, "inexact", workers=(2, 2, 2), repeated=3)), 80)
    assert told.splitlines()[0] == "mydata:make_loader: Loader, workers: 2, ranks: 2"
    assert headings(told) == ["trial", "saved", "ended", "how", "verdict", "repeated"]
    assert "in the middle of a fetch" in told


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        (["exact"], "EXACT: the one trial, ended and resumed, delivered the 20 batches (80 rows) of the run"),
        (["inexact"], "INEXACT: the one trial did not deliver what the run without a stop delivers."),
        (["failed"], "FAILED: the one trial ended with an error."),
        (["exact"] * 2, "EXACT: 2 trials, ended and resumed, each delivered the 20 batches (80 rows) of the run"),
        (["exact", "inexact"], "INEXACT: 1 of 2 trials did not deliver what the run without a stop delivers."),
        (["failed", "inexact"], "INEXACT: 1 of 2 trials did not deliver what the run without a stop delivers; 1 ended"),
        (["failed", "exact"], "FAILED: of 2 trials, 1 ended with an error; the other is exact."),
        (["failed", "failed"], "FAILED: 2 trials, and none came to its end without an error."),
    ],
)
def test_the_verdict_is_told_of_one_and_of_many(verdicts: list[str], text: str) -> None:
    trials = [trial(number, verdict) for number, verdict in enumerate(verdicts, 1)]
    assert text in " ".join(tell(findings(*trials)).split())


def test_trials_have_the_same_numbers_in_all_that_is_told() -> None:
    first = Difference(3, 0, 3, "[1]", "[2]")
    found = findings(trial(1), trial(2, "inexact", lost=1, first=first), trial(3, "failed", error="gone"))
    told = tell(found)
    assert "First difference of trial 2: batch 3" in told and "Trial 3 ended with an error:" in told
    assert [each["number"] for each in json.loads(to_json(found))["trials"]] == [1, 2, 3]
