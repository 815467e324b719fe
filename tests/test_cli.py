"""The command line: what it offers, its exit codes, and how it ends when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import unbroken.demo
from unbroken.cli import app

runner = CliRunner()


def test_help_names_the_commands() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "never loses its place" in result.output


def test_without_a_command_there_is_help() -> None:
    assert "Usage" in runner.invoke(app, []).output


def test_the_version_is_printed() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("unbroken ")


def test_the_help_of_the_demo_says_what_is_compared_and_what_the_exit_codes_mean() -> None:
    result = runner.invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    for word in ("SIGKILL", "Exit code", "--skip-loader-state", "--keep", "--trainer", "--data", "Parquet"):
        assert word in result.output


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_is_the_verdict(passed: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unbroken.demo, "run_demo", lambda plan, console: passed)
    assert runner.invoke(app, ["demo"]).exit_code == code


def test_the_options_reach_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans: list[Any] = []
    monkeypatch.setattr(unbroken.demo, "run_demo", lambda plan, console: plans.append(plan) or True)
    options = ["demo", "--out", str(tmp_path), "--keep", "--skip-loader-state", "--kill-at", "6", "--quick"]
    assert runner.invoke(app, options).exit_code == 0
    (plan,) = plans
    assert (plan.out, plan.keep, plan.skip_loader_state, plan.kill_at, plan.steps) == (tmp_path, True, True, 6, 12)
    assert plan.data is None


def test_the_data_reaches_the_demo_in_one_option_or_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    monkeypatch.setattr(unbroken.demo, "run_demo", lambda plan, console: plans.append(plan) or True)
    about = ["--format", "parquet", "--text", "body", "--dtype", "uint16", "--vocab-size", "300"]
    for paths in (["--data", "a", "b", "c"], ["--data", "a", "--data", "b", "c"]):
        assert runner.invoke(app, ["demo", *paths, *about]).exit_code == 0
    expected = unbroken.demo.Data(("a", "b", "c"), "parquet", "body", "uint16", 300)
    assert [plan.data for plan in plans] == [expected, expected]


@pytest.mark.parametrize("options", [["a.parquet"], ["--text", "body"], ["--dtype", "uint16"]])
def test_options_about_data_without_data_are_refused(options: list[str]) -> None:
    result = runner.invoke(app, ["demo", *options])
    assert result.exit_code == 2
    assert "--data PATH" in result.output


@pytest.mark.parametrize("options", [["--trainer", "nowhere.py"], ["--kill-at", "3"], ["--data", "x.py"]])
def test_a_demo_that_cannot_be_run_has_an_exit_code_of_its_own(options: list[str], tmp_path: Path) -> None:
    result = runner.invoke(app, ["demo", *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "The demo could not be run." in result.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_ends_its_runs(number: signal.Signals, code: int, tmp_path: Path) -> None:
    started, trainer = tmp_path / "started", tmp_path / "waits.py"
    os.mkfifo(started)
    trainer.write_text(
        f"import os, pathlib, signal\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\nsignal.pause()\n"
    )
    options = ["demo", "--quick", "--trainer", str(trainer), "--out", str(tmp_path / "out")]
    with subprocess.Popen([sys.executable, "-m", "unbroken.cli", *options], stdout=subprocess.PIPE) as demo:
        process = int(started.read_text())  # waits until the run has been started
        demo.send_signal(number)
        demo.communicate(timeout=60)
    assert demo.returncode == code
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
