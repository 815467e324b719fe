"""What cannot be taken over exactly from another loader is refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from unbroken import StatefulDataLoader, StateMismatch, read_jsonl
from unbroken.checkpoints.files import open_checkpoint
from unbroken.checkpoints.foreign import find_foreign
from unbroken.checkpoints.takeover import take_over

pytest.importorskip("torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader as Other

from tests.checkpoints.others import BareRows, Rows, Table, rest_of, saved_after

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
    # torch's opinion of three workers on a small machine
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def taken(state: Any, folder: Path, loader: StatefulDataLoader[Any]) -> dict[str, str]:
    """A state through a file of ``torch.save``, taken over."""
    torch.save({"loader": state}, folder / "old.pt")
    return take_over([find_foreign(open_checkpoint(folder / "old.pt"))], loader).position


def jsonl(folder: Path) -> StatefulDataLoader[Any]:
    (folder / "rows.jsonl").write_text("{}\n")
    return StatefulDataLoader(read_jsonl(folder / "rows.jsonl"))


class WithState(Table):
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("other", "steps", "ours", "reason"),
    [
        (lambda: Other(Rows(), batch_size=4), 2, jsonl, "over a stream of unbroken"),
        (
            lambda: Other(Rows(), batch_size=4),
            2,
            lambda _: StatefulDataLoader(Table()),
            "is of an iterable dataset, and the loader's is map-style",
        ),
        (lambda: Other(Table()), 2, lambda _: StatefulDataLoader(Rows()), "is of a map-style dataset"),
        (
            lambda: Other(Rows(), num_workers=2),
            2,
            lambda _: StatefulDataLoader(Rows(), lanes=3),
            "1 ranks with 2 workers each, and the loader has 3 lanes",
        ),
        (
            lambda: Other(Rows(), batch_size=4),
            2,
            lambda _: StatefulDataLoader(BareRows()),
            "BareRows has no state_dict and load_state_dict",
        ),
        (
            lambda: Other(BareRows(), batch_size=4, num_workers=3),
            12,
            lambda _: StatefulDataLoader(BareRows(), batch_size=4, lanes=3),
            "before one of them ended is not in the state",
        ),
        (
            lambda: Other(Rows(), batch_size=4),
            2,
            lambda _: StatefulDataLoader(Rows(), batch_size=4, save_prefetched=True),
            "save_prefetched=True counts on batches",
        ),
        (
            lambda: Other(Table(), shuffle=True),
            2,
            lambda _: StatefulDataLoader(Table(), shuffle=True, seed=1),
            "shuffles by its seed",
        ),
        (
            lambda: Other(Table(), shuffle=True),
            2,
            lambda _: StatefulDataLoader(Table()),
            "the loader has a SequentialSampler",
        ),
        (
            lambda: Other(Table(), sampler=WeightedRandomSampler([1.0] * 50, 50)),
            2,
            lambda _: StatefulDataLoader(Table(), sampler=WeightedRandomSampler([1.0] * 50, 50)),
            "no generator in the state",
        ),
        (
            lambda: Other(Table(), shuffle=True),
            None,
            lambda _: StatefulDataLoader(Table(), shuffle=True),
            "not that of the generator's first epoch",
        ),
        (lambda: Other(WithState()), 2, lambda _: StatefulDataLoader(WithState()), "had a state of its own"),
        (
            lambda: Other(Table(), sampler=[3, 1, 2]),
            1,
            lambda _: StatefulDataLoader(Table(), sampler=[3, 1, 2]),
            "a sampler of its own",
        ),
        (
            lambda: Other(Table()),
            1,
            lambda _: StatefulDataLoader(Table(), dp_rank=0, dp_world_size=2),
            "shares out rows among 2 ranks",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(
    tmp_path: Path,
    other: Callable[[], Other[Any]],
    steps: int | None,
    ours: Callable[[Path], StatefulDataLoader[Any]],
    reason: str,
) -> None:
    state = saved_after(other, steps)
    with pytest.raises(StateMismatch, match=reason):
        taken(state, tmp_path, ours(tmp_path))


def test_a_worker_that_ended_since_the_snapshot_is_refused(tmp_path: Path) -> None:
    """Which of the batches since then came from which worker is not in the state where one of them has ended."""
    state = saved_after(lambda: Other(Rows(), batch_size=4, num_workers=3, snapshot_every_n_steps=7), 13)
    with pytest.raises(StateMismatch, match="not as many whole batches"):
        taken(state, tmp_path, StatefulDataLoader(Rows(), batch_size=4, lanes=3))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("generator", [True, False])
def test_the_end_of_a_shuffled_epoch_with_workers_is_refused(tmp_path: Path, workers: int, generator: bool) -> None:
    """What is drawn before the next order is another with persistent workers, or a generator of the loader's own."""

    def make() -> Other[Any]:
        own = torch.Generator().manual_seed(3) if generator else None
        return Other(Table(), batch_size=4, shuffle=True, generator=own, num_workers=workers)

    ours = StatefulDataLoader(Table(), batch_size=4, shuffle=True, generator=torch.Generator())
    with pytest.raises(StateMismatch, match="workers were persistent"):
        taken(saved_after(make, None), tmp_path, ours)
    taken(saved_after(lambda: Other(Table(), batch_size=4, num_workers=workers), None), tmp_path, ours_in_sequence())


def ours_in_sequence() -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Table(), batch_size=4)


@pytest.mark.filterwarnings("ignore:Neither dataset nor iter:UserWarning")
def test_a_state_without_places_that_torchdata_refuses_itself_is_refused(tmp_path: Path) -> None:
    """A loader that was resumed there begins its turns anew, and its state names another worker as the last."""

    def make() -> Other[Any]:
        return Other(BareRows(), batch_size=4, num_workers=3)

    def resumed() -> Other[Any]:
        loader = make()
        loader.load_state_dict(first)
        return loader

    first = saved_after(make, 2)
    state = saved_after(resumed, 2)
    with pytest.raises(ValueError, match="last_yielded_worker_id does not match"):
        rest_of(make, state)
    with pytest.raises(StateMismatch, match="do not end with worker"):
        taken(state, tmp_path, StatefulDataLoader(BareRows(), batch_size=4, lanes=3))


def test_a_dataset_that_raises_on_the_way_is_told(tmp_path: Path) -> None:
    class Gone(Rows):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise OSError("no data here")

    state = saved_after(lambda: Other(Rows(), batch_size=4, num_workers=2, snapshot_every_n_steps=3), 4)
    with pytest.raises(StateMismatch, match="Gone raised OSError: no data here"):
        taken(state, tmp_path, StatefulDataLoader(Gone(), batch_size=4, lanes=2))


def test_states_of_ranks_at_other_steps_are_refused(tmp_path: Path) -> None:
    found = []
    for number, steps in enumerate((2, 3)):
        torch.save(saved_after(partial(Other, Rows(), batch_size=4), steps), tmp_path / f"{number}.pt")
        found.append(find_foreign(open_checkpoint(tmp_path / f"{number}.pt")))
    with pytest.raises(StateMismatch, match="the ranks have other steps: 2, 3"):
        take_over(found, StatefulDataLoader(Rows(), lanes=2))
    with pytest.raises(StateMismatch, match="states of 2 ranks, and the loader has a leaf for each rank alone"):
        take_over([found[0], found[0]], StatefulDataLoader(Rows()))
