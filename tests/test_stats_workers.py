"""``loader.stats()`` while workers die, epochs are left and others look on; and that asking changes nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import datasets as ds
from tests.engine.acts import wait_until
from tests.test_dead_workers import DiesInLanes, once
from tests.test_stats import ENGINES, corpus, encode
from unbroken import StatefulDataLoader, read_jsonl
from unbroken.errors import WorkerDied

# torch's advice on a machine with few cores; and Python's, from 3.12 on, on forks where there are threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    pytest.mark.timeout(60),
]


# What becomes of workers


def _kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KilledOnce(DiesInLanes):
    """The first worker that comes to row ``at`` is killed there."""

    def __init__(self, n: int, at: int, path: Path) -> None:
        super().__init__(n, at, lambda: _kill_myself() if once(path) else None)


def test_a_worker_that_was_replaced_has_its_numbers_kept(tmp_path: Path) -> None:
    loader = StatefulDataLoader(
        KilledOnce(24, 14, tmp_path / "killed"), batch_size=2, num_workers=1, multiprocessing_context="fork"
    )
    rows = [int(row) for batch in loader for row in batch[:, 0]]
    stats = loader.stats()
    assert rows == list(range(24))
    assert stats["restarts"] == 1
    assert stats["batches"] == 12
    # Rows 0 to 13 by the first worker, and by the second from the batch on that was not delivered by then.
    assert 24 <= stats["rows"] <= 24 + 14
    loader.close()


def test_it_can_be_asked_when_a_worker_has_died_for_good(tmp_path: Path) -> None:
    dataset = DiesInLanes(24, 8, _kill_myself)
    loader = StatefulDataLoader(dataset, batch_size=2, num_workers=1, worker_restarts=0, multiprocessing_context="fork")
    iterator = iter(loader)
    seen = 0
    with pytest.raises(WorkerDied):
        for _ in iterator:
            seen += 1
    stats = loader.stats()
    assert (stats["batches"], stats["step"], stats["restarts"], stats["queue_depth"]) == (seen, seen, 0, 0)
    assert stats["rows"] == 8


@pytest.mark.parametrize("persistent", [False, True])
def test_the_numbers_of_all_epochs_add_up(persistent: bool) -> None:
    loader = StatefulDataLoader(
        ds.Numbers(20), batch_size=2, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    for epoch in (1, 2, 3):
        list(loader)
        assert (loader.stats()["rows"], loader.stats()["batches"]) == (20 * epoch, 10 * epoch)
    loader.close()


def test_an_epoch_that_is_left_leaves_no_queue_behind() -> None:
    loader = StatefulDataLoader(
        ds.Numbers(40), batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    next(iter(loader))
    for _ in range(2):
        iterator = iter(loader)
        next(iterator)
        wait_until(lambda: loader.stats()["queue_depth"] == 4, "what is made is not counted")
    assert len(list(iterator)) == 19
    assert loader.stats()["queue_depth"] == 0
    loader.close()


# It changes nothing


def _states(loader: StatefulDataLoader, ask: bool) -> Iterator[dict[str, str]]:
    for _ in loader:
        if ask:
            loader.stats()
        yield loader.state_dict()


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_positions_are_the_same_whoever_looks(tmp_path: Path, progress: bool, engine: dict[str, Any]) -> None:
    stream = read_jsonl(corpus(tmp_path)).shuffle(8).tokenize(encode, append=0).pack(16)

    def loader(**more: Any) -> StatefulDataLoader:
        return StatefulDataLoader(stream, batch_size=2, lanes=3, seed=1, **engine, **more)

    assert list(_states(loader(progress=progress), True)) == list(_states(loader(), False))


def test_other_threads_may_ask_while_batches_are_delivered() -> None:
    loader = StatefulDataLoader(ds.Numbers(400), batch_size=1, num_workers=2, multiprocessing_context="fork")
    done, asked, failures = threading.Event(), threading.Event(), []

    def ask() -> None:
        try:
            while not done.is_set():
                loader.stats()
                asked.set()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(20)
    assert len(list(loader)) == 400
    done.set()
    thread.join()
    assert failures == []
    loader.close()


def test_progress_that_is_no_bool_is_refused() -> None:
    with pytest.raises(TypeError, match="progress must be True or False, but got progress='yes'"):
        StatefulDataLoader(ds.Numbers(4), progress="yes")  # type: ignore[arg-type]
