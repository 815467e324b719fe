"""What the tests of columnar formats share: a file system that counts what is read of it, and values that compare."""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec
import numpy as np
from fsspec.spec import AbstractFileSystem

from unbroken.lanes import Lane
from unbroken.streams.stage import Stage

IDS = list(range(40))


class CountedFiles(AbstractFileSystem):
    """Files in memory, under ``counted://``; each read is a ``(path, start, stop)`` in ``reads``."""

    protocol = "counted"
    cachable = False
    store: ClassVar[dict[str, bytes]] = {}
    reads: ClassVar[list[tuple[str, int, int]]] = []

    @classmethod
    def hold(cls, **files: bytes) -> None:
        """Hold these files and no others; nothing was read yet."""
        cls.store = dict(files)
        cls.reads = []

    @classmethod
    def bytes_read(cls) -> int:
        return sum(stop - start for _, start, stop in cls.reads)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        found = [{"name": name, "size": len(data), "type": "file"} for name, data in self.store.items()]
        found = [info for info in found if self._strip_protocol(path) in ("", info["name"])]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [info["name"] for info in found]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        name = self._strip_protocol(path)
        data = self.store[name][start:end]
        self.reads.append((name, start or 0, (start or 0) + len(data)))
        return data


fsspec.register_implementation("counted", CountedFiles, clobber=True)


def comparable(value: Any) -> Any:
    """A value whose arrays, at any depth, are their dtype and list."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {name: comparable(inner) for name, inner in value.items()}
    return [comparable(inner) for inner in value] if isinstance(value, list) else value


def rows_over(stage: Stage, lanes: int, **place: int) -> list[Any]:
    """The rows of all lanes, one lane after another."""
    return [comparable(row) for index in range(lanes) for row in stage.open(Lane(index, lanes, **place))]


def numbers(rows: list[Any]) -> list[int]:
    return [row["id"] for row in rows]
