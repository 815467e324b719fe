"""Cases 34, 35, 37, 39 and 42: worker processes and what users do in and around them."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.errors import UnbrokenError, UnsealableState
from unbroken.testing import Point, assert_resumes_exactly

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

ROOT = Path(__file__).parent.parent
within_10_s = pytest.mark.timeout(10)


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# Case 34


class Unpicklable(ds.Numbers):
    """Sample 5 holds a function that has no name."""

    def __getitem__(self, index: int) -> Any:
        return {"row": index, "f": (lambda: None) if index == 5 else None}


@within_10_s
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_sample_that_cannot_be_pickled_is_an_error_that_names_it(num_workers: int) -> None:
    """Case 34."""
    loader = StatefulDataLoader(Unpicklable(8), batch_size=2, collate_fn=ds.as_list, num_workers=num_workers)
    with pytest.raises((UnbrokenError, pickle.PicklingError, AttributeError, TypeError), match="lambda"):
        list(loader)
    loader.close()


class AwkwardError(Exception):
    """Takes two arguments and holds something that cannot be pickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because of {why}")
        self.handle = lambda: None


class RaisesAwkwardly(ds.Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise AwkwardError("row 5", "a full disk")
        return index


@within_10_s
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_exception_that_cannot_be_pickled_is_an_error_that_names_it(num_workers: int) -> None:
    """Case 34: its type where that can be made again, its name and text always."""
    loader = StatefulDataLoader(RaisesAwkwardly(8), batch_size=2, num_workers=num_workers)
    with pytest.raises((AwkwardError, RuntimeError), match="row 5 because of a full disk") as caught:
        list(loader)
    assert "AwkwardError" in text_of(caught.value)
    loader.close()


class LambdaInState(ds.WellBehaved):
    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "f": lambda: None}


@within_10_s
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_state_that_cannot_be_pickled_is_an_error_that_names_it(num_workers: int) -> None:
    """Case 34."""
    loader = StatefulDataLoader(LambdaInState(8), num_workers=num_workers, snapshot_every_n_steps=1)
    with pytest.raises(UnsealableState, match=r"\['f'\]"):
        list(loader)
    loader.close()


class UnpicklableDataset(ds.Numbers):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.f = lambda: None


@within_10_s
def test_a_dataset_that_cannot_be_pickled_for_spawn_is_an_error_that_names_it() -> None:
    """Case 34."""
    loader = StatefulDataLoader(UnpicklableDataset(8), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises((UnbrokenError, pickle.PicklingError, AttributeError, TypeError), match="lambda"):
        list(loader)
    loader.close()


# Case 35


class RaisesAt(ds.Numbers):
    """Row 7 is broken."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("row 7 is broken")
        return index


class StreamRaisesAt(ds.WellBehaved):
    """Row 7 is broken; it is the fourth of lane 1 of 2."""

    def row(self, number: int) -> int:
        if number == 7:
            raise ValueError("row 7 is broken")
        return number


@within_10_s
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_exception_of_a_map_style_dataset_keeps_its_type_and_message(num_workers: int) -> None:
    """Case 35: original type and message, the traceback down to the user's line."""
    loader = StatefulDataLoader(RaisesAt(12), batch_size=2, num_workers=num_workers)
    got = []
    with pytest.raises(KeyError, match="row 7 is broken") as caught:
        for batch in loader:
            got.append(batch.tolist())
    assert got == [[0, 1], [2, 3], [4, 5]]
    assert 'raise KeyError("row 7 is broken")' in text_of(caught.value)
    loader.close()


@within_10_s
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_exception_of_an_iterable_dataset_names_lane_and_sample(num_workers: int) -> None:
    """Case 35: lane 1, sample 3 (from 0); inline the traceback is the user's own, as torch has it."""
    loader = StatefulDataLoader(StreamRaisesAt(12), batch_size=2, lanes=2, num_workers=num_workers)
    got = []
    with pytest.raises(ValueError, match="row 7 is broken") as caught:
        for batch in loader:
            got.append(batch.tolist())
    assert got == [[0, 2], [1, 3], [4, 6]]
    text = text_of(caught.value)
    assert 'raise ValueError("row 7 is broken")' in text
    assert num_workers == 0 or re.search(r"lane 1\b.*sample 3\b", text, re.DOTALL)
    loader.close()


@within_10_s
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_a_collate_fn_keeps_its_type_and_message(num_workers: int) -> None:
    """Case 35."""
    loader = StatefulDataLoader(ds.Numbers(6), batch_size=2, collate_fn=broken_collate, num_workers=num_workers)
    with pytest.raises(ZeroDivisionError, match="division"):
        list(loader)
    loader.close()


def broken_collate(batch: list[Any]) -> Any:
    return len(batch) / 0


def broken_init(worker: int) -> None:
    raise LookupError(f"no file for worker {worker}")


@within_10_s
def test_an_exception_of_a_worker_init_fn_keeps_its_type_and_message() -> None:
    """Case 35."""
    loader = StatefulDataLoader(ds.Numbers(6), worker_init_fn=broken_init, num_workers=2)
    with pytest.raises(LookupError, match="no file for worker"):
        list(loader)
    loader.close()


@within_10_s
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_position_is_good_after_an_exception(num_workers: int) -> None:
    """Case 35: what was delivered is in it; another loader, without the fault, goes on."""
    loader = StatefulDataLoader(StreamRaisesAt(12), batch_size=2, num_workers=num_workers, lanes=2)
    got = []
    with pytest.raises(ValueError, match="row 7"):
        for batch in loader:
            got.append(batch.tolist())
    state = loader.state_dict()
    loader.close()
    mended = StatefulDataLoader(ds.WellBehaved(12), batch_size=2, num_workers=num_workers, lanes=2)
    reference = [batch.tolist() for batch in mended]
    mended.load_state_dict(state, strict=False)
    assert got + [batch.tolist() for batch in mended] == reference


# Case 37


class Wide(ds.Numbers):
    """Rows of 1000 numbers, all of them the row's own."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), index)


def held_and_checked(loader: StatefulDataLoader, between: Any) -> None:
    held: list[torch.Tensor] = []
    for number, batch in enumerate(loader):
        held.append(batch)
        if number == 5:
            between()
    assert [batch[:, 0].tolist() for batch in held] == [[2 * i, 2 * i + 1] for i in range(len(held))]
    assert all((batch == batch[:, :1]).all() for batch in held)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_held_while_a_subprocess_runs_stay_what_they_were(num_workers: int) -> None:
    """Case 37: a subprocess."""
    loader = StatefulDataLoader(Wide(60), batch_size=2, num_workers=num_workers)
    held_and_checked(loader, lambda: subprocess.run(["true"], check=True))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_held_while_other_workers_start_stay_what_they_were(num_workers: int) -> None:
    """Case 37: the workers of another loader, forked while batches are out."""
    loader = StatefulDataLoader(Wide(60), batch_size=2, num_workers=num_workers)
    other = StatefulDataLoader(Wide(20), batch_size=2, num_workers=2)
    held_and_checked(loader, lambda: list(other))


def test_batches_held_are_the_same_in_a_forked_child() -> None:
    """Case 37: the child lets go of its copies, and the parent runs on over the memory."""
    loader = StatefulDataLoader(Wide(200), batch_size=2, num_workers=2)
    iterator = iter(loader)
    held = [next(iterator) for _ in range(5)]
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # only what is async-signal-safe enough: no test machinery in the child
        status = 1
        try:
            os.close(write_end)
            os.read(read_end, 1)  # until the parent has gone on
            right = all((batch == batch[:, :1]).all() and batch[0, 0] == 2 * i for i, batch in enumerate(held))
            held.clear()
            status = 0 if right else 2
        finally:
            os._exit(status)
    os.close(read_end)
    kept = [batch[:, 0].tolist() for batch in iterator]
    os.write(write_end, b"x")
    os.close(write_end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [batch[:, 0].tolist() for batch in held] + kept == [[2 * i, 2 * i + 1] for i in range(100)]


def test_a_batch_changed_in_place_does_not_change_another() -> None:
    """Case 37: neither one delivered before nor one delivered after."""
    loader = StatefulDataLoader(Wide(60), batch_size=2, num_workers=2)
    held = []
    for batch in loader:
        held.append(batch.clone())
        batch.fill_(-1)
    assert [batch[:, 0].tolist() for batch in held] == [[2 * i, 2 * i + 1] for i in range(30)]


def test_a_batch_sent_to_another_process_stays_what_it_was() -> None:
    """Case 37: through a queue of torch's, while the loader runs on."""
    context = torch.multiprocessing.get_context("spawn")
    queue, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=first_of_each, args=(queue, answers))
    process.start()
    loader = StatefulDataLoader(Wide(40), batch_size=2, num_workers=1)
    for batch in loader:
        queue.put(batch)
        del batch
    queue.put(None)
    assert answers.get() == [2 * i for i in range(20)]
    process.join(10)
    assert process.exitcode == 0


def first_of_each(queue: Any, answers: Any) -> None:
    firsts = []
    while (batch := queue.get()) is not None:
        firsts.append(int(batch[0, 0]) if (batch == batch[:, :1]).all() else -1)
    answers.put(firsts)


MANY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from tests.datasets import Numbers
from unbroken import StatefulDataLoader

held = list(StatefulDataLoader(Numbers(20_000), batch_size=1, num_workers=1))
assert [int(batch) for batch in held] == list(range(20_000))
"""


def test_many_batches_can_be_kept_with_few_descriptors() -> None:
    """Case 37: 20 000 of them under ``ulimit -n 256``."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 256
    done = subprocess.run([sys.executable, "-c", MANY], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


# Case 39

LONG_RUN = """
import json, os, sys
from tests.datasets import Numbers
from unbroken import StatefulDataLoader

loader = StatefulDataLoader(Numbers(100_000), batch_size=4, num_workers=2, shuffle=True, seed=1)
for number, batch in enumerate(loader):
    if number == 3:
        print(json.dumps(batch.tolist()), flush=True)
        sys.stdin.readline()
"""


def start_long_run() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LONG_RUN], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def named_files_of(pid: int) -> set[str]:
    """Files in shared memory that the process maps or holds open, and that have a name."""
    mapped = re.findall(r"(/dev/shm/\S+)(?! \(deleted\))$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    held = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return {path for path in [*mapped, *held] if path.startswith("/dev/shm/") and Path(path).exists()}


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")
def test_a_killed_run_leaves_nothing_and_is_started_again_at_once() -> None:
    """Case 39: SIGKILL; no process and no name is left, and the next run gives the same."""
    with start_long_run() as run:
        first = json.loads(run.stdout.readline())
        workers = children_of(run.pid)
        assert len(workers) >= 2
        names = set().union(*(named_files_of(pid) for pid in [run.pid, *workers]))
        run.send_signal(signal.SIGKILL)
        with start_long_run() as again:
            assert json.loads(again.stdout.readline()) == first
            again.kill()
    deadline = time.monotonic() + 10
    while not all(is_gone(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.01)
    assert {name for name in names if Path(name).exists()} == set()


def test_two_runs_side_by_side_do_not_meet() -> None:
    """Case 39."""
    with start_long_run() as one, start_long_run() as two:
        assert json.loads(one.stdout.readline()) == json.loads(two.stdout.readline())
        one.kill()
        two.kill()


# Case 42


class SlowState(ds.WellBehaved):
    """Counts how often it is asked for its state, which takes long compared with a row."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        until = time.perf_counter() + 0.005
        while time.perf_counter() < until:
            pass
        return super().state_dict()


def test_a_state_that_is_slow_to_take_is_taken_seldom() -> None:
    """Case 42: the rest is the count, so that the steps stay as fast as without a state."""
    dataset = SlowState(4000)
    assert len(list(StatefulDataLoader(dataset, batch_size=2))) == 2000
    assert dataset.asked < 200


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_large_state_is_exact_however_seldom_it_is_taken(num_workers: int) -> None:
    """Case 42: 10 000 rows in the state."""

    def make_loader() -> StatefulDataLoader:
        return StatefulDataLoader(ds.LargeState(300), batch_size=2, num_workers=num_workers)

    assert_resumes_exactly(make_loader, epochs=1, restore_points=[1, 2, 77, [40, 41, 120], Point(1, -1)])


# What workers can and cannot see


class TellsItsWorker(IterableDataset):
    """Yields what worker info says."""

    def __iter__(self) -> Iterator[list[int]]:
        info = get_worker_info()
        for _ in range(2):
            yield [-1, -1] if info is None else [info.id, info.num_workers]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
def test_a_dataset_sees_its_lane_as_the_worker_info(num_workers: int) -> None:
    """Case 20: id is the lane and num_workers the number of lanes, in every process; none outside."""
    loader = StatefulDataLoader(TellsItsWorker(), batch_size=None, lanes=4, num_workers=num_workers)
    seen = [row for row in loader if get_worker_info() is None]
    assert [[int(x) for x in row] for row in seen] == [[lane, 4] for lane in range(4)] * 2
    assert get_worker_info() is None


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("dataset", [ds.Late, ds.Augmented])
def test_every_way_to_start_a_process_gives_the_same(dataset: Any, context: str) -> None:
    """Case 1: ``multiprocessing_context``."""

    def batches(**arguments: Any) -> list[Any]:
        loader = StatefulDataLoader(dataset(12), batch_size=3, seed=1, lanes=None, **arguments)
        return [batch.tolist() for batch in loader]

    assert batches(num_workers=1, multiprocessing_context=context) == batches()
