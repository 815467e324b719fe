"""Cases 34 and 35: samples, failures and habits of datasets that are odd, through every kind of dataset.

Where torch's loader can do it, the batches are compared with its own. Where nobody can, an error comes within seconds
that names the thing and its place, and the run can go on.
"""

from __future__ import annotations

import collections
import ctypes
import io
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.beside import outcome, told
from tests.beside_rows import Kind, Who, as_list
from tests.odd import SENDABLE
from unbroken import StatefulDataLoader, UnsendableBatch, from_iterable, from_map

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch rebuilds a quantized tensor
]
FORKED: Who = {"num_workers": 2, "multiprocessing_context": "fork"}


class Made(Dataset):
    """Rows are made by a function of their number."""

    def __init__(self, make: Any, n: int) -> None:
        self.make = make
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class MadeInTurn(IterableDataset):
    """The same, one after another, shared out among lanes."""

    def __init__(self, make: Any, n: int) -> None:
        self.make = make
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.n, step):
            yield self.make(number)


def made_in_a_stream(make: Any, n: int) -> Any:
    return from_map(range(n)).map(make)


def made_in_an_iterable_of_a_stream(make: Any, n: int) -> Any:
    return from_iterable(lambda lane, lanes: map(make, range(lane, n, lanes)))


KINDS: dict[str, Callable[[Any, int], Any]] = {
    "map-style": Made,
    "iterable": MadeInTurn,
    "a stream": made_in_a_stream,
    "a stream of an iterable": made_in_an_iterable_of_a_stream,
}

# ---- samples that can be sent


NAMES = list(SENDABLE)


def gives(name: str, **arguments: Any) -> bool:
    """Whether torch's loader has a batch of them, inline."""
    return outcome(DataLoader, lambda kind, who: kind(Made(SENDABLE[name], 2), **arguments)).error is None


STACKING = [name for name in NAMES if gives(name, batch_size=2)]
WAYS = {
    "as they are": (NAMES, as_list),
    "converted": ([name for name in NAMES if gives(name, batch_size=None)], None),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_all_kinds_arrive_as_torch_gives_them_inline(kind: str, way: str, num_workers: int) -> None:
    """And so one after another, from each kind of dataset."""
    names, collate_fn = WAYS[way]
    n = 2 * len(names)

    def of_all_kinds(number: int) -> Any:
        return number, SENDABLE[names[number // 2]](number % 2)

    lanes = {} if kind == "map-style" else {"lanes": 2}
    who = {**FORKED, "num_workers": num_workers} if num_workers else {}
    theirs = DataLoader(Made(of_all_kinds, n), batch_size=None, collate_fn=collate_fn)
    ours = StatefulDataLoader(KINDS[kind](of_all_kinds, n), batch_size=None, collate_fn=collate_fn, **who, **lanes)
    found = {number: told(sample) for number, sample in ours}
    assert len(found) == n
    for number, sample in theirs:
        assert found[number] == told(sample), names[number // 2]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["a stream", "a stream of an iterable"])
def test_streams_collate_as_torch_does(kind: str, num_workers: int) -> None:
    """All kinds of samples, as the fields of one row."""
    names = [name for name in STACKING if name != "parameter"]  # a batch of them cannot be told apart from its graph

    def row(number: int) -> Any:
        return {name: SENDABLE[name](number) for name in names}

    who = {**FORKED, "num_workers": num_workers} if num_workers else {}
    (theirs,) = DataLoader(Made(row, 2), batch_size=2)
    (ours,) = StatefulDataLoader(KINDS[kind](row, 2), batch_size=2, lanes=2, **who)
    assert list(ours) == list(theirs)
    for name in names:
        assert told(ours[name]) == told(theirs[name]), name


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in STACKING])
def test_rows_of_a_stream_that_torch_does_not_collate_are_an_error_of_its_kind(name: str, num_workers: int) -> None:
    if num_workers and name not in ("None", "array of objects", "sparse", "dataclass"):
        return  # they are collated in the training process either way

    def load(kind: Kind, who: Who) -> Any:
        dataset = Made(SENDABLE[name], 2) if kind is DataLoader else made_in_a_stream(SENDABLE[name], 2)
        return kind(dataset, batch_size=2, **(who if kind is StatefulDataLoader else {}))

    theirs, ours = outcome(DataLoader, load), outcome(StatefulDataLoader, load, num_workers)
    assert theirs.error is not None
    assert ours.error is not None
    assert ours.error.kind == theirs.error.kind
    assert theirs.error.text in ours.error.text


# ---- samples that cannot be sent


class FailsToReduce:
    def __reduce__(self) -> Any:
        raise ValueError("will not be packed")


class FailsInItsState:
    def __getstate__(self) -> Any:
        raise LookupError("the state is out")


class FailsToBeMade:
    """Is packed, and fails where it is unpacked."""

    def __reduce__(self) -> Any:
        return refuse, ("made elsewhere",)


def refuse(what: str) -> Any:
    raise ValueError(f"cannot be {what}")


def local_object() -> Any:
    class Local:
        pass

    return Local()


def deep_list() -> Any:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    return deep


def coroutine() -> Any:
    async def later() -> None: ...

    made = later()
    made.close()
    return made


UNSENDABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "lambda": (lambda: lambda: None, "<lambda>"),
    "object of a local class": (local_object, "Local"),
    "generator": (lambda: (i for i in ()), "generator"),
    "coroutine": (coroutine, "coroutine"),
    "lock": (threading.Lock, "lock"),
    "open file": (lambda: io.open(__file__), "TextIOWrapper"),  # noqa: SIM115, UP020
    "module": (lambda: types, "module"),
    "memoryview": (lambda: memoryview(b"ab"), "memoryview"),
    "mappingproxy": (lambda: types.MappingProxyType({}), "mappingproxy"),
    "weak reference": (lambda: weakref.ref(Made), "weakref"),
    "pointer": (lambda: ctypes.pointer(ctypes.c_int(1)), "pointer"),
    "default dict of a lambda": (lambda: collections.defaultdict(lambda: 0), "<lambda>"),
    "fails to be packed": (FailsToReduce, "will not be packed"),
    "fails in its state": (FailsInItsState, "the state is out"),
    "nested too deeply": (deep_list, "nested too deeply"),
    "fails to be unpacked": (FailsToBeMade, "cannot be made elsewhere"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNSENDABLE)
def test_a_sample_that_cannot_be_sent_is_an_error_that_names_it(name: str, kind: str) -> None:
    """Case 34: and the run goes on, past the batch of a map-style dataset, and at it in any other."""
    make, text = UNSENDABLE[name]

    def row(number: int) -> Any:
        return {"row": number, "odd": make() if number == 2 else None}

    lanes = {} if kind == "map-style" else {"lanes": 2}
    loader = StatefulDataLoader(KINDS[kind](row, 6), batch_size=None, collate_fn=as_list, **lanes, **FORKED)
    iterator = iter(loader)
    got = [next(iterator)["row"], next(iterator)["row"]]
    position = loader.state_dict()
    with pytest.raises(UnsendableBatch) as caught:
        next(iterator)
    assert text in str(caught.value)
    if name not in ("fails to be unpacked", "nested too deeply"):
        assert "['odd']" in str(caught.value)
        assert "in DataLoader worker process" in str(caught.value)
    assert loader.state_dict() == position
    if kind == "map-style":
        got += [batch["row"] for batch in iterator]
        assert got == [0, 1, 3, 4, 5]
    else:
        with pytest.raises(UnsendableBatch, match=r"cannot be|nested too deeply"):
            next(iterator)
    loader.close()


@pytest.mark.timeout(10)
def test_indices_that_cannot_be_sent_are_an_error_that_names_them() -> None:
    """Case 34."""
    loader = StatefulDataLoader(Made(len, 3), sampler=[lambda: 0], batch_size=None, **FORKED)
    with pytest.raises((TypeError, AttributeError, Exception), match="lambda"):
        next(iter(loader))
    loader.close()


@pytest.mark.timeout(20)
def test_what_cannot_be_sent_is_told_by_spawned_workers_too() -> None:
    """Case 34: all of it in one run."""
    loader = StatefulDataLoader(
        OddInManyWays(), batch_size=None, collate_fn=as_list, num_workers=1, multiprocessing_context="spawn"
    )
    iterator, seen = iter(loader), []
    for _ in range(len(OddInManyWays())):
        try:
            seen.append(told(next(iterator)))
        except Exception as error:
            seen.append((type(error).__name__, str(error).partition("\n")[0]))
    assert [what[0] for what in seen] == ["int", "UnsendableBatch", "RuntimeError", "RuntimeError", "ValueError", "int"]
    assert "Caught SystemExit in" in seen[2][1]
    assert "Local in" in seen[3][1]
    loader.close()


class OddInManyWays(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            return threading.Lock()
        if index == 2:
            raise SystemExit(3)
        if index == 3:

            class Local(Exception):
                pass

            raise Local("here")
        if index == 4:
            raise ValueError("bad row")
        return index


# ---- states


class OddState(MadeInTurn):
    """Its state is what ``state`` makes."""

    def __init__(self, state: Any) -> None:
        super().__init__(int, 8)
        self.state = state

    def state_dict(self) -> Any:
        return {"deep": [self.state()]}

    def load_state_dict(self, state: Any) -> None: ...


def failing_state() -> Any:
    raise LookupError("the state is out")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", ["lambda", "lock", "generator", "object of a local class", "mappingproxy"])
def test_a_state_that_no_position_can_carry_is_an_error_that_names_it(name: str, num_workers: int) -> None:
    """Case 34."""
    who = {**FORKED, "num_workers": num_workers} if num_workers else {}
    loader = StatefulDataLoader(OddState(UNSENDABLE[name][0]), snapshot_every_n_steps=1, **who)
    with pytest.raises(TypeError, match=r"the state_dict\(\) of OddState") as caught:
        list(loader)
    assert "['deep'][0]" in str(caught.value)
    loader.close()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_that_fails_is_the_error_of_its_own(num_workers: int) -> None:
    """Case 34."""
    who = {**FORKED, "num_workers": num_workers} if num_workers else {}
    loader = StatefulDataLoader(OddState(failing_state), snapshot_every_n_steps=1, **who)
    with pytest.raises(LookupError, match="the state is out"):
        list(loader)
    loader.close()
