"""Each known cause is found on a loader made for it, and no cause is named without evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.audit import victims
from tests.audit.here import audit_here
from unbroken.audit import judging
from unbroken.audit.findings import Findings
from unbroken.audit.probe import probe
from unbroken.audit.subject import Subject


def names(findings: Findings) -> list[str]:
    return [cause.name for cause in findings.causes]


@pytest.mark.parametrize(
    ("factory", "cause", "seen"),
    [
        ("late", "state updated after yield", "the last row before the save came again (1: int64[] [67])"),
        (
            "buffered",
            "buffer shuffle forgotten",
            "7 of the next 18 rows never came, and the others came in another order",
        ),
        ("forgets_epoch", "epoch not in the state", "delivered what belongs to epoch 0"),
        ("noisy", "augmentation not seeded", "other values of 'value'"),
        ("only_noise", "augmentation not seeded", "a fresh run under other seeds has other rows too"),
        ("global_order", "order not seeded", "a fresh run under other seeds has another order too"),
        ("no_effect", "load_state_dict after iter, or without effect", "the loader began at the start of the run"),
        ("begun", "load_state_dict after iter, or without effect", "Begun gave its first row again at 3 of them"),
        ("document_ahead", "state ahead of what was delivered", "the next 2 rows were passed over"),
        ("coarse", "state behind what was delivered", "from before the save came again"),
        ("ahead", "state ahead of what was delivered", "the next 4 rows were passed over"),
        ("live_ahead", "live buffer handed out", "in the same object"),
    ],
)
def test_each_known_cause_is_found_with_its_evidence(factory: str, cause: str, seen: str, tmp_path: Path) -> None:
    findings = audit_here(tmp_path, factory)
    assert findings.verdict == "inexact"
    assert cause in names(findings)
    (found,) = (each for each in findings.causes if each.name == cause)
    assert seen in found.evidence
    assert found.remedy


@pytest.mark.parametrize(
    "factory", ["late", "buffered", "forgets_epoch", "noisy", "global_order", "no_effect", "ahead"]
)
def test_a_loader_that_is_wrong_in_one_way_has_one_cause(factory: str, tmp_path: Path) -> None:
    assert len(audit_here(tmp_path, factory).causes) == 1


@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        ("late", "state updated after yield"),
        ("coarse", "state behind what was delivered"),
        ("document_ahead", "state ahead of what was delivered"),
        ("buffered", "buffer shuffle forgotten"),
    ],
)
def test_causes_are_found_behind_workers_too(factory: str, cause: str, tmp_path: Path) -> None:
    findings = audit_here(tmp_path, factory, workers=(2,), trials=4)
    assert findings.verdict == "inexact"
    assert names(findings) == [cause]


def test_a_dataset_that_hands_out_its_live_buffer_is_found_by_looking_at_it_alone() -> None:
    assert probe(lambda: Subject(victims.live()))["live"] == 1
    assert probe(lambda: Subject(victims.late()))["live"] is None
    assert probe(lambda: Subject(victims.exact()))["dataset"] == "Loader"


def test_what_the_look_showed_is_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"dataset": "Tokens", "asked": 0, "late": 0, "start": 0, "live": 2}
    monkeypatch.setattr(judging, "run_probe", lambda audit, processes: seen)
    (cause,) = audit_here(tmp_path, "halves", trials=1).causes
    assert cause.name == "live buffer handed out"
    assert cause.evidence.startswith("Tokens by itself: the state handed out after 2 rows had changed")


def test_a_dataset_that_is_late_is_asked_itself(tmp_path: Path) -> None:
    (cause,) = audit_here(tmp_path, "late").causes
    assert (
        "Opened by itself at 3 of its own states, Late gave the row before the place once more at 3" in cause.evidence
    )


def test_a_loader_that_differs_between_fresh_runs_is_not_repeatable(tmp_path: Path) -> None:
    findings = audit_here(tmp_path, "clock")
    assert names(findings) == ["not repeatable", "augmentation not seeded"]
    assert "from row 0 on, in the rows themselves" in findings.causes[0].evidence


@pytest.mark.parametrize("factory", ["exact", "well_behaved", "live"])
def test_an_exact_loader_has_no_cause_though_its_dataset_may_be_odd(factory: str, tmp_path: Path) -> None:
    findings = audit_here(tmp_path, factory)
    assert (findings.verdict, findings.causes) == ("exact", ())


def test_an_error_has_no_cause_but_its_text(tmp_path: Path) -> None:
    findings = audit_here(tmp_path, "refuses")
    assert (findings.verdict, findings.causes) == ("failed", ())
    assert findings.trials[0].error.startswith("ValueError: this state has 2 keys, and three were expected")


@pytest.mark.parametrize(
    ("options", "name"), [({"workers": (0, 2)}, "workers"), ({"ranks": (1, 2)}, "ranks"), ({"workers": (2,)}, "")]
)
def test_a_state_that_only_its_own_number_of_workers_or_ranks_loads_is_said_to_be_bound(
    options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    findings = audit_here(tmp_path, "bound", **options)
    failed = [trial.number for trial in findings.trials if trial.verdict == "failed"]
    assert names(findings) == ([f"state bound to the number of {name}"] if name else [])
    assert bool(failed) == bool(name)
    if name:
        listed = f"{', '.join(map(str, failed))}), and none on the same number did."
        assert findings.causes[0].evidence.endswith(listed) and f"--{name} N" in findings.causes[0].remedy


def test_where_every_resume_fails_nothing_is_said_of_workers(tmp_path: Path) -> None:
    assert audit_here(tmp_path, "bound_refuses", workers=(0, 2)).causes == ()


def test_what_fits_no_known_cause_is_told_without_one(tmp_path: Path) -> None:
    findings = audit_here(tmp_path, "halves")
    assert (findings.verdict, findings.causes) == ("inexact", ())
