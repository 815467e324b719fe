"""The end that all ranks come to together: what a position says then, and what comes after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests import datasets as ds
from tests.distributed.peers import Peer, Words, merged, on_ranks, trained
from unbroken import StatefulDataLoader
from unbroken.errors import StateMismatch


def make(peer: Peer | None, dataset: Any, **arguments: Any) -> StatefulDataLoader:
    return StatefulDataLoader(dataset, batch_size=2, lanes=4, seed=1, group=peer, **arguments)


def stopped(dataset: Any, world: int = 2, after: int = 0, **arguments: Any) -> dict[str, str]:
    """The position after a whole pass, and ``after`` steps of the next."""

    def act(peer: Peer) -> dict[str, str]:
        loader = make(peer, dataset, **arguments)
        trained(peer, loader)
        iterator = iter(loader) if after else None
        for _ in range(after):
            next(iterator)  # type: ignore[call-overload]
            peer.train()
        return loader.state_dict()

    return merged(on_ranks(world, act))


LENGTHS = [9, 3, 8, 4]


def heads(state: dict[str, str]) -> set[tuple[int, bool]]:
    """The epoch and whether it was stopped, of every lane."""
    leaves = [json.loads(leaf) for name, leaf in state.items() if name.startswith("lane-")]
    return {(leaf["lane"]["epoch"], leaf.get("stopped", False)) for leaf in leaves}


def test_the_position_stays_in_the_epoch_that_was_stopped() -> None:
    """Rank 1 of two has 7 rows and rank 0 has 17, of which four steps take 8."""
    assert heads(stopped(Words(LENGTHS))) == {(0, True)}
    assert heads(stopped(Words(LENGTHS), after=1)) == {(1, False)}


def test_what_was_left_is_delivered_on_other_ranks_and_then_the_next_epoch() -> None:
    """Case 21."""
    loader = make(None, Words(LENGTHS))
    loader.load_state_dict(stopped(Words(LENGTHS)))
    rest = [row for batch in loader for row in batch.tolist()]
    assert sorted(rest) == [*range(4, 9), *range(204, 208)]
    assert sum(len(batch) for batch in loader) == sum(LENGTHS)


def test_on_the_same_ranks_the_next_epoch_begins_at_once() -> None:
    """Case 12: never an empty epoch."""
    state = stopped(Words(LENGTHS))

    def act(peer: Peer) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        live, resumed = make(peer, Words(LENGTHS)), make(peer, Words(LENGTHS))
        resumed.load_state_dict(state)
        trained(peer, live)
        return tuple(  # type: ignore[return-value]
            [[batch.tolist() for batch in trained(peer, loader)] for _ in range(2)] for loader in (live, resumed)
        )

    for live, resumed in on_ranks(2, act):
        assert live == resumed
        assert len(live[0]) == 4


def test_what_was_left_is_told_once_with_its_lanes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unbroken.options._said", set())

    def act(peer: Peer) -> None:
        loader = make(peer, Words(LENGTHS))
        for _ in range(3):
            trained(peer, loader)

    on_ranks(2, act)
    (told,) = [text for text in caplog.messages if "at_end" in text]
    assert "lanes of this rank that had not come to their end are 0, 2." in told


class Told(ds.Uneven):
    """A dataset whose epoch the training loop sets."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for row in super().__iter__():
            yield 1000 * self.epoch + row


def goes_on(world: int, epoch: int | None) -> list[int]:
    """The rows of the pass after a position that was stopped in epoch 0."""
    state = stopped(Told(LENGTHS))

    def act(peer: Peer) -> list[int]:
        dataset = Told(LENGTHS)
        loader = make(peer, dataset)
        loader.load_state_dict(state)
        if epoch is not None:
            dataset.set_epoch(epoch)
        return [row for batch in trained(peer, loader) for row in batch.tolist()]

    return sorted(row for rank in on_ranks(world, act) for row in rank)


@pytest.mark.parametrize("epoch", [None, 0])
def test_a_loop_that_names_no_other_epoch_gets_what_was_left(epoch: int | None) -> None:
    assert goes_on(1, epoch) == [*range(4, 9), *range(204, 208)]


@pytest.mark.parametrize("world", [1, 2])
def test_a_loop_that_names_the_next_epoch_gets_that(world: int) -> None:
    """Case 13: a training loop that had come to its next epoch calls ``set_epoch`` for that."""
    rows = goes_on(world, 1)
    assert {row // 1000 for row in rows} == {1}
    assert len(rows) == (sum(LENGTHS) if world == 1 else 15)


def test_another_epoch_is_refused_in_the_midst_of_one() -> None:
    state = stopped(Told(LENGTHS), after=1)
    dataset = Told(LENGTHS)
    loader = make(None, dataset)
    loader.load_state_dict(state)
    dataset.set_epoch(5)
    with pytest.raises(ValueError, match="set to epoch 5 in the middle of its epoch 0"):
        iter(loader)


def test_files_may_change_when_all_ranks_have_stopped() -> None:
    """As between any two epochs: by name, and what was left of the old ones is given up."""
    state, inside = stopped(Words(LENGTHS)), stopped(Words(LENGTHS), after=1)
    other = Words([2, 2, 2, 3])
    for position in (state, inside):
        with pytest.raises(StateMismatch, match="files"):
            make(None, other).load_state_dict(position)
    with pytest.raises(StateMismatch, match="In the middle of an epoch files cannot change"):
        make(None, other).load_state_dict(inside, strict=False)
    loader = make(None, other)
    loader.load_state_dict(state, strict=False)
    assert sum(len(batch) for batch in loader) == 9
