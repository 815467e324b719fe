"""A file system far away, in memory: what is asked of it is recorded, and a test may let any of it fail or wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import fsspec
import numpy as np
import torch
from fsspec.spec import AbstractFileSystem


class Call(NamedTuple):
    """``what`` is ``"info"``, ``"ls"`` or ``"cat"``; ``start`` and ``end`` are the bytes that were asked for."""

    what: str
    path: str
    start: int = 0
    end: int = 0


class Store:
    """The files of ``far://``. ``before`` is called with each call, in the thread that makes it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.calls: list[Call] = []
        self.before: Callable[[Call], None] = lambda call: None

    def told(self, call: Call) -> None:
        self.calls.append(call)
        self.before(call)

    def read(self, path: str = "") -> list[Call]:
        """The reads of a file, or of all."""
        return [call for call in self.calls if call.what == "cat" and path in call.path]

    def fail(self, times: int, error: Callable[[], Exception], what: str = "cat", path: str = "") -> list[Call]:
        """Let the next calls fail so many times. Returns the calls that failed, and later ones once they do."""
        failed: list[Call] = []

        def before(call: Call) -> None:
            if call.what == what and path in call.path and len(failed) < times:
                failed.append(call)
                raise error()

        self.before = before
        return failed


STORE = Store()


class FarFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Each process has its own ``STORE``."""

    protocol = "far"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        STORE.told(Call("info", path))
        if path in STORE.files:
            return {"name": path, "size": len(STORE.files[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in STORE.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        STORE.told(Call("ls", path))
        inside = f"{path}/" if path else ""
        found = {inside + name[len(inside) :].split("/")[0] for name in STORE.files if name.startswith(inside)}
        if not found:
            raise FileNotFoundError(path)
        listed = [{"name": name, "size": len(STORE.files.get(name, b"")), "type": kind_of(name)} for name in found]
        return listed if detail else sorted(found)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        STORE.told(Call("cat", path, start or 0, end or 0))
        if path not in STORE.files:
            raise FileNotFoundError(path)
        return STORE.files[path][start:end]


def kind_of(name: str) -> str:
    return "file" if name in STORE.files else "directory"


@contextmanager
def far_away() -> Iterator[Store]:
    """An empty store at ``far://``."""
    global STORE
    STORE = Store()
    fsspec.register_implementation("far", FarFileSystem, clobber=True)
    try:
        yield STORE
    finally:
        STORE.before = lambda call: None


def global_draws() -> Any:
    """What comes next of the global random generators; they are put back."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return drawn
