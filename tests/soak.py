"""A training run that is ended again and again, in every way, and goes on each time on other ranks and workers.

A trainer steps two loaders of each of ``world`` ranks side by side in one process: a stream (mixed, shuffled, with
random numbers, packed) and a map-style dataset. It writes what it was given to a log, and its position to a file, as a
real one does. Whoever reads the log keeps what lies before the position that the next trainer began at.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from unbroken import StatefulDataLoader, mix, read_jsonl

ROWS = 8  # of a step, over all ranks
WAYS = ["SIGTERM to the group", "SIGKILL to the group", "SIGKILL of the parent", "an exception"]


@dataclass(frozen=True)
class Topology:
    world: int
    workers: int
    persistent: bool
    prefetch_factor: int
    context: str | None
    save_every: int
    seed: int

    @staticmethod
    def drawn(draw: random.Random) -> Topology:
        workers = draw.choice([0, 1, 2, 3])
        return Topology(
            draw.choice([1, 2, 4]), workers, bool(workers) and draw.random() < 0.5, draw.choice([1, 2, 5]),
            "fork" if workers else None, draw.randint(1, 12), draw.randrange(1 << 30),
        )  # fmt: skip


class Pictures(Dataset[torch.Tensor]):
    """Row i with random numbers of all three generators."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.rand(()).item(), random.random(), float(np.random.rand())
        return torch.tensor([float(index), *drawn], dtype=torch.float64).repeat(1 + index % 3 * 400)[:4]


def write_corpus(folder: Path) -> None:
    draw = random.Random(5)
    for name, documents in (("web", 300), ("code", 120)):
        for part in range(3):
            lines = [{"input_ids": draw.choices(range(1000), k=draw.randint(1, 40))} for _ in range(documents)]
            (folder / f"{name}-{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def stream(folder: Path) -> Any:
    web = read_jsonl(str(folder / "web-*.jsonl")).shuffle(200, seed=1).map(_noisy, rng=True)
    code = read_jsonl(str(folder / "code-*.jsonl")).filter(_is_long)
    return mix({"web": web.repeat(), "code": code.repeat()}, {"web": 3, "code": 1}, seed=2).pack(32)


def _noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"input_ids": [*row["input_ids"], int(rng.integers(1000))]}


def _is_long(row: dict[str, Any]) -> bool:
    return len(row["input_ids"]) > 5


def loaders(folder: Path, topology: Topology) -> list[list[StatefulDataLoader]]:
    """The stream's, one a rank, and those of the map-style dataset."""
    given: dict[str, Any] = {
        "num_workers": topology.workers,
        "multiprocessing_context": topology.context,
        "worker_restarts": 20,
    }
    if topology.workers:
        given |= {"persistent_workers": topology.persistent, "prefetch_factor": topology.prefetch_factor}
    ranks = [{"dp_rank": rank, "dp_world_size": topology.world} for rank in range(topology.world)]
    size = ROWS // topology.world
    return [
        [StatefulDataLoader(stream(folder), size, lanes=16, seed=3, **given, **rank) for rank in ranks],
        [
            StatefulDataLoader(Pictures(), size, shuffle=True, seed=4, seed_by="sample", **given, **rank)
            for rank in ranks
        ],
    ]


def rows_of(batch: Any) -> list[str]:
    """A digest of each row of a batch."""
    fields = [batch[name].numpy() for name in sorted(batch)] if isinstance(batch, dict) else [batch.numpy()]
    return [
        xxhash.xxh3_64_hexdigest(b"".join(np.ascontiguousarray(field[row]).tobytes() for field in fields))
        for row in range(len(fields[0]))
    ]


class Steps:
    """The steps of a run from a position on. Each is the rows of all ranks, of the stream and of the map-style one."""

    def __init__(self, folder: Path, topology: Topology) -> None:
        self.kinds = loaders(folder, topology)
        self.iterators: list[list[Iterator[Any]] | None] = [None, None]
        self.step = 0

    def load(self, position: dict[str, Any]) -> None:
        self.step = position["step"]
        for ranks, state in zip(self.kinds, position["states"], strict=True):
            for loader in ranks:
                loader.load_state_dict(state)

    def position(self) -> dict[str, Any]:
        merged: list[dict[str, str]] = [{}, {}]
        for state, ranks in zip(merged, self.kinds, strict=True):
            for loader in ranks:
                state |= loader.state_dict()
        return {"step": self.step, "states": merged}

    def take(self) -> list[list[str]]:
        found = []
        for number, ranks in enumerate(self.kinds):
            batches = None
            while batches is None:
                iterators = self.iterators[number] = self.iterators[number] or [iter(loader) for loader in ranks]
                batches = [next(iterator, None) for iterator in iterators]
                if None in batches:
                    assert batches == [None] * len(ranks), "ranks end at different steps"
                    batches = self.iterators[number] = None
            found.append(sorted(row for batch in batches for row in rows_of(batch)))
        self.step += 1
        return found


def train(folder: Path, topology: Topology, steps: int | None = None) -> None:
    """Go on from the saved position: for so many steps, or until something ends it."""
    draw = random.Random(topology.seed)
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    run = Steps(folder, topology)
    with contextlib.suppress(FileNotFoundError):
        run.load(json.loads((folder / "position.json").read_text()))
    last = None if steps is None else run.step + steps
    log = os.open(folder / "log.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while not stop and run.step != last:
        os.write(log, (json.dumps([run.step, *run.take()]) + "\n").encode())
        if run.step % topology.save_every == 0:
            save(folder, run.position())
        if draw.random() < 0.01:  # what a run does that goes back to its own position
            run.load(run.position())
        if (folder / "fail").exists():
            raise RuntimeError("a training loop that fails")
    save(folder, run.position())  # also where SIGTERM came to the whole group: workers live until then


def save(folder: Path, position: dict[str, Any]) -> None:
    (folder / "position.tmp").write_text(json.dumps(position))
    os.replace(folder / "position.tmp", folder / "position.json")


# The one that watches


def log_of(folder: Path) -> dict[int, list[list[str]]]:
    """What each step was given; a line that was cut short is none."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "log.jsonl").read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                step, *rows = json.loads(line)
                found[step] = rows
    return found


def position_of(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "position.json").read_text())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return {"step": 0, "states": [{}, {}]}


def session(leader: int) -> list[int]:
    """The processes of a session that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, of = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                if int(of) == leader and state not in "ZX":
                    found.append(int(entry.name))
    return found


def _begin(folder: Path, topology: Topology) -> None:
    os.setsid()
    with (folder / "errors.txt").open("a") as file:
        os.dup2(file.fileno(), 2)
    train(folder, topology)


def disturb(folder: Path, topology: Topology, draw: random.Random, seconds: float) -> str:
    """One trainer, from its start to its end; returns how it was ended. Raises where something of it lives on."""
    way = draw.choice(WAYS)
    trainer = multiprocessing.get_context("fork").Process(target=_begin, args=(folder, topology))
    trainer.start()
    leader = trainer.pid
    assert leader is not None
    until = time.monotonic() + draw.uniform(0.3, 1.5) * seconds
    while time.monotonic() < until and trainer.is_alive():
        time.sleep(draw.expovariate(8))
        workers = [pid for pid in session(leader) if pid != leader]
        if workers and draw.random() < 0.4:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(workers), draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
    assert trainer.is_alive(), f"the trainer ended by itself\n{(folder / 'errors.txt').read_text()[-3000:]}"
    if way == "an exception":
        (folder / "fail").touch()
    elif way == "SIGKILL of the parent":
        os.kill(leader, signal.SIGKILL)
    else:
        os.killpg(leader, signal.SIGTERM if way.startswith("SIGTERM") else signal.SIGKILL)
    trainer.join(30)
    assert trainer.exitcode is not None, f"{way}: the trainer goes on"
    deadline = time.monotonic() + 10
    while left := session(leader):
        assert time.monotonic() < deadline, f"{way}: processes {left} live on"
        time.sleep(0.01)
    (folder / "fail").unlink(missing_ok=True)
    return f"{way} of {asdict(topology)}"


def soak(folder: Path, seconds: float, seed: int, each: float = 2.0) -> tuple[int, list[str]]:
    """End trainers for so long, and compare all steps with the run that never stopped; (steps, how each was ended)."""
    draw = random.Random(seed)
    write_corpus(folder)
    ends: list[str] = []
    given: dict[int, list[list[str]]] = {}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        given = {step: rows for step, rows in given.items() if step < position_of(folder)["step"]}
        (folder / "log.jsonl").unlink(missing_ok=True)
        ends.append(disturb(folder, Topology.drawn(draw), draw, each))
        given |= log_of(folder)
    position = position_of(folder)
    compare(folder, given, position, ends)
    return position["step"], ends


def compare(folder: Path, given: dict[int, Any], position: dict[str, Any], ends: list[str]) -> None:
    """Hold all that was given, and the ledgers, against a run without workers that nobody ended."""
    reference = Steps(folder, Topology(1, 0, False, 2, None, 1, 0))
    for step in range(position["step"]):
        assert given.get(step) == reference.take(), f"step {step} differs; ends: {ends}"
    whole = reference.position()["states"][0]
    found = position["states"][0]
    lanes = [name for name in whole if name.startswith("lane-")]
    assert len(lanes) == 16
    for name in lanes:
        assert json.loads(found[name])["lane"]["ledger"] == json.loads(whole[name])["lane"]["ledger"], name
