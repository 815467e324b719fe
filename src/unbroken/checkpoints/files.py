"""Positions in files: found in a DCP folder, in what ``torch.save`` wrote, or in JSON, at any depth; and written.

Of a DCP folder only the metadata and the keys of the position are read, in one process; of a file of ``torch.save``
no tensor. Nothing that is stored is run.
"""

from __future__ import annotations

import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from unbroken.checkpoints.inert import read_dcp_metadata, read_torch_bytes, read_torch_file
from unbroken.errors import InvalidState
from unbroken.state import HEADER

__all__ = ["Checkpoint", "Place", "open_checkpoint", "read_merged", "read_position", "write_position"]

Place = tuple[str | int, ...]
"""Where something lies in a checkpoint: the keys and numbers on the way to it."""

_METADATA = ".metadata"
_WRITTEN = (".json", ".pt", ".pth")
_FILES = (".json", ".pt", ".pth", ".ckpt", ".bin", ".tar")
_MOST_TOLD = 12
_DIGITS = re.compile(r"(\d+)")


def read_position(path: Path, key: str | None = None) -> dict[str, str]:
    """The position in a checkpoint: a DCP folder, a file of ``torch.save``, or JSON.

    ``key`` names it where there are several: the keys on the way to it with dots between, or the last of them.

    Raises ``InvalidState`` where the file cannot be read or is no checkpoint, where there is no position in it (what is
    there is listed), several and no ``key``, or none of that name.
    """
    checkpoint = open_checkpoint(path)
    return checkpoint.position(_chosen(checkpoint, key))


def read_merged(paths: Sequence[Path], key: str | None = None) -> dict[str, str]:
    """The position in one checkpoint, or that which the files of several ranks make together.

    Raises ``InvalidState`` as ``read_position`` does, and where two files have the same leaf with other content.
    """
    merged: dict[str, str] = {}
    for path in paths:
        position = read_position(path, key)
        for name in merged.keys() & position.keys() - {HEADER}:
            if merged[name] != position[name]:
                raise InvalidState(
                    f"{path} has the leaf {name!r} with another content than a file before it: these are not the ranks "
                    "of one save.\nName only files of one save, one for each rank; to compare two saves, use "
                    "unbroken state diff A B."
                )
        merged |= position
    return merged


def write_position(path: Path, position: Mapping[str, str], key: str = "") -> str:
    """Write a position: as JSON where the name ends in ``.json``, by ``torch.save`` where it ends in ``.pt`` or
    ``.pth``, and where it has no such ending as a DCP folder, in which it needs a name (``loader`` without a ``key``).
    Returns what was written, in words.

    Raises ``InvalidState`` where there is something already, or the name has another ending.
    """
    if re.fullmatch(r"\.[A-Za-z]\w*", path.suffix) and path.suffix not in _WRITTEN:
        raise InvalidState(
            f"{path} ends in {path.suffix}, and a position is written to a file that ends in {', '.join(_WRITTEN)}, or "
            "to a DCP folder, whose name has no ending."
        )
    if path.exists():
        raise InvalidState(f"{path} is there already, and is left as it is. Name a new file or folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = dict(position)
    for part in reversed(key.split(".") if key else []):
        content = {part: content}
    if path.suffix == ".json":
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        return f"{path} (JSON{f', under {key!r}' if key else ''})"
    if path.suffix in (".pt", ".pth"):
        torch.save(content, path)
        return f"{path} (torch.save{f', under {key!r}' if key else ''})"
    content = content if key else {"loader": content}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that a single process saves
        save(content, checkpoint_id=str(path), no_dist=True)
    return f"{path} (a DCP folder, under {key or 'loader'!r})"


class Checkpoint(ABC):
    """What one file or folder holds. Values are read when they are asked for."""

    path: Path

    @abstractmethod
    def places(self) -> Iterator[Place]:
        """Where each value lies that is no dict and no list."""

    @abstractmethod
    def at(self, place: Place) -> Any:
        """What lies there, with all that is in it. Raises ``InvalidState`` where it cannot be read."""

    def told(self) -> str:
        """What is there, for an error."""
        first = list(dict.fromkeys(str(place[0]) for place in self.places() if place))
        names = ", ".join(map(repr, first[:_MOST_TOLD])) + (", ..." if len(first) > _MOST_TOLD else "")
        return f"it holds {names}" if names else "it is empty"

    @cached_property
    def found(self) -> dict[str, Place]:
        """The positions by name: the keys on the way to each, with dots between; empty for the whole.

        Each has a header, which is JSON and may be damaged: the same key also stands for a version, say.
        """
        places = [place[:-1] for place in self.places() if place and place[-1] == HEADER]
        return {".".join(map(str, place)): place for place in places if _is_header(self.at((*place, HEADER)))}

    def position(self, name: str) -> dict[str, str]:
        """The position of this name. Raises ``InvalidState`` where a value in it is no text."""
        position = self.at(self.found[name])
        for leaf, text in position.items():
            if not isinstance(text, str):
                raise InvalidState(
                    f"{self.path}: the leaf {leaf!r} of the position is a {type(text).__name__}, and not text: it was "
                    "changed since state_dict() returned it."
                )
        return dict(position)


@final
@dataclass(frozen=True, eq=False)
class _Tree(Checkpoint):
    """A value that was read as a whole. ``unknown`` are types in it that were not."""

    path: Path
    value: Any
    unknown: tuple[str, ...] = ()

    def places(self) -> Iterator[Place]:
        return _leaves(self.value, ())

    def at(self, place: Place) -> Any:
        value = self.value
        for part in place:
            value = value[part]
        return value

    def told(self) -> str:
        if not isinstance(self.value, dict | list):
            return f"it holds a {getattr(self.value, 'kind', '') or type(self.value).__name__}"
        unread = f"; not looked into were objects of {', '.join(self.unknown)}" if self.unknown else ""
        return super().told() + unread


@final
@dataclass(frozen=True, eq=False)
class _Folder(Checkpoint):
    """A checkpoint of ``torch.distributed.checkpoint``."""

    path: Path
    metadata: Metadata

    @cached_property
    def _names(self) -> dict[Place, str]:
        """The name in the metadata by place. Without the planner's data only the name tells the way to a value."""
        ways = self.metadata.planner_data
        ways = ways if isinstance(ways, dict) else {}
        names = self.metadata.state_dict_metadata
        found = {name: ways.get(name) for name in names}
        return {
            way
            if type(way) is tuple and all(type(part) in (str, int) for part in way)
            else tuple(name.split(".")): name
            for name, way in found.items()
        }

    @cached_property
    def _pieces(self) -> dict[str, list[Any]]:
        """Where the pieces of each value lie."""
        pieces: dict[str, list[Any]] = {}
        for index, info in (self.metadata.storage_data or {}).items():
            pieces.setdefault(index.fqn, []).append(info)
        return pieces

    def places(self) -> Iterator[Place]:
        return iter(self._names)

    def at(self, place: Place) -> Any:
        if place in self._names:
            return self._read(self._names[place])
        inside = {way[len(place) :]: name for way, name in self._names.items() if way[: len(place)] == place}
        return _nested({way: self._read(name) for way, name in inside.items()})

    def _read(self, name: str) -> Any:
        """One value. A tensor has to be in one piece, as those of data loaders are."""
        pieces = self._pieces.get(name, [])
        whole = isinstance(self.metadata.state_dict_metadata[name], BytesStorageMetadata) or len(pieces) == 1
        if not whole or not pieces:
            raise InvalidState(f"{self.path}: {name!r} is a tensor in {len(pieces)} pieces, and no part of a position.")
        info = pieces[0]
        if getattr(info, "transform_descriptors", None):
            raise InvalidState(
                f"{self.path}: {name!r} was saved compressed ({', '.join(info.transform_descriptors)}), which is not "
                "read here. Load the loader from it in a program, and save loader.state_dict() as JSON."
            )
        file = self.path / info.relative_path
        if not file.resolve().is_relative_to(self.path.resolve()):
            raise InvalidState(f"{self.path}: {name!r} is said to lie outside of the folder, in {info.relative_path}.")
        try:
            with file.open("rb") as stream:
                stream.seek(info.offset)
                data = stream.read(info.length)
        except OSError as error:
            raise InvalidState(f"{self.path}: {name!r} cannot be read: {error}") from None
        if len(data) < info.length:
            raise InvalidState(
                f"{file} is cut short: {name!r} should have {info.length} bytes from byte {info.offset} on, and "
                f"{len(data)} are there. Use another checkpoint."
            )
        return read_torch_bytes(data, f"{self.path}: {name!r}")


def open_checkpoint(path: Path) -> Checkpoint:
    """What is in a file or folder. Raises ``InvalidState`` where there is none, or it is no checkpoint."""
    path = path.parent if path.name == _METADATA else path
    if not path.exists():
        raise InvalidState(f"There is no file or folder {path}.")
    try:
        if path.is_dir():
            return _Folder(path, read_dcp_metadata(_metadata_of(path)))
        with path.open("rb") as stream:
            first = stream.read(64)
        if first[:2] == b"PK" or first[:1] == b"\x80":
            return _Tree(path, *read_torch_file(path))
        if first.lstrip()[:1] not in (b"{", b"["):  # of a very large file no more is read
            raise ValueError("it begins with no brace")
        return _Tree(path, json.loads(path.read_bytes()))
    except OSError as error:
        raise InvalidState(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise InvalidState(f"{path} is nested too deeply to be read. No checkpoint is.") from None
    except ValueError as error:
        if isinstance(error, InvalidState):
            raise
        raise InvalidState(
            f"{path} is neither JSON ({error}) nor a file of torch.save, nor a DCP folder.\n"
            "Name one of these, in which a loader's state_dict() was saved."
        ) from None


def _metadata_of(folder: Path) -> Path:
    """The metadata of a DCP folder. Raises ``InvalidState`` where it has none."""
    if (folder / _METADATA).is_file():
        return folder / _METADATA
    if any(folder.glob("*.distcp")):
        raise InvalidState(
            f"{folder} has the parts of a DCP checkpoint and no {_METADATA}, which is written last: the save did not "
            "come to its end. Use another checkpoint."
        )
    inside = [found.parent for depth in ("*", "*/*", "*/*/*") for found in folder.glob(f"{depth}/{_METADATA}")]
    inside.sort(key=_by_number)
    inside += sorted((file for file in folder.iterdir() if file.suffix in _FILES and file.is_file()), key=_by_number)
    if not inside:
        raise InvalidState(
            f"{folder} is no checkpoint: it has no {_METADATA} of torch.distributed.checkpoint, and no file of "
            f"torch.save or JSON ({', '.join(_FILES)})."
        )
    listed = "\n".join(f"  {found}" for found in inside[:_MOST_TOLD])
    more = f"\n  and {len(inside) - _MOST_TOLD} more" if len(inside) > _MOST_TOLD else ""
    raise InvalidState(
        f"{folder} is no checkpoint; there {'is one' if len(inside) == 1 else f'are {len(inside)}'} in it:\n"
        f"{listed}{more}\nName one of them; of files of the ranks of one save, all."
    )


def _is_header(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("{")


def _by_number(path: Path) -> list[tuple[int, str]]:
    """An order in which 50 comes before 100."""
    parts = _DIGITS.split(str(path))  # each second one is a number
    return [(int(part), "") if number % 2 else (0, part) for number, part in enumerate(parts)]


def _chosen(checkpoint: Checkpoint, key: str | None) -> str:
    """The name of the position that is meant."""
    found = checkpoint.found
    if not found:
        raise InvalidState(
            f"There is no position of unbroken in {checkpoint.path}: {checkpoint.told()}.\n"
            "A position is a dict with the key 'unbroken'. Was loader.state_dict() saved in this checkpoint? A state "
            "of another loader is taken over by unbroken state import."
        )
    if key is None:
        if len(found) == 1:
            return next(iter(found))
        names = ", ".join(name or "(the whole)" for name in found)
        raise InvalidState(f"There are {len(found)} positions in {checkpoint.path}: {names}.\nSay which with --key.")
    wanted = [name for name in found if name == key] or [name for name in found if name.split(".")[-1] == key]
    if len(wanted) != 1:
        names = ", ".join(map(repr, wanted or found))
        none = f"no position {key!r}" if not wanted else f"{len(wanted)} positions {key!r}"
        raise InvalidState(f"There is {none} in {checkpoint.path}; there is {names}.")
    return wanted[0]


def _leaves(value: Any, place: Place) -> Iterator[Place]:
    """The places of all values that are neither a dict nor a list."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(name, str | int):
                yield from _leaves(inner, (*place, name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            if isinstance(inner, dict | list | tuple):
                yield from _leaves(inner, (*place, number))
    else:
        yield place


def _nested(flat: Mapping[Place, Any]) -> Any:
    """Dicts, and lists where the keys are numbers, from a value for each way."""
    if () in flat:
        return flat[()]
    inside: dict[str | int, dict[Place, Any]] = {}
    for (first, *rest), value in flat.items():
        inside.setdefault(first, {})[tuple(rest)] = value
    if inside and all(isinstance(name, int) for name in inside):
        return [_nested(inside[name]) for name in sorted(inside)]
    return {name: _nested(values) for name, values in inside.items()}
