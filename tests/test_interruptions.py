"""Whatever comes between two batches, an error, Ctrl-C or a failed start: what follows is what would have followed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, Sampler

from tests import datasets as ds
from unbroken import StatefulDataLoader, read_jsonl
from unbroken.engine.pool import Pool


def rows_of(batches: Iterator[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def all_rows(loader: StatefulDataLoader, error: type[BaseException]) -> list[list[int]]:
    """The batches of an epoch, by a user who goes on after an error."""
    found, batches = [], iter(loader)
    for _ in range(1000):
        try:
            found.append(next(batches).tolist())
        except StopIteration:
            return found
        except error:
            continue
    raise AssertionError("the epoch has no end")


def raising_at(call: int, original: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """The same function, whose n-th call raises before it does anything."""
    calls = iter(range(1_000_000))

    def wrapped(*args: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise error
        return original(*args, **named)

    return wrapped


@pytest.mark.parametrize("call", range(8))
@pytest.mark.parametrize(
    "make",
    [
        lambda: StatefulDataLoader(ds.Numbers(20), batch_size=2, num_workers=1, shuffle=True, seed=1),
        lambda: StatefulDataLoader(ds.WellBehaved(20), batch_size=2, num_workers=1, seed=1),
    ],
    ids=["map", "iterable"],
)
def test_ctrl_c_while_a_message_is_taken_in_loses_nothing(
    make: Callable[[], StatefulDataLoader], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was half done is dropped with the workers, and the next batch starts at the position."""
    expected = rows_of(iter(make()))
    monkeypatch.setattr(Pool, "take", raising_at(call, Pool.take, KeyboardInterrupt()))
    assert all_rows(make(), KeyboardInterrupt) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_batch_in_which_a_lane_ends_loses_none_of_its_rows(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane ends in the position when its last rows are delivered, and not when its end is known."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"row": n}) + "\n" for n in range(21)), "utf-8")
    flag = tmp_path / "failed"

    def fail_once(row: dict[str, int]) -> dict[str, int]:
        if row["row"] == 20 and not flag.exists():
            flag.touch()
            raise OSError("a transient error")
        return row

    def make() -> StatefulDataLoader:
        stream = read_jsonl(str(path)).map(fail_once)
        return StatefulDataLoader(stream, batch_size=8, lanes=2, num_workers=num_workers, collate_fn=numbers, seed=1)

    assert sorted(row for batch in all_rows(make(), OSError) for row in batch) == list(range(21))
    assert flag.exists()


def numbers(rows: list[dict[str, int]]) -> torch.Tensor:
    return torch.tensor([row["row"] for row in rows])


class FailsToOpen(Sampler[int]):
    """Raises when it is opened for the first time."""

    def __init__(self) -> None:
        self.opened = 0

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        if self.opened == 1:
            raise OSError("not yet")
        return iter(range(12))

    def __len__(self) -> int:
        return 12


def test_an_epoch_that_could_not_be_started_is_started_by_the_next_try() -> None:
    """Not the one after it."""
    loader = StatefulDataLoader(ds.Numbers(12), batch_size=4, sampler=FailsToOpen(), seed=1)
    with pytest.raises(OSError, match="not yet"):
        next(iter(loader))
    assert rows_of(iter(loader)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert json.loads(loader.state_dict()["rank-0000"])["epoch"] == 1


@pytest.mark.parametrize("copied", [lambda loader: pickle.loads(pickle.dumps(loader))], ids=["pickle"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_copy_of_a_loader_goes_on_where_it_was_copied(num_workers: int, copied: Callable[[Any], Any]) -> None:
    loader = StatefulDataLoader(ds.Numbers(12), batch_size=4, num_workers=num_workers, shuffle=True, seed=3)
    batches = iter(loader)
    next(batches)
    again = copied(loader)
    assert rows_of(iter(again)) == rows_of(batches)


def test_a_loop_that_begins_with_an_epoch_that_is_over_is_told() -> None:
    """Its rows would be those of the next epoch in the order of the last."""

    def make() -> tuple[StatefulDataLoader, Any]:
        sampler: Any = DistributedSampler(ds.Numbers(8), 1, 0)
        return StatefulDataLoader(ds.Numbers(8), batch_size=4, sampler=sampler), sampler

    loader, sampler = make()
    sampler.set_epoch(3)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()

    again, sampler = make()
    again.load_state_dict(state)
    sampler.set_epoch(3)
    with pytest.raises(ValueError, match=r"set_epoch\(4\)"):
        iter(again)
    sampler.set_epoch(4)
    expected, fresh = make()
    fresh.set_epoch(4)
    assert rows_of(iter(again)) == rows_of(iter(expected))
