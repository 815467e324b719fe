"""States of other loaders are found in checkpoints, and only plain values of them are read."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import IterableDataset

from unbroken import StatefulDataLoader
from unbroken.checkpoints.files import open_checkpoint, write_position
from unbroken.checkpoints.foreign import find_foreign
from unbroken.checkpoints.takeover import take_over
from unbroken.errors import InvalidState, UnsealableState

pytest.importorskip("torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader as Other

from tests.checkpoints.others import Table, batches_of, saved_after

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
]


def test_the_ranks_of_torchtitan_become_lanes(tmp_path: Path) -> None:
    """Each rank has a shard of its own, and was saved as a pickle in one DCP folder."""

    def shard(rank: int) -> list[int]:
        return list(range(rank, 40, 2))

    class Shard(IterableDataset[int]):
        def __init__(self, rank: int | None = None) -> None:
            self.rank, self.done = rank, 0

        def __iter__(self) -> Any:
            info = torch.utils.data.get_worker_info()
            rows = shard(self.rank if info is None or self.rank is not None else info.id)  # type: ignore[arg-type]
            while self.done < len(rows):
                self.done += 1
                yield rows[self.done - 1]

        def state_dict(self) -> dict[str, Any]:
            return {"done": self.done, "buffer": [1, [2, {"three": 3}]]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.done = state["done"]

    states = [saved_after(partial(Other, Shard(rank), batch_size=3), 2) for rank in range(2)]
    saved: dict[str, Any] = {f"dp_rank_{rank}": pickle.dumps(state) for rank, state in enumerate(states)}
    dcp.save(
        {"dataloader": {**saved, "world_size": 2}, "w": torch.ones(2)}, checkpoint_id=tmp_path / "old", no_dist=True
    )
    found = find_foreign(open_checkpoint(tmp_path / "old"))
    assert found.origin == "torchtitan"
    taken_over = take_over([found], StatefulDataLoader(Shard(), batch_size=3, lanes=2))
    write_position(tmp_path / "new", taken_over.position, "dataloader")
    for rank in range(2):
        loader = StatefulDataLoader(Shard(), batch_size=3, lanes=2, dp_rank=rank, dp_world_size=2)
        dcp.load({"dataloader": loader}, checkpoint_id=tmp_path / "new", no_dist=True)
        assert batches_of(loader) == batches_of(shard(rank)[6:][i : i + 3] for i in range(0, 14, 3))


def test_a_pickle_with_anything_but_plain_values_is_not_read(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    torch.save({"dp_rank_0": pickle.dumps({"_num_yielded": Touch()}), "world_size": 1}, tmp_path / "old.pt")
    with pytest.raises(InvalidState, match=r"dp_rank_0.*pathlib"):
        find_foreign(open_checkpoint(tmp_path / "old.pt"))
    assert not (tmp_path / "touched").exists()


class Counted(IterableDataset[int]):
    """Its state has whatever it is given beside the count."""

    def __init__(self, beside: Any) -> None:
        self.beside = beside
        self.done = 0

    def __iter__(self) -> Any:
        while self.done < 20:
            self.done += 1
            yield self.done - 1

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "beside": self.beside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert type(state["beside"]) is type(self.beside)
        self.done = state["done"]


@pytest.mark.parametrize("name", ["old.pt", "old"])
def test_states_with_arrays_are_read_and_those_with_objects_are_named(tmp_path: Path, name: str) -> None:
    def save(beside: Any) -> Path:
        state = saved_after(partial(Other, Counted(beside), batch_size=4), 2)
        path = tmp_path / type(beside).__name__ / name
        path.parent.mkdir()
        if name == "old":
            dcp.save({"data": state}, checkpoint_id=path, no_dist=True)
        else:
            torch.save({"data": state}, path)
        return path

    array = np.random.RandomState(1).get_state()[1]
    loader = StatefulDataLoader(Counted(array), batch_size=4)
    position = take_over([find_foreign(open_checkpoint(save(array)))], loader).position
    loader.load_state_dict(position)
    assert batches_of(loader) == [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    found = find_foreign(open_checkpoint(save(SimpleNamespace(a=1))))
    with pytest.raises(UnsealableState, match=r"\['beside'\] is a types.SimpleNamespace"):
        take_over([found], loader)


def test_ranks_that_are_missing_are_named(tmp_path: Path) -> None:
    torch.save({"dp_rank_0": b"", "dp_rank_2": b"", "world_size": 3}, tmp_path / "old.pt")
    with pytest.raises(InvalidState, match=r"saved by 3 ranks, and of these only 0, 2 are here"):
        find_foreign(open_checkpoint(tmp_path / "old.pt"))


def test_a_position_of_unbroken_is_told_as_one(tmp_path: Path) -> None:
    write_position(tmp_path / "ours.pt", StatefulDataLoader(Table()).state_dict(), "train")
    with pytest.raises(InvalidState, match=r"has a position of unbroken already \(train\)"):
        find_foreign(open_checkpoint(tmp_path / "ours.pt"))


def test_a_file_without_a_state_of_others_says_what_is_there(tmp_path: Path) -> None:
    torch.save({"model": torch.zeros(1), "epoch": 2}, tmp_path / "old.pt")
    with pytest.raises(InvalidState, match=r"There is no state of torchdata.*it holds 'model', 'epoch'"):
        find_foreign(open_checkpoint(tmp_path / "old.pt"))
    state = saved_after(partial(Other, Table()), 1)
    torch.save({"train": state, "val": state}, tmp_path / "two.pt")
    with pytest.raises(InvalidState, match=r"are 'train', 'val'\.\nSay which with --key"):
        find_foreign(open_checkpoint(tmp_path / "two.pt"))
    with pytest.raises(InvalidState, match=r"no state of a loader 'foo' in .*; there is 'train', 'val'") as error:
        find_foreign(open_checkpoint(tmp_path / "two.pt"), key="foo")
    assert "Say which" not in str(error.value)
    torch.save({"a": {"train": state}, "b": {"train": state}}, tmp_path / "three.pt")
    with pytest.raises(InvalidState, match=r"2 states of loaders 'train' in .*; there is 'a.train', 'b.train'"):
        find_foreign(open_checkpoint(tmp_path / "three.pt"), key="train")
    assert find_foreign(open_checkpoint(tmp_path / "two.pt"), key="val").origin == "torchdata"
    del state["fetcher_state"]
    torch.save(state, tmp_path / "cut.pt")
    with pytest.raises(InvalidState, match="not the structure of torchdata"):
        find_foreign(open_checkpoint(tmp_path / "cut.pt"))
