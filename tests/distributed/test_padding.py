"""``at_end="pad"``: batches with no row in them, on ranks that are threads here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.peers import Peer, Words, merged, on_ranks, trained
from unbroken import StatefulDataLoader
from unbroken.errors import PeerFailed


def test_their_steps_count_like_any_other() -> None:
    """The leaves of all ranks are of one step."""

    def act(peer: Peer) -> dict[str, str]:
        loader = StatefulDataLoader(Words([3, 9]), seed=1, group=peer, at_end="pad")
        iterator = iter(loader)
        for _ in range(7):
            next(iterator)
        return loader.state_dict()

    other = StatefulDataLoader(Words([3, 9]), seed=1)
    other.load_state_dict(merged(on_ranks(2, act)))
    assert [batch.tolist() for batch in other] == [[107], [108]]


def row_of_everything(number: int) -> Any:
    return {"x": torch.full((2, 3), number, dtype=torch.int16), "text": str(number), "pair": (number, float(number))}


@pytest.mark.parametrize(("lengths", "exchanges"), [([2, 9], 0), ([0, 9], 1), ([9, 0], 1)])
def test_the_shape_is_that_of_a_batch_seen_here_or_on_another_rank(lengths: list[int], exchanges: int) -> None:
    """Of another only where this one has seen none: that costs a second round, once."""

    def act(peer: Peer) -> tuple[list[Any], int]:
        loader = StatefulDataLoader(
            Words(lengths, row_of_everything), batch_size=2, seed=1, group=peer, at_end="pad", lanes=2
        )
        return [batch for _ in range(2) for batch in trained(peer, loader)], peer.exchanges

    for found, asked in on_ranks(2, act):
        assert asked == exchanges
        assert len(found) == 10
        for batch in found:
            rows = len(batch["text"])
            assert (batch["x"].dtype, tuple(batch["x"].shape)) == (torch.int16, (rows, 2, 3))
            assert [len(part) for part in batch["pair"]] == [rows, rows]
            assert [part.dtype for part in batch["pair"]] == [torch.int64, torch.float64]
    assert [[len(batch["text"]) for batch in found][:5] for found, _ in on_ranks(2, act)] == [
        [min(2, max(0, length - 2 * step)) for step in range(5)] for length in lengths
    ]


def test_each_batch_without_rows_is_a_new_one() -> None:
    def act(peer: Peer) -> list[Any]:
        loader = StatefulDataLoader(Words([1, 4], row_of_everything), seed=1, group=peer, at_end="pad")
        found = []
        for batch in loader:
            assert "mine" not in batch
            batch["mine"] = 1
            found.append(batch)
        return found

    assert len(on_ranks(2, act)[0]) == 4


class Graph:
    """A batch of a kind that cannot be emptied."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows


def test_a_batch_that_cannot_be_emptied_is_an_error_at_the_first_step_and_not_at_the_end() -> None:
    def act(peer: Peer) -> int:
        loader = StatefulDataLoader(Words([9, 9]), batch_size=2, seed=1, group=peer, at_end="pad", collate_fn=Graph)
        iterator, steps = iter(loader), 0
        with pytest.raises(TypeError, match="cannot make one of a Graph"):
            for _ in iterator:
                steps += 1
        return steps

    assert on_ranks(2, act) == [1, 1]


def test_a_shape_that_no_rank_can_send_is_an_error_on_all_of_them() -> None:
    class Local(dict[str, Any]):
        pass

    def act(peer: Peer) -> str:
        loader = StatefulDataLoader(
            Words([9, 0]), batch_size=2, seed=1, group=peer, at_end="pad", collate_fn=lambda rows: Local(x=rows)
        )
        with pytest.raises(PeerFailed) as caught:
            next(iter(loader))
        return str(caught.value)

    assert all("no other rank has one that can be sent" in text for text in on_ranks(2, act))


def test_data_that_nobody_has_ends_at_once() -> None:
    def act(peer: Peer) -> list[Any]:
        return list(StatefulDataLoader(Words([0, 0]), seed=1, group=peer, at_end="pad"))

    assert on_ranks(2, act) == [[], []]
