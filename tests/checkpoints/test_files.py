"""Positions are found in any checkpoint, and nothing that is stored is run."""

from __future__ import annotations

import argparse
import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoints.runs import lanes_loader, position_after
from unbroken.checkpoints.files import open_checkpoint, read_merged, read_position, write_position
from unbroken.checkpoints.summary import summarize
from unbroken.errors import InvalidState

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


@pytest.fixture(scope="module")
def position() -> dict[str, str]:
    return position_after(lanes_loader(), 4)


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def save(content: Any, path: Path) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    elif path.suffix == ".pt":
        torch.save(content, path)
    else:
        dcp.save(content, checkpoint_id=path, no_dist=True)
    return path


NAMES = pytest.mark.parametrize("name", ["ckpt.json", "ckpt.pt", "ckpt"])


@NAMES
def test_a_position_is_found_at_any_depth(name: str, position: dict[str, str], tmp_path: Path) -> None:
    model = {"w": [1.0, 2.0] if name == "ckpt.json" else torch.ones(4)}
    path = save({"model": model, "step": 3, "train": {"loops": [{"loader": position}]}}, tmp_path / name)
    assert read_position(path) == position
    assert list(open_checkpoint(path).found) == ["train.loops.0.loader"]


@NAMES
def test_a_position_may_be_the_whole(name: str, position: dict[str, str], tmp_path: Path) -> None:
    assert read_position(save(position, tmp_path / name)) == position


@NAMES
def test_what_was_written_is_read(name: str, position: dict[str, str], tmp_path: Path) -> None:
    for key in ("", "train.loader"):
        told = write_position(tmp_path / f"of {key}" / name, position, key)
        assert read_position(tmp_path / f"of {key}" / name) == position
        assert (key or "ckpt") in told
        with pytest.raises(InvalidState, match="is there already"):
            write_position(tmp_path / f"of {key}" / name, position, key)


@NAMES
def test_of_several_positions_one_is_named(name: str, position: dict[str, str], tmp_path: Path) -> None:
    other = position_after(lanes_loader(), 1)
    path = save({"train": {"loader": position}, "val": {"loader": other}}, tmp_path / name)
    assert read_position(path, "val.loader") == other
    with pytest.raises(InvalidState, match=r"2 positions in .*: train.loader, val.loader\.\nSay which with --key"):
        read_position(path)
    with pytest.raises(InvalidState, match=r"2 positions 'loader' in .*'train.loader', 'val.loader'"):
        read_position(path, "loader")
    with pytest.raises(InvalidState, match=r"no position 'test' in .*'train.loader', 'val.loader'"):
        read_position(path, "test")


@NAMES
def test_where_there_is_no_position_it_is_said_what_is_there(name: str, tmp_path: Path) -> None:
    path = save({"model": {"w": 1}, "epoch": 2}, tmp_path / name)
    with pytest.raises(InvalidState, match=r"no position of unbroken in .*: it holds 'model', 'epoch'"):
        read_position(path)


def test_a_dcp_folder_that_torch_loads_a_loader_from_is_read(tmp_path: Path) -> None:
    """The loader itself is saved, as in a training program."""
    loader = lanes_loader()
    position = position_after(loader, 5)
    dcp.save(
        {"loader": loader, "model": torch.nn.Linear(3, 3).state_dict()}, checkpoint_id=tmp_path / "5", no_dist=True
    )
    assert read_position(tmp_path / "5") == position
    assert read_position(tmp_path / "5" / ".metadata") == position


def test_the_tensors_of_a_dcp_folder_are_not_looked_at(position: dict[str, str], tmp_path: Path) -> None:
    """They are overwritten in the file, and could not be read."""
    path = save({"model": {"w": torch.arange(1000.0)}, "loader": position}, tmp_path / "ckpt")
    metadata = dcp.FileSystemReader(path).read_metadata()
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "model.w"]
    with (path / info.relative_path).open("r+b") as stream:
        stream.seek(info.offset)
        stream.write(b"\0" * info.length)
    assert read_position(path) == position


def test_the_folder_of_several_checkpoints_lists_them(position: dict[str, str], tmp_path: Path) -> None:
    for step in (10, 20):
        save({"loader": position}, tmp_path / "run" / f"step-{step}")
    save(position, tmp_path / "run" / "rank-0.json")
    with pytest.raises(InvalidState, match=r"there are 3 in it:\n.*step-10\n.*step-20\n.*rank-0.json\nName one"):
        read_position(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidState, match=r"empty is no checkpoint: it has no .metadata"):
        read_position(tmp_path / "empty")


def test_checkpoints_are_listed_by_their_numbers(position: dict[str, str], tmp_path: Path) -> None:
    for step in (100, 50, 150):
        save(position, tmp_path / f"step-{step}.json")
        (tmp_path / f"{step}").mkdir()
        save(position, tmp_path / f"{step}" / "loader")
    with pytest.raises(InvalidState) as error:
        open_checkpoint(tmp_path)
    listed = [line.strip().removeprefix(f"{tmp_path}/") for line in str(error.value).splitlines()[1:-1]]
    assert listed == ["50/loader", "100/loader", "150/loader", "step-50.json", "step-100.json", "step-150.json"]


@NAMES
def test_a_version_of_unbroken_is_no_position(name: str, position: dict[str, str], tmp_path: Path) -> None:
    versions = {"versions": {"unbroken": "0.1.0", "torch": "2.9"}}
    with pytest.raises(InvalidState, match="There is no position of unbroken in"):
        read_position(save(versions, tmp_path / name))
    (tmp_path / "beside").mkdir()
    assert read_position(save({**versions, "loader": position}, tmp_path / "beside" / name)) == position
    damaged = {**position, "unbroken": position["unbroken"][:40]}
    (tmp_path / "damaged").mkdir()
    path = save({**versions, "loader": damaged}, tmp_path / "damaged" / name)
    with pytest.raises(InvalidState, match="The leaf 'unbroken' of this position is not JSON"):
        summarize(read_position(path))


@pytest.mark.parametrize("name", ["new.txt", "new.pkl"])
def test_a_name_with_another_ending_is_not_written(name: str, position: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(
        InvalidState, match=r"is written to a file that ends in \.json, \.pt, \.pth, or to a DCP folder"
    ):
        write_position(tmp_path / name, position)
    assert not (tmp_path / name).exists()
    write_position(tmp_path / "at-0.5", position)
    assert read_position(tmp_path / "at-0.5") == position


def test_a_save_that_did_not_come_to_its_end_is_told(position: dict[str, str], tmp_path: Path) -> None:
    path = save({"loader": position}, tmp_path / "ckpt")
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:500])
    with pytest.raises(InvalidState, match=r"is cut short: '.*' should have \d+ bytes from byte \d+ on, and \d+ are"):
        read_position(path)
    (path / ".metadata").unlink()
    with pytest.raises(InvalidState, match="the save did not come to its end"):
        read_position(path)


def test_a_metadata_that_would_run_something_is_not_read(position: dict[str, str], tmp_path: Path) -> None:
    path = save({"loader": position}, tmp_path / "ckpt")
    (path / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    with pytest.raises(InvalidState, match=r"\.metadata holds a pathlib.*, and not the metadata of a checkpoint"):
        read_position(path)
    (path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(InvalidState, match="holds a dict, and not the metadata of a checkpoint"):
        read_position(path)
    assert not (tmp_path / "touched").exists()


def test_a_metadata_that_points_out_of_its_folder_is_not_followed(position: dict[str, str], tmp_path: Path) -> None:
    path = save({"loader": position}, tmp_path / "ckpt")
    metadata = dcp.FileSystemReader(path).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = "../other"
    (tmp_path / "other").write_bytes(b"secret")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InvalidState, match="is said to lie outside of the folder"):
        read_position(path)


def test_a_torch_file_with_objects_of_any_kind_is_looked_into(position: dict[str, str], tmp_path: Path) -> None:
    """The objects are not made: neither is their class imported, nor is anything of them run."""
    content = {
        "args": argparse.Namespace(lr=0.1),
        "model": torch.nn.Linear(3, 3),
        "weight": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "touch": Touch(tmp_path / "touched"),
        "raw": b"bytes",
        "ids": {1, 2},
        "array": np.arange(3),
        "ordered": OrderedDict(a=1),
        "loader": position,
    }
    path = save(content, tmp_path / "ckpt.pt")
    assert read_position(path) == position
    read = open_checkpoint(path)
    assert read.at(("array",)).tolist() == [0, 1, 2]
    assert (read.at(("raw",)), read.at(("ids",)), read.at(("ordered",))) == (b"bytes", {1, 2}, {"a": 1})
    assert read.at(("weight",)).dtype == torch.bfloat16
    assert not (tmp_path / "touched").exists()
    del content["loader"]
    with pytest.raises(InvalidState, match=r"it holds 'args', .*not looked into were objects of argparse.Namespace"):
        read_position(save(content, tmp_path / "none.pt"))


def test_files_that_are_no_checkpoints_are_told_apart(position: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(InvalidState, match="There is no file or folder"):
        read_position(tmp_path / "none")
    (tmp_path / "text").write_text("once upon a time")
    with pytest.raises(InvalidState, match=r"is neither JSON .* nor a file of torch.save, nor a DCP folder"):
        read_position(tmp_path / "text")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(position))
    with pytest.raises(InvalidState, match=r"plain.pkl cannot be read"):
        read_position(tmp_path / "plain.pkl")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("a", "b")
    with pytest.raises(InvalidState, match=r"a.zip cannot be read"):
        read_position(tmp_path / "a.zip")
    (tmp_path / "cut.json").write_text('{"loader": {"unbroken": ')
    with pytest.raises(InvalidState, match=r"cut.json is neither JSON \(Expecting value"):
        read_position(tmp_path / "cut.json")
    torch.save(3, tmp_path / "number.pt")
    with pytest.raises(InvalidState, match="it holds a int"):
        read_position(tmp_path / "number.pt")


def test_files_that_torch_wrote_in_the_old_way_are_read(position: dict[str, str], tmp_path: Path) -> None:
    torch.save({"loader": position}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert read_position(tmp_path / "old.pt") == position
    torch.save({"loader": position, "a": argparse.Namespace()}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(InvalidState, match=r"Save the loader's state alone"):
        read_position(tmp_path / "a.pt")


def test_a_leaf_that_is_no_text_is_refused(position: dict[str, str], tmp_path: Path) -> None:
    changed: dict[str, Any] = {**position, "lane-000002": {"lane": 1}}
    with pytest.raises(InvalidState, match="the leaf 'lane-000002' of the position is a dict, and not text"):
        read_position(save(changed, tmp_path / "ckpt.json"))


def test_files_of_ranks_are_merged(tmp_path: Path) -> None:
    paths, whole = [], {}
    for rank in range(2):
        position = position_after(lanes_loader(dp_rank=rank, dp_world_size=2), 3)
        paths.append(save({"loader": position}, tmp_path / f"{rank}.pt"))
        whole |= position
    assert read_merged(paths) == whole
    later = position_after(lanes_loader(dp_rank=1, dp_world_size=2), 4)
    with pytest.raises(InvalidState, match="not the ranks of one save"):
        read_merged([*paths, save(later, tmp_path / "later.json")])
