"""What a position says is shown: header, fingerprint, lanes, sources, weights, and what was left out."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.checkpoints.runs import Squares, Table, lanes_loader, mixed_loader, position_after, text_files
from unbroken import StatefulDataLoader, concat, from_iterable, read_jsonl
from unbroken.checkpoints.summary import Summary, summarize
from unbroken.checkpoints.tables import tables_of
from unbroken.errors import InvalidState, StateError


def shown(position: dict[str, str], *, every_lane: bool = False, width: int = 80) -> str:
    """The text, each line without the spaces at its end."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(tables_of(summarize(position), "ckpt", every_lane=every_lane))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def table_of(text: str, title: str) -> list[list[str]]:
    """The words of each line of one table, the header first."""
    lines = text.split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((number for number in range(start, len(lines)) if not lines[number]), len(lines))
    return [line.split() for line in lines[start:end]]


def test_the_header_and_the_fingerprint_are_shown() -> None:
    text = shown(position_after(lanes_loader(), 4))
    for line in (
        ["kind", "iterable"],
        ["steps", "4,", "of", "which", "4", "in", "this", "epoch"],
        ["lanes", "6"],
        ["samples", "delivered", "12", "over", "all", "epochs"],
        ["dataset", "Squares"],
        ["batch_size", "3"],
    ):
        assert line in [words.split() for words in text.split("\n")]


def test_the_header_s_own_place_is_shown_only_where_it_is_another() -> None:
    position = position_after(lanes_loader(), 4)
    assert "header written at" not in shown(position)
    header = json.loads(position["unbroken"])
    other = {**position, "unbroken": json.dumps({**header, "at": [0, 3, 3]})}
    assert "header written at  epoch 0, step 3 of it, step 3 in all" in shown(other)


def test_steps_that_are_in_no_ledger_are_told() -> None:
    """As after a state of another loader was taken over."""
    position = lanes_loader().state_dict()
    assert "not in the ledger" not in shown(position)
    taken = {
        name: json.dumps({**json.loads(leaf), "step": 5}) if name != "unbroken" else leaf
        for name, leaf in position.items()
    }
    assert "0 over all epochs; the steps before are not in the ledger" in " ".join(shown(taken).split())


def test_ranks_whose_leaves_are_missing_are_named() -> None:
    position = position_after(StatefulDataLoader(Squares(), batch_size=3), 2)
    header = json.loads(position["unbroken"])
    part = {**position, "unbroken": json.dumps({**header, "ranks": 3})}
    assert summarize(part).missing_ranks == [1, 2]
    assert "not here are 1-2" in " ".join(shown(part).split())
    assert json.loads(summarize(part).to_json())["missing_ranks"] == [1, 2]
    alone = {"unbroken": lanes_loader().state_dict()["unbroken"]}
    assert summarize(alone).missing == list(range(6))


def test_each_lane_is_shown_with_its_ledger() -> None:
    position = position_after(lanes_loader(), 8)
    summary = summarize(position)
    assert [(lane.turns, lane.delivered, lane.count) for lane in summary.lanes] == [(2, 6, 6)] * 2 + [(1, 3, 3)] * 4
    rows = table_of(shown(position), "Lanes")
    assert rows[0][:3] == ["lane", "epoch", "turns"]
    for lane, row in zip(summary.lanes, rows[1:], strict=True):
        assert row[:6] == [
            str(int(lane.name[5:])),
            "0",
            str(lane.turns),
            *[str(lane.delivered)] * 2,
            f"{lane.digest:016x}",
        ]
        assert len(" ".join(row)) <= 80


def test_many_lanes_are_shown_in_groups_or_one_by_one() -> None:
    position = position_after(lanes_loader(lanes=40, batch_size=1), 45)
    assert table_of(shown(position), "Lanes (those that stand alike")[1:] == [
        ["lanes", "epoch", "turns", "delivered", "samples", "in", "all"],
        ["5-39", "0", "1", "1", "1"],
        ["0-4", "0", "2", "2", "2"],
    ]
    assert len(table_of(shown(position, every_lane=True), "Lanes")) == 41


def test_the_lanes_of_a_plain_loader_are_shown() -> None:
    position = position_after(StatefulDataLoader(Squares(), batch_size=3), 2)
    assert [row[0] for row in table_of(shown(position), "Lanes")] == ["lane", "0"]
    assert "1, of which each has its own leaf" in shown(position)


def test_lanes_of_other_ranks_are_named_as_missing() -> None:
    summary = summarize(position_after(lanes_loader(dp_rank=1, dp_world_size=3), 2))
    assert summary.missing == [0, 2, 3, 5]
    assert "6; not here are 0, 2-3, 5 (of other ranks)" in shown(
        position_after(lanes_loader(dp_rank=1, dp_world_size=3), 1)
    )


def test_sources_of_a_mix_are_shown_with_rows_and_tokens(tmp_path: Path) -> None:
    position = position_after(mixed_loader(text_files(tmp_path)), 12)
    summary = summarize(position)
    places = [place for lane in summary.lanes for place in lane.stream.places]
    assert {place.source for place in places} == {"web", "code"}
    assert {place.format for place in places} == {"read_jsonl"}
    assert all(place.rows and place.tokens and place.anchored and place.counted_early for place in places)
    rows = {row[0]: row for row in table_of(shown(position, width=200), "Sources, in this epoch")}
    for name in ("web", "code"):
        of_source = [place for place in places if place.source == name]
        totals = [f"{sum(getattr(place, count) for place in of_source):,}" for count in ("rows", "tokens")]
        assert rows[name][1:3] == totals
    assert summary.tokens == 48 * 16
    assert summary.lanes[0].stream.documents is not None


def test_the_place_of_a_source_is_that_of_its_state(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(["{}"] * 50))
    position = position_after(StatefulDataLoader(read_jsonl(tmp_path / "rows.jsonl"), batch_size=5, lanes=2), 4)
    for lane in summarize(position).lanes:
        (place,) = lane.stream.places
        state = json.loads(position[lane.name])["lane"]["anchor"]["after"]
        assert (place.chunk, place.place, place.unit) == (state["chunk"], state["place"], "byte")
        assert (place.source, place.anchored, place.rows) == ("", False, None)
    assert "read_jsonl" in [row[0] for row in table_of(shown(position), "Sources")]


def test_streams_one_after_another_and_iterables_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n" * 20)
    stream = concat([read_jsonl(tmp_path / "rows.jsonl"), from_iterable(rows_of_lane)])
    loader = StatefulDataLoader(stream, batch_size=5, lanes=1)
    batches = iter(loader)
    found = []
    for _ in range(6):
        next(batches)
        (lane,) = summarize(loader.state_dict()).lanes
        found += [(place.source, place.format) for place in lane.stream.places]
    assert list(dict.fromkeys(found)) == [("0", "read_jsonl"), ("1", "from_iterable")]


def rows_of_lane(lane: int, lanes: int) -> range:
    return range(lane, 30, lanes)


def test_the_history_of_weights_is_shown(tmp_path: Path) -> None:
    folder = text_files(tmp_path)
    first = position_after(mixed_loader(folder), 6)
    loader = mixed_loader(folder, {"web": 1, "code": 3})
    loader.load_state_dict(first)
    position = position_after(loader, 6)
    told = shown(position, width=120)
    rows = table_of(told, "History of weights")
    assert [row[-4:] for row in rows[1:]] == [["web", "0.7,", "code", "0.3"], ["web", "1,", "code", "3"]]
    assert all(weights.epoch == 0 for lane in summarize(position).lanes for weights in lane.stream.weights)


def test_a_schedule_of_weights_is_shown_step_by_step(tmp_path: Path) -> None:
    weights = {0: {"web": 1, "code": 0}, 50: {"web": 1, "code": 1}}
    told = shown(position_after(mixed_loader(text_files(tmp_path), weights), 2), width=120)
    assert "from row 0: web 1, code 0" in told
    assert "from row 50: web 1, code 1" in told


def test_rows_that_were_left_out_are_counted_and_named(tmp_path: Path) -> None:
    loader = mixed_loader(text_files(tmp_path))
    summary = summarize(position_after(loader, 12))
    left_out = [each for lane in summary.lanes for each in lane.stream.left_out]
    assert [(each.source, each.count) for each in left_out] == [("web", 1)]
    text = shown(loader.state_dict(), width=200)
    assert table_of(text, "Left out")[1][:4] == ["rows", "of", "web", "1"]
    assert "web.jsonl, byte 126" in " ".join(text.split())


@pytest.mark.parametrize("lanes", [6, None])
def test_samples_that_were_left_out_are_counted_and_named(lanes: int | None) -> None:
    options: dict[str, Any] = {"lanes": lanes} if lanes else {}
    loader = StatefulDataLoader(Squares(failing=(1, 8)), batch_size=3, on_error="skip", **options)
    text = shown(position_after(loader, 6), width=160)
    rows = table_of(text, "Left out")[1:]
    assert rows[0][:2] == ["samples", "2"]
    assert "row 8 is bad" in text


def test_a_map_style_dataset_shows_its_place() -> None:
    position = position_after(StatefulDataLoader(Table(), batch_size=4, shuffle=True), 5)
    (order,) = summarize(position).orders
    assert (order.name, order.rows, order.step, order.epoch) == ("rank-0000", 20, 5, 0)
    assert table_of(shown(position), "Place in the order")[1][:5] == [
        "rank-0000",
        "5",
        "0",
        "20",
        f"{order.digest:016x}",
    ]
    assert "a drawn seed" in shown(position)
    shared = StatefulDataLoader(Table(), batch_size=4, shuffle=True, seed=1, dp_rank=0, dp_world_size=2)
    position = position_after(shared, 3)
    assert table_of(shown(position), "Place in the order")[1] == [
        "place",
        "3",
        "0",
        "24",
        "none:",
        "shared",
        "seed",
        "and",
        "epoch",
    ]
    generator = torch.Generator()
    position = position_after(StatefulDataLoader(Table(), shuffle=True, generator=generator), 1)
    assert "a generator" in shown(position)


def test_an_order_with_holes_and_one_of_a_sampler_are_told(tmp_path: Path) -> None:
    position = position_after(StatefulDataLoader(Table(), sampler=list(range(30, 0, -1))), 7)
    assert "a sampler of its own, 7 indices in" in " ".join(shown(position).split())
    leaf = json.loads(position["rank-0000"])
    leaf["beyond"] = [[2, 4]]
    assert "2-4" in shown({**position, "rank-0000": json.dumps(leaf)})


def test_fields_that_are_seldom_there_are_shown() -> None:
    position = position_after(lanes_loader(), 4)
    header = json.loads(position["unbroken"])
    changed = {"unbroken": json.dumps({**header, "world": 8})}
    for name in position.keys() - {"unbroken"}:
        leaf = json.loads(position[name])
        changed[name] = json.dumps({**leaf, "passed": [[3, 5], [9, 10]], "stopped": True, "epochs": {"dataset": 2}})
    text = shown(changed)
    assert summarize(changed).head.passed == [[3, 5], [9, 10]]
    for line in ("saved on 8; any number at a load", "3-4, 9-9", "all ranks ended the epoch together", "dataset 2"):
        assert line in text


def test_the_summary_is_json(tmp_path: Path) -> None:
    summary = summarize(position_after(mixed_loader(text_files(tmp_path)), 5))
    read = json.loads(summary.to_json())
    assert read["lanes"][0]["digest"] == summary.lanes[0].digest
    assert (read["samples"], read["tokens"], read["missing"]) == (20, 320, [])
    assert read["lanes"][0]["stream"]["places"][0]["source"] == "web"


@pytest.mark.parametrize("every", [1, 3])
def test_every_loader_has_a_summary(every: int, tmp_path: Path) -> None:
    """Before the first batch, within an epoch, and after it."""
    for loader in (lanes_loader(), StatefulDataLoader(Table(), batch_size=7), mixed_loader(text_files(tmp_path))):
        summaries: list[Summary] = [summarize(loader.state_dict())]
        summaries += [summarize(loader.state_dict()) for number, _ in enumerate(loader) if not number % every]
        summaries.append(summarize(loader.state_dict()))
        assert [summary.head.step for summary in summaries] == sorted(summary.head.step for summary in summaries)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_is_changed_in_a_position_it_is_shown_or_refused(data: st.DataObject) -> None:
    """A value anywhere in a leaf becomes another one, or is gone."""
    position = dict(data.draw(st.sampled_from(some_positions())))
    name = data.draw(st.sampled_from(sorted(position)))
    leaf = json.loads(position[name])
    holder: Any = leaf
    while True:
        place = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        if not isinstance(holder[place], dict | list) or not holder[place] or data.draw(st.booleans()):
            break
        holder = holder[place]
    if data.draw(st.booleans()):
        del holder[place]
    else:
        holder[place] = data.draw(st.sampled_from([None, -1, 3, "text", [], {}, [[1]], {"a": "b"}, 0.5, True]))
    position[name] = json.dumps(leaf)
    try:
        text = shown(position, every_lane=data.draw(st.booleans()))
    except StateError:
        return
    assert "Fingerprint" in text


@functools.cache
def some_positions() -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        mixed = position_after(mixed_loader(text_files(Path(folder))), 6)
    skipping = position_after(StatefulDataLoader(Squares(failing=(1, 8)), batch_size=3, on_error="skip"), 6)
    return [mixed, skipping, position_after(StatefulDataLoader(Table(), batch_size=4, shuffle=True), 5)]


def test_a_position_that_was_changed_is_refused() -> None:
    position = position_after(lanes_loader(), 4)
    with pytest.raises(InvalidState, match="'unbroken' is missing"):
        summarize({"lane-000000": "{}"})
    with pytest.raises(InvalidState, match="The leaf 'lane-000003' of this position is cut short or changed"):
        summarize({**position, "lane-000003": '{"step": 1, "began": 0, "lane": {}}'})
    with pytest.raises(InvalidState, match="is not JSON"):
        summarize({**position, "lane-000003": "{"})
