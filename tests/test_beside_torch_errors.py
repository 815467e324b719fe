"""The same program with torch's loader and with ours: errors, with their texts, and what comes after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from tests.beside import (
    BOTH,
    Difference,
    Failed,
    Outcome,
    Scenario,
    assert_the_same,
    assert_they_differ_as_told,
    cases_of,
    told,
)
from tests.beside_rows import Kind, Rows, Stream, Who


class RaisesAt(Rows):
    """Row 2 raises what ``make`` makes."""

    def __init__(self, n: int, make: Any) -> None:
        super().__init__(n)
        self.make = make

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise self.make()
        return index


class StreamRaisesAt(Stream):
    def __init__(self, n: int, make: Any) -> None:
        super().__init__(n)
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            if row == 2:
                raise self.make()
            yield row


class RaisesOnOpening(Stream):
    def __iter__(self) -> Iterator[Any]:
        raise ValueError("closed today")


class TwoArguments(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because of {why}")


class Keyword(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class WithMessage(Exception):
    """Takes its text by name only, and shows it."""

    message = "none"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)
        self.message = message


class Silent(Exception):
    def __str__(self) -> str:
        return "a text of its own"


class OwnKeyError(KeyError):
    pass


def chained() -> Exception:
    try:
        raise LookupError("the first fault")
    except LookupError as error:
        fault = ValueError("the second fault")
        fault.__cause__ = error
        return fault


ERRORS: dict[str, Any] = {
    "ValueError": lambda: ValueError("bad row"),
    "KeyError": lambda: KeyError("name"),
    "KeyError of a pair": lambda: KeyError(("a", 1)),
    "IndexError": lambda: IndexError("index"),
    "IndexError without a text": IndexError,
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "rows.bin"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf8", b"\xff", 0, 1, "invalid"),
    "EOFError": lambda: EOFError("Ran out of input"),
    "ConnectionResetError": lambda: ConnectionResetError(104, "Connection reset by peer"),
    "BrokenPipeError": BrokenPipeError,
    "two arguments": lambda: TwoArguments("row 2", "rain"),
    "keyword only": lambda: Keyword(code=7),
    "chained": chained,
    "NotImplementedError": NotImplementedError,
    "AssertionError": AssertionError,
    "MemoryError": lambda: MemoryError("none left"),
    "RecursionError": lambda: RecursionError("too deep"),
    "AttributeError": lambda: AttributeError("'Rows' object has no attribute 'x'"),
    "TypeError about pickle": lambda: TypeError("my pickle jar is full"),
    "RuntimeError": lambda: RuntimeError("stack"),
    "lines": lambda: ValueError("one\ntwo\n  three"),
    "no text": ValueError,
}


def raising(make: Any) -> Scenario:
    return lambda kind, who: kind(RaisesAt(5, make), **who)


def raising_in_a_stream(make: Any) -> Scenario:
    return lambda kind, who: kind(StreamRaisesAt(5, make), **who)


def after_an_error(kind: Kind, who: Who) -> Iterator[Any]:
    """A map-style dataset: the batch that failed is passed over."""
    iterator = iter(kind(RaisesAt(5, lambda: ValueError("bad")), **who))
    for _ in range(6):
        try:
            yield next(iterator)
        except ValueError:
            yield "failed"
        except StopIteration:
            yield "over"


class NoRow(Dataset):
    def __len__(self) -> int:
        return 3


class NoLength(Dataset):
    def __getitem__(self, index: int) -> Any:
        return index


class NoIter(IterableDataset):
    pass


class BadSampler(Sampler):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise ValueError("no more indices")


def failing_collate(samples: Any) -> Any:
    raise ZeroDivisionError("no batch")


def failing_collate_about_pickle(samples: Any) -> Any:
    raise AttributeError("the pickle jar has no lid")


def failing_init(worker: int) -> None:
    raise LookupError("no file for this worker")


def of_mixed_kinds(samples: Any) -> Any:
    return torch.stack([torch.zeros(n + 1) for n in range(len(samples))])


SAME: dict[str, Scenario] = {
    "after an error": after_an_error,
    "no __getitem__": lambda kind, who: kind(NoRow(), **who),
    "no __len__": lambda kind, who: kind(NoLength(), **who),
    "no __len__, shuffled": lambda kind, who: kind(NoLength(), shuffle=True, **who),
    "no __len__, with indices": lambda kind, who: kind(NoLength(), sampler=[1, 2], **who),
    "no __iter__": lambda kind, who: kind(NoIter(), **who),
    "raises on opening": lambda kind, who: kind(RaisesOnOpening(3), **who),
    "an index beyond the end": lambda kind, who: kind(Rows(3), sampler=[0, 7], **who),
    "a sampler that is no iterable": lambda kind, who: kind(Rows(3), sampler=7, **who),
    "a collate_fn that raises": lambda kind, who: kind(Rows(3), collate_fn=failing_collate, **who),
    "a collate_fn that raises about pickle": lambda kind, who: kind(
        Rows(3), collate_fn=failing_collate_about_pickle, **who
    ),
    "a collate_fn that is none": lambda kind, who: kind(Rows(3), collate_fn=7, **who),
    "a worker_init_fn that raises": lambda kind, who: kind(Rows(3), worker_init_fn=failing_init, **who),
    "rows that do not stack": lambda kind, who: kind([torch.zeros(1), torch.zeros(2)], batch_size=2, **who),
    "a collate_fn whose rows do not stack": lambda kind, who: kind(
        Rows(4), batch_size=2, collate_fn=of_mixed_kinds, **who
    ),
    "None": lambda kind, who: kind([None, None], **who),
    "a dict that lacks a key": lambda kind, who: kind([{"a": 1}, {"b": 1}], batch_size=2, **who),
    "lists of other lengths": lambda kind, who: kind([[1], [1, 2]], batch_size=2, **who),
} | {
    f"{name} in {where}": make(error)
    for name, error in ERRORS.items()
    for where, make in (("a row", raising), ("a stream", raising_in_a_stream))
}


def retried(kind: Kind, who: Who) -> Iterator[Any]:
    """A stream that fails once."""
    iterator = iter(kind(FailsOnce(4)))
    for _ in range(5):
        try:
            yield next(iterator)
        except OSError:
            yield "failed"
        except StopIteration:
            yield "over"


class FailsOnce(Stream):
    """The first attempt at row 2 fails."""

    failed = False

    def __iter__(self) -> Iterator[Any]:
        for row in super().__iter__():
            if row == 2 and not self.failed:
                self.failed = True
                raise OSError("the disk was busy")
            yield row


def caught(kind: str, text: str, *through: str) -> Failed:
    return Failed("RuntimeError", f"Caught {kind} in DataLoader worker process N.\n{text}", list(through))


def first_rows(number: int) -> list[Any]:
    return [told(torch.tensor([row])) for row in range(number)]


# sys.exit() and what is no Exception end torch's workers; see test_odd_failures.py for what becomes of them here.
STOPPED = "The dataset or collate_fn raised StopIteration, which would end the epoch."
DIFFERENT = {
    "a sampler that raises": Difference(
        "the batches of the indices before are delivered first; torch's workers get no more than the first few",
        lambda kind, who: kind(Rows(3), sampler=BadSampler(), **who),
        lambda theirs: theirs._replace(batches=first_rows(1)),
        (2,),
    ),
    "StopIteration in a row": Difference(
        "it ends torch's epoch in silence",
        raising(lambda: StopIteration("early")),
        lambda theirs: Outcome(first_rows(2), Failed("RuntimeError", STOPPED, []), []),
        (0,),
    ),
    "StopIteration in a row of a worker": Difference(
        "it ends torch's epoch in silence",
        raising(lambda: StopIteration("early")),
        lambda theirs: Outcome(first_rows(2), caught("StopIteration", "StopIteration: early", "__getitem__"), []),
        (2,),
    ),
    "after an error in a stream": Difference(
        "torch's generator is over after an error; here the next try is for the same batch",
        retried,
        lambda theirs: theirs._replace(
            batches=[*first_rows(2), told("failed"), *[told(torch.tensor([row])) for row in (2, 3)]]
        ),
        (0,),
    ),
    "rows that require grad, in a worker": Difference(
        "torch refuses to stack them there, and we to send them",
        lambda kind, who: kind([torch.ones(2, requires_grad=True)], **who),
        lambda theirs: theirs._replace(error=theirs.error._replace(text=COWARDLY)),  # type: ignore[union-attr]
        (2,),
    ),
}
COWARDLY = (
    "Caught RuntimeError in DataLoader worker process N.\nRuntimeError: Cowardly refusing to serialize non-leaf tensor "
    "which requires_grad, since autograd does not support crossing process boundaries.  If you just want to transfer "
    "the data, call detach() on the tensor before serializing (e.g., putting it on the queue)."
)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SAME)
def test_a_program_gives_the_same(name: str, num_workers: int) -> None:
    assert_the_same(SAME[name], num_workers)


@pytest.mark.parametrize(("name", "num_workers"), cases_of(DIFFERENT))
def test_what_differs_differs_as_told(name: str, num_workers: int) -> None:
    assert_they_differ_as_told(DIFFERENT[name], num_workers)


def test_more_workers_than_cores_are_warned_of_in_torchs_words() -> None:
    found = []
    for kind in BOTH:
        with pytest.warns(UserWarning, match="This DataLoader will create 1000 worker processes") as caught:
            kind(Rows(3), num_workers=1000)
        found.append([str(warning.message) for warning in caught])
    assert found[1] == found[0]
