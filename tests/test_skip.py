"""``loader.skip``: steps that are left out, wherever the run is stopped and resumed."""

from __future__ import annotations

import json
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from unbroken import StatefulDataLoader, from_map
from unbroken.errors import InvalidState
from unbroken.steps import joined, lies_in, read_steps, to_leave_out
from unbroken.testing import assert_resumes_exactly


class Squares(Dataset[torch.Tensor]):
    """40 rows; it notes which were asked for, and those in ``bad`` fail."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.asked: list[int] = []
        self.bad = bad

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        if index in self.bad:
            raise OSError(f"row {index}")
        return torch.tensor([index, index * index])


class Dealt(IterableDataset[int]):
    """The numbers below 36, dealt to the lanes."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(info.id, 36, info.num_workers) if info else range(36)


def over_map(**options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Squares(), batch_size=4, shuffle=True, seed=3, **options)


def over_lanes(**options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Dealt(), batch_size=3, lanes=4, seed=3, **options)


def over_stream(**options: Any) -> StatefulDataLoader[Any]:
    stream = from_map(list(range(50))).shuffle(8, seed=1)
    return StatefulDataLoader(stream, batch_size=4, lanes=4, seed=3, **options)


KINDS = [over_map, over_lanes, over_stream]
Make = Callable[..., StatefulDataLoader[Any]]


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def through_json(state: dict[str, str]) -> dict[str, str]:
    return dict(json.loads(json.dumps(state)))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_next_batches_are_left_out_and_the_rest_is_as_it_would_have_been(make: Make, num_workers: int) -> None:
    whole = values(make())
    loader = make(num_workers=num_workers)
    batches = iter(loader)
    before = values(next(batches) for _ in range(2))
    loader.skip(3)
    saved = through_json(loader.state_dict())
    assert before + values(batches) == whole[:2] + whole[5:]
    resumed = make(num_workers=num_workers)
    resumed.load_state_dict(saved)
    assert values(resumed) == whole[5:]


@pytest.mark.parametrize("make", KINDS)
def test_a_run_with_steps_left_out_resumes_exactly_at_every_point(make: Make) -> None:
    def leaving_out(**options: Any) -> StatefulDataLoader[Any]:
        loader = make(**options)
        loader.skip(range(1, 3))
        loader.skip(range(8, 14))  # over the end of epoch 0
        loader.skip(range(17, 18))
        return loader

    topologies = [{}, {"num_workers": 2, "multiprocessing_context": "fork"}]
    assert_resumes_exactly(leaving_out, topologies=topologies, epochs=2)
    steps = [batch for _ in range(2) for batch in values(make())]
    assert len(values(leaving_out())) < len(steps) // 2


@pytest.mark.parametrize("make", KINDS)
def test_every_rank_leaves_out_its_part_of_a_step(make: Make) -> None:
    whole = [values(make(dp_rank=rank, dp_world_size=2)) for rank in range(2)]
    merged: dict[str, str] = {}
    for rank in range(2):
        loader = make(dp_rank=rank, dp_world_size=2)
        loader.skip(range(1, 3))
        assert values(loader) == whole[rank][:1] + whole[rank][3:]
        loader.load_state_dict({})
        loader.skip(range(1, 3))
        next(iter(loader))
        merged |= through_json(loader.state_dict())
    for rank in range(2):
        resumed = make(dp_rank=rank, dp_world_size=2)
        resumed.load_state_dict(merged)
        assert values(resumed) == whole[rank][3:]
    alone = make()
    alone.load_state_dict(merged)
    assert json.loads(next(text for name, text in alone.state_dict().items() if name != "unbroken"))["passed"] == [
        [1, 3]
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_map_style_dataset_that_are_left_out_are_not_made(num_workers: int) -> None:
    bad = tuple(range(8, 20))
    loader = StatefulDataLoader(Squares(bad), batch_size=4, num_workers=num_workers, multiprocessing_context=None)
    loader.skip(range(2, 5))
    assert [batch[0, 0].item() for batch in loader] == [0, 4, 20, 24, 28, 32, 36]
    if not num_workers:
        assert not set(bad) & set(loader.dataset.asked)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_in_what_is_left_out_change_nothing_whatever_was_made_ahead(num_workers: int) -> None:
    """A batch of which nothing is left takes a step there, made or not, and what is left out is in no count."""
    loader = StatefulDataLoader(
        Squares(tuple(range(8, 13))), batch_size=4, num_workers=num_workers, on_error="skip", max_skipped=0
    )
    batches = iter(loader)
    assert next(batches)[0, 0].item() == 0
    if num_workers:  # what was asked for ahead is there
        while not loader._iterating()._feed.ready():  # type: ignore[attr-defined, misc, union-attr]
            time.sleep(0.01)
    loader.skip(3)
    position = loader.state_dict()
    assert [batch[0, 0].item() for batch in batches] == [16, 20, 24, 28, 32, 36]
    assert loader.skipped.count == 0
    resumed = StatefulDataLoader(Squares(tuple(range(8, 13))), batch_size=4, on_error="skip", max_skipped=0)
    resumed.load_state_dict(position)
    assert [batch[0, 0].item() for batch in resumed] == [16, 20, 24, 28, 32, 36]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_of_nothing_that_is_to_be_delivered_takes_no_step(num_workers: int) -> None:
    loader = StatefulDataLoader(
        Squares(tuple(range(4, 8))), batch_size=4, num_workers=num_workers, on_error="skip", max_skipped=4
    )
    loader.skip(range(2, 4))
    assert [batch[0, 0].item() for batch in loader] == [0, 8, 20, 24, 28, 32, 36]
    assert loader.skipped.count == 4


def test_a_batch_that_fails_moves_those_after_it_one_step_up() -> None:
    """It takes no step, so that the steps left out are of the batches that follow."""
    loader = StatefulDataLoader(Squares((4,)), batch_size=4)
    loader.skip(range(2, 4))
    batches, firsts = iter(loader), []
    while len(firsts) < 7:
        try:
            firsts.append(next(batches)[0, 0].item())
        except OSError:
            firsts.append(None)
        except StopIteration:
            break
    assert firsts == [0, None, 8, 20, 24, 28, 32]


@pytest.mark.parametrize("make", KINDS)
def test_a_batch_taken_before_has_what_is_left_out_since_in_its_position(make: Make) -> None:
    whole = values(make())
    loader = make()
    batches = iter(loader)
    first, second = next(batches), next(batches)
    loader.skip(2)
    third = next(batches)
    for batch, rest in ((first, [whole[1], *whole[4:]]), (second, whole[4:]), (third, whole[5:])):
        resumed = make()
        resumed.load_state_dict(through_json(loader.state_after(batch)))
        assert values(resumed) == rest


@pytest.mark.parametrize("make", KINDS)
def test_what_is_left_out_is_in_no_ledger(make: Make) -> None:
    """A ledger is of what was delivered: the same batches without those that were left out have another."""

    def ledgers(loader: StatefulDataLoader[Any]) -> list[Any]:
        leaves = [json.loads(text) for name, text in loader.state_dict().items() if name != "unbroken"]
        return [leaf["lane"]["ledger"] if "lane" in leaf else leaf["ledger"] for leaf in leaves]

    loader, other, plain = make(), make(num_workers=2), make()
    for each in (loader, other):
        each.skip(range(1, 4))
        batches = iter(each)
        values(next(batches) for _ in range(4))
        each.close()
    values(batch for _, batch in zip(range(7), plain, strict=False))
    assert ledgers(loader) == ledgers(other) != ledgers(plain)


@pytest.mark.parametrize("make", KINDS)
def test_ctrl_c_among_steps_that_are_left_out_loses_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values(make())
    loader = make()
    loader.skip(range(1, 6))
    batches = iter(loader)
    assert next(batches).tolist() == whole[0]
    real, calls = type(loader).pass_over, []

    def interrupted(self: Any, epoch: Any, commit: Any) -> None:
        def committed() -> None:
            commit()
            if len(calls) == 3:
                signal.raise_signal(signal.SIGINT)

        calls.append(commit)
        real(self, epoch, committed)

    monkeypatch.setattr(type(loader), "pass_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    monkeypatch.undo()
    resumed = make()
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert values(resumed) == whole[6:]
    assert values(batches) == whole[6:]


def test_a_whole_epoch_can_be_left_out() -> None:
    loader = over_map()
    epochs = [values(loader) for _ in range(3)]
    loader = over_map()
    loader.skip(range(4, 25))
    assert [values(loader) for _ in range(3)] == [epochs[0][:4], [], epochs[2][5:]]


def test_a_load_replaces_what_was_to_be_left_out() -> None:
    loader = over_map()
    state = loader.state_dict()
    whole = values(loader)
    loader.skip(5)
    loader.load_state_dict(state)
    assert values(loader) == whole


def test_an_older_iterator_keeps_what_was_left_out_when_it_was_the_newest() -> None:
    loader = over_map()
    whole = values(over_map())
    loader.skip(range(2, 4))
    older = iter(loader)
    next(older)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iter(loader)
    assert values(older) == whole[1:2] + whole[4:]


@pytest.mark.parametrize(
    ("batches", "error", "text"),
    [
        (-1, ValueError, "load a position that was saved earlier"),
        (range(1, 4), ValueError, "the next step is 2"),
        (range(1, 1 << 40), ValueError, "the next step is 2"),
        (10**20, ValueError, r"0 to 2\*\*53"),
        (range(3, 10**20), ValueError, r"to 2\*\*53 at most"),
        (range(-4, 5), ValueError, "the next step is 2"),
        (range(2, 9, 2), ValueError, "goes up by one"),
        (2.0, TypeError, "a number of batches, or a range of steps"),
        (True, TypeError, "a number of batches"),
    ],
)
def test_what_cannot_be_left_out_is_refused(batches: Any, error: type[Exception], text: str) -> None:
    loader = over_map()
    taken = iter(loader)
    values(next(taken) for _ in range(2))
    before = loader.state_dict()
    with pytest.raises(error, match=text):
        loader.skip(batches)
    assert loader.state_dict() == before


def test_what_was_left_out_may_be_asked_for_again() -> None:
    """So a program may be started again with the same arguments."""
    loader = over_map()
    loader.skip(range(2, 5))
    taken = iter(loader)
    values(next(taken) for _ in range(3))
    before = loader.state_dict()
    loader.skip(range(2, 5))
    assert loader.state_dict() == before
    with pytest.raises(ValueError, match="the next step is 6"):
        loader.skip(range(3, 8))
    loader.skip(range(6, 8))
    assert values(taken) == values(over_map())[8:]


def test_nothing_is_left_out_by_zero_and_by_an_empty_range() -> None:
    loader = over_map()
    before = loader.state_dict()
    loader.skip(0)
    loader.skip(range(3, 3))
    assert loader.state_dict() == before


@pytest.mark.parametrize("passed", [[[3, 3]], [[1, 4], [4, 6]], [[5, 9], [1, 2]], [[1]], "x", [[-1, 2]], [["a", 3]]])
def test_a_position_with_other_ranges_than_these_is_refused(passed: Any) -> None:
    loader = over_map()
    state = loader.state_dict()
    name = next(name for name in state if name != "unbroken")
    state[name] = json.dumps({**json.loads(state[name]), "passed": passed})
    with pytest.raises(InvalidState, match=name):
        loader.load_state_dict(state)


@given(ranges=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=6), step=st.integers(0, 60))
@settings(max_examples=200)
def test_joined_ranges_hold_the_steps_of_each(ranges: list[tuple[int, int]], step: int) -> None:
    steps: tuple[tuple[int, int], ...] = ()
    for first, length in ranges:
        steps = joined(steps, *to_leave_out(range(first, first + length), 0))
    assert lies_in(step, steps) == any(first <= step < first + length for first, length in ranges)
    assert read_steps(json.loads(json.dumps(steps))) == steps
