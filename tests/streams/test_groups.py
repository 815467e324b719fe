"""Groups of rows: every row is in one part, every lane has work, and files are looked into with patience."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import BadRow
from unbroken.streams.reading import groups as reading_groups
from unbroken.streams.reading.files import SourceFile
from unbroken.streams.reading.groups import Groups, scan_files


def groups_of(*files: list[int]) -> Groups:
    """Files with so many rows in each of their groups."""
    rows = [count for listed in files for count in listed]
    found = tuple(SourceFile(f"{number}", 100) for number in range(len(files)))
    return Groups(found, np.array([len(listed) for listed in files], np.int64), np.array(rows, np.int64))


FILES = st.lists(st.lists(st.integers(0, 40), max_size=5), min_size=1, max_size=5)


@given(FILES, st.integers(1, 50))
def test_every_row_is_in_one_part_in_the_order_of_the_files(files: list[list[int]], grain: int) -> None:
    parts = groups_of(*files).parts(grain)
    found = []
    for number in range(len(parts)):
        part = parts[number]
        assert 0 < part.stop - part.start <= grain
        assert part.before == sum(files[part.file_number][: part.group])
        assert part.file.path == str(part.file_number)
        assert part.number == sum(map(len, files[: part.file_number])) + part.group
        found += [(part.file_number, part.group, row) for row in range(part.start, part.stop)]
    assert found == [
        (file, group, row)
        for file, listed in enumerate(files)
        for group, rows in enumerate(listed)
        for row in range(rows)
    ]


@given(FILES, st.integers(1, 64))
def test_every_lane_has_work_where_there_are_enough_rows(files: list[list[int]], lanes: int) -> None:
    groups = groups_of(*files)
    grain, total = groups.grain(lanes), sum(map(sum, files))
    assert len(groups.parts(grain)) >= min(lanes, total)
    if total >= lanes > sum(rows > 0 for listed in files for rows in listed):
        assert len(groups.parts(grain + 1)) < lanes, "cut more finely than lanes need"


@pytest.mark.parametrize(
    ("files", "lanes", "parts"), [([[5000]], 64, 64), ([[500], [500]], 3, 4), ([[9] * 64], 64, 64)]
)
def test_groups_are_cut_as_coarsely_as_lanes_allow(files: list[list[int]], lanes: int, parts: int) -> None:
    groups = groups_of(*files)
    assert len(groups.parts(groups.grain(lanes))) == parts


def test_a_group_is_cut_where_it_has_more_than_twice_the_share_of_a_lane() -> None:
    even = groups_of([100, 100, 100, 101])
    assert len(even.parts(even.grain(4))) == 4
    uneven = groups_of([1000, 1, 1, 1])
    assert [len(uneven.parts(uneven.grain(lanes))) for lanes in (1, 2, 4)] == [4, 4, 5]


def scan(file: SourceFile) -> int:
    if file.size < 0:
        raise BadRow(f"{file.path}: cannot be read.\nReplace it.")
    return file.size


def test_files_are_looked_into_in_their_order() -> None:
    files = [SourceFile(f"{number}", number) for number in range(200)]
    assert scan_files("read_x", files, scan, skips=False) == [(file, file.size) for file in files]


def test_a_file_that_cannot_be_read_ends_the_construction_or_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = [SourceFile("a", 1), SourceFile("b", -1), SourceFile("c", 2)]
    with pytest.raises(BadRow, match="b: cannot be read"):
        scan_files("read_x", files, scan, skips=False)
    assert caplog.messages == []
    assert [file.path for file, _ in scan_files("read_x", files, scan, skips=True)] == ["a", "c"]
    assert caplog.record_tuples == [
        ("unbroken", logging.WARNING, 'read_x: left out, as on_error="skip" says: b: cannot be read.')
    ]
    with pytest.raises(BadRow, match="read_x: none of the 1 files can be read"):
        scan_files("read_x", files[1:2], scan, skips=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("patience", "shows"), [(0.0, True), (1e9, False)])
def test_a_bar_shows_what_takes_long_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], patience: float, shows: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(reading_groups, "_PATIENCE", patience)
    monkeypatch.setattr(sys, "stderr", terminal)
    scan_files("read_x", [SourceFile(f"{n}", n) for n in range(50)], scan, skips=False)
    assert ("read_x: looking into files" in terminal.getvalue()) == shows
    assert capsys.readouterr().out == ""


def test_no_bar_shows_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading_groups, "_PATIENCE", 0.0)
    found: Any = scan_files("read_x", [SourceFile("a", 1)], scan, skips=False)
    assert [size for _, size in found] == [1]
    assert capsys.readouterr() == ("", "")
