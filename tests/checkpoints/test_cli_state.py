"""``unbroken state``: what it prints, and its exit codes, on real files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from tests.checkpoints.runs import lanes_loader, position_after
from unbroken import StatefulDataLoader
from unbroken.checkpoints.files import read_position
from unbroken.cli import app

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)
runner = CliRunner()
FACTORIES = """
from tests.checkpoints.runs import Table, lanes_loader
from unbroken import StatefulDataLoader

def make():
    return lanes_loader()

def other():
    return lanes_loader(seed=2)

def table():
    return StatefulDataLoader(Table(), batch_size=4, shuffle=True)
"""


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: checkpoints of steps 4 and 8, and a module with factories."""
    folder = tmp_path_factory.mktemp("run")
    loader = lanes_loader()
    batches = iter(loader)
    for step in range(1, 9):
        next(batches)
        if step == 4:
            torch.save({"step": 4, "loader": loader.state_dict()}, folder / "4.pt")
    dcp.save({"loader": loader, "w": torch.ones(3)}, checkpoint_id=folder / "8", no_dist=True)
    (folder / "factories.py").write_text(FACTORIES)
    return folder


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the user's is imported anew by each test, and its folder is not looked into by others."""
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("factories", None)


def run(code: int, *arguments: Any) -> str:
    result = runner.invoke(app, ["state", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_show_prints_tables_or_json(saves: Path) -> None:
    for name in ("4.pt", "8"):
        text = run(0, "show", saves / name)
        for title in ("Position", "Fingerprint", "Lanes"):
            assert title in text
        assert all(len(line) <= 80 for line in text.splitlines())
    assert json.loads(run(0, "show", saves / "8", "--json"))["head"]["step"] == 8
    assert "ledger" not in run(0, "show", saves / "8", "--key", "loader", "--lanes")


def test_show_merges_the_files_of_ranks(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        paths.append(tmp_path / f"{rank}.json")
        paths[-1].write_text(json.dumps(position_after(lanes_loader(dp_rank=rank, dp_world_size=2), 3)))
    assert json.loads(run(0, "show", *paths, "--json"))["missing"] == []


def test_what_cannot_be_read_ends_with_2(saves: Path, tmp_path: Path) -> None:
    assert "There is no file or folder" in run(2, "show", tmp_path / "none")
    assert "there are 3 in it" not in run(2, "show", saves)
    assert "Name one of them" in run(2, "show", saves)
    assert "no position 'val'" in run(2, "show", saves / "8", "--key", "val")
    assert "cannot be compared" in run(2, "diff", saves / "8", tmp_path / "none")
    assert "cannot be checked" in run(2, "check", saves / "8", f"{saves}/factories.py:none")


def test_diff_says_by_its_code_whether_they_differ(saves: Path) -> None:
    assert "equal" in run(0, "diff", saves / "8", saves / "8")
    text = run(1, "diff", saves / "4.pt", saves / "8")
    assert "Lanes: how much further B is than A" in text
    assert "Ledgers" in text
    assert json.loads(run(1, "diff", saves / "4.pt", saves / "8", "--json"))["equal"] is False


def test_check_says_by_its_code_whether_it_would_load(saves: Path) -> None:
    assert "It would load." in run(0, "check", saves / "8", f"{saves}/factories.py:make")
    assert "saved 1   now 2" in run(1, "check", saves / "8", f"{saves}/factories.py:other")
    answer = json.loads(run(1, "check", saves / "4.pt", f"{saves}/factories.py:other", "--json"))
    assert answer["without_strict"] is True


def test_the_wrong_order_of_a_check_is_told(saves: Path) -> None:
    text = " ".join(run(2, "check", f"{saves}/factories.py:make", saves / "4.pt").replace("│", " ").split())
    assert "which comes first" in text
    assert "unbroken state check" in text


def test_import_writes_a_position(saves: Path, tmp_path: Path) -> None:
    others = pytest.importorskip("torchdata.stateful_dataloader")
    from tests.checkpoints.runs import Table

    loader = others.StatefulDataLoader(Table(), batch_size=4, shuffle=True)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    dcp.save({"data": loader, "w": torch.ones(3)}, checkpoint_id=tmp_path / "old", no_dist=True)
    wanted = [batch.tolist() for batch in batches]
    text = run(0, "import", tmp_path / "old", tmp_path / "new.pt", f"{saves}/factories.py:table", "--as", "train")
    assert "Written" in text
    assert "drawn by unbroken" in text
    ours = StatefulDataLoader(Table(), batch_size=4, shuffle=True)
    ours.load_state_dict(read_position(tmp_path / "new.pt", "train"))
    assert [batch.tolist() for batch in ours] == wanted
    again = run(2, "import", tmp_path / "old", tmp_path / "new.pt", f"{saves}/factories.py:table")
    assert "is there already" in again
    refused = run(2, "import", tmp_path / "old", tmp_path / "newer", f"{saves}/factories.py:make")
    assert "cannot be taken over exactly" in refused
    assert not (tmp_path / "newer").exists()
    unknown = run(2, "import", tmp_path / "old", tmp_path / "new.txt", f"{saves}/factories.py:table")
    assert "new.txt ends in .txt" in unknown
    assert not (tmp_path / "new.txt").exists()
    run(2, "import", tmp_path / "old", tmp_path / "newer", f"{saves}/factories.py:table", "--from", "elsewhere")


def test_help_says_what_each_option_means() -> None:
    for command in ("show", "diff", "check", "import"):
        text = " ".join(run(0, command, "--help").split())
        assert "--key" in text
        assert "Exit code" in text
        assert "......" not in text
    assert "Exit code" in run(0, "--help")


def test_an_interrupt_ends_with_130(saves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("unbroken.checkpoints.files.read_merged", interrupted)
    assert "Nothing was changed" in run(130, "show", saves / "8")
