"""What hypothesis draws: datasets and samplers by name, settings of the loader, topologies and chains of points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests import datasets as ds
from unbroken import StatefulDataLoader
from unbroken.testing import Point

# Each makes a dataset of n rows. The first must be exact; the others may be refused as InexactDataset, since their
# state does not lead back to the place, or nothing in their content tells one place from another.
EXACT: dict[str, Callable[[int], Any]] = {
    "well-behaved": ds.WellBehaved,
    "stays at the end": ds.StaysAtEnd,
    "late": ds.Late,
    "late, entry per worker": ds.LateEntryPerWorker,
    "coarse, set on entering": ds.CoarseEntering,
    "coarse, set on leaving": ds.CoarseLeaving,
    "live buffer": ds.LiveBuffer,
    "live state": ds.LiveState,
    "document ahead": ds.DocumentAhead,
    "openings counted": ds.OpeningsCounted,
    "epoch counted": ds.EpochCounting,
    "large state": partial(ds.LargeState, size=30),
    "without state": ds.Stateless,
    "own iterator": ds.OwnIterator,
    "own iterator, going on": ds.OwnIteratorGoingOn,
    "state on the iterator": ds.StateOnIterator,
    "state on both": ds.StateOnBoth,
    "permutation without state": ds.PermutationWithoutState,
    **{f"permutation on opening, {s}": partial(ds.PermutationOnOpening, source=s) for s in ds.DRAWS},
    **{f"permutation on the first row, {s}": partial(ds.PermutationOnFirstRow, source=s) for s in ds.DRAWS},
    **{f"generator on opening, {s}": partial(ds.GeneratorOnOpening, source=s) for s in ds.DRAWS},
    **{f"random content, {s}": partial(ds.RandomContent, source=s) for s in ds.DRAWS},
}
REFUSED_OR_EXACT: dict[str, Callable[[int], Any]] = {
    "constant content": ds.ConstantContent,
    "constant content, late": ds.ConstantLate,
    "constant content, coarse": ds.ConstantCoarse,
    "repeating content, late": ds.RepeatingContent,
    "periodic content, coarse": ds.PeriodicCoarse,
    **{f"periodic content, document ahead, {p}": partial(ds.PeriodicAhead, period=p) for p in (2, 3, 4, 5)},
    "order by openings": ds.OrderByOpenings,
    "draws in flight": ds.DrawsInFlight,
    "hidden buffer": ds.HiddenBuffer,
}
ITERABLE = EXACT | REFUSED_OR_EXACT

TOGETHER = partial(ds.FetchedTogether, source="numpy")
MAP_STYLE: dict[str, Callable[[int], Any]] = {
    "numbers": ds.Numbers,
    "fetched together": TOGETHER,
    **{f"augmented, {s}": partial(ds.Augmented, source=s) for s in ds.DRAWS},
    **{f"shaped, {s}": partial(ds.Shaped, shape=s) for s in ds.SHAPES},
}

# Each gives the loader's arguments for a dataset and a batch size.
SAMPLERS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "in order": lambda d, b: {"batch_size": b},
    "shuffle": lambda d, b: {"batch_size": b, "shuffle": True},
    "shuffle, generator": lambda d, b: {"batch_size": b, "shuffle": True, "generator": drawn_generator()},
    "sequential": lambda d, b: {"batch_size": b, "sampler": SequentialSampler(d)},
    "random": lambda d, b: {"batch_size": b, "sampler": RandomSampler(d)},
    "random, generator": lambda d, b: {"batch_size": b, "sampler": RandomSampler(d, generator=drawn_generator())},
    "random, replacement": lambda d, b: {"batch_size": b, "sampler": RandomSampler(d, True, len(d) + 5)},
    "weighted": lambda d, b: {"batch_size": b, "sampler": WeightedRandomSampler([1 + i % 3 for i in range(len(d))], 9)},
    "subset": lambda d, b: {"batch_size": b, "sampler": SubsetRandomSampler(range(0, len(d), 2))},
    "distributed": lambda d, b: {"batch_size": b, "sampler": DistributedSampler(d, 2, 1, seed=3)},
    "with state": lambda d, b: {"batch_size": b, "sampler": ds.SamplerWithState(len(d))},
    "with state on its iterator": lambda d, b: {"batch_size": b, "sampler": ds.SamplerWithStateOnIterator(len(d))},
    "without state": lambda d, b: {"batch_size": b, "sampler": ds.SamplerWithoutState(len(d))},
    "torch's batches": lambda d, b: {"batch_sampler": BatchSampler(RandomSampler(d), b, False)},
    "torch's batches, no rest": lambda d, b: {"batch_sampler": BatchSampler(SequentialSampler(d), min(b, 2), True)},
    "torch's batches, distributed": lambda d, b: {"batch_sampler": BatchSampler(DistributedSampler(d, 2, 1), b, False)},
    "torch's batches, with state": lambda d, b: {"batch_sampler": BatchSampler(ds.SamplerWithState(len(d)), b, False)},
    "torch's batches, a list": lambda d, b: {"batch_sampler": BatchSampler([*range(len(d))][::-1], b, False)},
    "a list": lambda d, b: {"batch_size": b, "sampler": [*range(len(d))][::-1]},
    "a list of batches": lambda d, b: {"batch_sampler": [[0], [len(d) - 1, 0], [1]]},
    "batches with state": lambda d, b: {"batch_sampler": ds.BatchesWithState(len(d))},
    "batches without state": lambda d, b: {"batch_sampler": ds.BatchesWithoutState(len(d))},
    "one row at a time": lambda d, b: {"batch_size": None, "shuffle": True},
}


def drawn_generator() -> torch.Generator:
    """Another generator in every process: its seed is drawn, so that a resume finds one that is no help."""
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())))


@dataclass(frozen=True)
class Setup:
    """A loader that can be made again, under any topology."""

    make_dataset: Callable[[int], Any]
    n: int
    arguments: dict[str, Any]
    sampler: str | None = None
    batch_size: int = 1

    def __call__(self, **topology: Any) -> StatefulDataLoader:
        dataset = self.make_dataset(self.n)
        order = SAMPLERS[self.sampler](dataset, self.batch_size) if self.sampler else {}
        return StatefulDataLoader(dataset, **order, **self.arguments, **topology)


SEEDED = {
    "seed": st.sampled_from([None, 0, 2**63]),
    "snapshot_every_n_steps": st.sampled_from([None, 1, 2, 5]),
}


@st.composite
def iterable_setups(draw: st.DrawFn, kind: str | None = None, several_lanes: bool = True) -> tuple[str, Setup]:
    """The name of an iterable dataset, and a loader over it."""
    name = kind or draw(st.sampled_from(sorted(ITERABLE)))
    batch_size = draw(st.sampled_from([None, 1, 2, 3, 5]))
    arguments = {
        "batch_size": batch_size,
        "drop_last": draw(st.booleans()) if batch_size else False,
        "lanes": draw(st.sampled_from([None, 2, 3, 5])) if several_lanes else None,
        "seed_by": draw(st.sampled_from(["batch", "sample"])),
        **{key: draw(values) for key, values in SEEDED.items()},
    }
    return name, Setup(ITERABLE[name], draw(st.integers(1, 40)), arguments)


@st.composite
def map_style_setups(draw: st.DrawFn, sampler: str | None = None) -> tuple[str, Setup]:
    """The name of a sampler, and a loader over a map-style dataset in its order."""
    name = sampler or draw(st.sampled_from(sorted(SAMPLERS)))
    kinds = sorted(MAP_STYLE.keys() - ({"fetched together"} if name == "one row at a time" else set()))
    make_dataset = MAP_STYLE[draw(st.sampled_from(kinds))]
    arguments = {
        "seed_by": draw(st.sampled_from(["batch", "sample"])) if make_dataset is not TOGETHER else "batch",
        **{key: draw(values) for key, values in SEEDED.items()},
    }
    if name == "shuffle, generator":
        arguments["seed"] = None  # one or the other
    if "batches" not in name and name != "one row at a time":
        arguments["drop_last"] = draw(st.booleans())
    return name, Setup(make_dataset, draw(st.integers(2, 30)), arguments, name, draw(st.integers(1, 5)))


def workers(most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Numbers of workers, with what goes with them."""
    some = st.fixed_dictionaries(
        {
            "num_workers": st.integers(1, max(1, most)),
            "prefetch_factor": st.integers(1, 3),
            "persistent_workers": st.booleans(),
        }
    )
    none = st.just({"num_workers": 0})
    return st.one_of(none, some) if most else none


def chains(epochs: int = 2) -> st.SearchStrategy[list[Point]]:
    """Restore points that one run goes through: before, in, at the end of and between epochs."""
    return st.lists(st.builds(Point, st.integers(0, epochs - 1), st.integers(-1, 14)), min_size=1, max_size=4).map(
        sorted
    )
