"""Where epochs and data begin and end: compared, saved at, and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.here import audit_here
from unbroken.audit.findings import Findings


def audited(folder: Path, factory: str, **options: object) -> Findings:
    return audit_here(folder, f"tests.audit.ends:{factory}", **{"trials": 10, **options})


@pytest.mark.parametrize(
    "factory", ["Alike", "OnePass", "NoneFirst", "EmptyBetween", "OwnClose", "OfIterator", "Swallows"]
)
@pytest.mark.parametrize("kill", ["sigkill", "none"])
def test_what_is_right_at_every_end_is_exact(factory: str, kill: str, tmp_path: Path) -> None:
    findings = audited(tmp_path, factory, kill=kill)
    assert [trial.error for trial in findings.trials if trial.error] == []
    assert (findings.verdict, findings.causes) == ("exact", ())
    assert all(trial.stops for trial in findings.trials)


@pytest.mark.parametrize(
    ("factory", "expected", "found"),
    [
        ("NoEnd", "epoch 1 begins with it", "epoch 0 goes on"),
        ("LongAgain", "epoch 1 begins with it", "epoch 0 goes on"),
        ("Split", "epoch 0 goes on", "epoch 1 begins with it"),
    ],
)
def test_an_epoch_that_ends_elsewhere_is_inexact_though_all_batches_are_alike(
    factory: str, expected: str, found: str, tmp_path: Path
) -> None:
    findings = audited(tmp_path, factory)
    wrong = [trial for trial in findings.trials if trial.verdict == "inexact"]
    texts = [
        (trial.first.expected.split("\n")[-1], trial.first.found.split("\n")[-1]) for trial in wrong if trial.first
    ]
    assert (expected, found) in texts
    assert all((trial.lost, trial.repeated, trial.reordered, trial.altered) == (0, 0, 0, 0) for trial in wrong)


def test_what_comes_after_the_end_of_the_data_is_repeated(tmp_path: Path) -> None:
    findings = audited(tmp_path, "OnceMore", trials=4)
    assert findings.batches == 12
    assert [(trial.verdict, trial.repeated) for trial in findings.trials] == [("inexact", 48)] * 4
    first = findings.trials[0].first
    assert first is not None
    assert (first.batch, first.expected) == (12, "nothing: the data came to its end")


def test_data_of_one_pass_are_saved_after_the_last_batch_and_before_it(tmp_path: Path) -> None:
    findings = audited(tmp_path, "LastLost")
    assert {11, 12} <= {stop.saved for trial in findings.trials for stop in trial.stops}
    wrong = [trial for trial in findings.trials if trial.verdict == "inexact"]
    assert wrong and all(trial.lost == 4 and trial.stops[-1].saved == 11 for trial in wrong)


@pytest.mark.parametrize("kill", ["sigkill", "none"])
def test_a_state_that_is_wrong_between_epochs_is_found_where_it_is_saved_there(kill: str, tmp_path: Path) -> None:
    findings = audited(tmp_path, "WrongBetween", kill=kill)
    between = [trial for trial in findings.trials if any("saved between epochs" in stop.how for stop in trial.stops)]
    assert between
    assert [trial for trial in findings.trials if trial.verdict == "inexact"] == between


def test_a_state_that_is_wrong_before_the_first_batch_is_found(tmp_path: Path) -> None:
    findings = audited(tmp_path, "WrongFirst")
    assert {trial.stops[0].saved for trial in findings.trials if trial.verdict == "inexact"} == {0}


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_that_is_lost_after_an_epoch_is_found_whatever_the_seed(seed: int, tmp_path: Path) -> None:
    findings = audited(tmp_path, "SkipsAtEnd", seed=seed)
    assert findings.verdict == "inexact"
    assert [cause.name for cause in findings.causes] == ["state ahead of what was delivered"]


def test_a_load_without_effect_is_told_where_all_epochs_are_alike_too(tmp_path: Path) -> None:
    causes = audited(tmp_path, "Restarts").causes
    assert causes[0].name == "load_state_dict after iter, or without effect"


def test_a_state_dict_that_changes_what_comes_is_told_as_such_and_not_as_a_fault_of_the_resume(tmp_path: Path) -> None:
    (cause,) = audited(tmp_path, "Eats").causes
    assert cause.name == "saving changes what comes"
    assert "rows differed before the first stop" in cause.evidence


def test_a_loader_that_counts_its_batches_after_the_yield_is_late(tmp_path: Path) -> None:
    (cause,) = audited(tmp_path, "LateBatches").causes
    assert cause.name == "state updated after yield"
    assert "the last rows before the save came again (4: " in cause.evidence


def test_an_error_that_is_no_utf_8_is_told(tmp_path: Path) -> None:
    findings = audited(tmp_path, "Wordy", trials=1)
    assert findings.verdict == "failed"
    assert findings.trials[0].error.startswith("ValueError: no file shard-\\udc80")


def test_it_is_noted_whose_state_is_used(tmp_path: Path) -> None:
    assert "The loader itself has no state; that of its iterator was saved and loaded." in (
        audited(tmp_path, "OfIterator", trials=2).notes
    )
    assert not any("has no state" in note for note in audited(tmp_path, "Alike", trials=2).notes)


def test_rows_that_another_number_of_ranks_leaves_out_are_not_called_repeated(tmp_path: Path) -> None:
    findings = audited(tmp_path, "Shares", ranks=(1, 2, 3), batches=30)
    assert findings.verdict == "inexact"
    assert all(trial.repeated == 0 for trial in findings.trials)
    assert any("drop_last" in note for note in findings.notes)
