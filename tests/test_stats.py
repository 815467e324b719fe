"""``loader.stats()``: how long the loop waits, what lies ready, what stages take, and what was read."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import datasets as ds
from tests.engine.acts import wait_until
from unbroken import StatefulDataLoader, from_iterable, from_map, mix, read_jsonl, read_tokens
from unbroken.meters import STAGES
from unbroken.stats import RECENT

# torch's advice on a machine with few cores; and Python's, from 3.12 on, on forks where there are threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    pytest.mark.timeout(60),
]

ENGINES: dict[str, dict[str, Any]] = {
    "inline": {},
    "processes": {"num_workers": 2, "multiprocessing_context": "fork"},
    "threads": {"num_workers": 2, "multiprocessing_context": "thread"},
}


@pytest.fixture(params=ENGINES)
def engine(request: Any) -> dict[str, Any]:
    return ENGINES[request.param]


class Clock:
    """Stands still but where it is moved on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def clocked(loader: StatefulDataLoader) -> Clock:
    """The clock by which a loader measures from now on."""
    clock = Clock()
    loader.measured.clock = loader.measured.own.clock = clock
    return clock


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class Made(ds.Numbers):
    """Row i is what ``make(i)`` gives."""

    def __init__(self, n: int, make: Callable[[int], Any]) -> None:
        super().__init__(n)
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def corpus(folder: Path, name: str = "text", rows: int = 50) -> Path:
    """``rows`` documents; document i has i mod 7 letters."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (row % 7)}) + "\n" for row in range(rows)))
    return path


def named(stats: dict[str, float], what: str) -> dict[str, float]:
    """The numbers below ``what/``, by name."""
    return {key.partition("/")[2]: value for key, value in stats.items() if key.startswith(f"{what}/")}


# What it is


def test_before_the_first_batch_all_is_zero() -> None:
    loader = StatefulDataLoader(ds.Numbers(8), batch_size=2)
    stats = loader.stats()
    assert set(stats.values()) == {0}
    assert {
        "batches", "batches_per_second", "wait_seconds", "wait_seconds_per_batch", "wait_share", "queue_depth",
        "prefetch", "step", "epoch", "step_in_epoch", "restarts", "skipped", "rows", "tokens", "bytes",
    } <= set(stats)  # fmt: skip
    assert list(named(stats, "seconds")) == list(STAGES)


def test_each_key_is_in_the_docstring() -> None:
    text = StatefulDataLoader.stats.__doc__ or ""
    keys = StatefulDataLoader(ds.Numbers(8)).stats()
    assert [key for key in keys if f"``{key}``" not in text] == []


def test_all_numbers_are_plain_ones_that_any_tracker_takes(tmp_path: Path, engine: dict[str, Any]) -> None:
    stream = mix({"a": read_jsonl(corpus(tmp_path)).tokenize(encode)}).pack(8)
    loader = StatefulDataLoader(stream, batch_size=2, lanes=2, **engine)
    list(loader)
    stats = loader.stats()
    assert all(type(key) is str and type(value) in (int, float) for key, value in stats.items())
    assert json.loads(json.dumps(stats)) == stats


def test_the_step_and_the_epoch_are_those_of_the_position() -> None:
    loader = StatefulDataLoader(ds.Numbers(6), batch_size=2)
    list(loader)
    iterator = iter(loader)
    next(iterator)
    stats = loader.stats()
    assert [stats[key] for key in ("epoch", "step", "step_in_epoch", "batches")] == [1, 4, 1, 4]
    resumed = StatefulDataLoader(ds.Numbers(6), batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    stats = resumed.stats()
    assert [stats[key] for key in ("epoch", "step", "step_in_epoch", "batches")] == [1, 4, 1, 0]


@pytest.mark.parametrize("copied", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_begins_at_zero(copied: Callable[[Any], Any]) -> None:
    loader = StatefulDataLoader(ds.Numbers(6), batch_size=2)
    list(loader)
    other = copied(loader)
    assert (other.stats()["batches"], other.stats()["rows"]) == (0, 0)
    list(other)
    assert (loader.stats()["rows"], other.stats()["rows"]) == (6, 6)


# How long it is waited for


class Takes(ds.Numbers):
    """To make a row moves a clock on by so much."""

    clock: Any = None
    seconds = 0.0

    def __getitem__(self, index: int) -> int:
        if self.clock is not None:
            self.clock.now += self.seconds
        return index


def test_waits_are_what_next_takes_and_no_more() -> None:
    dataset = Takes(40)
    loader = StatefulDataLoader(dataset, batch_size=4)
    dataset.clock, dataset.seconds = clocked(loader), 0.5
    for _ in loader:
        dataset.clock.now += 6.0  # the training step
    stats = loader.stats()
    assert stats["wait_seconds"] == pytest.approx(10 * 2.0)
    assert stats["wait_seconds_per_batch"] == pytest.approx(2.0)
    assert stats["wait_share"] == pytest.approx(2.0 / 8.0)
    assert stats["batches_per_second"] == pytest.approx(1 / 8.0)
    assert stats["seconds/dataset"] == pytest.approx(20.0)


def test_what_is_recent_forgets_the_first_batches() -> None:
    dataset = Takes(2 * RECENT)
    loader = StatefulDataLoader(dataset, batch_size=1)
    dataset.clock, dataset.seconds = clocked(loader), 3.0
    iterator = iter(loader)
    for number in range(2 * RECENT):
        next(iterator)
        dataset.clock.now += 1.0
        dataset.seconds = 3.0 if number < RECENT - 1 else 0.25
    stats = loader.stats()
    assert stats["wait_seconds"] == pytest.approx(RECENT * 3.25)
    assert stats["wait_seconds_per_batch"] == pytest.approx(0.25)
    assert stats["wait_share"] == pytest.approx(0.2)


def test_a_batch_that_fails_is_none() -> None:
    loader = StatefulDataLoader(ds.Numbers(6), batch_size=2, collate_fn=_fails_at_two)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="two"):
        next(iterator)
    assert loader.stats()["batches"] == 1
    next(iterator)
    assert loader.stats()["batches"] == 2


def _fails_at_two(rows: list[int]) -> list[int]:
    if 2 in rows:
        raise ValueError("two")
    return rows


# What lies ready


class Gated(ds.Numbers):
    """From row ``at`` on rows wait until ``gate`` is set."""

    def __init__(self, n: int, at: int, gate: Any) -> None:
        super().__init__(n)
        self.at, self.gate = at, gate

    def __getitem__(self, index: int) -> int:
        if index >= self.at:
            self.gate.wait()
        return index


def test_the_queue_has_what_workers_have_made_and_nobody_has_taken() -> None:
    gate = multiprocessing.get_context("fork").Event()
    loader = StatefulDataLoader(
        Gated(40, 8, gate), batch_size=2, num_workers=1, prefetch_factor=3, multiprocessing_context="fork"
    )
    iterator = iter(loader)
    depths = []
    for _ in range(4):  # rows 0 to 7
        next(iterator)
        made = 4 - int(loader.stats()["step"])
        wait_until(lambda made=made: loader.stats()["queue_depth"] == min(3, made), "what is made is not counted")  # type: ignore[misc]
        depths.append(loader.stats()["queue_depth"])
    assert depths == [3, 2, 1, 0]
    assert loader.stats()["prefetch"] == 3
    gate.set()
    wait_until(lambda: loader.stats()["queue_depth"] == 3, "what is made is not counted")
    loader.close()
    assert (loader.stats()["queue_depth"], loader.stats()["prefetch"]) == (0, 0)


def test_the_queue_of_a_stream_is_in_batches(tmp_path: Path, engine: dict[str, Any]) -> None:
    loader = StatefulDataLoader(read_jsonl(corpus(tmp_path)), batch_size=4, lanes=4, collate_fn=list, **engine)
    iterator = iter(loader)
    next(iterator)
    workers = engine.get("num_workers", 0)
    assert loader.stats()["prefetch"] == 2 * workers
    wait_until(lambda: (loader.stats()["queue_depth"] > 0) == (workers > 0), "no batch is ready")
    most = max(loader.stats()["queue_depth"] for _ in iterator)
    assert most <= 4 * workers
    assert loader.stats()["queue_depth"] == 0
    loader.close()


# What was read


def test_rows_tokens_and_bytes_of_a_stream_are_counted_in_every_engine(tmp_path: Path, engine: dict[str, Any]) -> None:
    rows = 50
    stream = read_jsonl(corpus(tmp_path, rows=rows)).shuffle(8).tokenize(encode, append=0).pack(16)
    loader = StatefulDataLoader(stream, batch_size=2, lanes=3, seed=1, **engine)
    for epoch in (1, 2):
        list(loader)
        stats = loader.stats()
        assert named(stats, "rows") == {"read_jsonl": epoch * rows}
        assert named(stats, "tokens") == {"read_jsonl": epoch * sum(row % 7 + 1 for row in range(rows))}
        assert stats["bytes/read_jsonl"] >= epoch * (tmp_path / "text.jsonl").stat().st_size
        assert [stats[what] for what in ("rows", "tokens")] == [
            sum(named(stats, w).values()) for w in ("rows", "tokens")
        ]
        assert all(stats[f"seconds/{stage}"] > 0 for stage in ("read", "decode", "tokenize", "pack", "collate"))
        assert stats["seconds/dataset"] == stats["seconds/map"] == 0
    loader.close()
    assert loader.stats() | {"prefetch": 0} == stats | {"prefetch": 0}, "they stay when the workers are gone"


def test_sources_of_a_mix_are_counted_by_name(tmp_path: Path, engine: dict[str, Any]) -> None:
    web, code = read_jsonl(corpus(tmp_path, "web", 30)), read_jsonl(corpus(tmp_path, "code", 20))
    inside = mix({"web": web.tokenize(encode, append=0), "code": code.tokenize(encode)}, stop="all")
    loader = StatefulDataLoader(inside, batch_size=2, lanes=2, seed=1, collate_fn=list, **engine)
    list(loader)
    stats = loader.stats()
    assert named(stats, "rows") == {"code": 20, "web": 30}
    assert named(stats, "tokens") == {
        "code": sum(row % 7 for row in range(20)),
        "web": sum(row % 7 + 1 for row in range(30)),
    }
    behind = mix({"web": web, "code": code}, stop="all").tokenize(encode, append=0)
    loader = StatefulDataLoader(behind, batch_size=2, lanes=2, seed=1, collate_fn=list, **engine)
    list(loader)
    stats = loader.stats()
    assert named(stats, "rows") == {"code": 20, "web": 30}
    assert (stats["tokens"], named(stats, "tokens")) == (sum(row % 7 + 1 for row in [*range(20), *range(30)]), {})


def test_documents_that_were_tokenised_before_are_counted_where_they_are_packed() -> None:
    documents = from_map(Made(12, lambda row: {"input_ids": np.arange(row)}))
    loader = StatefulDataLoader(documents.pack(8), batch_size=2, lanes=2)
    list(loader)
    stats = loader.stats()
    assert named(stats, "tokens") == {"from_map": sum(range(12))}
    assert named(stats, "rows") == {"from_map": 12}
    assert stats["seconds/dataset"] > 0


def test_token_files_are_counted_as_they_are_read(tmp_path: Path) -> None:
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    loader = StatefulDataLoader(read_tokens(tmp_path / "tokens.bin", seq_len=8, dtype="uint16"), batch_size=2, lanes=1)
    list(loader)
    stats = loader.stats()
    assert (stats["rows"], stats["tokens"], stats["bytes/read_tokens"] >= 128) == (8, 64, True)


@pytest.mark.parametrize("kind", ["map", "iterable", "from_iterable"])
@pytest.mark.parametrize("workers", [0, 2])
def test_datasets_of_torch_are_counted_too(kind: str, workers: int) -> None:
    made: dict[str, Callable[[], Any]] = {
        "map": lambda: ds.Numbers(20),
        "iterable": lambda: ds.WellBehaved(20),
        "from_iterable": lambda: from_iterable(_share_of_twenty),
    }
    name = {"from_iterable": "from_iterable"}.get(kind, "dataset")
    loader = StatefulDataLoader(made[kind](), batch_size=3, num_workers=workers, multiprocessing_context=_fork(workers))
    list(loader)
    stats = loader.stats()
    assert named(stats, "rows") == {name: 20}
    assert stats["seconds/dataset"] > 0
    assert stats["seconds/collate"] > 0


def _share_of_twenty(lane: int, lanes: int) -> range:
    return range(lane, 20, lanes)


def _fork(workers: int) -> str | None:
    return "fork" if workers else None


def test_the_users_functions_are_timed(tmp_path: Path) -> None:
    clocks: list[Clock] = []

    def takes_two(row: Any) -> Any:
        clocks[0].now += 2.0
        return row

    stream = read_jsonl(corpus(tmp_path, rows=10)).map(takes_two).filter(takes_two).map(list, batched=4)
    loader = StatefulDataLoader(stream, batch_size=2, lanes=1, collate_fn=list)
    clocks.append(clocked(loader))
    list(loader)
    assert loader.stats()["seconds/map"] == pytest.approx(2 * 10 * 2.0)


def test_what_is_left_out_is_counted(tmp_path: Path, engine: dict[str, Any]) -> None:
    path = corpus(tmp_path, rows=12)
    path.write_text("no json\n" + path.read_text() + "nor this\n")
    loader = StatefulDataLoader(read_jsonl(path, on_error="skip"), batch_size=2, lanes=2, collate_fn=list, **engine)
    list(loader)
    assert (loader.stats()["skipped"], loader.stats()["rows"]) == (2, 12)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_dataset_that_are_left_out_are_counted(workers: int) -> None:
    loader = StatefulDataLoader(
        Made(12, _raises_at_five), batch_size=2, on_error="skip", num_workers=workers,
        multiprocessing_context=_fork(workers),
    )  # fmt: skip
    list(loader)
    assert (loader.stats()["skipped"], loader.stats()["rows"]) == (1, 11)


def _raises_at_five(row: int) -> int:
    if row == 5:
        raise ValueError("five")
    return row
