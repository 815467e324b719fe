"""What a scenario gives with one loader class and with another, told in values that compare.

A scenario is a function of the loader class and of the arguments that say who loads: it returns what is iterated. It
is run with the global generators at the same place each time.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import itertools
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from unbroken import StatefulDataLoader

BOTH: list[type[Any]] = [DataLoader, StatefulDataLoader]
WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2, "multiprocessing_context": "fork"}]


class Scenario(Protocol):
    """``who`` are the arguments for worker processes, if there are to be any."""

    def __call__(self, kind: type[Any], who: dict[str, Any]) -> Iterable[Any]: ...


class Failed(NamedTuple):
    """An error: its class, its text without the traceback in it, and the functions of tests that it came through."""

    kind: str
    text: str
    through: list[str]


class Outcome(NamedTuple):
    """The batches, what ended them if they did not end by themselves, and the warnings."""

    batches: list[Any]
    error: Failed | None
    warnings: list[tuple[str, str]]


def outcome(kind: type[Any], scenario: Scenario, num_workers: int = 0, context: str = "fork") -> Outcome:
    """Run a scenario to its end, or to its first error."""
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    who = {"num_workers": num_workers, "multiprocessing_context": context} if num_workers else {}
    batches: list[Any] = []
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for batch in scenario(kind, who):
                batches.append(told(batch))
        except Exception as raised:
            error = failed(raised)
            traceback.clear_frames(raised.__traceback__)  # torch's iterator would keep itself, and its workers
    return Outcome(batches, error, [(w.category.__name__, str(w.message)) for w in caught if not once_only(w)])


def outcomes(scenario: Scenario, num_workers: int = 0, context: str = "fork") -> tuple[Outcome, Outcome]:
    """With torch's loader, and with ours."""
    theirs, ours = (outcome(kind, scenario, num_workers, context) for kind in BOTH)
    return theirs, ours


def assert_the_same(scenario: Scenario, num_workers: int = 0, context: str = "fork") -> Outcome:
    """Batches, error and warnings are torch's; returns them."""
    theirs, ours = outcomes(scenario, num_workers, context)
    assert ours == theirs
    return ours


class Difference(NamedTuple):
    """Where the two differ on purpose: ``why``, and what torch's outcome has to ``become`` to be ours."""

    why: str
    scenario: Scenario
    becomes: Callable[[Outcome], Outcome]
    workers: tuple[int, ...] = (0, 2)


def cases_of(differences: dict[str, Difference]) -> list[tuple[str, int]]:
    """Each by name, for each number of workers with which it shows."""
    return [(name, workers) for name, difference in differences.items() for workers in difference.workers]


def assert_they_differ_as_told(difference: Difference, num_workers: int) -> None:
    theirs, ours = outcomes(difference.scenario, num_workers)
    assert ours != theirs, "not a difference any more: put it among those that are the same"
    assert ours == difference.becomes(theirs), difference.why


def once_only(warning: warnings.WarningMessage) -> bool:
    """Whether it depends on the machine, or is one of those that torch's C++ gives once in a process."""
    text = str(warning.message)
    return "This DataLoader will create" in text or "(Triggered internally at" in text


# ---- errors

_PLACE = re.compile(r"(worker process )\d+(?: \((?:ind|lane|a batch|rows|batch)[^\n]*\))?\.\n")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_FRAME = re.compile(r'^ +File "([^"]+)", line \d+, in (\S+)$', re.MULTILINE)


def failed(error: BaseException) -> Failed:
    """An error of either side. In one that a worker sent, the frames of the worker are in the text."""
    text = str(error)
    frames = [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    frames += _FRAME.findall(text)
    through = [name for file, name in frames if Path(file).name.startswith("test_")]
    through = [name for name, _ in itertools.groupby(through)]  # how deep a recursion goes depends on who calls
    return Failed(type(error).__name__, _ADDRESS.sub(" at 0x", without_traceback(text)), through)


def without_traceback(text: str) -> str:
    """The text of an error less what differs by machine: the number of the worker, the place in brackets that
    ``StatefulDataLoader`` adds, and the lines of a traceback.
    """
    head, found, rest = text.partition("Original Traceback (most recent call last):\n")
    if not found:
        return text
    last = rest.rfind("\n", 0, max(0, rest.rfind("\n  "))) if "\n  " in rest else 0
    lines = rest[last:].split("\n")
    return _PLACE.sub(r"\1N.\n", head) + "\n".join(line for line in lines if line and not line.startswith("  "))


# ---- values


def told(value: Any) -> Any:
    """A value in types, layouts and contents, so that two are equal where nothing tells them apart."""
    if isinstance(value, torch.Tensor):
        return told_tensor(value)
    name = type(value).__name__
    if hasattr(value, "__array_interface__") and not isinstance(value, np.ndarray | np.generic):
        return name, told(np.asarray(value))  # an image
    if isinstance(value, np.ndarray):
        content = told(value.tolist()) if value.dtype.hasobject else value.tobytes()
        extra = told(np.ma.getmaskarray(value)) if isinstance(value, np.ma.MaskedArray) else None
        return name, str(value.dtype), value.shape, value.flags.writeable, content, extra
    if isinstance(value, np.generic):
        return name, value.tobytes()
    if isinstance(value, enum.Enum):
        return name, value.name
    if isinstance(value, collections.abc.Mapping):
        return name, [(told(key), told(inner)) for key, inner in value.items()], own(value)
    if isinstance(value, str | bytes | range):
        return name, value, own(value)
    if isinstance(value, set | frozenset):
        return name, sorted(map(repr, value))
    if isinstance(value, collections.abc.Sequence | collections.deque):
        return name, [told(inner) for inner in value], own(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return name, [(field.name, told(getattr(value, field.name))) for field in dataclasses.fields(value)]
    return name, _ADDRESS.sub(" at 0x", repr(value)), own(value)


def own(value: Any) -> Any:
    """What an object carries besides what its kind holds."""
    return [(name, told(inner)) for name, inner in getattr(value, "__dict__", {}).items() if inner is not value]


def told_tensor(value: torch.Tensor) -> Any:
    about = type(value).__name__, str(value.dtype), str(value.layout), value.requires_grad, str(value.device)
    if value.is_nested:
        return *about, [told(part) for part in value.detach().unbind()]
    if value.is_meta or value.is_quantized:
        return *about, tuple(value.shape), repr(value.detach())
    if value.layout is torch.sparse_coo:
        whole = value.detach().coalesce()
        return *about, tuple(value.shape), told(whole.indices()), told(whole.values())
    if value.layout is not torch.strided:
        return *about, tuple(value.shape), told(value.detach().to_dense())
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    bits = plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return *about, tuple(value.shape), bits.numpy().tobytes(), own(value)


def collected(loader: Any, then: Callable[[Any], Any] = lambda loader: ()) -> Iterable[Any]:
    """The batches of a loader, and what is asked of it after them."""
    yield from loader
    yield from then(loader)
