"""The same program with torch's loader and with ours: workers, generators and lengths."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    default_collate,
    get_worker_info,
)

from tests.beside import (
    Difference,
    Outcome,
    Scenario,
    assert_the_same,
    assert_they_differ_as_told,
    cases_of,
    outcome,
    told,
)
from tests.beside_rows import Kind, Rows, Stream, Told, Who, as_list, simply, twice
from unbroken import StatefulDataLoader

# ---- workers


class TellsWorker(Rows):
    """A row tells about its worker."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return None
        fields = [field.name for field in dataclasses.fields(info)]
        return info.num_workers, info.id in (0, 1), info.dataset is self, fields, torch.get_num_threads()


class StreamTellsWorker(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for _ in range(3):
            yield None if info is None else (info.id, info.num_workers, info.dataset is self)


class Marked(Rows):
    """What ``worker_init_fn`` does to it can be seen."""

    mark: Any = None

    def __getitem__(self, index: int) -> Any:
        return index, self.mark


class StreamMarked(Stream):
    mark: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter([(row, self.mark) for row in super().__iter__()])


def mark(worker: int) -> None:
    info = get_worker_info()
    info.dataset.mark = type(worker).__name__, worker == info.id, info.num_workers, info.seed is not None


def seed_of_torch(worker: int) -> None:
    """What people write to seed numpy."""
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed())


class Counts(Rows):
    """Counts its own calls."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.calls


class Changes(Rows):
    """Its rows change with what the program does to it between epochs."""

    factor = 1

    def __getitem__(self, index: int) -> Any:
        return index * self.factor


def changed_between_epochs(kind: Kind, who: Who) -> Iterator[Any]:
    dataset = Changes(4)
    loader = kind(dataset, batch_size=2, **who)
    yield from loader
    dataset.factor = 10
    yield from loader


def arguments_changed_later(kind: Kind, who: Who) -> Iterator[Any]:
    loader = kind(Rows(4))
    loader.collate_fn = as_list
    loader.num_workers = who.get("num_workers", 0)
    loader.prefetch_factor = 2 if loader.num_workers else None
    yield from loader
    loader.collate_fn = default_collate
    loader.num_workers = 0
    yield from loader


def two_at_a_time(kind: Kind, who: Who) -> Any:
    loader = kind(Rows(5), batch_size=2, **who)
    return zip(loader, loader, strict=True)


def nested_loops(kind: Kind, who: Who) -> Any:
    loader = kind(Rows(3), **who)
    return [(a, b) for a in loader for b in loader]


def asked_beyond_the_end(kind: Kind, who: Who) -> Any:
    iterator = iter(kind(Rows(2), **who))
    return [next(iterator, "over") for _ in range(5)]


def left_early(kind: Kind, who: Who) -> Iterator[Any]:
    loader = kind(Rows(6), **who)
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number == 2:
                break
            yield batch


def persistent(kind: Kind, who: Who) -> Any:
    return twice(kind, who, Counts(1), persistent_workers=bool(who)) if who else []


def loader_in_a_loader(kind: Kind, who: Who) -> Any:
    return kind(WithLoader(kind), batch_size=None, **who)


class WithLoader(Dataset):
    """A row is what a loader gives."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return list(self.kind(Rows(3), batch_size=2))


def in_a_thread(kind: Kind, who: Who) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(kind(Rows(5), batch_size=2, **who)))
    thread.start()
    thread.join()
    return found


def pickled_loader(kind: Kind, who: Who) -> Any:
    return pickle.loads(pickle.dumps(kind(Rows(5), batch_size=2, **who)))


def copied_loader(kind: Kind, who: Who) -> Any:
    return copy.deepcopy(kind(Rows(5), batch_size=2, **who))


def annotated(kind: Kind, who: Who) -> Any:
    return kind[torch.Tensor](Rows(5), batch_size=2, **who)


# ---- generators


def with_generator(kind: Kind, who: Who) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(3)
    loader = kind(Rows(7), batch_size=2, shuffle=True, generator=generator, **who)
    for _ in range(3):
        yield from loader
        yield generator.get_state()


def global_state_after(kind: Kind, who: Who) -> Iterator[Any]:
    """What the first epoch draws from the global generators."""
    yield from kind(Rows(7), batch_size=2, shuffle=True, **who)
    yield torch.rand(1), random.random(), np.random.rand()


def nothing_drawn_by_building(kind: Kind, who: Who) -> Iterator[Any]:
    len(kind(Rows(7), batch_size=2, shuffle=True, **who))
    yield torch.rand(1)


# ---- lengths


def lengths(*datasets: Any, **arguments: Any) -> Scenario:
    def ask(kind: Kind, who: Who) -> Iterator[Any]:
        for dataset in datasets:
            loader = kind(dataset, **arguments, **who)
            yield len(loader), len(iter(loader)), len(loader.dataset)

    return ask


def length_alone(dataset: Any, **arguments: Any) -> Scenario:
    return lambda kind, who: [len(kind(dataset, **arguments, **who))]


def understated(kind: Kind, who: Who) -> Iterator[Any]:
    loader = kind(Understated(8), batch_size=2, **who)
    yield len(loader)
    yield from loader


class Understated(Told):
    def __len__(self) -> int:
        return 2

    def __repr__(self) -> str:
        return "Understated"


class FailsAtLength(Rows):
    def __len__(self) -> int:
        raise ValueError("not counted yet")


SAME: dict[str, Scenario] = {
    "worker info": simply(lambda: TellsWorker(5), batch_size=2, collate_fn=as_list),
    "worker info of a stream": simply(lambda: StreamTellsWorker(5), batch_size=2, collate_fn=as_list),
    "worker_init_fn": lambda kind, who: kind(Marked(4), collate_fn=as_list, worker_init_fn=mark, **who),
    "worker_init_fn of a stream": lambda kind, who: kind(
        StreamMarked(4), collate_fn=as_list, worker_init_fn=mark, **who
    ),
    "worker_init_fn that seeds": lambda kind, who: kind(Rows(4), worker_init_fn=seed_of_torch, **who),
    "a dataset that counts": lambda kind, who: twice(kind, {}, Counts(3)),
    "a dataset that counts, persistent": persistent,
    "changed between epochs": changed_between_epochs,
    "arguments changed later": arguments_changed_later,
    "two at a time": two_at_a_time,
    "nested loops": nested_loops,
    "asked beyond the end": asked_beyond_the_end,
    "left early": left_early,
    "a loader in a dataset": loader_in_a_loader,
    "in a thread": in_a_thread,
    "pickled": pickled_loader,
    "copied": copied_loader,
    "annotated": annotated,
    "prefetch_factor": lambda kind, who: kind(Rows(9), prefetch_factor=1 if who else None, **who),
    "timeout": lambda kind, who: kind(Rows(9), timeout=60 if who else 0, **who),
    "spawn": lambda kind, who: kind(Rows(3), num_workers=1, multiprocessing_context="spawn") if who else [],
    "many workers": lambda kind, who: kind(Rows(3), num_workers=4, multiprocessing_context="fork") if who else [],
    "generator": with_generator,
    "global generators": global_state_after,
    "building": nothing_drawn_by_building,
    "a global seed": lambda kind, who: kind(Rows(30), shuffle=True, batch_size=7, **who),
    "lengths": lengths(Rows(7), Rows(0), batch_size=3),
    "lengths, drop_last": lengths(Rows(7), Rows(0), batch_size=3, drop_last=True),
    "lengths, unbatched": lengths(Rows(7), batch_size=None),
    "length told by a stream": length_alone(Told(7), batch_size=3),
    "length told by a stream, drop_last": length_alone(Told(7), batch_size=3, drop_last=True),
    "length told by a stream, unbatched": length_alone(Told(7), batch_size=None),
    "length of a stream": lengths(Stream(3)),
    "a length that raises": lengths(FailsAtLength(3)),
    "pin_memory": lambda kind, who: kind(Rows(4), pin_memory=True, **who),
    "pin_memory_device": lambda kind, who: kind(Rows(4), pin_memory=True, pin_memory_device="cuda", **who),
    "pin_memory_device alone": lambda kind, who: kind(Rows(4), pin_memory_device="cuda", **who),
}


def with_space(theirs: Outcome) -> Outcome:
    """The sentence has a space more."""
    return theirs._replace(warnings=[(kind, text.replace("2(when", "2 (when")) for kind, text in theirs.warnings])


def with_lengths(theirs: Outcome) -> Outcome:
    return theirs._replace(error=None, batches=[told((3, 3, 7))])


def drawn_from_the_place(kind: Kind, who: Who) -> Iterator[Any]:
    """The program's own random numbers, while the dataset draws too."""
    for _ in kind(Draws(4), batch_size=2):
        yield torch.rand(1), random.random(), np.random.rand()


class Draws(Rows):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(1), random.random(), np.random.rand()


def as_without_draws(theirs: Outcome) -> Outcome:
    """What the program would draw if the dataset drew nothing, after the one number that torch draws at the start."""

    def alone(kind: Kind, who: Who) -> Iterator[Any]:
        for _ in kind(Rows(4), batch_size=2):
            yield torch.rand(1), random.random(), np.random.rand()

    return theirs._replace(batches=outcome(DataLoader, alone).batches)


def asks_in_collate(samples: Any) -> Any:
    return get_worker_info() is None


DIFFERENT = {
    "a length that is exceeded": Difference("torch's sentence lacks a space", understated, with_space),
    "the length of the iterator of a stream": Difference(
        "it is that of the loader; torch's raises TypeError", lengths(Told(7), batch_size=3), with_lengths
    ),
    "random numbers in the training process": Difference(
        "a dataset in the training process does not draw from the program's numbers",
        drawn_from_the_place,
        as_without_draws,
        (0,),
    ),
    "worker info in collate_fn": Difference(
        "collate_fn is not part of the dataset, and may run in any process",
        lambda kind, who: kind(Rows(2), collate_fn=asks_in_collate, **who),
        lambda theirs: theirs._replace(batches=[told(True)] * 2),
        (2,),
    ),
    "an epoch of the same loader": Difference(
        "without a generator later epochs go on from the number drawn in the first one, so that a new process can too",
        lambda kind, who: itertools.islice(twice(kind, who, Rows(20), shuffle=True, batch_size=20), 2, None),
        lambda theirs: outcome(StatefulDataLoader, lambda kind, who: second_alone(kind)),
    ),
}


def second_alone(kind: Kind) -> Iterator[Any]:
    """The second epoch, whatever the program draws after the first has begun."""
    loader = kind(Rows(20), shuffle=True, batch_size=20)
    next(iter(loader))
    torch.rand(100)
    return iter(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SAME)
def test_a_program_gives_the_same(name: str, num_workers: int) -> None:
    assert_the_same(SAME[name], num_workers)


@pytest.mark.parametrize(("name", "num_workers"), cases_of(DIFFERENT))
def test_what_differs_differs_as_told(name: str, num_workers: int) -> None:
    assert_they_differ_as_told(DIFFERENT[name], num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_generator_is_left_as_after_a_whole_epoch_though_it_was_left_early(num_workers: int) -> None:
    """torch's loader leaves it wherever the sampler had come to, which depends on how much was made ahead; here the
    next epoch has the order that it would have had.
    """
    who = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    states = []
    for left_early in (False, True):
        generator = torch.Generator().manual_seed(3)
        loader = StatefulDataLoader(Rows(7), batch_size=2, shuffle=True, generator=generator, **who)
        for _ in range(3):
            for _ in loader:
                if left_early:
                    break
            states.append(generator.get_state().tolist())
    assert states[:3] == states[3:]
