"""Audits from end to end, in this process: what is found, noted, and kept apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.audit.here import audit_here
from unbroken.errors import AuditError


def test_ranks_that_change_are_compared_by_rows_and_it_is_said(tmp_path: Path) -> None:
    findings = audit_here(tmp_path, "ranked", ranks=(1, 2))
    assert findings.verdict == "exact"
    assert any("the rows of each epoch were compared" in note for note in findings.notes)
    assert {len({each["dp_world_size"] for each in trial.topologies}) for trial in findings.trials} == {1, 2}


def test_rows_that_a_change_of_ranks_loses_are_found(tmp_path: Path) -> None:
    findings = audit_here(tmp_path, "keeps_rank", ranks=(1, 2))
    changed = [t for t in findings.trials if len({each["dp_world_size"] for each in t.topologies}) > 1]
    wrong = [trial for trial in changed if trial.verdict == "inexact"]  # at the end of an epoch none is due
    assert wrong and all(trial.lost for trial in wrong)
    assert all(trial.verdict == "exact" for trial in findings.trials if trial not in changed)


def test_ranks_with_states_of_their_own_are_resumed_each_by_its_own(tmp_path: Path) -> None:
    assert audit_here(tmp_path, "own_rank", ranks=(2,)).verdict == "exact"


def test_the_map_has_every_row_of_the_reference_and_its_epochs(tmp_path: Path) -> None:
    findings = audit_here(tmp_path, "exact")
    assert (findings.batches, findings.rows, findings.epochs) == (24, 96, (0, 40, 80))
    assert all(trial.counts == bytes([1] * 96) for trial in findings.trials)
    assert findings.loader == "tests.audit.victims.Loader"
    assert findings.versions["torch"]


def test_data_that_end_early_are_audited_as_far_as_they_go(tmp_path: Path) -> None:
    findings = audit_here(tmp_path, "short")
    assert (findings.verdict, findings.batches) == ("exact", 5)
    assert findings.notes[0] == "The data ended after 5 batches; 24 were asked for."


def test_a_pass_without_a_batch_after_the_end_of_an_epoch_is_noted(tmp_path: Path) -> None:
    findings = audit_here(tmp_path, "empty_pass", trials=12)
    assert findings.verdict == "exact"
    assert any("a loop over a fixed number of epochs trains one fewer" in note for note in findings.notes)


@pytest.mark.parametrize("save", ["torch", "json", "dcp"])
def test_each_format_carries_the_state(save: str, tmp_path: Path) -> None:
    assert audit_here(tmp_path, "exact", trials=2, save=save).verdict == "exact"


def test_a_state_that_the_format_cannot_carry_is_a_failure_and_says_so(tmp_path: Path) -> None:
    findings = audit_here(tmp_path, "opaque", trials=1, save="json")
    assert findings.verdict == "failed"
    assert "bytes is not JSON serializable" in findings.trials[0].error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batches": 3}, "at least 4 batches, and 3 were asked for"),
        ({"trials": 0}, "at least one trial"),
        ({"timeout": 0}, "must be above 0 seconds"),
        ({"workers": ()}, "--workers takes numbers"),
        ({"ranks": (0,)}, "--ranks takes numbers"),
    ],
)
def test_what_cannot_be_audited_is_refused_at_once(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(AuditError, match=text):
        audit_here(tmp_path, "exact", **options)


def test_rows_of_later_that_come_early_are_not_altered_and_those_in_their_way_are_lost(tmp_path: Path) -> None:
    """Of 96 rows compared; the reference has 144, and the buffer of 80 that is forgotten leads beyond them."""
    findings = audit_here(tmp_path, "buffered_far")
    wrong = [trial for trial in findings.trials if trial.verdict == "inexact"]
    assert len(wrong) >= 3
    assert all((trial.altered, trial.repeated, trial.unknown) == (0, 0, ()) for trial in wrong)
    assert all(trial.lost == trial.counts.count(0) > 0 for trial in wrong)
    assert [cause.name for cause in findings.causes] == ["buffer shuffle forgotten"]
    assert list(tmp_path.glob("further-*"))


def test_rows_that_the_longer_reference_has_not_either_are_altered_and_it_is_said_how_long_it_is(
    tmp_path: Path,
) -> None:
    findings = audit_here(tmp_path, "much_noise", trials=1)
    assert findings.trials[0].altered > 0
    assert "Rows that the run without a stop does not have in 96 batches are altered." in findings.notes


def test_an_exact_audit_runs_nothing_more_than_was_planned(tmp_path: Path) -> None:
    audit_here(tmp_path, "exact", trials=2)
    assert not list(tmp_path.glob("further-*"))


def test_the_same_seed_is_the_same_audit(tmp_path: Path) -> None:
    one, other = (audit_here(tmp_path / name, "noisy", trials=2, seed=8) for name in ("a", "b"))
    assert one.trials == other.trials
