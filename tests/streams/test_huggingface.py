"""``from_hf``: datasets of Hugging Face, by index and streamed."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.streams.runs import assert_law, plain, resumed, run, run_lanes, saved
from unbroken import options
from unbroken.errors import InexactDataset
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.streams.reading.huggingface import from_hf
from unbroken.streams.stage import Stage

datasets: Any = pytest.importorskip("datasets", reason="rows of datasets of Hugging Face need datasets")
Dataset, IterableDataset = datasets.Dataset, datasets.IterableDataset
concatenate_datasets, interleave_datasets = datasets.concatenate_datasets, datasets.interleave_datasets
by_rank: Any = pytest.importorskip("datasets.distributed").split_dataset_by_node
ROWS = 46
TABLE = {"id": list(range(ROWS)), "text": [f"text {n}" for n in range(ROWS)], "ids": [[n] * 3 for n in range(ROWS)]}


def by_index() -> Dataset:
    return Dataset.from_dict(TABLE)


def streamed(shards: int = 3) -> IterableDataset:
    return by_index().to_iterable_dataset(num_shards=shards)


def rows_of(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"id": 100 * shard + n} for n in range(9))


def generated(shards: int = 4) -> IterableDataset:
    return IterableDataset.from_generator(rows_of, gen_kwargs={"shards": list(range(shards))})


def twice(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [value for value in values for _ in range(2)] for name, values in batch.items()}


def every_third(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"id": [value for value in batch["id"] if value % 3 == 0]}


def even(row: dict[str, Any]) -> bool:
    return row["id"] % 2 == 0


def numbered(row: dict[str, Any], number: int) -> dict[str, Any]:
    return {"number": number}


def noisy(row: dict[str, Any]) -> dict[str, Any]:
    return {"noise": random.random() + float(torch.rand(()))}


BATCHED: dict[str, Any] = {"batched": True, "batch_size": 4}
STREAMED: dict[str, Callable[[], IterableDataset]] = {
    "tables": streamed,
    "generator": generated,
    "map": lambda: streamed().map(numbered, with_indices=True),
    "map of a generator": lambda: generated().map(numbered, with_indices=True),
    "filter": lambda: streamed().filter(even),
    "batched map": lambda: streamed().map(twice, **BATCHED),
    "batched map to fewer": lambda: streamed().map(every_third, remove_columns=["id", "text", "ids"], **BATCHED),
    "batched maps": lambda: generated().map(twice, **BATCHED).map(twice, batched=True, batch_size=3),
    "filter of a batched map": lambda: generated().map(twice, **BATCHED).filter(even).map(numbered, with_indices=True),
    "torch": lambda: streamed().with_format("torch"),
    "numpy": lambda: streamed().with_format("numpy"),
    "map in torch": lambda: streamed().with_format("torch").map(lambda row: {"more": row["ids"] * 2}),
    "map of tables": lambda: streamed().with_format("arrow").map(lambda table: table, **BATCHED).with_format(None),
    "columns": lambda: streamed().select_columns(["id", "text"]).rename_column("id", "name").remove_columns("text"),
    "batches": lambda: generated().batch(4),
    "skip and take": lambda: generated().skip(5).take(20),
    "repeat": lambda: generated(2).repeat(2),
    "concatenated": lambda: concatenate_datasets([generated(2), generated(3)]),
    "side by side": lambda: concatenate_datasets(
        [streamed().select_columns(["id"]), generated().rename_column("id", "n")], axis=1
    ),
    "interleaved": lambda: interleave_datasets([generated(2), streamed().select_columns(["id"])]),
    "interleaved by chance": lambda: interleave_datasets(
        [generated(2), generated(3)], probabilities=[0.3, 0.7], seed=1
    ),
    "interleaved to the end": lambda: interleave_datasets(
        [generated(2), generated(3)], stopping_strategy="all_exhausted"
    ),
    "shuffled shards": lambda: generated().shuffle(seed=1, buffer_size=1),
}
BY_INDEX: dict[str, Callable[[], Dataset]] = {
    "plain": by_index,
    "numpy": lambda: by_index().with_format("numpy"),
    "torch": lambda: by_index().with_format("torch"),
    "some columns": lambda: by_index().with_format("torch", columns=["id"]),
    "shuffled": lambda: by_index().shuffle(seed=1),
    "selected": lambda: by_index().select([7, 3, 3, 40, 0]),
    "empty": lambda: by_index().select([]),
    "filtered": lambda: by_index().filter(even, keep_in_memory=True),
}


def assert_rows_law(stage: Stage, lane: Lane) -> list[Any]:
    """The law for the rows alone: a state of datasets may be written in another way after a resume."""
    rows, ref, states = stage.open(lane), [], []
    while True:
        states.append(saved(rows))
        row = next(rows, None)
        if row is None:
            break
        ref.append(plain(row))
    for k, state in enumerate(states):
        assert [plain(row) for row in resumed(stage, lane, state)] == ref[k:]
    found: list[Any] = []
    state = states[0]
    for apart in [1, 0, 3, 25, 2, len(ref)]:
        rows = resumed(stage, lane, state)
        found += [plain(row) for _, row in zip(range(apart), rows, strict=False)]
        state = saved(rows)
    assert found == ref
    return ref


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # datasets' own, in a map of tensors
@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 2, epoch=1)])
def test_every_restore_point_of_a_streamed_dataset_is_exact(name: str, lane: Lane) -> None:
    """Each step that changes a state, with states in the middle of a batch, and after several resumes."""
    assert_rows_law(from_hf(STREAMED[name]()), lane)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("name", STREAMED)
def test_one_lane_has_the_rows_of_the_dataset(name: str) -> None:
    expected = [
        plain({key: values[0] for key, values in batch.items()}) for batch in STREAMED[name]().iter(batch_size=1)
    ]
    assert run(from_hf(STREAMED[name]())) == expected != []


@pytest.mark.parametrize("lanes", [1, 2, 3, 7])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_lanes_share_out_every_row_once(lanes: int, epoch: int) -> None:
    for dataset in (streamed(5), streamed(5).map(numbered, with_indices=True), generated(5)):
        found = [row["id"] for rows in run_lanes(from_hf(dataset), lanes, epoch=epoch) for row in rows]
        assert sorted(found) == sorted(row["id"] for row in dataset)


def test_lanes_and_openings_in_one_process_do_not_disturb_one_another() -> None:
    """The state of a streamed dataset lives in its parts, which lanes must not share."""
    for dataset in (STREAMED["side by side"](), STREAMED["interleaved"](), streamed(2).map(twice, **BATCHED)):
        stream = from_hf(dataset)
        lanes = [stream.open(Lane(index % 2, 2)) for index in range(4)]
        expected = run_lanes(stream, 2)
        found: list[list[Any]] = [[], [], [], []]
        for turn in range(30):
            for index, lane in enumerate(lanes):
                found[index] += [plain(row) for _, row in zip(range(2), lane, strict=False)]
                if turn == index * 5 + 3:
                    lanes[index] = resumed(stream, Lane(index % 2, 2), saved(lane))
                    next(iter(dataset))
        assert [rows[:60] for rows in found] == [rows[:60] for rows in expected * 2]


def test_epochs_reorder_the_shards_and_leave_the_users_own_dataset_alone() -> None:
    dataset = generated(8)
    orders = [[row["id"] for row in run(from_hf(dataset), Lane(0, 1, epoch))] for epoch in (0, 1, 2, 1)]
    assert orders[1] == orders[3]
    assert len({str(order) for order in orders}) == 3
    assert dataset.epoch == 0
    assert [row["id"] for row in dataset] == orders[0]


def test_more_lanes_than_shards_are_without_rows_and_it_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(options, "_said", set())
    with caplog.at_level(logging.WARNING, "unbroken"):
        lanes = run_lanes(from_hf(streamed(2)), 5)
    assert [len(rows) for rows in lanes] == [23, 23, 0, 0, 0]
    (record,) = [record for record in caplog.records if record.name == "unbroken"]
    assert "has 2 shards, so that 3 of 5 lanes are without rows" in record.getMessage()
    assert assert_law(from_hf(streamed(2)), Lane(4, 5)) == []


def test_under_torchs_own_loader_rows_are_not_split_twice() -> None:
    for dataset in (streamed(4), by_index()):
        loader = DataLoader(from_hf(dataset), batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert sorted(row["id"] for row in loader) == list(range(ROWS))


def test_random_numbers_in_a_map_come_again() -> None:
    """Case 17."""
    noises = {row["noise"] for row in assert_rows_law(from_hf(streamed().map(noisy)), Lane(0, 1, seed=3))}
    assert len(noises) == ROWS


BUFFERED: dict[str, Callable[[], IterableDataset]] = {
    "last": lambda: streamed().shuffle(seed=1, buffer_size=8),
    "of a generator": lambda: generated().shuffle(seed=1, buffer_size=8),
    "under take": lambda: streamed().shuffle(seed=1, buffer_size=8).take(20),
    "under skip and map": lambda: streamed().shuffle(seed=1, buffer_size=8).skip(3).map(twice, **BATCHED),
    "under a format": lambda: streamed().shuffle(seed=1, buffer_size=8).with_format("torch"),
    "in one of those interleaved": lambda: interleave_datasets(
        [generated(), generated().shuffle(seed=1, buffer_size=8).filter(even)]
    ),
    "in one of those concatenated": lambda: concatenate_datasets(
        [generated(), generated().shuffle(buffer_size=8, seed=1)]
    ),
}


@pytest.mark.parametrize("name", BUFFERED)
def test_a_shuffle_buffer_is_refused_wherever_it_is_and_replay_takes_it(name: str) -> None:
    dataset = BUFFERED[name]()
    with pytest.raises(ValueError, match=r"(?s)keeps rows in a buffer that no state holds.*shuffle\(window=.*replay"):
        from_hf(dataset)
    assert_rows_law(from_hf(dataset, resume="replay"), Lane(0, 1))


def test_a_state_that_loses_rows_is_found_at_once_and_on_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in versions of datasets whose states stand behind the batch that is being read."""
    stream = from_hf(streamed(2))
    lanes = [stream.open(Lane(index, 2)) for index in range(2)]
    for lane in lanes:
        for _ in range(22):
            next(lane)
    exact = IterableDataset.load_state_dict

    def ahead(self: Any, state: dict[str, Any]) -> None:
        state["examples_iterable"]["num_chunks_since_previous_state"] += 2
        exact(self, state)

    monkeypatch.setattr(IterableDataset, "load_state_dict", ahead)
    for rows in (resumed(stream, Lane(1, 2), saved(lanes[1])), stream.open(Lane(0, 2))):
        with pytest.raises(InexactDataset) as caught:
            list(rows)
        assert "from_hf: IterableDataset, lane" in str(caught.value) and "older versions" in str(caught.value)
    assert len(run(from_hf(streamed(1), resume="replay"))) == ROWS


@pytest.mark.parametrize("name", BY_INDEX)
@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 2, epoch=1)])
def test_every_restore_point_of_a_dataset_by_index_is_exact(name: str, lane: Lane) -> None:
    stream = from_hf(BY_INDEX[name]())
    assert_law(stream, lane, [1, 0, 20])
    assert_law(stream.shuffle(8, seed=1), lane, [1, 0, 20])


@pytest.mark.parametrize("name", BY_INDEX)
def test_rows_by_index_are_what_torchs_loader_gets(name: str) -> None:
    dataset = BY_INDEX[name]()
    expected = dataset.__getitems__(list(range(len(dataset)))) if len(dataset) else []
    found = list(from_hf(dataset).open(Lane(0, 1)))
    assert [plain(row) for row in found] == [plain(row) for row in expected]
    assert [list(map(type, row.values())) for row in found] == [list(map(type, row.values())) for row in expected]


@pytest.mark.parametrize("lanes", [1, 3, 64])
def test_lanes_share_out_the_rows_by_index_once(lanes: int) -> None:
    found = [row["id"] for rows in run_lanes(from_hf(by_index()).shuffle(5), lanes) for row in rows]
    assert sorted(found) == list(range(ROWS))


def test_a_transform_draws_the_same_random_numbers_again() -> None:
    """Case 17."""
    dataset = by_index().with_transform(lambda batch: {"noise": [random.random() for _ in batch["id"]]})
    noises = [row["noise"] for row in assert_law(from_hf(dataset), Lane(0, 1, seed=3), [7, 0, 1])]
    assert len(set(noises)) == ROWS
    assert run(from_hf(dataset), Lane(0, 1, epoch=1)) != run(from_hf(dataset))
    random.seed(1)
    ref = random.random()
    random.seed(1)
    assert len(list(from_hf(dataset))) == ROWS and random.random() == ref


def test_a_transform_that_drops_rows_is_an_error() -> None:
    dataset = by_index().with_transform(lambda batch: {"id": batch["id"][1:]})
    with pytest.raises(ValueError, match=r"rows 0 to 4 of the dataset came out as 4 rows"):
        run(from_hf(dataset))


def test_lineage_names_the_kind_and_the_row() -> None:
    rows = from_hf(by_index()).shuffle(5, seed=1).open(Lane(0, 1), lineage=True)
    for row in rows:
        assert rows.origin() == (Origin("from_hf", "Dataset", row["id"]),)
    rows = from_hf(streamed()).open(Lane(1, 3), lineage=True)
    next(rows), next(rows)
    assert rows.origin() == (Origin("from_hf", "IterableDataset, lane 1 of 3", 1),)


def test_fingerprints_tell_other_rows_and_other_steps() -> None:
    described = from_hf(by_index()).describe()
    assert described["files"] == f"46 rows, fingerprint {by_index()._fingerprint}"
    assert from_hf(by_index().shuffle(seed=1)).describe() != described
    mapped = from_hf(streamed().map(noisy)).describe()
    assert mapped["files"] == "IterableDataset, 3 shards"
    assert mapped["steps"].startswith("Mapped(noisy:") and "< Arrow, " in mapped["steps"]
    assert from_hf(streamed().map(noisy)).describe() == mapped
    assert from_hf(streamed().map(twice, batched=True)).describe()["steps"] != mapped["steps"]
    assert from_hf(generated(2)).describe()["files"] != from_hf(generated(3)).describe()["files"]
    assert repr(from_hf(streamed())) == "from_hf(IterableDataset)"
    assert "3 shards on 64 lanes" in str(from_hf(streamed()))


@pytest.mark.parametrize(
    ("dataset", "error", "text"),
    [
        ([1, 2], TypeError, "must be a Dataset or an IterableDataset of datasets, but got a list"),
        (datasets.DatasetDict({"train": by_index()}), TypeError, "Pass one of its splits ('train')"),
        (by_index().with_format("arrow"), ValueError, "has the format 'arrow'. Rows are dicts here"),
        (streamed().with_format("pandas"), ValueError, "has the format 'pandas'. Rows are dicts here"),
        (
            by_rank(streamed(), 0, 2),
            ValueError,
            "was split by rank (split_dataset_by_node)",
        ),
    ],
)
def test_what_cannot_be_streamed_exactly_fails_at_construction(dataset: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        from_hf(dataset)
    assert text in str(caught.value)


def test_resume_is_one_of_two_words() -> None:
    with pytest.raises(ValueError, match="from_hf: resume must be 'checked' or 'replay'"):
        from_hf(streamed(), resume="trust")
