"""How ranks agree on their steps: few votes, and nobody waits for a rank that failed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import datasets as ds
from tests.distributed.peers import Meeting, Peer, Words, merged, on_ranks, trained
from unbroken import StatefulDataLoader
from unbroken.engine.agree import Ballot, Together, TorchGroup
from unbroken.engine.feeds import Feed, Prepared
from unbroken.errors import LaneError, PeerFailed, WorkerTimeout
from unbroken.lane_position import LanePosition
from unbroken.position import LanesPosition


class Counting(Feed):
    """Makes 0, 1, ... below ``number``. ``trouble`` raises at a number, once; ``slow``: workers lag behind."""

    def __init__(self, number: int, trouble: dict[int, BaseException] | None = None, slow: bool = False) -> None:
        self.number = number
        self.trouble = trouble or {}
        self.slow = slow
        self.made = 0
        self.committed: list[int] = []
        self.ended = 0
        self.position: LanesPosition | None = None

    def make(self) -> Prepared:
        if self.made in self.trouble:
            raise self.trouble.pop(self.made)
        if self.made == self.number:
            raise StopIteration
        self.made += 1
        return Prepared(torch.full((2, 3), self.made - 1), self.made - 1)

    @property
    def passing(self) -> bool:
        return False

    def commit(self, record: int) -> None:
        self.committed.append(record)
        if self.position is not None:
            self.position.step += 1

    def end(self) -> None:
        self.ended += 1

    def ready(self) -> bool:
        return not self.slow

    def knows(self, error: Exception) -> bool:
        return True


def together(peer: Peer, feed: Counting, *, pads: bool = False) -> tuple[Together, LanesPosition]:
    position = feed.position = LanesPosition({peer.rank(): LanePosition()})
    return Together(feed, Ballot(peer, pads=pads), position), position


def deliver(feed: Feed) -> list[int]:
    """The numbers in the next batch, counted as delivered."""
    batch, record = feed.make()
    feed.commit(record)
    return batch[:, 0].tolist()


def delivered(peer: Peer, feed: Counting, *, pads: bool = False) -> list[Any]:
    """What a rank delivers to the end: numbers, and the errors between them, by their type."""
    group, _ = together(peer, feed, pads=pads)
    found: list[Any] = []
    while True:
        try:
            found.append(deliver(group))
        except StopIteration:
            group.end()
            return found
        except (Exception, KeyboardInterrupt) as error:
            found.append(type(error))
        else:
            peer.train()


def steps_to(number: int) -> list[list[int]]:
    return [[step, step] for step in range(number)]


# How many votes there are


@pytest.mark.parametrize("lengths", [(40, 40), (40, 33), (7, 9, 8), (100, 61)])
@pytest.mark.parametrize("pads", [False, True])
def test_one_vote_serves_several_steps(lengths: tuple[int, ...], pads: bool) -> None:
    """And every rank votes the same number of times, or one would wait for ever."""
    votes = on_ranks(
        len(lengths), lambda peer: (delivered(peer, Counting(lengths[peer.rank()]), pads=pads), len(peer.votes))
    )
    steps = max(lengths) if pads else min(lengths)
    assert all(len(found) == steps for found, _ in votes)
    assert len({number for _, number in votes}) == 1
    assert votes[0][1] <= steps / 4 + 3


def test_there_is_no_vote_in_the_middle_of_a_stretch_that_all_ranks_hold() -> None:
    def act(peer: Peer) -> list[int]:
        group, _ = together(peer, Counting(100))
        found = []
        for _ in range(50):
            deliver(group)
            found.append(len(peer.votes))
        return found

    votes = on_ranks(2, act)
    assert votes[0] == votes[1]
    assert [len(list(stretch)) for _, stretch in itertools.groupby(votes[0])] == [1, 4, 8, 8, 8, 8, 8, 5]


def test_the_first_batch_is_not_kept_waiting_for_later_ones() -> None:
    feeds = [Counting(100), Counting(100)]
    on_ranks(2, lambda peer: deliver(together(peer, feeds[peer.rank()])[0]))
    assert [feed.made for feed in feeds] == [1, 1]


def test_what_workers_have_under_way_does_not_count() -> None:
    feeds = [Counting(20, slow=True), Counting(20)]

    def act(peer: Peer) -> list[int]:
        delivered(peer, feeds[peer.rank()])
        return [words[0] for words in peer.votes]

    slow, fast = on_ranks(2, act)
    assert set(slow) == {0, 1}
    assert max(fast) == 8


def test_what_is_made_ahead_moves_no_position() -> None:
    """Case 2."""

    def act(peer: Peer) -> list[list[int]]:
        loader = StatefulDataLoader(Words([20, 20]), batch_size=2, seed=1, group=peer)
        iterator, found = iter(loader), []
        for _ in range(4):
            next(iterator)
            state = loader.state_dict()
            other = StatefulDataLoader(Words([20, 20]), batch_size=2, seed=1, dp_rank=peer.rank(), dp_world_size=2)
            other.load_state_dict(state)
            found.append(next(iter(other)).tolist())
        return found

    assert on_ranks(2, act) == [[[100 * rank + row, 100 * rank + row + 1] for row in (2, 4, 6, 8)] for rank in range(2)]


# Errors


@pytest.mark.parametrize("at", [0, 1, 3, 12, 18])
@pytest.mark.parametrize("pads", [False, True])
def test_an_error_comes_after_what_was_made_before_it_and_the_others_name_the_rank(at: int, pads: bool) -> None:
    """Case 35: it does not leave the others waiting; all may try again."""
    feeds = [Counting(20), Counting(20, {at: OSError("disk")}), Counting(20)]
    found = on_ranks(3, lambda peer: delivered(peer, feeds[peer.rank()], pads=pads))
    for rank, kind in enumerate((PeerFailed, OSError, PeerFailed)):
        assert found[rank] == [*steps_to(at), kind, *steps_to(20)[at:]]
        assert feeds[rank].committed == list(range(20))


def test_ranks_that_fail_together_raise_what_each_of_them_has() -> None:
    feeds = [Counting(9, {4: OSError()}), Counting(9, {4: KeyError()}), Counting(9)]
    found = on_ranks(3, lambda peer: delivered(peer, feeds[peer.rank()]))
    assert [batches[4] for batches in found] == [OSError, KeyError, PeerFailed]


def test_the_message_names_the_rank_and_what_to_do() -> None:
    def act(peer: Peer) -> str:
        group, _ = together(peer, Counting(3, {0: ValueError("own")} if peer.rank() == 1 else None))
        with pytest.raises((PeerFailed, ValueError)) as caught:
            group.make()
        return str(caught.value)

    peer, own = on_ranks(2, act)
    assert own == "own"
    assert peer.startswith("Rank 1 of the group could not make its next batch")
    assert "state_dict() gives the position" in peer


def test_an_error_that_is_behind_the_last_step_of_all_is_not_raised() -> None:
    feeds = [Counting(5), Counting(20, {7: OSError()})]
    found = on_ranks(2, lambda peer: delivered(peer, feeds[peer.rank()]))
    assert found == [steps_to(5)] * 2


@pytest.mark.parametrize("at", [0, 1, 2, 5, 11])
@pytest.mark.parametrize("at_end", ["stop", "pad"])
@pytest.mark.parametrize("by_rows", [True, False], ids=["stream", "iterable"])
def test_an_error_in_the_dataset_of_one_rank_loses_nothing(by_rows: bool, at_end: str, at: int) -> None:
    """Case 35: the lanes of that rank stand where they were delivered, and go on."""

    once: list[int] = []

    def mend(number: int) -> int:
        if number == 100 + at and not once:
            once.append(number)
            raise OSError("not now")
        return number

    class BrokenUneven(ds.Uneven):
        def __iter__(self) -> Iterator[int]:
            return map(mend, super().__iter__())

    def act(peer: Peer) -> tuple[list[Any], list[str]]:
        dataset = Words([20, 13, 9, 14], mend) if by_rows else BrokenUneven([20, 13, 9, 14])
        loader = StatefulDataLoader(dataset, batch_size=2, lanes=4, seed=1, group=peer, at_end=at_end)
        iterator, found, errors = iter(loader), [], []
        while True:
            try:
                found.append(next(iterator).tolist())
            except StopIteration:
                return found, errors
            except (OSError, PeerFailed) as error:
                errors.append(type(error).__name__)
            else:
                peer.train()

    (first, told), (second, own) = on_ranks(2, act)
    assert (told, own) == (["PeerFailed"], ["OSError"])
    assert on_ranks(2, act) == [(first, []), (second, [])]


def test_a_rank_that_is_late_is_waited_for_again() -> None:
    feeds = [Counting(9, {3: WorkerTimeout("late")}), Counting(9)]
    found = on_ranks(2, lambda peer: delivered(peer, feeds[peer.rank()]))
    assert found[0] == [*steps_to(3), WorkerTimeout, *steps_to(9)[3:]]
    assert found[1] == [*steps_to(3), PeerFailed, *steps_to(9)[3:]]


@pytest.mark.parametrize("at", range(0, 30, 3))
@pytest.mark.parametrize("at_end", ["stop", "pad"])
def test_an_interrupt_on_one_rank_leaves_the_ranks_in_step(at_end: str, at: int) -> None:
    """Ctrl-C, caught by the user: what was made ahead is made again, and what was agreed on stays."""
    once: list[int] = []

    def row(number: int) -> int:
        if number == 100 + at and not once:
            once.append(number)
            raise KeyboardInterrupt
        return number

    def act(peer: Peer) -> list[Any]:
        loader = StatefulDataLoader(Words([20, 31], row), batch_size=2, seed=1, group=peer, at_end=at_end)
        iterator, found = iter(loader), []
        while True:
            try:
                found.append(next(iterator).tolist())
            except StopIteration:
                return found
            except KeyboardInterrupt:
                continue
            peer.train()

    found = on_ranks(2, act)
    assert once == [100 + at][: len(once)]
    assert on_ranks(2, act) == found


@pytest.mark.parametrize("vote", range(4))
def test_an_interrupt_while_a_rank_waits_for_the_answer_leaves_the_ranks_in_step(vote: int) -> None:
    """The others have that answer, and go by it."""

    def act(peer: Peer) -> list[Any]:
        loader = StatefulDataLoader(Words([20, 31]), batch_size=2, seed=1, group=peer)
        answers = itertools.count()

        def interrupt() -> None:
            if peer.rank() == 1 and next(answers) == vote:
                raise KeyboardInterrupt

        peer.on_answer = interrupt
        iterator, found = iter(loader), []
        while True:
            try:
                found.append(next(iterator).tolist())
            except StopIteration:
                return found
            except KeyboardInterrupt:
                continue
            peer.train()

    assert on_ranks(2, act) == [
        [[100 * rank + row, 100 * rank + row + 1] for row in range(0, 20, 2)] for rank in range(2)
    ]


# Ranks that are not where the others are


def out_of_step(act: Callable[[Peer], Any]) -> list[str]:
    def caught(peer: Peer) -> str:
        with pytest.raises(PeerFailed) as error:
            act(peer)
        return str(error.value)

    return on_ranks(2, caught)


def test_ranks_that_left_their_loops_at_different_steps_are_told_so() -> None:
    def act(peer: Peer) -> None:
        loader = StatefulDataLoader(Words([40, 40]), batch_size=2, seed=1, group=peer)
        iterator = iter(loader)
        for _ in range(5 if peer.rank() else 1):
            next(iterator)
        list(iterator if peer.rank() else loader)

    texts = out_of_step(act)
    assert "This is rank 0 of 2: 0 batches delivered in this pass" in texts[0]
    assert "This is rank 1 of 2: 1 batches delivered in this pass" in texts[1]
    assert all("leave the loop on all of them after the same step" in text for text in texts)


def test_ranks_with_other_ends_are_told_so() -> None:
    def act(peer: Peer) -> None:
        list(StatefulDataLoader(Words([4, 4]), seed=1, group=peer, at_end=("stop", "pad")[peer.rank()]))

    assert ['at_end="pad"' in text for text in out_of_step(act)] == [False, True]


def test_ranks_of_which_one_alone_was_resumed_are_told_so() -> None:
    state = StatefulDataLoader(Words([4, 4]), seed=1).state_dict()

    def act(peer: Peer) -> None:
        loader = StatefulDataLoader(Words([4, 4]), seed=1, group=peer)
        if peer.rank() == 1:
            loader.load_state_dict(state)
        list(loader)

    assert [", resumed;" in text for text in out_of_step(act)] == [False, True]


@pytest.mark.parametrize("at_end", ["stop", "pad"])
def test_ranks_that_were_saved_in_different_epochs_begin_in_one(at_end: str) -> None:
    """Case 21: saved without a group after 4 steps, when one rank of two had begun its second epoch."""
    lengths = [3, 6]
    states = []
    for rank in range(2):
        loader = StatefulDataLoader(Words(lengths), seed=1, dp_rank=rank, dp_world_size=2)
        batches = itertools.chain(loader, loader)
        states.append([next(batches) for _ in range(4)] and loader.state_dict())

    def act(peer: Peer) -> list[list[list[int]]]:
        loader = StatefulDataLoader(Words(lengths), seed=1, group=peer, at_end=at_end)
        loader.load_state_dict(merged(states))
        return [[batch.tolist() for batch in trained(peer, loader)] for _ in range(2)]

    first, second = on_ranks(2, act)
    if at_end == "stop":  # rank 1 gives up what it had left: rank 0 has nothing for that epoch
        assert first == [[[1], [2]], [[0], [1], [2]]]
        assert second == [[[100], [101]], [[100], [101], [102]]]
    else:
        assert first == [[[], []], [[1], [2], [], [], [], []]]
        assert second == [[[104], [105]], [[100], [101], [102], [103], [104], [105]]]


# Ranks without data


def test_a_rank_that_ran_out_yields_batches_without_rows_until_the_last_is_done() -> None:
    feeds = [Counting(3), Counting(9)]
    found = on_ranks(2, lambda peer: delivered(peer, feeds[peer.rank()], pads=True))
    assert found == [steps_to(3) + [[]] * 6, steps_to(9)]
    assert [feed.committed for feed in feeds] == [list(range(3)), list(range(9))]
    assert [feed.ended for feed in feeds] == [1, 1]


def test_a_rank_without_data_is_an_error_where_ranks_stop_together() -> None:
    """Case 22."""

    def act(peer: Peer) -> str:
        with pytest.raises((LaneError, PeerFailed)) as caught:
            next(iter(StatefulDataLoader(Words([9, 0]), seed=1, group=peer)))
        return f"{type(caught.value).__name__}: {caught.value}"

    first, second = on_ranks(2, act)
    assert first.startswith("PeerFailed: Rank 1 of the group")
    assert second.startswith("LaneError: This rank has no data: of its lanes [1] none has a row")


# Several iterators


def test_two_passes_at_a_time_do_not_mix_up_what_was_agreed_on() -> None:
    def act(peer: Peer) -> list[list[int]]:
        loader = StatefulDataLoader(Words([20, 20]), batch_size=2, seed=1, group=peer)
        one, found = iter(loader), []
        for _ in range(2):
            found.append(next(one).tolist())
        other = iter(loader)
        for _ in range(3):
            found.append(next(other).tolist())
            found.append(next(one).tolist())
        return found

    first, second = on_ranks(2, act)
    assert [row for row, _ in first] == [0, 2, 0, 4, 2, 6, 4, 8]
    assert second == [[row + 100 for row in batch] for batch in first]


# A group of torch.distributed


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_process_group_votes_and_exchanges(world: Any) -> None:
    group = TorchGroup(world)
    assert (group.rank(), group.size()) == (0, 1)
    answer = group.announce([3, -(1 << 61), 1 << 40])
    assert answer() == answer() == [3, -(1 << 61), 1 << 40]
    assert group.exchange(b"data") == [b"data"]


def test_a_vote_that_fails_is_named_and_what_to_do_about_it(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    class Broken:
        wait = closed

    monkeypatch.setattr(dist, "all_reduce", closed)
    monkeypatch.setattr(dist, "all_gather_object", closed)
    group = TorchGroup(world)
    for act in (lambda: group.announce([1]), lambda: group.exchange(b"")):
        with pytest.raises(PeerFailed, match="could not agree on their next step: Connection closed by peer") as caught:
            act()
        assert "This is rank 0 of 1; another one has ended" in str(caught.value)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Broken())
    with pytest.raises(PeerFailed, match="Connection closed by peer"):
        group.announce([1])()


@pytest.mark.parametrize(
    ("backends", "device"),
    [("cpu:gloo,cuda:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda:3"), ("xpu:xccl", "xpu:3")],
)
def test_a_vote_travels_on_the_cpu_where_the_group_can(
    world: Any, monkeypatch: pytest.MonkeyPatch, backends: str, device: str
) -> None:
    class Three:
        @staticmethod
        def current_device() -> int:
            return 3

    seen = []

    def tensor(words: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        seen.append(str(device))
        return torch.as_tensor(words, dtype=dtype)

    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch, "get_device_module", lambda name: Three)
    monkeypatch.setattr(torch, "tensor", tensor)
    assert TorchGroup(world).announce([1, 2])() == [1, 2]
    assert seen == [device]


def test_ranks_that_stay_away_are_not_waited_for_in_these_tests() -> None:
    """Of the meeting itself: a rank that fails lets the others go."""

    def act(peer: Peer) -> None:
        if peer.rank():
            raise ValueError("mine")
        peer.train()

    with pytest.raises(ValueError, match="mine"):
        on_ranks(2, act)
    meeting = Meeting(1)
    assert meeting.meet(0, "vote", 7) == [7]
