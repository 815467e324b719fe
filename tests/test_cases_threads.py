"""Threads are one more way to run lanes: same batches, same positions, and positions that go from one to another."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.streams.runs import write_jsonl
from unbroken import Stage, StatefulDataLoader, mix, read_jsonl, read_tar, read_tokens
from unbroken.testing import Point, assert_resumes_exactly

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

HERE = {"num_workers": 0}
THREADS = {"num_workers": 2, "multiprocessing_context": "thread"}
MORE_THREADS = {"num_workers": 3, "multiprocessing_context": "thread"}
PROCESSES = {"num_workers": 2, "multiprocessing_context": "fork"}


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def drawn(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"text": row["text"][int(rng.integers(3)) :] + "yx"[: int(rng.integers(3))]}


def regrouped(rows: list[Any], rng: np.random.Generator) -> list[Any]:
    return [rows[i] for i in rng.integers(0, len(rows), int(rng.integers(4)))]


def kept(row: Any, rng: np.random.Generator) -> bool:
    return bool(rng.random() < 0.8)


def texts(folder: Path, name: str, rows: int, seed: int) -> Stage:
    """Texts of 0 to 20 letters in three files, one of them compressed."""
    draws = random.Random(seed)
    files = [
        write_jsonl(folder / f"{name}{end}", ({"text": draws.choice("abc") * draws.randrange(20)} for _ in range(rows)))
        for end in ("0.jsonl", "1.jsonl.gz", "2.jsonl")
    ]
    return read_jsonl(files)


def packed(folder: Path) -> Stage:
    return texts(folder, "a", 20, 1).shuffle(8, seed=1).tokenize(ids_of, append=0).pack(24, document_ids=True)


def mixed(folder: Path) -> Stage:
    sources = {name: texts(folder, name, rows, rows).tokenize(ids_of) for name, rows in {"web": 20, "code": 9}.items()}
    return mix(sources, weights={"web": 0.7, "code": 0.3}, by="tokens", stop="all", seed=2).pack(24)


def drawing(folder: Path) -> Stage:
    rows = texts(folder, "a", 16, 2).map(drawn, rng=True).filter(kept, rng=True)
    return rows.flat_map(regrouped, rng=True, batched=4).shuffle(5, seed=3)


def skipping(folder: Path) -> Stage:
    texts(folder, "a", 12, 3)
    with (folder / "a0.jsonl").open("a") as file:
        file.write('no row\n{"text": "a row"}\n' * 8)
    return read_jsonl(sorted(folder.glob("a*")), on_error="skip", read_ahead=True).shuffle(4, seed=1)


def best_fitting(folder: Path) -> Stage:
    return texts(folder, "a", 20, 4).tokenize(ids_of).pack(24, "best_fit", window=200).repeat(2)


def of_numbers(folder: Path) -> Stage:
    np.arange(700, dtype=np.uint16).tofile(folder / "a.bin")
    return read_tokens(folder / "a.bin", 9, dtype="uint16").shuffle(6, seed=2)


PIPELINES: list[Callable[[Path], Stage]] = [packed, mixed, drawing, skipping, best_fitting, of_numbers]


@pytest.fixture(params=PIPELINES, ids=lambda pipeline: pipeline.__name__)
def stream(request: Any, tmp_path: Path) -> Stage:
    pipeline: Callable[[Path], Stage] = request.param
    return pipeline(tmp_path)


def loader_over(stream: Stage, **arguments: Any) -> StatefulDataLoader:
    return StatefulDataLoader(stream, **{"batch_size": 3, "lanes": 4, "seed": 5, **arguments})


def plain(batch: Any) -> Any:
    """Values that compare."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return (str(batch.dtype), batch.tolist()) if isinstance(batch, torch.Tensor) else batch


def history(loader: StatefulDataLoader, epochs: int = 2) -> list[Any]:
    """Each batch with the position after it, and the positions at the ends."""
    found: list[Any] = [loader.state_dict()]
    for _ in range(epochs):
        found += [(plain(batch), json.dumps(loader.state_dict())) for batch in loader]
        found.append(json.dumps(loader.state_dict()))
    return found


@pytest.mark.parametrize("more", [{}, {"drop_last": True, "prefetch_factor": 1}, {"persistent_workers": True}], ids=str)
def test_batches_and_positions_are_those_of_one_process_and_of_several(stream: Stage, more: dict[str, Any]) -> None:
    """Cases 2 and 20: order and bytes do not depend on who runs the lanes."""
    here = {name: value for name, value in more.items() if name == "drop_last"}
    expected = history(loader_over(stream, **HERE, **here))
    assert len(expected) > 12
    for topology in (THREADS, MORE_THREADS, PROCESSES):
        assert history(loader_over(stream, **topology, **more)) == expected


@pytest.mark.parametrize("after", [THREADS, MORE_THREADS, HERE, PROCESSES], ids=["same", "more", "inline", "processes"])
def test_every_position_of_threads_can_be_loaded_by_all_and_the_other_way_round(
    stream: Stage, after: dict[str, Any]
) -> None:
    """Cases 1, 3 and 20: every restore point of an epoch and its ends, and chains from one to the other and back."""

    def make_loader(**topology: Any) -> StatefulDataLoader:
        return loader_over(stream, **topology)

    steps = sum(1 for _ in loader_over(stream))
    every = [Point(0, step) for step in range(-1, steps + 2)]
    points: list[Any] = every if after is not PROCESSES else every[:: max(1, steps // 4)]
    chain = [Point(0, step) for step in range(0, steps, max(1, steps // 5))]
    assert_resumes_exactly(make_loader, topologies=[THREADS, after], restore_points=[*points, chain], epochs=1)


def test_shards_of_images_and_texts_come_alike(tmp_path: Path) -> None:
    """Several threads walk the same archive for where its groups begin."""
    import io
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(60):
            for end, content in {"txt": f"text {number}", "json": json.dumps({"number": number})}.items():
                member = tarfile.TarInfo(f"{number:03}.{end}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content.encode()))
    stream = read_tar(tmp_path / "a.tar").shuffle(5, seed=1)
    runs = [history(loader_over(stream, lineage=True, collate_fn=list, **by)) for by in (HERE, MORE_THREADS)]
    assert [repr(step) for step in runs[0]] == [repr(step) for step in runs[1]]


def test_lineage_and_epochs_without_an_end_are_the_same(tmp_path: Path) -> None:
    stream = packed(tmp_path)

    def first(count: int, **topology: Any) -> list[Any]:
        loader = loader_over(stream, lineage=True, at_end="repeat", **topology)
        iterator = iter(loader)
        found = []
        for _ in range(count):
            batch = next(iterator)
            found.append((repr(batch.pop("lineage")), plain(batch), loader.state_dict()))
        loader.close()
        return found

    steps = sum(1 for _ in loader_over(stream))
    assert first(3 * steps, **THREADS) == first(3 * steps, **HERE)


@pytest.mark.parametrize("arguments", [{"batch_size": None}, {"collate_fn": lambda rows: [len(rows), rows]}])
def test_single_rows_and_batches_of_one_s_own_come_alike(tmp_path: Path, arguments: Any) -> None:
    stream = drawing(tmp_path)
    runs = [history(loader_over(stream, **arguments, **by)) for by in (HERE, THREADS)]
    assert runs[0] == runs[1]


def test_ranks_may_have_threads(tmp_path: Path) -> None:
    """Case 21: saved by two ranks on threads, loaded by one without."""

    def make_loader(**topology: Any) -> StatefulDataLoader:
        return loader_over(stream, **topology)

    stream = packed(tmp_path)
    ranks = {"dp_world_size": 2, **THREADS}
    assert_resumes_exactly(make_loader, topologies=[ranks, {"dp_world_size": 1}], restore_points=[1, 3], epochs=1)
