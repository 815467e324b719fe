"""``state_after(batch)``: which objects are batches that it knows, in whatever way they come and go."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests import datasets as ds
from tests.lookahead import follow
from tests.streams.mixing import rows_of, streams
from unbroken import StatefulDataLoader, mix
from unbroken.trail import LENGTH

# What is told about repeated data and slow resumes, and torch's advice on a machine with few cores, have their tests.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# Batches


@pytest.mark.parametrize("shape", ["tensor", "dict", "tuple", "namedtuple", "ndarray", "nested"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [2, None])
def test_batches_may_be_any_objects(shape: str, num_workers: int, batch_size: int | None) -> None:
    context = "fork" if num_workers else None
    with closing(
        StatefulDataLoader(ds.Shaped(40, shape), batch_size, num_workers=num_workers, multiprocessing_context=context)
    ) as loader:
        assert follow(loader) >= 40


class Buffer(ds.Numbers):
    """Gives the same object for every row."""

    def __init__(self, buffer: Any) -> None:
        super().__init__(6)
        self.buffer = buffer

    def __getitem__(self, index: int) -> Any:
        return self.buffer


@pytest.mark.parametrize("buffer", [torch.zeros(2), None, "text", 7], ids=repr)
def test_an_object_that_comes_again_does_not_say_which_batch_is_meant(buffer: Any) -> None:
    """Rather than the place of the last one, which a loop that looks ahead has not trained on."""
    loader = StatefulDataLoader(Buffer(buffer), batch_size=None, collate_fn=as_it_is)
    for number, batch in enumerate(loader):
        assert batch is buffer
        if number == 0:
            assert loader.state_after(batch) == loader.state_dict()
        else:
            with pytest.raises(ValueError, match=f"delivered {min(number + 1, 16)} times among the last"):
                loader.state_after(batch)


def as_it_is(batch: Any) -> Any:
    return batch


def test_a_batch_that_was_freed_leaves_its_memory() -> None:
    """Each takes a slot of its own while it is alive, and slots are used again."""
    dataset = ds.Shaped(200, "dict")
    with closing(StatefulDataLoader(dataset, 2, num_workers=1, multiprocessing_context="fork")) as loader:
        places = {batch["x"].data_ptr() for batch in loader}
        assert len(places) < LENGTH
        kept = list(loader)
        assert len({batch["x"].data_ptr() for batch in kept}) == 100


def test_pinned_batches_are_known_by_what_the_user_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unbroken.engine.epoch.should_pin", lambda asked, *_: asked)
    monkeypatch.setattr("unbroken.engine.epoch.pin", lambda batch, *_: batch.clone())
    assert follow(StatefulDataLoader(ds.Numbers(40), batch_size=2, pin_memory=True)) == 40


# What is known


def test_what_is_not_known_is_an_error_that_says_so() -> None:
    loader = StatefulDataLoader(ds.Numbers(80), batch_size=2)
    batches = list(loader)
    for batch in (batches[-LENGTH - 1], batches[-1].clone(), None, 3):
        with pytest.raises(ValueError, match="none of the last 16 batches of this loader"):
            loader.state_after(batch)
    assert loader.state_after(batches[-LENGTH])


def test_after_a_load_nothing_is_known_of_before() -> None:
    loader = StatefulDataLoader(ds.WellBehaved(80), batch_size=2)
    epoch = iter(loader)
    batch, state = next(epoch), loader.state_dict()
    for back_to in (state, {}):
        loader.load_state_dict(back_to)
        with pytest.raises(ValueError, match="of which it has 0"):
            loader.state_after(batch)
        batch = next(epoch)
        assert loader.state_after(batch) == loader.state_dict()


def test_a_copy_of_a_loader_knows_its_own_batches_only() -> None:
    loader = StatefulDataLoader(ds.Numbers(80), batch_size=2)
    epoch = iter(loader)
    batch = next(epoch)
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        with pytest.raises(ValueError, match="of which it has 0"):
            other.state_after(batch)
        own = next(iter(other))
        assert other.state_after(own) == other.state_dict()
    assert loader.state_after(batch) == loader.state_dict()


def test_batches_of_an_iterator_that_was_replaced_are_not_counted() -> None:
    loader = StatefulDataLoader(ds.WellBehaved(80), batch_size=2, lanes=2)
    old = iter(loader)
    counted, state = next(old), loader.state_dict()
    new = iter(loader)
    later = next(old)
    assert loader.state_after(counted) == state
    with pytest.raises(ValueError, match="newest iterator"):
        loader.state_after(later)
    batch, state = next(new), loader.state_dict()
    next(old)
    next(new)
    assert loader.state_after(batch) == state


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_an_interrupt_the_batches_before_it_are_still_known(num_workers: int) -> None:
    loader = StatefulDataLoader(
        ds.WellBehaved(80), 2, lanes=3, num_workers=num_workers, multiprocessing_context="fork" if num_workers else None
    )
    epoch = iter(loader)
    known = []
    for number in range(12):
        batch = next(epoch)
        known.append((batch, loader.state_dict()))
        if number % 5 == 3:
            epoch.close()  # as an interrupt does
        for batch, state in known:
            assert loader.state_after(batch) == state
    loader.close()


def test_what_a_mix_keeps_of_a_source_that_is_gone_is_told_after_its_epoch_too(tmp_path: Path) -> None:
    """The header has its fields until the epoch ends."""
    sources = streams(tmp_path, rows_of({"a": 20, "b": 20}))
    before = StatefulDataLoader(mix(sources, weights={"a": 1, "b": 1}, stop="all"), 2, lanes=2, seed=1)
    next(iter(before))
    loader = StatefulDataLoader(mix({"a": sources["a"]}, weights={"a": 1}, stop="all"), 2, lanes=2, seed=1)
    loader.load_state_dict(before.state_dict())
    assert "b: " in loader.state_dict()["unbroken"]
    assert follow(loader) > LENGTH / 2


def test_batches_that_cannot_be_made_again_are_refused() -> None:
    try:
        loader = StatefulDataLoader(ds.WellBehaved(8), batch_size=2, save_prefetched=True)
    except NotImplementedError:
        pytest.skip("not in this version")
    with pytest.raises(ValueError, match="save_prefetched"):
        loader.state_after(next(iter(loader)))


def step_of(state: dict[str, str]) -> int:
    """The step that all leaves agree about."""
    (step,) = {json.loads(leaf)["step"] for name, leaf in state.items() if name != "unbroken"}
    assert json.loads(state["unbroken"])["at"][2] == step
    return int(step)


def test_another_thread_may_save_while_batches_are_delivered() -> None:
    """Whatever it gets is a position that there was."""

    class Many(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(240))

    loader = StatefulDataLoader(Many(), batch_size=2, lanes=2)
    latest: list[Any] = []
    found: list[tuple[int, int, int]] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def save() -> None:
        try:
            while not done.is_set():
                if not latest:
                    continue
                number, batch = latest[-1]
                with suppress(ValueError):  # sixteen more may have been delivered since
                    found.append((number, step_of(loader.state_after(batch)), step_of(loader.state_dict())))
        except BaseException as error:
            failures.append(error)

    saver = threading.Thread(target=save)
    saver.start()
    number = 0
    for _ in range(2):
        for batch in loader:
            number += 1
            latest.append((number, batch))
            del latest[:-1]
    done.set()
    saver.join()
    assert not failures
    assert found
    assert all(number == after <= now for number, after, now in found)
    gc.collect()
