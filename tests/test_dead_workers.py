"""Workers that die or hang, at any moment: they are replaced, and the batches are the same. Case 33."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from tests import datasets as ds
from unbroken import StatefulDataLoader, read_jsonl
from unbroken.errors import WorkerDied, WorkerTimeout

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
within_20_s = pytest.mark.timeout(20)


def workers() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


def values(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: value.tolist() for name, value in batch.items()}
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def once(path: Path) -> bool:
    """True the first time that it is asked, in whatever process."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Dies(ds.Numbers):
    """``act`` is called before row ``at`` is made, in the worker; a row is a random number and its own."""

    def __init__(self, n: int, at: int, act: Callable[[], Any]) -> None:
        super().__init__(n)
        self.at, self.act = at, act

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            self.act()
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


class DiesInLanes(ds.WellBehaved):
    """The same for an iterable dataset that shares its rows out."""

    def __init__(self, n: int, at: int, act: Callable[[], Any]) -> None:
        super().__init__(n)
        self.at, self.act = at, act

    def row(self, number: int) -> Any:
        if number == self.at:
            self.act()
        return torch.stack([torch.tensor(float(number)), torch.rand(())])


def text_stream(folder: Path, rows: int = 60) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [row, row + 1]}) + "\n" for row in range(rows)))
    return read_jsonl(path).shuffle(16, seed=3).map(_as_tensors, rng=True)


def _as_tensors(row: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {"input_ids": torch.tensor(row["input_ids"]), "noise": torch.tensor(rng.random())}


KINDS: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "map": lambda folder: (Dies(40, -1, int), {"shuffle": True}),
    "map, custom sampler": lambda folder: (Dies(40, -1, int), {"sampler": ds.SamplerWithState(40)}),
    "iterable": lambda folder: (DiesInLanes(40, -1, int), {}),
    "iterable, lanes": lambda folder: (DiesInLanes(40, -1, int), {"lanes": 5}),
    "late": lambda folder: (ds.Late(40), {}),
    "coarse": lambda folder: (ds.CoarseEntering(40), {}),
    "stateless": lambda folder: (ds.Stateless(40), {}),
    "stream": lambda folder: (text_stream(folder), {"lanes": 5}),
}


def loader_of(kind: str, folder: Path, **more: Any) -> StatefulDataLoader:
    dataset, arguments = KINDS[kind](folder)
    return StatefulDataLoader(
        dataset,
        **{"batch_size": 3, "num_workers": 2, "seed": 7, "multiprocessing_context": "fork", **arguments, **more},
    )


# From outside, at any moment


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_are_killed_between_any_two_batches_change_nothing(
    kind: str, persistent: bool, tmp_path: Path
) -> None:
    loader = loader_of(kind, tmp_path, persistent_workers=persistent)
    reference = [[values(batch) for batch in loader] for _ in range(2)]
    loader.close()
    loader = loader_of(kind, tmp_path, persistent_workers=persistent)
    held: list[Any] = []
    generator = random.Random(kind)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            held.append(batch)  # the slots of batches that are held are never written again
            if generator.random() < 0.3:
                os.kill(generator.choice(workers()), signal.SIGKILL)
            if number % 3 == 0:
                loader.state_dict()
        assert [values(batch) for batch in held] == reference[epoch], epoch
        held.clear()
    loader.close()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_law_holds_with_deaths(data: st.DataObject, tmp_path: Path) -> None:
    """Saved and loaded between deaths, in a chain, on other numbers of workers."""
    kind = data.draw(st.sampled_from(["map", "iterable, lanes", "late", "stream"]))
    more = {"lanes": 3} if kind == "late" else {}
    reference = [values(batch) for batch in loader_of(kind, tmp_path, num_workers=1, **more)]
    found: list[Any] = []
    state: dict[str, str] = {}
    while len(found) < len(reference):
        loader = loader_of(kind, tmp_path, num_workers=data.draw(st.sampled_from([1, 2, 3])), **more)
        loader.load_state_dict(state)
        iterator = iter(loader)
        for _ in range(data.draw(st.integers(1, 6))):
            if data.draw(st.booleans()) and (alive := workers()):
                os.kill(data.draw(st.sampled_from(sorted(alive))), signal.SIGKILL)
            if (batch := next(iterator, None)) is None:
                break
            found.append(values(batch))
        state = loader.state_dict()
        loader.close()
    assert found == reference


# From inside, in each phase


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _exit() -> None:
    os._exit(3)


def _close_all() -> None:
    os.closerange(3, 1000)  # the process lives on, and cannot be spoken to any more


ENDS = {"SIGKILL": _kill, "segfault": _segfault, "os._exit": _exit, "closed descriptors": _close_all}


@within_20_s
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("make", [Dies, DiesInLanes])
def test_a_worker_that_ends_while_it_fetches_is_replaced(
    make: Any, end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def act() -> None:
        if once(tmp_path / "died"):
            ENDS[end]()

    calm = StatefulDataLoader(make(40, -1, int), batch_size=4, num_workers=2, seed=1)
    loader = StatefulDataLoader(make(40, 17, act), batch_size=4, num_workers=2, seed=1)
    assert [values(batch) for batch in loader] == [values(batch) for batch in calm]
    (told,) = [text for text in caplog.messages if "takes its place" in text]
    assert "it was on " in told


class Collates:
    """Ends the process while it makes a batch, or while that is written."""

    def __init__(self, flag: Path, where: str) -> None:
        self.flag, self.where = flag, where

    def __call__(self, samples: list[Any]) -> Any:
        batch = torch.stack(samples)
        if any(int(sample[0]) == 17 for sample in samples) and once(self.flag):
            if self.where == "collating":
                _kill()
            return [batch, Reduced()]
        return batch


class Reduced:
    def __reduce__(self) -> Any:
        _kill()


@within_20_s
@pytest.mark.parametrize("where", ["collating", "pickling"])
@pytest.mark.parametrize("make", [Dies, DiesInLanes])
def test_a_worker_that_ends_while_it_makes_a_batch_is_replaced(make: Any, where: str, tmp_path: Path) -> None:
    calm = StatefulDataLoader(make(40, -1, int), batch_size=4, num_workers=2, seed=1)
    collate = Collates(tmp_path / "died", where)
    loader = StatefulDataLoader(make(40, -1, int), batch_size=4, num_workers=2, seed=1, collate_fn=collate)
    assert [values(batch) for batch in loader] == [values(batch) for batch in calm]
    assert (tmp_path / "died").exists()


@within_20_s
def test_a_worker_that_ends_in_the_middle_of_a_slot_is_replaced() -> None:
    """Large batches, killed at moments that have nothing to do with them."""

    class Large(ds.Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.full((1 << 18,), index)

    loader = StatefulDataLoader(Large(120), batch_size=4, num_workers=2)
    found = []
    for number, batch in enumerate(loader):
        if number % 5 == 2:
            time.sleep(0.001 * (number % 7))
            os.kill(workers()[number % 2], signal.SIGKILL)
        assert (batch == batch[:, :1]).all()
        found += batch[:, 0].tolist()
    assert found == list(range(120))


@within_20_s
@pytest.mark.parametrize("make", [Dies, DiesInLanes])
def test_a_worker_that_ends_while_it_starts_is_replaced(make: Any, tmp_path: Path) -> None:
    def start(number: int) -> None:
        if once(tmp_path / f"died {number}"):
            _kill()

    calm = StatefulDataLoader(make(12, -1, int), batch_size=4, num_workers=2, seed=1)
    loader = StatefulDataLoader(make(12, -1, int), batch_size=4, num_workers=2, seed=1, worker_init_fn=start)
    assert [values(batch) for batch in loader] == [values(batch) for batch in calm]


@within_20_s
@pytest.mark.parametrize("make", [Dies, DiesInLanes])
def test_idle_workers_that_are_killed_between_two_epochs_are_replaced(make: Any) -> None:
    loader = StatefulDataLoader(make(12, -1, int), batch_size=4, num_workers=2, seed=1, persistent_workers=True)
    calm = StatefulDataLoader(
        make(12, -1, int), batch_size=4, seed=1, num_workers=0, lanes=2 if make is DiesInLanes else None
    )
    for _ in range(3):
        assert [values(batch) for batch in loader] == [values(batch) for batch in calm]
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
    loader.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [Dies, DiesInLanes])
def test_spawned_workers_are_replaced_too(make: Any) -> None:
    arguments = {"batch_size": 4, "num_workers": 2, "seed": 1}
    calm = StatefulDataLoader(make(24, -1, int), **arguments)
    found = []
    for number, batch in enumerate(StatefulDataLoader(make(24, -1, int), multiprocessing_context="spawn", **arguments)):
        if number == 2:
            os.kill(workers()[0], signal.SIGKILL)
        found.append(values(batch))
    assert found == [values(batch) for batch in calm]


# When it is enough


@pytest.mark.timeout(10)
@pytest.mark.parametrize("restarts", [0, 1, 3])
@pytest.mark.parametrize("make", [Dies, DiesInLanes])
def test_a_sample_that_always_kills_ends_in_an_error_that_says_all(make: Any, restarts: int, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    tries.touch()

    def act() -> None:
        with tries.open("a") as file:
            file.write("x")
        _kill()

    loader = StatefulDataLoader(make(40, 17, act), batch_size=4, num_workers=2, seed=1, worker_restarts=restarts)
    found: list[Any] = []
    with pytest.raises(WorkerDied) as caught:
        for batch in loader:
            found += batch[:, 0].tolist()
    assert len(tries.read_text()) == restarts + 1
    text = str(caught.value)
    assert "ended by signal 9 (SIGKILL)" in text
    assert "ran out of memory" in text
    assert ("worker_restarts=" in text) == (restarts > 0)
    if make is Dies:
        assert "indices [16, 17, 18, 19] (from place 16 of epoch 0): it was on sample 1 of its batch" in text
    else:  # row 17 is the ninth of lane 1
        assert "the first was a batch of lane 1: it was on the batch that begins with sample 8 of lane 1" in text
        assert "Position: lane 1 at sample 8 of epoch 0." in text
    assert loader.state_dict()
    assert 17 not in found


@within_20_s
def test_deaths_with_progress_in_between_are_never_too_many(tmp_path: Path) -> None:
    class Often(ds.Numbers):
        def __getitem__(self, index: int) -> int:
            if index % 4 == 3 and once(tmp_path / str(index)):
                _kill()
            return index

    loader = StatefulDataLoader(Often(40), batch_size=2, num_workers=1, worker_restarts=1)
    assert [row for batch in loader for row in batch.tolist()] == list(range(40))


@within_20_s
def test_a_batch_that_is_made_again_is_no_progress(tmp_path: Path) -> None:
    """Turns of a lane are made again up to the one that kills; the consumer waits for another worker meanwhile."""
    (tmp_path / "gate").touch()
    starts = tmp_path / "starts"
    starts.touch()

    class Lanes(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            lane = ds.my_lane()
            if lane == 0:
                yield 0
                while (tmp_path / "gate").exists():
                    time.sleep(0.01)
                yield from range(1, 4)
                return
            with starts.open("a") as file:
                file.write("x")
            yield from (100, 101)
            _kill()

    loader = StatefulDataLoader(Lanes(), batch_size=1, num_workers=2, worker_restarts=2, prefetch_factor=4)
    with pytest.raises(WorkerDied):
        list(loader)
    assert len(starts.read_text()) == 3


# Workers that hang


def _hang_here() -> None:
    time.sleep(100)


@within_20_s
@pytest.mark.parametrize("make", [Dies, DiesInLanes])
def test_a_late_worker_says_where_it_is_stuck(make: Any) -> None:
    loader = StatefulDataLoader(make(40, 17, _hang_here), batch_size=4, num_workers=2, seed=1, timeout=0.5)
    with pytest.raises(WorkerTimeout) as caught:
        list(loader)
    text = str(caught.value)
    assert text.splitlines()[0] == "DataLoader timed out after 0.5 seconds"
    assert "in _hang_here" in text
    assert "test_dead_workers.py" in text
    assert 'on_timeout="restart"' in text
    assert ("indices [16, 17, 18, 19]" in text) == (make is Dies)


@within_20_s
def test_a_worker_that_was_stopped_cannot_say_where_it_is() -> None:
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    loader = StatefulDataLoader(Dies(8, 5, stop), batch_size=4, num_workers=1, timeout=0.5)
    with pytest.raises(WorkerTimeout, match="does not say where it is"):
        list(loader)


@within_20_s
def test_a_worker_that_hangs_while_it_starts_is_told_apart() -> None:
    loader = StatefulDataLoader(
        Dies(8, 5, int), batch_size=4, num_workers=1, timeout=0.5, worker_init_fn=lambda number: time.sleep(100)
    )
    with pytest.raises(WorkerTimeout, match="still starting, or hangs there"):
        list(loader)


@within_20_s
@pytest.mark.parametrize("make", [Dies, DiesInLanes])
def test_a_late_worker_is_replaced_where_that_was_asked_for(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def act() -> None:
        if once(tmp_path / "hung"):
            _hang_here()

    arguments = {"batch_size": 4, "num_workers": 2, "seed": 1}
    calm = StatefulDataLoader(make(40, -1, int), **arguments)
    loader = StatefulDataLoader(make(40, 17, act), timeout=1, on_timeout="restart", **arguments)
    assert [values(batch) for batch in loader] == [values(batch) for batch in calm]
    (told,) = [text for text in caplog.messages if "takes its place" in text]
    assert "in _hang_here" in told


@within_20_s
def test_a_worker_that_always_hangs_ends_in_the_timeout() -> None:
    loader = StatefulDataLoader(
        Dies(40, 17, _hang_here), batch_size=4, num_workers=2, timeout=0.3, on_timeout="restart", worker_restarts=2
    )
    with pytest.raises(WorkerTimeout, match="It was number 3 in a row"):
        list(loader)


def test_restarts_are_told_through_the_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def act() -> None:
        if once(tmp_path / "died"):
            _exit()

    list(StatefulDataLoader(Dies(8, 5, act), batch_size=2, num_workers=1))
    (record,) = [record for record in caplog.records if record.name == "unbroken"]
    assert record.levelno == logging.WARNING
    assert "ended with exit code 3; it was on sample" in record.message
    assert "If 3 more make nothing, that is an error (see worker_restarts)." in record.message
