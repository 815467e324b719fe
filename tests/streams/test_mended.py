"""Faults that were found in whole pipelines, each with the values that are right. One test a kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from unbroken import BadRow, StatefulDataLoader, from_iterable, mix, read_arrow, read_jsonl

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

ROWS = {0: 5, 1: 1, 2: 0, 3: 1, 4: 5, 5: 1}


def test_ranks_that_are_an_epoch_apart_are_not_told_that_they_have_no_data() -> None:
    """Without a vote, rank 1 of two is an epoch ahead; on three ranks, one has only lanes that are ahead."""
    stream = from_iterable(lambda lane, lanes: [lane * 100 + i for i in range(ROWS[lane])])

    def make(rank: int, world: int) -> StatefulDataLoader:
        return StatefulDataLoader(stream, 1, lanes=6, seed=0, dp_rank=rank, dp_world_size=world)

    two = [make(0, 2), make(1, 2)]
    for rank in (0, 1, 1):
        list(two[rank])
    state = {**two[0].state_dict(), **two[1].state_dict()}
    rows = []
    for rank in range(3):
        loader = make(rank, 3)
        loader.load_state_dict(state)
        rows += [row for _ in range(3) for batch in loader for row in batch.tolist()]
    # Lanes 0, 2, 4 stand before epoch 1, lanes 1, 3, 5 before epoch 2.
    assert set(rows) == {lane * 100 + i for lane, n in ROWS.items() for i in range(n)}


def test_a_damaged_length_in_an_arrow_file_is_a_bad_row_and_no_lack_of_memory(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * 50] * 40})
    path = tmp_path / "m.arrow"
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=10)
    good, named = path.read_bytes(), 0
    for place in range(8, len(good) * 7 // 10, 3):
        damaged = bytearray(good)
        damaged[place] ^= 0x80
        path.write_bytes(bytes(damaged))
        try:
            list(StatefulDataLoader(read_arrow(path), 5, lanes=1, seed=0, collate_fn=list))
        except (BadRow, ValueError) as error:
            assert "m.arrow" in str(error)
            named += 1
    assert named > 10


@pytest.mark.parametrize("depth", [1, 2, 5, 6, 7, 12])
def test_mixes_lie_within_mixes_as_deep_as_anybody_likes(depth: int, tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text("\n".join(map(str, range(40))))
    stream: Any = read_jsonl(tmp_path / "n.jsonl").shuffle(40).repeat(1)
    for _ in range(depth):
        stream = mix({"x": stream})
    loader = StatefulDataLoader(stream, 40, lanes=1, seed=0)
    epochs = [next(iter(loader)).tolist() for _ in range(3)]
    assert all(sorted(rows) == list(range(40)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3
    again = StatefulDataLoader(stream, 40, lanes=1, seed=0)
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)).tolist() == next(iter(loader)).tolist()


def test_a_file_whose_name_is_no_utf_8_is_read_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / b"caf\xe9.jsonl".decode(errors="surrogateescape")
    path.write_text("\n".join(map(str, range(12))))
    loader = StatefulDataLoader(read_jsonl(path), 3, lanes=2, seed=0)
    iterator = iter(loader)
    first = next(iterator).tolist()
    again = StatefulDataLoader(read_jsonl(path), 3, lanes=2, seed=0)
    again.load_state_dict(loader.state_dict())
    assert sorted(first + [row for batch in again for row in batch.tolist()]) == list(range(12))


def _optional(number: int) -> dict[str, Any]:
    return {"x": np.array([number, number])} | ({"note": "odd"} if number % 4 == 3 else {})


def _number_or_array(number: int) -> dict[str, Any]:
    return {"x": np.array([number, number]), "n": number if number % 3 == 2 else np.array(number)}


def _two_widths(number: int) -> dict[str, Any]:
    return {"x": np.array([number, number], np.int32 if number % 2 else np.int64)}


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy:UserWarning")  # torch's, of what it collates
@pytest.mark.parametrize("row", [_optional, _number_or_array, _two_widths])
def test_rows_of_different_kinds_make_the_same_batches_with_workers_and_without(
    row: Callable[[int], dict[str, Any]],
) -> None:
    def rows(lane: int, lanes: int) -> Iterator[dict[str, Any]]:
        return map(row, range(lane, 12, lanes))

    def outcome(workers: int) -> Any:
        loader = StatefulDataLoader(from_iterable(rows), 4, lanes=2, seed=0, num_workers=workers)
        try:
            return [
                {name: (value.dtype, value.tolist()) if hasattr(value, "dtype") else value for name, value in b.items()}
                for b in loader
            ]
        except Exception as error:
            return type(error)

    inline = outcome(0)
    assert [outcome(workers) for workers in (1, 2)] == [inline, inline]
    assert isinstance(inline, list) or inline is KeyError
