"""Two positions, held against each other field by field and lane by lane."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.checkpoints.runs import Table, lanes_loader, mixed_loader, position_after, text_files
from unbroken import StatefulDataLoader, read_jsonl, read_tokens
from unbroken.checkpoints.differ import Comparison, compare
from unbroken.errors import InvalidState


def compared(a: dict[str, str], b: dict[str, str]) -> Comparison:
    return compare(a, b, "a", "b")


def shown(comparison: Comparison, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(comparison.tables())
    return " ".join(capture.get().split())


def meanings(comparison: Comparison) -> dict[str, str]:
    return {change.field: change.meaning for change in comparison.fingerprint}


def test_equal_positions_are_equal() -> None:
    position = position_after(lanes_loader(), 4)
    found = compared(position, dict(reversed(position.items())))
    assert found.equal
    assert shown(found) == "The positions are equal."


def test_lanes_are_as_far_apart_as_they_are() -> None:
    loader = lanes_loader()
    first = position_after(loader, 4)
    list(loader)
    later = position_after(loader, 8)
    found = compared(first, later)
    assert not found.equal
    assert {change.field for change in found.header} == {"step", "began", "at"}
    by_name = {change.name: change for change in found.lanes}
    assert len(by_name) == 6
    change = by_name["lane-000000"]
    assert (change.epochs, change.turns, change.delivered, change.count) == (2, 1, 3, 16)
    assert shown(compared(later, first)).count("-2") >= 1
    assert found.ledgers.verdict == "unknown"


def test_lanes_that_moved_alike_are_one_line() -> None:
    text = shown(compared(lanes_loader().state_dict(), position_after(lanes_loader(), 8)))
    assert "0-1 +0 +2 +6 +6" in text
    assert "2-5 +0 +1 +3 +3" in text


def test_a_lane_that_only_one_of_them_has_is_told() -> None:
    whole = position_after(lanes_loader(), 4)
    found = compared(whole, {name: text for name, text in whole.items() if name != "lane-000003"})
    (change,) = found.lanes
    assert (change.name, change.a, change.b, change.turns) == ("lane-000003", True, False, None)
    assert "3 only in A" in shown(found)


def test_fields_of_the_fingerprint_have_their_meaning(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 9)
    (tmp_path / "b.jsonl").write_text("{}\n" * 8)
    one = StatefulDataLoader(read_jsonl(tmp_path / "a.jsonl").shuffle(5), seed=1, batch_size=2)
    other = StatefulDataLoader(read_jsonl(tmp_path / "b.jsonl").shuffle(6).take(3), seed=2, batch_size=3)
    found = compared(one.state_dict(), other.state_dict())
    assert meanings(found) == {
        "dataset": "data-changing",
        "seed": "order-changing",
        "batch_size": "safe",
        "stages": "data-changing, refused within an epoch",
        "files": "data-changing, refused within an epoch",
        "window": "order-changing",
        "take": "data-changing",
    }
    assert "refused within an epoch" in shown(found, width=160)


def test_a_length_of_rows_is_held_where_they_are_read_so(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(200))
    (tmp_path / "a.jsonl").write_text("{}\n")

    def tokens(length: int) -> dict[str, str]:
        return StatefulDataLoader(read_tokens(tmp_path / "a.bin", dtype="uint16", seq_len=length)).state_dict()

    def packed(length: int) -> dict[str, str]:
        return StatefulDataLoader(read_jsonl(tmp_path / "a.jsonl").tokenize(list).pack(length)).state_dict()

    assert meanings(compared(tokens(5), tokens(6)))["seq_len"] == "safe between epochs"
    assert meanings(compared(packed(5), packed(6)))["seq_len"] == "safe where no later stage counts rows"


def test_sources_that_come_and_go_are_safe(tmp_path: Path) -> None:
    position = mixed_loader(text_files(tmp_path)).state_dict()
    header = json.loads(position["unbroken"])
    fields = {name: value for name, value in header["fingerprint"].items() if not name.startswith("code: ")}
    fields |= {"mix_sources": ["web"], "web: window": 11}
    changed = {**position, "unbroken": json.dumps({**header, "fingerprint": fields})}
    found = meanings(compared(position, changed))
    assert found["mix_sources"] == "safe"
    assert found["web: window"] == "order-changing"
    assert found["code: files"] == "safe: the source came or went"


def test_places_of_map_style_datasets_differ_by_field() -> None:
    a, b = (position_after(StatefulDataLoader(Table(), batch_size=4, seed=seed, shuffle=True), 4) for seed in (1, 2))
    found = compared(a, b)
    assert {change.field for change in found.header} == {"run"}
    assert meanings(found) == {"seed": "order-changing"}
    later = position_after(StatefulDataLoader(Table(), batch_size=4, seed=1, shuffle=True), 5)
    assert "rank-0000: rows" in {change.field for change in compared(a, later).header}


def test_leaves_that_differ_in_nothing_that_is_shown_are_named() -> None:
    position = position_after(lanes_loader(), 9)
    leaf = json.loads(position["lane-000002"])
    leaf["lane"]["last"] = 5
    found = compared(position, {**position, "lane-000002": json.dumps(leaf)})
    assert not found.equal
    assert found.others == ["lane-000002"]
    assert "no table shows: lane-000002" in shown(found)


def test_the_comparison_is_json() -> None:
    found = compared(position_after(lanes_loader(), 4), position_after(lanes_loader(), 5))
    read = json.loads(found.to_json())
    assert (read["equal"], read["ledgers"]["verdict"], len(read["ledgers"]["rows"])) == (False, "unknown", 6)


def test_what_is_no_position_is_an_error() -> None:
    with pytest.raises(InvalidState):
        compared({}, lanes_loader().state_dict())
