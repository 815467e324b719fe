"""A position made of another loader's state goes on exactly as that loader would have, in real files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DistributedSampler, IterableDataset

from unbroken import StatefulDataLoader
from unbroken.checkpoints.files import open_checkpoint, read_position, write_position
from unbroken.checkpoints.foreign import find_foreign
from unbroken.checkpoints.takeover import take_over
from unbroken.errors import InvalidState, StateMismatch

pytest.importorskip("torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader as Other

from tests.checkpoints.others import (
    BareRows,
    OwnIterator,
    Rows,
    StatefulIterator,
    Table,
    batches_of,
    rest_of,
    saved_after,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
    # torch's opinion of three workers on a small machine
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:Neither dataset nor iter:UserWarning"),
]
Make = Callable[[], "Other[Any]"]


def taken(state: Any, folder: Path, loader: StatefulDataLoader[Any]) -> dict[str, str]:
    """A state through a file of ``torch.save``, taken over, and the position through a file of JSON."""
    torch.save({"model": torch.zeros(3), "loader": state}, folder / "old.pt")
    position = take_over([find_foreign(open_checkpoint(folder / "old.pt"))], loader).position
    write_position(folder / "new.json", position)
    return read_position(folder / "new.json")


def assert_goes_on(make: Make, steps: int | None, ours: Callable[[], StatefulDataLoader[Any]], folder: Path) -> None:
    """Ours delivers the batches that torchdata delivers after its own load; also after another save on the way."""
    state = saved_after(make, steps)
    wanted = rest_of(make, state)
    position = taken(state, folder, ours())
    loader = ours()
    loader.load_state_dict(position)
    assert batches_of(loader) == wanted
    loader = ours()
    loader.load_state_dict(position)
    batches = iter(loader)
    first = batches_of(next(batches) for _ in wanted[: min(2, len(wanted) - 1)])
    again = ours()
    again.load_state_dict(loader.state_dict())
    assert [*first, *batches_of(again)] == wanted


DATASETS = [BareRows, Rows, StatefulIterator, OwnIterator]


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_an_iterable_dataset_without_workers_goes_on(
    tmp_path: Path, dataset: type[IterableDataset[int]], steps: int
) -> None:
    assert_goes_on(
        lambda: Other(dataset(), batch_size=4), steps, lambda: StatefulDataLoader(dataset(), batch_size=4), tmp_path
    )


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize(("steps", "every"), [(0, 1), (1, 1), (5, 1), (6, 4)])
def test_workers_become_lanes_and_whose_turn_it_is_is_kept(
    tmp_path: Path, dataset: type[IterableDataset[int]], steps: int, every: int
) -> None:
    """With a snapshot every 4 steps, two batches come after the last one, and are made again."""

    def make() -> Other[Any]:
        return Other(dataset(), batch_size=3, num_workers=3, snapshot_every_n_steps=every)

    assert_goes_on(make, steps, lambda: StatefulDataLoader(dataset(), batch_size=3, lanes=3), tmp_path)


def test_a_plain_loader_takes_over_the_workers_too(tmp_path: Path) -> None:
    make = partial(Other, Rows(), batch_size=3, num_workers=2)
    assert_goes_on(make, 3, lambda: StatefulDataLoader(Rows(), batch_size=3), tmp_path)


@pytest.mark.parametrize("steps", [8, 9, 10, 11, 12])
def test_a_worker_that_ended_is_a_lane_that_ended(tmp_path: Path, steps: int) -> None:
    """Worker 2 of 3 has 14 of 50 rows, and ends at its fourth turn with a batch that is not full."""
    make = partial(Other, Rows(), batch_size=4, num_workers=3)
    assert_goes_on(make, steps, lambda: StatefulDataLoader(Rows(), batch_size=4, lanes=3), tmp_path)


@pytest.mark.parametrize("steps", [3, 8, 9])
def test_a_last_batch_that_is_not_full_is_left_out_here_too(tmp_path: Path, steps: int) -> None:
    make = partial(Other, Rows(), batch_size=4, num_workers=3, drop_last=True)
    assert_goes_on(make, steps, lambda: StatefulDataLoader(Rows(), batch_size=4, lanes=3, drop_last=True), tmp_path)


def test_the_end_of_an_epoch_is_the_start_of_the_next(tmp_path: Path) -> None:
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        make = partial(Other, BareRows(), batch_size=4, num_workers=workers)
        ours = partial(StatefulDataLoader, BareRows(), batch_size=4, lanes=max(1, workers))
        position = taken(saved_after(make, None), folder, ours())
        loader = ours()
        loader.load_state_dict(position)
        assert batches_of(loader) == batches_of(make())


def test_rows_without_batches_go_on(tmp_path: Path) -> None:
    make = partial(Other, Rows(), batch_size=None, num_workers=2)
    assert_goes_on(make, 7, lambda: StatefulDataLoader(Rows(), batch_size=None, lanes=2), tmp_path)


@pytest.mark.parametrize("resume", ["trust", "replay"])
def test_loaders_that_trust_a_state_or_ignore_it_go_on_too(tmp_path: Path, resume: str) -> None:
    make = partial(Other, Rows(), batch_size=4, num_workers=2, snapshot_every_n_steps=4)
    assert_goes_on(make, 5, lambda: StatefulDataLoader(Rows(), batch_size=4, lanes=2, resume=resume), tmp_path)


def test_the_batch_size_may_be_another_from_here_on(tmp_path: Path) -> None:
    state = saved_after(lambda: Other(Rows(), batch_size=4, num_workers=1, snapshot_every_n_steps=3), 5)
    position = taken(state, tmp_path, StatefulDataLoader(Rows(), batch_size=5, lanes=1))
    loader = StatefulDataLoader(Rows(), batch_size=5, lanes=1)
    loader.load_state_dict(position)
    assert [row for batch in batches_of(loader) for row in batch] == list(range(20, 50))


def test_a_state_in_a_dcp_folder_goes_on(tmp_path: Path) -> None:
    """DCP takes it apart into values, tensors among them."""
    make = partial(Other, Rows(), batch_size=4, num_workers=2, snapshot_every_n_steps=3)
    state = saved_after(make, 4)
    dcp.save({"model": {"w": torch.ones(2)}, "data": {"loader": state}}, checkpoint_id=tmp_path / "old", no_dist=True)
    ours = StatefulDataLoader(Rows(), batch_size=4, lanes=2)
    ours.load_state_dict(take_over([find_foreign(open_checkpoint(tmp_path / "old"))], ours).position)
    assert batches_of(ours) == rest_of(make, state)


# ---- map-style datasets


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("steps", "every"), [(0, 1), (3, 1), (5, 4)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_map_style_dataset_goes_on(tmp_path: Path, workers: int, steps: int, every: int, shuffle: bool) -> None:
    """With workers torchdata draws two orders before the first batch, and goes on with the second."""

    def ours() -> StatefulDataLoader[Any]:
        generator = torch.Generator() if workers else None
        return StatefulDataLoader(Table(), batch_size=4, shuffle=shuffle, generator=generator)

    make = partial(Other, Table(), batch_size=4, shuffle=shuffle, num_workers=workers, snapshot_every_n_steps=every)
    assert_goes_on(make, steps, ours, tmp_path)


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_later_epoch_is_drawn_from_the_state_of_a_generator(tmp_path: Path, batch_size: int | None) -> None:
    def make() -> Other[Any]:
        loader = Other(Table(), batch_size=batch_size, shuffle=True)
        list(loader)
        return loader

    def ours() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(Table(), batch_size=batch_size, shuffle=True, generator=torch.Generator())

    assert_goes_on(make, 5, ours, tmp_path)


def test_the_next_epoch_of_a_shuffled_dataset_is_the_one_that_torchdata_draws(tmp_path: Path) -> None:
    make = partial(Other, Table(), batch_size=4, shuffle=True)
    generator = torch.Generator()
    ours = partial(StatefulDataLoader, Table(), batch_size=4, shuffle=True, generator=generator)
    assert_goes_on(make, None, ours, tmp_path)


def test_a_sampler_with_replacement_goes_on(tmp_path: Path) -> None:
    from torch.utils.data import RandomSampler
    from torchdata.stateful_dataloader.sampler import RandomSampler as OtherSampler

    def make() -> Other[Any]:
        sampler = OtherSampler(Table(), replacement=True, num_samples=75)  # type: ignore[arg-type]
        return Other(Table(), batch_size=4, sampler=sampler)

    def ours() -> StatefulDataLoader[Any]:
        sampler = RandomSampler(Table(), replacement=True, num_samples=75)  # type: ignore[arg-type]
        return StatefulDataLoader(Table(), batch_size=4, sampler=sampler)

    assert_goes_on(make, 3, ours, tmp_path)


def test_ranks_with_a_distributed_sampler_go_on_at_one_place(tmp_path: Path) -> None:
    def sampler(rank: int) -> DistributedSampler[int]:
        return DistributedSampler(Table(), num_replicas=3, rank=rank, seed=4)

    state = saved_after(lambda: Other(Table(), batch_size=4, sampler=sampler(1)), 2)
    position = taken(state, tmp_path, StatefulDataLoader(Table(), batch_size=4, sampler=sampler(1)))
    for rank in range(3):
        loader = StatefulDataLoader(Table(), batch_size=4, sampler=sampler(rank))
        loader.load_state_dict(position)
        whole = batches_of(Other(Table(), batch_size=4, sampler=sampler(rank)))
        assert batches_of(loader) == whole[2:]


@pytest.mark.parametrize(("steps", "named"), [(3, True), (5, False)])
def test_a_batch_size_that_is_not_in_the_state_is_named(tmp_path: Path, steps: int, named: bool) -> None:
    """torchdata took the state before the first batch, and three were delivered since."""
    for number, dataset in enumerate((Rows, Table)):
        make = partial(Other, dataset(), batch_size=4, num_workers=2, snapshot_every_n_steps=4)
        torch.save(saved_after(make, steps), tmp_path / f"{number}.pt")
        ours = StatefulDataLoader(dataset(), batch_size=4, lanes=2 if dataset is Rows else None)
        notes = take_over([find_foreign(open_checkpoint(tmp_path / f"{number}.pt"))], ours).notes
        told = "batch_size=4 of the loader was counted with, for the 3 batches"
        assert any(told in note for note in notes) is named


@pytest.mark.parametrize("states", [2, 4])
def test_states_of_another_number_of_ranks_than_the_sampler_has_are_refused(states: int, tmp_path: Path) -> None:
    def sampler(rank: int, world: int) -> DistributedSampler[int]:
        return DistributedSampler(Table(), num_replicas=world, rank=rank, shuffle=False)

    saved = [saved_after(lambda: Other(Table(), batch_size=2, sampler=sampler(0, states)), 1) for _ in range(states)]
    loader = StatefulDataLoader(Table(), batch_size=2, sampler=sampler(0, 3))
    for number, state in enumerate(saved):
        torch.save(state, tmp_path / f"{number}.pt")
    foreign = [find_foreign(open_checkpoint(tmp_path / f"{number}.pt")) for number in range(states)]
    with pytest.raises(StateMismatch, match=f"states of {states} ranks, and the sampler of the loader is that of 3"):
        take_over(foreign, loader)


def test_a_batch_that_was_short_after_the_state_was_taken_is_refused(tmp_path: Path) -> None:
    """How many samples it had is in no state: the first batch would raise."""

    def make() -> Other[Any]:
        return Other(Rows(20), batch_size=3, num_workers=2, snapshot_every_n_steps=3)

    torch.save(saved_after(make, 7), tmp_path / "old.pt")
    with pytest.raises(StateMismatch, match="not as many whole batches"):
        take_over(
            [find_foreign(open_checkpoint(tmp_path / "old.pt"))],
            StatefulDataLoader(Rows(20), batch_size=3, num_workers=2),
        )


def test_a_position_that_begins_at_a_state_is_refused_by_a_loader_that_ignores_states(tmp_path: Path) -> None:
    """It would begin the epoch anew."""

    def ours(**options: Any) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(Rows(20), batch_size=3, **options)

    state = saved_after(lambda: Other(Rows(20), batch_size=3), 3)
    position = taken(state, tmp_path, ours())
    for resume in ("checked", "trust"):
        loader = ours(resume=resume)
        loader.load_state_dict(position)
        assert batches_of(loader)[0] == [9, 10, 11]
    loader = ours(resume="replay")
    loader.load_state_dict(position)
    with pytest.raises(InvalidState, match=r'(?s)taken over.*resume="replay" ignores states'):
        next(iter(loader))
    (tmp_path / "again").mkdir()
    loader.load_state_dict(taken(state, tmp_path / "again", ours(resume="replay")))
    assert batches_of(loader)[0] == [9, 10, 11]
