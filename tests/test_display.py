"""The live view of a loader: what the line says, how often, and that nothing of it is left."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import datasets as ds
from unbroken import StatefulDataLoader, display
from unbroken.display import LoaderView, Screen, fitted, parts_of, total_of

ROOT = Path(__file__).parent.parent
SHOWN, HIDDEN = "\x1b[?25h", "\x1b[?25l"  # the cursor
STATS = {
    "epoch": 1, "step": 1234, "step_in_epoch": 234, "batches": 240, "rows": 7680, "tokens": 3_000_000,
    "wait_share": 0.031, "queue_depth": 3, "prefetch": 4, "restarts": 0, "skipped": 0,
}  # fmt: skip


class Terminal:
    """A console that writes into a text."""

    def __init__(self, width: int = 120) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=True, width=width, height=20, color_system=None)
        self.screen = Screen(self.console)

    @property
    def written(self) -> str:
        return self.file.getvalue()

    @property
    def lines(self) -> list[str]:
        """Each time a line was drawn."""
        return re.findall(r"epoch [^\r\n\x1b]*", self.written)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Where loaders draw."""
    found = Terminal()
    monkeypatch.setattr(display, "_screen", found.screen)
    yield found


class Clock:
    """Moves on by a second each time it is asked."""

    def __init__(self, step: float = 1.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def loader_of(rows: int = 20, **more: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(ds.Numbers(rows), batch_size=2, progress=True, **more)


# What it says


def test_the_line_says_where_the_run_is_and_how_it_goes() -> None:
    before = STATS | {"batches": 220, "rows": 7040, "tokens": 1_000_000}
    assert fitted(parts_of(STATS, before, 2.0, 5000)) == (
        "epoch 1, batch 234 of 5,000 · waiting 3% · 3 of 4 ready · 10.0 batches/s · 1.00M tokens/s · 320 rows/s · "
        "step 1,234"
    )


def test_what_is_not_known_or_not_there_is_left_out() -> None:
    now = STATS | {"prefetch": 0}
    assert parts_of(now, now, 0.0, None) == ["epoch 1, batch 234", "waiting 3%", "step 1,234"]
    assert parts_of(now | {"batches": 1}, now, 0.0, None) == ["epoch 1, batch 234", "step 1,234"]


def test_the_step_is_not_said_twice() -> None:
    now = STATS | {"epoch": 0, "step": 234, "prefetch": 0}
    assert parts_of(now, now, 0.0, None) == ["epoch 0, batch 234", "waiting 3%"]


@pytest.mark.parametrize(("restarts", "text"), [(1, "1 restart"), (2, "2 restarts")])
def test_what_broke_is_in_the_line(restarts: int, text: str) -> None:
    now = STATS | {"restarts": restarts, "skipped": 2000}
    assert parts_of(now, now, 0.0, None)[2:] == ["3 of 4 ready", text, "2,000 skipped", "step 1,234"]


def test_in_80_columns_the_place_the_wait_and_the_speed_stay() -> None:
    before = STATS | {"batches": 220, "rows": 7040, "tokens": 1_000_000}
    line = fitted(parts_of(STATS | {"step_in_epoch": 1234}, before, 2.0, 50_000), 80)
    assert line == "epoch 1, batch 1,234 of 50,000 · waiting 3% · 3 of 4 ready · 10.0 batches/s"


@pytest.mark.parametrize(
    ("width", "line"), [(None, "one · two · six"), (15, "one · two · six"), (14, "one · two"), (8, "one"), (1, "one")]
)
def test_what_does_not_fit_is_left_out_from_the_end(width: int | None, line: str) -> None:
    assert fitted(["one", "two", "six"], width) == line


def test_a_pass_that_is_over_is_told_as_a_whole() -> None:
    first = STATS | {"batches": 200, "wait_seconds": 7.5}
    now = STATS | {"epoch": 2, "wait_seconds": 8.5, "rows": 11_680, "tokens": 3_000_000}
    assert (
        fitted(total_of(now, first, 4.0))
        == "epoch 1, 41 batches in 4.0 s · waiting 25% · 10.0 batches/s · 1.00k rows/s"
    )
    assert fitted(total_of(now, first, 0.0)) == "epoch 1, 41 batches in 0.0 s"


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0.1234, "0.12"),
        (9.5, "9.50"),
        (42.5, "42.5"),
        (999, "999"),
        (1000, "1.00k"),
        (2_500_000, "2.50M"),
        (3e12, "3000G"),
    ],
)
def test_rates_have_three_digits(rate: float, text: str) -> None:
    assert f"{text} rows/s" in parts_of(STATS | {"rows": rate}, STATS | {"rows": 0}, 1.0, None)


# When it is drawn


def test_it_is_drawn_four_times_a_second_at_most(terminal: Terminal) -> None:
    loader = loader_of(200)
    loader.measured.clock = Clock(0.05)  # asked twice a batch: 0.1 s
    assert sum(1 for _ in loader) == 100
    assert 100 / 4 <= len(terminal.lines) <= 100 / 2


def test_the_line_moves_on_and_is_gone_at_the_end(terminal: Terminal) -> None:
    loader = loader_of()
    loader.measured.clock = Clock()
    list(loader)
    assert [line.split(" · ")[0] for line in terminal.lines if "batch 0" not in line][:10] == [
        f"epoch 0, batch {number} of 10" for number in range(1, 11)
    ]
    assert_gone(terminal)


def assert_gone(terminal: Terminal) -> None:
    assert terminal.written.count(HIDDEN) == terminal.written.count(SHOWN) > 0
    assert terminal.written.endswith("\x1b[1A\x1b[2K"), "the line is wiped away"


@pytest.mark.parametrize("end", ["break", "close", ValueError, KeyboardInterrupt])
def test_it_is_gone_however_the_loop_ends(end: Any, terminal: Terminal) -> None:
    raises = [] if isinstance(end, str) else [end("four")]

    def collate(rows: list[Any]) -> list[Any]:
        if 4 in rows and raises:
            raise raises.pop()
        return rows

    loader = loader_of(collate_fn=collate)
    loader.measured.clock = Clock()
    iterator = iter(loader)
    next(iterator)
    assert terminal.lines
    if end == "close":
        loader.close()
    elif end == "break":
        del iterator
    else:
        with pytest.raises(end, match="four"):
            list(iterator)
    assert_gone(terminal)
    before = len(terminal.lines)
    list(loader)
    assert len(terminal.lines) > before, "it is shown again with the next pass"
    assert_gone(terminal)


def test_two_loaders_have_a_line_each(terminal: Terminal) -> None:
    train, validate = loader_of(8), loader_of(4)
    train.measured.clock = validate.measured.clock = Clock()
    for _ in train:
        list(validate)
    assert "epoch 0, batch 1 of 4" in terminal.written
    assert re.search(r"epoch 0, batch 1 of 4[^\r]*\n[^\n]*epoch 0, batch 1 of 2", terminal.written)
    assert_gone(terminal)


def test_a_terminal_that_is_gone_stops_no_training(terminal: Terminal) -> None:
    loader = loader_of()
    loader.measured.clock = Clock()
    terminal.file.close()
    assert len(list(loader)) == 10


@pytest.mark.parametrize(("width", "lines"), [(12, {"epoch 1, ba…"}), (40, {"epoch 1, batch 234 · waiting 3%"})])
def test_a_line_is_as_wide_as_the_terminal_at_most(width: int, lines: set[str]) -> None:
    narrow = Terminal(width)
    view = LoaderView(lambda: lambda: STATS, None, narrow.screen)
    view.show(0.0)
    view.show(1.0)
    assert set(narrow.lines) == lines


# Where it is not drawn


def test_what_is_no_terminal_gets_a_line_in_the_log_every_half_minute(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(200)
    loader.measured.clock = Clock(0.5)  # 1 s a batch
    with caplog.at_level(logging.INFO, "unbroken"):
        list(loader)
    *found, last = [record.message.split(" · ")[0] for record in caplog.records if record.name == "unbroken"]
    assert found == [f"epoch 0, batch {number} of 100" for number in (1, 31, 61, 91)]
    assert last.startswith("epoch 0, 100 batches in ")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says, without seconds and rates."""
    return [record.message.split(" · ")[0].split(" in ")[0] for record in caplog.records if record.name == "unbroken"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_short_pass_has_a_line_at_its_first_batch_and_one_at_its_end(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = loader_of(num_workers=workers, multiprocessing_context="fork" if workers else None)
    with caplog.at_level(logging.INFO, "unbroken"):
        list(loader)
        for number, _ in enumerate(loader):
            if number == 3:
                break
        loader.close()
    assert told(caplog) == [
        "epoch 0, batch 1 of 10", "epoch 0, 10 batches", "epoch 1, batch 1 of 10", "epoch 1, 4 batches"
    ]  # fmt: skip


def test_a_pass_of_one_batch_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "unbroken"):
        list(loader_of(2))
    assert told(caplog) == ["epoch 0, batch 1 of 1"]


def test_a_forked_process_tells_nothing_of_what_its_parent_iterates(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter([STATS, STATS | {"batches": 250}])
    view = LoaderView(lambda: lambda: next(numbers), None)
    with caplog.at_level(logging.INFO, "unbroken"):
        view.show(0.0)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        view.pause()
    assert told(caplog) == ["epoch 1, batch 234"]


def test_a_log_that_breaks_at_the_end_of_a_pass_stops_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(parts: list[str]) -> None:
        raise OSError("the disk is full")

    screen = Screen()
    monkeypatch.setattr(screen, "end", fail)
    monkeypatch.setattr(display, "_screen", screen)
    assert len(list(loader_of())) == 10


def test_other_ranks_show_nothing(terminal: Terminal) -> None:
    loaders = [StatefulDataLoader(ds.Numbers(8), dp_rank=rank, dp_world_size=2, progress=True) for rank in (0, 1)]
    assert [loader.measured.progress for loader in loaders] == [True, False]
    list(loaders[1])
    assert terminal.written == ""


def test_nothing_is_shown_unless_it_is_asked_for(terminal: Terminal, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "unbroken"):
        list(StatefulDataLoader(ds.Numbers(8)))
    assert (terminal.written, caplog.records) == ("", [])


def test_a_loader_that_is_gone_is_not_kept_by_its_view(terminal: Terminal) -> None:
    view = LoaderView(lambda: None, None)
    assert view.show(1.0) == float("inf")
    assert terminal.written == ""


def test_an_iterator_that_is_left_but_kept_has_no_line(terminal: Terminal) -> None:
    loader = loader_of()
    loader.measured.clock = Clock()
    left = iter(loader)
    next(left)
    list(loader)
    assert_gone(terminal)
    assert not left.finished


def test_a_forked_process_prints_where_its_parent_did(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    screen = Terminal().screen
    view = LoaderView(lambda: lambda: STATS, None, screen)
    monkeypatch.setattr(display, "_is_terminal", lambda stream: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes anything for a terminal
    screen._console, errors = None, sys.stderr
    view.show(0.0)
    assert sys.stdout is not written
    screen.leave()
    assert (sys.stdout, sys.stderr) == (written, errors)


# A real terminal

SCRIPT = """
    import os, signal, sys, time
    import torch
    from unbroken import StatefulDataLoader

    class Rows(torch.utils.data.Dataset):
        def __len__(self): return 60
        def __getitem__(self, index): return index

    loader = StatefulDataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="fork", progress=True)
    clock = iter(range(10**6))
    loader.measured.clock = lambda: float(next(clock))
    for number, batch in enumerate(loader):
        print(f"loss of {number} is {number / 8:.3f}")
        print(f"warning {number}", file=sys.stderr)
        if number == 20 and "interrupt" in sys.argv:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
    print("done")
"""


def on_a_terminal(folder: Path, *arguments: str) -> tuple[str, int]:
    """What a program writes to its terminal, and its exit code."""
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, str(folder / "train.py"), *arguments],
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment,
    )  # fmt: skip
    os.close(theirs)
    written = b""
    while True:
        try:
            more = os.read(ours, 1 << 16)
        except OSError:  # nobody has the other end any more
            break
        if not more:
            break
        written += more
    os.close(ours)
    return written.decode(), process.wait(20)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("arguments", [[], ["interrupt"]])
def test_what_the_loop_prints_is_not_torn_and_the_cursor_comes_back(arguments: list[str], tmp_path: Path) -> None:
    written, code = on_a_terminal(tmp_path, *arguments)
    assert written.count("epoch 0, batch") > 3
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "\n")
    lines = [line.strip() for line in plain.split("\n")]
    last = 21 if arguments else 30
    for number in range(last):
        assert f"loss of {number} is {number / 8:.3f}" in lines
        assert f"warning {number}" in lines
    assert written.rindex(SHOWN) > written.rindex(HIDDEN)
    assert (code, "done" in lines, "KeyboardInterrupt" in lines) == (
        (-2, False, True) if arguments else (0, True, False)
    )
