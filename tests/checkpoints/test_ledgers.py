"""Whether two checkpoints saw the same data, on any topology."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from tests.checkpoints.runs import Squares, Table, lanes_loader, mixed_loader, position_after, text_files
from unbroken import StatefulDataLoader
from unbroken.checkpoints.ledgers import LedgerComparison, compare_ledgers, compare_positions
from unbroken.cli import app
from unbroken.errors import InvalidState

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


def compared(a: dict[str, str], b: dict[str, str]) -> LedgerComparison:
    return compare_positions(a, b, "a", "b")


def changed(position: dict[str, str], lane: int) -> dict[str, str]:
    """The same with another digest of one lane, as if it had seen other data."""
    leaf = json.loads(position[f"lane-{lane:06d}"])
    leaf["lane"]["ledger"][1] ^= 1
    return {**position, f"lane-{lane:06d}": json.dumps(leaf)}


def findings(comparison: LedgerComparison) -> list[str]:
    return [row.finding for row in comparison.rows]


def test_one_run_that_was_resumed_and_one_that_was_not_saw_the_same(tmp_path: Path) -> None:
    """As a DCP folder and as JSON."""
    whole = position_after(lanes_loader(), 14)
    loader = lanes_loader()
    loader.load_state_dict(position_after(lanes_loader(), 5))
    dcp.save({"loader": position_after(loader, 9)}, checkpoint_id=tmp_path / "a", no_dist=True)
    (tmp_path / "b.json").write_text(json.dumps({"state": {"loader": whole}}))
    found = compare_ledgers(tmp_path / "a", tmp_path / "b.json")
    assert found.same
    assert findings(found) == ["equal"] * 6
    assert str(found).endswith("The same data: 6 of 6 lanes agree.")
    assert str(tmp_path / "a") in str(found)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["iterable", "stream"])
def test_other_ranks_saw_the_same(world: int, kind: str, tmp_path: Path) -> None:
    """Of an iterable dataset a step is a batch of each rank; of a stream the global batch is kept."""
    folder = text_files(tmp_path)

    def position(rank: int, ranks: int) -> dict[str, str]:
        if kind == "iterable":
            return position_after(lanes_loader(dp_rank=rank, dp_world_size=ranks), 12 // ranks)
        loader = mixed_loader(folder, lanes=6, batch_size=12 // ranks, dp_rank=rank, dp_world_size=ranks)
        return position_after(loader, 6)

    merged: dict[str, str] = {}
    for rank in range(world):
        merged |= position(rank, world)
    assert compared(position(0, 1), merged).same


def test_other_data_is_told_by_the_lane() -> None:
    position = position_after(lanes_loader(), 14)
    found = compared(position, changed(position, 4))
    assert not found.same
    assert found.verdict == "different"
    assert findings(found) == ["equal"] * 4 + ["differs", "equal"]
    assert "Other data: 1 of 6 lanes differ at the same place." in str(found)


def test_at_other_steps_only_lanes_at_the_same_place_can_be_compared() -> None:
    """After 8 and 9 batches five of six lanes stand at the same place."""
    loader = lanes_loader()
    first, later = position_after(loader, 8), position_after(lanes_loader(), 9)
    found = compared(first, later)
    assert findings(found) == ["equal"] * 2 + ["B is further"] + ["equal"] * 3
    assert (found.same, found.verdict) == (False, "unknown")
    assert "5 of 6 lanes stand at the same place and agree" in str(found)
    assert findings(compared(later, first))[2] == "A is further"
    assert compared(changed(first, 5), later).verdict == "different"
    assert compared(changed(first, 2), later).verdict == "unknown"


def test_an_epoch_later_the_counts_go_on() -> None:
    loader, other = lanes_loader(), lanes_loader()
    list(loader)
    list(other)
    assert compared(position_after(loader, 2), position_after(other, 2)).same
    assert compared(lanes_loader().state_dict(), loader.state_dict()).verdict == "unknown"


def test_before_the_first_batch_there_is_nothing_to_compare() -> None:
    found = compared(lanes_loader().state_dict(), lanes_loader().state_dict())
    assert found.verdict == "unknown"
    assert "Neither has delivered anything" in str(found)


def test_digests_of_batches_of_other_sizes_are_not_compared() -> None:
    found = compared(position_after(lanes_loader(), 12), position_after(lanes_loader(batch_size=6), 6))
    assert findings(found) == ["cannot be compared"] * 6
    assert "digests are of batches, which have 3 samples in A and 6 in B" in str(found)
    assert "It cannot be told: nothing in these two can be compared." in str(found)
    assert "The fingerprints differ in batch_size." in str(found)


def test_a_stream_is_compared_whatever_its_batch_size(tmp_path: Path) -> None:
    folder = text_files(tmp_path)
    found = compared(position_after(mixed_loader(folder), 6), position_after(mixed_loader(folder, batch_size=8), 3))
    assert found.same


def test_other_kinds_and_other_lanes_are_not_compared() -> None:
    found = compared(position_after(lanes_loader(), 4), position_after(StatefulDataLoader(Table()), 4))
    assert "the dataset of A is iterable, that of B map" in str(found)
    found = compared(position_after(lanes_loader(), 4), position_after(lanes_loader(lanes=4), 4))
    assert "A has 6 lanes and B 4, and they are dealt other rows" in str(found)
    assert found.verdict == "unknown"


def test_lanes_that_only_one_of_them_has_are_told() -> None:
    found = compared(position_after(lanes_loader(), 4), position_after(lanes_loader(dp_rank=0, dp_world_size=2), 2))
    assert findings(found)[1::2] == ["cannot be compared"] * 3
    assert {row.why for row in found.rows[1::2]} == {"only A has it"}
    assert "Not all lanes are here" in str(found)


def test_the_only_lane_of_a_plain_loader_is_that_of_one_with_lanes() -> None:
    plain = position_after(StatefulDataLoader(Squares(), batch_size=3), 4)
    assert compared(plain, position_after(StatefulDataLoader(Squares(), batch_size=3, lanes=1), 4)).same


def table_loader(**options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Table(), **{"batch_size": 4, "shuffle": True, "seed": 3, **options})


def test_the_batches_of_a_rank_of_a_map_style_dataset_are_compared() -> None:
    found = compared(position_after(table_loader(), 5), position_after(table_loader(num_workers=0), 5))
    assert found.same
    assert "The same data: 1 of 1 rank agree." in str(found)
    assert compared(position_after(table_loader(), 5), position_after(table_loader(seed=4), 5)).verdict == "different"
    assert compared(position_after(table_loader(), 5), position_after(table_loader(), 6)).verdict == "unknown"


def test_of_a_place_that_ranks_share_only_rows_order_and_seed_are_compared() -> None:
    def place(world: int, steps: int, **options: Any) -> dict[str, str]:
        return position_after(table_loader(dp_rank=0, dp_world_size=world, **options), steps)

    found = compared(place(2, 6), place(4, 3))
    assert (found.same, found.verdict, findings(found)) == (False, "unknown", ["equal"])
    assert "It cannot be told: they stand at the same place of the same order" in str(found)
    assert "Only rows, order and seed were compared." in str(found)
    assert compared(place(2, 6), place(4, 2)).verdict == "unknown"
    assert "they stand at other places" in str(compared(place(2, 6), place(4, 2)))
    other = compared(place(2, 6), place(2, 6, seed=4))
    assert other.verdict == "different"
    assert "another order: seed" in str(other)
    assert compared(place(2, 6), position_after(table_loader(), 6)).verdict == "unknown"


@pytest.mark.parametrize(
    ("changes", "verdict", "told"),
    [
        ({"passed": [[2, 4]]}, "different", "steps left out: none in A, 2-3 in B"),
        ({"passed": [[9, 12]]}, "unknown", "the same order and seed"),
        ({"epochs": {"sampler": 3}}, "different", "set_epoch (none and sampler 3)"),
        ({"sampler": {"seed": 5}}, "different", "the draw"),
        ({"skipped": {"count": 1, "last": [["5", "bad"]]}}, "unknown", "samples left out on the rank that saved: 0 in"),
    ],
)
def test_what_else_differs_at_a_place_that_ranks_share_is_told(
    changes: dict[str, Any], verdict: str, told: str
) -> None:
    position = position_after(table_loader(dp_rank=0, dp_world_size=2), 6)
    other = {**position, "place": json.dumps({**json.loads(position["place"]), **changes})}
    found = compared(position, other)
    assert (found.verdict, told in str(found)) == (verdict, True)


def test_a_sampler_that_gave_out_other_indices_is_told() -> None:
    def place(sampler: list[int]) -> dict[str, str]:
        loader = StatefulDataLoader(Table(), batch_size=4, sampler=sampler, seed=3, dp_rank=0, dp_world_size=2)
        return position_after(loader, 3)

    first = place(list(range(40)))
    found = compared(first, place([*range(39), 7]))
    assert found.verdict == "unknown"  # the other one is not reached
    found = compared(first, place(list(range(39, -1, -1))))
    assert found.verdict == "different"
    assert "the sampler gave out other indices" in str(found)


@pytest.mark.parametrize("kind", ["lanes", "ranks"])
def test_where_not_all_are_here_it_cannot_be_told(kind: str) -> None:
    if kind == "lanes":
        whole = position_after(lanes_loader(), 12)
        part = position_after(lanes_loader(dp_rank=0, dp_world_size=2), 6)
        assert compared(whole, whole).same
    else:
        part = position_after(table_loader(), 5)
        part = {**part, "unbroken": json.dumps({**json.loads(part["unbroken"]), "ranks": 2})}
    found = compared(part, part)
    assert set(findings(found)) == {"equal"}
    assert (found.same, found.verdict) == (False, "unknown")
    assert f"Not all {kind} are here" in str(found)
    assert f"It cannot be told for all: the {len(found.rows)}" in str(found)


def test_the_code_says_whether_it_could_be_told(tmp_path: Path) -> None:
    position = position_after(lanes_loader(), 12)
    ours = position_after(lanes_loader(dp_rank=0, dp_world_size=2), 6)
    for name, saved in (("a", position), ("b", changed(position, 4)), ("c", ours)):
        (tmp_path / f"{name}.json").write_text(json.dumps(saved))
    codes = [
        CliRunner()
        .invoke(app, ["audit", "--ledger", str(tmp_path / "a.json"), str(tmp_path / f"{name}.json")])
        .exit_code
        for name in "abc"
    ]
    assert codes == [0, 1, 2]


def test_many_lanes_are_told_in_a_few_lines() -> None:
    a, b = (position_after(lanes_loader(lanes=40, batch_size=1), steps) for steps in (40, 45))
    text = str(compared(a, changed(b, 30)))
    assert len(text.split("\n")) < 25
    assert "lane-000030" in text
    assert "and 28 more: equal" in text


def test_a_file_without_a_position_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(InvalidState, match="no position of unbroken"):
        compare_ledgers(tmp_path / "a.json", tmp_path / "a.json")
