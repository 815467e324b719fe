"""Real processes: killed where they halt, given up where they hang, and none of them left, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import leftovers
from unbroken.audit.crash import run_reference
from unbroken.audit.judging import run_audit
from unbroken.audit.plan import Audit
from unbroken.audit.processes import AUDITED, Processes, Stopped
from unbroken.audit.saves import saved_steps
from unbroken.audit.stretch import Halt, Orders, read_log
from unbroken.errors import AuditError


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """All that a test starts carries a mark, and is gone after it, and so are the files."""
    monkeypatch.setenv(leftovers.MARK, str(tmp_path))
    # A short path: worker processes make sockets in it.
    folder = tempfile.mkdtemp(prefix="left-")
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield
    leftovers.wait_until(lambda: not leftovers.marked(), leftovers.marked)
    left = os.listdir(folder)
    shutil.rmtree(folder)
    assert "KILL" in request.node.name or left == []


def orders(folder: Path, factory: str = "exact", **more: Any) -> Orders:
    return Orders(f"tests.audit.victims:{factory}", {}, str(folder), "torch", **{"end": 12, **more})


def test_an_audit_with_kills_passes_an_exact_loader_and_leaves_nothing(tmp_path: Path) -> None:
    factory = "tests.audit.victims:well_behaved"
    findings = run_audit(Audit(factory, batches=12, trials=2, workers=(2,), save="json"))
    assert findings.verdict == "exact", findings
    assert findings.trials[0].stops[0].how == "between batches"
    assert all(trial.stops[0].ended >= trial.stops[0].saved >= 0 for trial in findings.trials)


def test_a_run_that_halts_in_a_fetch_is_killed_before_it_has_the_batch(tmp_path: Path) -> None:
    given = orders(tmp_path / "run", saves=(3,), halt=Halt(7, "fetch", 0.5))
    with Processes(60) as processes:
        assert processes.run([given], "sigkill").error == ""
    assert len(read_log(given.log).lines) == 7


def test_a_run_that_halts_in_a_save_is_killed_there_and_has_its_last_save(tmp_path: Path) -> None:
    with Processes(60) as processes:
        given = orders(tmp_path / "run", saves=(3, 5, 8), halt=Halt(8, "save", 0.2))
        assert processes.run([given], "sigkill").error == ""
    assert len(read_log(given.log).lines) == 8
    assert saved_steps(tmp_path / "run", 1) == [3, 5]


def test_sigterm_lets_a_handler_run_and_the_process_end_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNBROKEN_TEST_TOLD", str(tmp_path / "told"))
    with Processes(60) as processes:
        assert processes.run([orders(tmp_path / "a", "lives_on", halt=Halt(4, "between"))], "sigterm").error == ""
        assert {path.name for path in tmp_path.glob("told.*")} == {"told.term", "told.exit"}


def test_a_loader_that_hangs_is_given_up(tmp_path: Path) -> None:
    before = orders(tmp_path / "a", saves=(4,), end=4)
    with Processes(60) as processes:
        assert processes.run([before], "none").error == ""
    with Processes(1) as processes:
        found = {"folder": before.folder, "world": 1, "epochs": [0]}
        ended = processes.run([orders(tmp_path / "b", "hangs", start=4, before=found)], "sigkill")
    assert ended.error == "No batch came for 1 s, and the process was ended."


def test_what_a_loader_raises_is_told_from_its_own_code_on(tmp_path: Path) -> None:
    given = orders(tmp_path / "a", "raises")
    with Processes(60) as processes:
        ended = processes.run([given], "none")
    assert read_log(given.log).said["error"] == "OSError: the corpus is not mounted"
    assert "ended with exit code 3" in ended.error
    assert "victims.py" in ended.error and "audit/run.py" not in ended.error


@pytest.mark.parametrize("factory", ["exits", "exits_hard"])
def test_a_loader_that_ends_its_process_with_success_has_failed(factory: str, tmp_path: Path) -> None:
    """Nothing more was delivered, and nothing was said of that."""
    findings = run_audit(Audit(f"tests.audit.victims:{factory}", batches=8, trials=1, kill="none"))
    assert findings.verdict == "failed"
    assert "ended" in findings.trials[0].error


def test_a_run_without_a_stop_that_ends_its_process_cannot_be_audited(tmp_path: Path) -> None:
    with Processes(60) as processes, pytest.raises(AuditError, match="exit code 0 before it had done what it was to"):
        run_reference(Audit("tests.audit.ends:EndsItself"), processes, (None, 1), "a", 0)


def test_a_thread_that_nothing_joins_does_not_keep_a_run_from_ending(tmp_path: Path) -> None:
    given = replace(orders(tmp_path / "a", end=4), factory="tests.audit.ends:Threaded")
    with Processes(20) as processes:
        assert processes.run([given], "none").error == ""
    assert len(read_log(given.log).lines) == 4


def test_a_run_without_a_stop_that_is_killed_from_outside_cannot_be_audited(tmp_path: Path) -> None:
    with Processes(60) as processes, pytest.raises(AuditError) as caught:
        run_reference(Audit("tests.audit.victims:dies"), processes, (None, 1), "a", 0)
    failed = "tests.audit.victims:dies failed in the run without a stop"
    assert str(caught.value) == f"{failed}: A process was ended by SIGSEGV. Its output ends with\n(no output)"


def test_an_audit_in_a_run_of_an_audit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUDITED, "1")
    with pytest.raises(AuditError, match="This process is itself a run of an audit") as caught:
        run_audit(Audit("mydata:make_loader"))
    assert 'if __name__ == "__main__"' in str(caught.value)


def test_nothing_is_started_after_a_stop(tmp_path: Path) -> None:
    with Processes(60) as processes:
        processes.stop()
        with pytest.raises(Stopped):
            processes.run([orders(tmp_path / "a")], "none")


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGKILL", -9)])
def test_an_audit_that_is_interrupted_ends_its_runs(
    number: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("UNBROKEN_TEST_FIFO", str(fifo))
    command = [sys.executable, "-m", "unbroken.cli", "audit", "tests.audit.victims:in_fifo", "--jobs", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as audit:
        fifo.read_text()  # waits until a run has been started
        audit.send_signal(signal.Signals[number])
        _, told = audit.communicate(timeout=60)
    assert audit.returncode == code
    assert ("Interrupted; the runs were ended." in told) == (number == "SIGINT")
