"""The report page: what it says, that nothing is lost on the map, and that it is one inert file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unbroken.audit.columns import runs, spread
from unbroken.audit.findings import Cause, Difference, Findings, Stop, Trial
from unbroken.audit.page import shown
from unbroken.audit.picture import COLUMNS, delivered_map
from unbroken.audit.report import write_report
from unbroken.errors import AuditError

VOID = {"br", "meta"}
EMPTY_SHAPES = {"path", "rect", "circle"}
# The map goes from here to there, in the units of its SVG.
LEFT, WIDTH = 96.0, 1000.0


class Read(HTMLParser):
    """A page as a browser reads it: the text outside styles, tags with their attributes, and that all tags close."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in EMPTY_SHAPES  # elsewhere HTML takes the tag as left open
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())

    def drawn(self, kind: str) -> list[tuple[float, float]]:
        """From where to where the boxes of one kind go, in columns of 0 to 1."""
        paths = [attributes["d"] or "" for tag, attributes in self.tags if attributes.get("class") == kind]
        found = re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", "".join(paths))
        return [((float(x) - LEFT) / WIDTH, (float(x) + float(wide) - LEFT) / WIDTH) for x, wide in found]


def findings(*trials: Trial, rows: int = 40, **changes: object) -> Findings:
    plain = Findings("train.py:make", "torchdata.Loader", {"torch": "2.7.1"}, 10, rows, (0, 20), trials, seconds=83.4)
    return replace(plain, **changes)  # type: ignore[arg-type]


def trial(number: int = 1, **changes: object) -> Trial:
    plain = Trial(
        number, (Stop(3, 5, "between batches"),), ({"workers": 2}, {"workers": 1}), "exact", counts=b"\1" * 40
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def lossy(number: int = 1) -> Trial:
    first = Difference(3, 0, 3, "ids: [12, 13], label: 1", "ids: [12, 14], label: 1")
    counts = b"\1" * 12 + b"\0" * 8 + b"\2" * 4 + b"\1" * 16
    return trial(number, verdict="inexact", lost=8, repeated=4, first=first, counts=counts)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Findings], Read]:
    def write_and_read(found: Findings) -> Read:
        path = tmp_path / "made" / "report.html"
        write_report(found, path)
        assert [file.name for file in path.parent.iterdir()] == ["report.html"]
        return Read(path.read_text("utf-8"))

    return write_and_read


def test_an_exact_audit_says_so_in_words(read: Callable[[Findings], Read]) -> None:
    page = read(findings(trial(1), trial(2)))
    assert "✓ Exact." in page.text
    assert "the same batches, in the same order, in all 2 trials" in page.text
    assert "Likely causes" not in page.text and "first difference of each" not in page.text
    assert not page.drawn("hole")


def test_what_was_judged_is_told(read: Callable[[Findings], Read]) -> None:
    page = read(findings(trial(), notes=("No state of its own.",)))
    for told in ("train.py:make", "torchdata.Loader", "torch 2.7.1", "10batches in a run", "40rows in a run"):
        assert told in page.text
    assert "1 min 23 s" in page.text and "No state of its own." in page.text


def test_an_inexact_audit_tells_the_rows_the_difference_and_the_cause(read: Callable[[Findings], Read]) -> None:
    cause = Cause("Fetched ahead", "Lost rows follow the save.", "Save the loader.")
    page = read(findings(trial(1), lossy(2), causes=(cause,)))
    assert "✗ Not exact. 1 of 2 trials" in page.text.replace("exact.1", "exact. 1")
    assert "Rows over all trials: 8 lost, 4 repeated." in page.text
    for told in ("ids: [12, 13], label: 1", "ids: [12, 14], label: 1", cause.name, cause.evidence, cause.remedy):
        assert told in page.text
    assert "saved after 3 batches, ended after 5, between batches" in page.text
    assert "workers=2→ workers=1" in page.text
    assert page.drawn("hole") == [pytest.approx((12 / 40, 20 / 40))]
    assert page.drawn("double") == [pytest.approx((20 / 40, 24 / 40))]
    assert "rows 12 to 19: 8 never delivered" in page.text
    assert "rows 20 to 23: 4 delivered more than once, up to 2 times" in page.text


def test_only_the_words_that_differ_are_marked(tmp_path: Path) -> None:
    write_report(findings(lossy()), tmp_path / "r.html")
    assert re.findall("<mark>(.*?)</mark>", (tmp_path / "r.html").read_text("utf-8")) == ["13", "14"]


def test_a_difference_far_into_a_long_text_is_shown(read: Callable[[Findings], Read]) -> None:
    same = "0, " * 5000
    first = Difference(0, 0, 0, f"{same}expected {same}", f"{same}found {same}")
    page = read(findings(trial(verdict="inexact", altered=1, first=first)))
    assert "0, expected 0" in page.text and "0, found 0" in page.text and "more characters" in page.text


def test_failed_trials_show_their_error_and_an_empty_frame(read: Callable[[Findings], Read]) -> None:
    broken = trial(2, verdict="failed", counts=b"", error='Traceback:\n  KeyError: "place"')
    page = read(findings(trial(1), broken))
    assert "! Failed." in page.text and "Of 2 trials, one ended with an error instead of batches." in page.text
    assert 'KeyError: "place"' in page.text and "failed: no batch to draw" in page.text
    assert page.drawn("unjudged") == [pytest.approx((0, 1))]


def test_an_error_of_several_trials_stands_once_and_what_was_not_counted_is_blank(tmp_path: Path) -> None:
    broken = [trial(n, verdict="failed", counts=b"", error=f"KeyError: place\nin process {n}") for n in (1, 2)]
    write_report(findings(*broken), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text("utf-8")
    assert text.count("KeyError: place") == 1
    assert "Trials 1, 2 KeyError" in " ".join(" ".join(re.findall(r">([^<]+)<", text)).split()).replace(" , ", ", ")
    assert '<td class="count zero">0</td>' not in text and text.count('<td class="count zero"></td>') == 8


@pytest.mark.parametrize(
    ("trials", "text"),
    [
        ([lossy(1)], "The one trial did not deliver"),
        ([trial(1)], "in the same order, in the one trial."),
        ([trial(1, verdict="failed", counts=b"", error="gone")], "The one trial ended with an error"),
        ([trial(1), trial(2, verdict="failed", counts=b"", error="gone")], "The other was exact."),
    ],
)
def test_one_is_told_as_one(trials: list[Trial], text: str, read: Callable[[Findings], Read]) -> None:
    page = read(findings(*trials, epochs=(0,)))
    assert text in page.text and "1epoch1 min" in page.text and "1 of 1" not in page.text


def test_a_trial_that_failed_on_its_way_is_drawn_as_far_as_it_came(read: Callable[[Findings], Read]) -> None:
    page = read(findings(trial(verdict="failed", counts=b"\1" * 10, error="gone")))
    assert page.drawn("unjudged") == [pytest.approx((10 / 40, 1))] and page.drawn("once") == [pytest.approx((0, 0.25))]


def test_without_a_trial_there_is_no_verdict(read: Callable[[Findings], Read]) -> None:
    page = read(Findings("a:b", "x", {}, 0, 0, (), ()))
    assert "No verdict." in page.text and "Exact" not in page.text


def test_a_run_without_rows_is_told_and_not_drawn(read: Callable[[Findings], Read]) -> None:
    page = read(findings(trial(counts=b""), rows=0, batches=0, epochs=(0,)))
    assert "The run has no row to draw." in page.text


def test_nothing_from_users_becomes_markup_or_leaves_unseen(read: Callable[[Findings], Read]) -> None:
    evil = "<script>alert(1)</script>'\"&<b onclick=x>\x00\u202e\ud800"
    page = read(
        findings(
            trial(
                verdict="inexact",
                stops=(Stop(1, 2, evil),),
                topologies=({evil: evil},),
                first=Difference(1, 0, 1, evil, evil + "!"),
                error=evil,
            ),
            factory=evil,
            loader=evil,
            versions={evil: evil},
            causes=(Cause(evil, evil, evil),),
            notes=(evil,),
        )
    )
    kinds = Counter(tag for tag, _ in page.tags)
    assert not kinds["script"] and kinds["b"] == 6  # the six numbers at the top
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count("<script>alert(1)</script>") >= 12 and "\\x00\\u202e\\ud800" in page.text


def test_the_page_fetches_nothing_and_runs_nothing(tmp_path: Path) -> None:
    write_report(findings(lossy()), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "default-src 'none'" in text and "//" not in text and "@import" not in text
    assert set(re.findall(r"url\((.*?)\)", text)) == {"#hatch"}
    tags = Read(text).tags
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in tags}
    assert {attributes["href"] for _, attributes in tags if "href" in attributes} == {"#trial-1"}
    assert not any("src" in attributes for _, attributes in tags)


def test_both_modes_and_print_have_their_looks(tmp_path: Path) -> None:
    write_report(findings(lossy()), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text("utf-8")
    dark, printed = text.split("@media print")
    assert "prefers-color-scheme: dark" in dark and "--ground: #ffffff" in printed
    for name in set(re.findall(r"var\((--\w+)\)", text)):
        assert text.count(f"{name}:") >= 3


@given(
    counts=st.binary(max_size=60) | st.lists(st.sampled_from([0, 1, 1, 1, 2]), max_size=300).map(bytes),
    beyond=st.integers(0, 20),
    columns=st.integers(1, 80),
)
@example(counts=b"\1" * 250 + b"\0" + b"\1" * 49, beyond=0, columns=2)
def test_no_hole_and_no_double_is_averaged_away(counts: bytes, beyond: int, columns: int) -> None:
    total = max(1, len(counts) + beyond)
    columns = min(columns, total)
    drawn = runs(counts, total, columns)
    for row, count in enumerate(counts):
        (run,) = [run for run in drawn if run.begin <= row < run.end]
        assert run.missing if count == 0 else run.more if count > 1 else True
        assert run.first <= row * columns // total + 1 and row * columns // total < run.last
    assert sum(run.missing for run in drawn) == counts.count(0)
    assert sum(run.more for run in drawn) == sum(count > 1 for count in counts)
    assert [run.begin for run in drawn[1:]] == [run.end for run in drawn[:-1]]
    assert [run.first for run in drawn[1:]] == [run.last for run in drawn[:-1]]


@given(places=st.lists(st.integers(0, 500), max_size=20), total=st.integers(1, 400), columns=st.integers(1, 60))
def test_every_unknown_row_is_in_a_marked_column(places: list[int], total: int, columns: int) -> None:
    columns = min(columns, total)
    marked = {column for first, last in spread(places, total, columns) for column in range(first, last)}
    assert marked == {min(place * columns // total, columns - 1) for place in places}


@pytest.mark.parametrize("rows", [1, 2, 39, COLUMNS, COLUMNS + 1, 7919, 100_000])
def test_every_hole_and_double_is_drawn_where_it_lies(rows: int) -> None:
    places = {0: 0, rows // 3: 2, rows // 2: 0, rows // 2 + 2: 3, rows - 1: 0}
    counts = bytearray(b"\1" * rows)
    for row, count in places.items():
        if row < rows:
            counts[row] = count
    page = Read(delivered_map(findings(trial(verdict="inexact", counts=bytes(counts)), rows=rows)))
    slack = 1.5 / COLUMNS
    for kind, wanted in (("hole", lambda count: count == 0), ("double", lambda count: count > 1)):
        boxes = page.drawn(kind)
        hit = [row for row, count in enumerate(counts) if wanted(count)]
        for row in hit:
            assert any(left - slack <= (row + 0.5) / rows <= right + slack for left, right in boxes)
        for left, right in boxes:
            assert -1e-6 <= left and right <= 1 + 1e-6
            assert right - left >= 0.0029  # a single row of very many is still seen
            assert any(left - slack <= (row + 0.5) / rows <= right + slack for row in hit)


def test_unknown_rows_and_the_first_difference_have_signs_of_their_own(read: Callable[[Findings], Read]) -> None:
    page = read(findings(replace(lossy(), unknown=(3, 4, 90), altered=3)))
    assert "3 rows that the run without a stop does not have; the first came in place 3 of the trial" in page.text
    assert "the first difference: batch 3 (epoch 0, step 3)" in page.text
    assert "stop 1: saved after 3 batches, ended after 5, between batches" in page.text
    assert "epoch 1 begins at row 20" in page.text


def test_many_rows_and_trials_make_a_page_of_reasonable_size(tmp_path: Path) -> None:
    torn = (b"\1" * 200 + b"\0" * 200 + b"\2" * 200 + b"\0\2" * 100) * 125  # a new look in every column
    trials = [trial(n, verdict="inexact", counts=torn, unknown=tuple(range(0, 100_000, 401))) for n in range(50)]
    write_report(findings(*trials, rows=100_000, epochs=tuple(range(0, 100_000, 50))), tmp_path / "torn.html")
    assert (tmp_path / "torn.html").stat().st_size < 2_000_000
    plain = [trial(n, counts=b"\1" * 100_000) for n in range(50)]
    write_report(findings(*plain, rows=100_000), tmp_path / "plain.html")
    assert (tmp_path / "plain.html").stat().st_size < 100_000


def test_a_report_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "r.html", tmp_path / "folder", tmp_path / ("n" * 300), tmp_path / "nul\0"):
        with pytest.raises(AuditError, match=r"could not be written to .*The audit itself was carried out \(Exact\)"):
            write_report(findings(trial()), path)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept" and not os.listdir(tmp_path / "folder")


def test_an_older_report_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")
    write_report(findings(trial()), path)
    assert path.read_text("utf-8").startswith("<!DOCTYPE html>") and os.listdir(tmp_path) == ["r.html"]


@given(st.text(st.characters()))
def test_shown_text_is_inert_and_can_be_written(text: str) -> None:
    made = shown(text)
    assert not set("<>\"'") & set(made)
    made.encode("utf-8")
    assert all(char.isprintable() or char == "\n" for char in made)
