"""``unbroken audit``: its options, what it prints and writes, and its exit codes."""

from __future__ import annotations

import base64
import importlib
import io
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from tests.audit.here import Here, globals_put_back
from unbroken.audit import judging
from unbroken.audit.findings import Findings
from unbroken.cli import app
from unbroken.errors import StateError

runner = CliRunner()
command = importlib.import_module("unbroken.cli.audit")  # the package has the function by this name
carry_out = judging.run_audit


@pytest.fixture(autouse=True)
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Audits run in this process; they are listed."""
    seen: list[Any] = []

    def here(audit: Any, progress: Any) -> Findings:
        seen.append(audit)
        with globals_put_back():
            return carry_out(audit, progress, Here(tmp_path / "runs"))

    monkeypatch.setattr(judging, "run_audit", here)
    monkeypatch.setenv("COLUMNS", "120")
    return seen


def audit(factory: str, *options: str) -> Any:
    return runner.invoke(app, ["audit", f"tests.audit.victims:{factory}", "--batches", "20", "--jobs", "1", *options])


def test_an_exact_loader_has_exit_code_0_and_says_what_was_delivered() -> None:
    result = audit("exact", "--trials", "7")
    assert result.exit_code == 0
    assert "EXACT: 7 trials, ended and resumed, each delivered the 20 batches (80 rows)" in result.output
    for word in ("between batches", "in the middle of a fetch", "during a save"):
        assert word in result.output


def test_an_inexact_loader_has_exit_code_1_with_both_batches_and_the_cause() -> None:
    result = audit("late", "--trials", "4")
    assert result.exit_code == 1
    assert re.search(r"INEXACT: \d of 4 trials did not deliver what the run without a stop delivers\.", result.output)
    for word in ("First difference of trial 1: batch", "expected", "found", "int64[4] [", "state updated after yield"):
        assert word in result.output
    assert "Way out: Move the position before the yield" in " ".join(result.output.split())


def test_a_loader_that_refuses_has_exit_code_1_and_its_error_is_shown_once() -> None:
    result = audit("refuses", "--trials", "2")
    assert result.exit_code == 1
    assert "FAILED: 2 trials, and none came to its end without an error." in result.output
    assert "Trials 1, 2 ended with an error:\n  ValueError: this state has 2 keys" in result.output


@pytest.mark.parametrize(
    ("factory", "options", "text"),
    [
        ("raises", [], "OSError: the corpus is not mounted"),
        ("number", [], "The factory returned an object of type int, which is no loader"),
        ("stateless", [], "has no state: there is no state_dict"),
        ("nothing", [], "delivered no batch"),
        ("nowhere", [], "has no 'nowhere'"),
        ("exact", ["--workers", "0,2"], "does not take num_workers, so that --workers cannot reach the loader"),
        ("exact", ["--ranks", "2"], "def exact(dp_world_size, dp_rank)"),
        ("own_rank", ["--ranks", "1,2"], "cannot be merged"),
        ("exact", ["--workers", "-1"], "--workers takes numbers of 0 and above"),
        ("exact", ["--ranks", "0"], "--ranks takes numbers of 1 and above"),
    ],
)
def test_an_audit_that_cannot_be_carried_out_has_exit_code_2_and_says_why(
    factory: str, options: list[str], text: str
) -> None:
    result = audit(factory, *options)
    assert result.exit_code == 2
    assert "The audit could not be carried out." in result.output
    assert text in result.output


@pytest.mark.parametrize("options", [["--kill", "9"], ["--save", "pickle"], ["--workers", "two"], ["--batches", "3"]])
def test_options_that_make_no_sense_are_refused(options: list[str]) -> None:
    assert audit("exact", *options).exit_code == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["exact", "--ledger", "a", "b"], "'exact' has no part in it"),
        (["exact", "--key", "train"], "goes with --ledger A B"),
    ],
)
def test_what_would_be_left_aside_is_refused(options: list[str], text: str, asked: list[Any]) -> None:
    result = runner.invoke(app, ["audit", *options])
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())
    assert not asked


def test_a_factory_has_to_be_named() -> None:
    result = runner.invoke(app, ["audit"])
    assert result.exit_code == 2
    assert "module:function" in result.output


def test_the_options_reach_the_audit(asked: list[Any]) -> None:
    options = [
        "--trials",
        "1",
        "--kill",
        "sigterm",
        "--save",
        "json",
        "--seed",
        "5",
        "--timeout",
        "9",
        "--ranks",
        "2,1",
    ]
    assert audit("ranked", *options, "--workers", "0").exit_code == 0
    (given,) = asked
    assert (given.trials, given.kill, given.save, given.seed, given.timeout) == (1, "sigterm", "json", 5, 9)
    assert (given.ranks, given.workers, given.batches, given.jobs) == ((2, 1), (0,), 20, 1)


def test_what_was_found_is_written_as_json(tmp_path: Path) -> None:
    assert audit("late", "--trials", "2", "--json", str(tmp_path / "a.json")).exit_code == 1
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["verdict"], found["rows"], len(found["trials"])) == ("inexact", 80, 2)
    assert [trial["number"] for trial in found["trials"]] == [1, 2]
    assert found["trials"][0]["repeated"] == 1
    assert 2 in base64.b64decode(found["trials"][0]["counts"])
    assert found["causes"][0]["name"] == "state updated after yield"


def test_the_report_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    assert audit("exact", "--trials", "1", "--report", str(tmp_path / "a.html")).exit_code == 0
    assert "<html" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, 1), (None, 2)])
def test_two_ledgers_are_compared(same: bool | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Comparison:
        def __init__(self) -> None:
            self.same = same
            self.verdict = "same" if same else "different"

        def __str__(self) -> str:
            return "lane 3 differs"

    def compare_ledgers(a: Path, b: Path, key: str | None) -> Comparison:
        assert (a, b, key) == (Path("one"), Path("other"), "train")
        if same is None:
            raise StateError("other has no ledger")
        return Comparison()

    ledgers = ModuleType("unbroken.checkpoints.ledgers")
    ledgers.compare_ledgers = compare_ledgers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ledgers.__name__, ledgers)
    result = runner.invoke(app, ["audit", "--ledger", "one", "other", "--key", "train"])
    assert result.exit_code == code
    assert ("lane 3 differs" if same is not None else "The checkpoints could not be compared.") in result.output


def test_the_help_says_what_is_done_and_what_the_exit_codes_mean() -> None:
    result = runner.invoke(app, ["audit", "--help"])
    assert result.exit_code == 0
    for word in (
        "state_dict",
        "get_state",
        "Exit code",
        "--workers",
        "--ranks",
        "--ledger",
        "sigkill|sigterm|none",
        "torch|json|dcp",
        "0,2,4",
        "--report",
    ):
        assert word in result.output


def test_a_bar_shows_what_is_going_on_and_how_much_is_done() -> None:
    told = io.StringIO()
    with Progress(*command.COLUMNS, console=Console(file=told, force_terminal=True, width=100)) as bar:
        progress = command.bar_of(bar)
        progress.begin(5)
        progress.tell("trial 1: ended in a fetch, after 7 batches")
        progress.done()
    assert "1/5" in told.getvalue()
    assert "trial 1: ended in a fetch, after 7 batches" in told.getvalue()
