"""A training loop ends in whatever way, and nothing is left of it: cases 36, 37, 39 and 41.

``ends.py`` has the loops and the ends.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import ends, leftovers

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc")

ROOT = Path(__file__).parent.parent
STRICT = ["-W", "error", "-W", "ignore:This DataLoader will create:UserWarning"]


def marked(mark: str) -> set[int]:
    """Processes with a mark in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{leftovers.MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def names() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def run_ends(first: int, last: int, folder: Path, mark: str) -> list[dict[str, Any]]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *STRICT, "-m", "tests.ends", str(first), str(last), str(folder)],
        cwd=ROOT,
        env={**os.environ, leftovers.MARK: mark},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_200_ends_leave_no_process_no_descriptor_no_memory_and_an_exact_position(tmp_path: Path) -> None:
    """In two programs side by side, each of which lives through a hundred of them."""
    marks = [uuid.uuid4().hex for _ in range(2)]
    before = names()
    try:
        with ThreadPoolExecutor() as pool:
            folders = tmp_path / "one", tmp_path / "other"
            runs = list(pool.map(run_ends, (0, 100), (100, 200), folders, marks))
    except BaseException:
        for pid in set.union(*map(marked, marks)):
            os.kill(pid, signal.SIGKILL)
        raise
    found = [end for _, *found in runs for end in found]
    assert len(found) == 200
    counted = [collections.Counter(end["end"] for end in found if end["program"] == of) for of in (True, False)]
    assert counted == [{end: 5 * often for end, often in of.items()} for of in (ends.OF_PROGRAMS, ends.OF_LOOPS)]
    for at_first, *run in runs:
        assert at_first["processes"] == [] and at_first["maps"] == 0
        for end in run:
            assert end["left"] == at_first, end
            assert end["exact"], end
            assert end["status"] == STATUS.get(end["end"], 0) * end["program"], end
            check_errors(end)
    assert not set.union(*map(marked, marks))
    assert {name for name in names() - before if any(mark in name for mark in ("unbroken", "torch_"))} == set()


STATUS = {
    "SIGTERM to the group": -signal.SIGTERM,
    "SIGINT to the group": -signal.SIGINT,
    "SIGKILL": -signal.SIGKILL,
    "SIGKILL beside a forked child": -signal.SIGKILL,
    "exception in the loop": 1,
}


def check_errors(end: dict[str, Any]) -> None:
    """A program shows the error that ended it, and nothing else."""
    last = {"SIGINT to the group": "KeyboardInterrupt", "exception in the loop": "KeyError: 'in the loop'"}
    wanted = last.get(end["end"]) if end["program"] else None
    if wanted is None:
        assert end["errors"] == "", end
    else:
        assert end["errors"].count("Traceback") == 1, end
        assert end["errors"].strip().endswith(wanted), end


# Programs of their own


HEAD = """
import json, logging, multiprocessing, os, signal, sys, threading, time
from tests import datasets as ds
from unbroken import StatefulDataLoader

logging.getLogger("unbroken").addHandler(logging.NullHandler())

def workers():
    return [p.pid for p in multiprocessing.active_children()]

def tell(**more):
    print(json.dumps({"workers": workers(), **more}), flush=True)
"""


def program(text: str, mark: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *options, *STRICT, "-c", HEAD + text],
        cwd=ROOT,
        env={**os.environ, leftovers.MARK: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


DEAD = """
held = []
for dataset in (ds.Numbers(1000), ds.WellBehaved(1000)):
    for more in ({}, {"persistent_workers": True}):
        held.append(iter(StatefulDataLoader(dataset, num_workers=2, multiprocessing_context="fork", **more)))
        next(held[-1])
for pid in workers()[::2]:
    os.kill(pid, signal.SIGKILL)
"""
AT_EXIT = {
    "in order": DEAD,
    "in a thread that goes on": DEAD + "threading.Thread(target=lambda: list(held[0]), daemon=True).start()",
    "with a copy that was forked": DEAD + "if os.fork(): os.wait()",
}


@pytest.mark.parametrize("how", AT_EXIT)
def test_an_interpreter_that_ends_with_dead_workers_says_nothing_and_leaves_nothing(how: str) -> None:
    """In development mode, which tells of everything that was not closed."""
    mark = uuid.uuid4().hex
    with program(AT_EXIT[how], mark, "-X", "dev") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    # A daemon thread that is in the middle of a batch may be told that its workers were shut down.
    assert err == "" or (how == "in a thread that goes on" and "have been shut down" in err), err
    wait_until(lambda: not marked(mark), "a process is left")


STARTING = """
class Stop(BaseException):
    pass

def stop(*_):
    raise Stop

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
make = lambda: StatefulDataLoader(ds.Numbers(40), batch_size=2, num_workers=3, multiprocessing_context="fork", seed=1)
reference = [batch.tolist() for batch in make()]
exact = True
print(json.dumps({}), flush=True)
for line in sys.stdin:
    if not line.strip():
        break
    loader, seen = make(), []
    try:
        threading.Timer(float(line), os.killpg, (0, signal.SIGTERM if len(line) % 2 else signal.SIGINT)).start()
        while True:
            seen.clear()
            for batch in loader:
                seen.append(batch)
    except Stop:
        pass
    other = make()
    other.load_state_dict(loader.state_dict())
    rest = [batch.tolist() for batch in other]
    loader.close()
    other.close()
    whole = len(seen) == len(reference)
    exact &= [batch.tolist() for batch in seen] + rest == reference * (1 + whole)
    print(json.dumps({"exact": bool(exact), "left": workers()}), flush=True)
"""


def test_signals_to_the_group_while_workers_start_disturb_nobody() -> None:
    """They come to a worker before it has begun, too; and between its start and the note of its number."""
    mark = uuid.uuid4().hex
    with program(STARTING, mark) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        for number in range(60):
            process.stdin.write(f"{0.0005 * number:.{4 + number % 2}f}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, process.communicate("\n", timeout=60)
            assert json.loads(answer) == {"exact": True, "left": []}
        out, err = process.communicate("\n", timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
    assert not marked(mark)


HOLDS_THE_LOCK = """
import ctypes

class Holds(ds.Numbers):
    def __getitem__(self, index):
        if index == 1:
            os.write(1, b"held\\n")
            ctypes.PyDLL(None).sleep(1000)  # and no other thread of this process runs
        return index

if __name__ == "__main__":
    iterator = iter(StatefulDataLoader(Holds(8), num_workers=1, multiprocessing_context=sys.argv[1]))
    next(iterator)
    signal.pause()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_lets_no_thread_run_ends_with_a_parent_that_is_killed(method: str, tmp_path: Path) -> None:
    path, mark = tmp_path / "holds.py", uuid.uuid4().hex
    path.write_text(HEAD + HOLDS_THE_LOCK)
    with subprocess.Popen(
        [sys.executable, *STRICT, str(path), method],
        env={**os.environ, leftovers.MARK: mark, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
        finally:
            process.kill()
    wait_until(lambda: not marked(mark), "a worker outlived its parent")
