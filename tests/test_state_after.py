"""``state_after(batch)``: what ``state_dict()`` was after a batch of some steps ago, for loops that look ahead."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests import datasets as ds
from tests import strategies as draws
from tests.distributed.peers import Peer, Words, merged, on_ranks
from tests.lookahead import LooksAhead, follow, jsonl
from unbroken import StatefulDataLoader
from unbroken.errors import InexactDataset
from unbroken.testing import assert_resumes_exactly
from unbroken.trail import LENGTH

# What is told about repeated data and slow resumes, and torch's advice on a machine with few cores, have their tests.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Loop = Callable[..., StatefulDataLoader]


# All kinds of datasets


@pytest.mark.parametrize("sampler", sorted(draws.SAMPLERS))
@settings(max_examples=8)
@given(data=st.data(), steps=st.sampled_from([3, 100]))
def test_the_order_of_a_map_style_dataset_is_told_at_every_lag(sampler: str, data: st.DataObject, steps: int) -> None:
    setup = data.draw(draws.map_style_setups(sampler))[1]
    loader = setup()
    if setup.make_dataset.keywords.get("shape") in ("str", "bytes") if isinstance(setup.make_dataset, partial) else 0:
        reject()  # single letters are the same object whenever they come
    follow(loader, steps)


@pytest.mark.parametrize("kind", sorted(draws.ITERABLE))
@settings(max_examples=8)
@given(data=st.data(), steps=st.sampled_from([3, 100]))
def test_lanes_are_told_at_every_lag(kind: str, data: st.DataObject, steps: int) -> None:
    loader = data.draw(draws.iterable_setups(kind))[1]()
    if loader.batch_size is None:
        reject()  # single numbers are the same object whenever they come
    follow(loader, steps)


WAYS: dict[str, Callable[[Path], Loop]] = {
    "map": lambda _: partial(StatefulDataLoader, ds.Numbers(40), batch_size=2, shuffle=True),
    "map, seeded": lambda _: partial(StatefulDataLoader, ds.Numbers(40), batch_size=2, shuffle=True, seed=3),
    "map, sampler": lambda _: partial(StatefulDataLoader, ds.Numbers(40), 2, sampler=ds.SamplerWithState(40)),
    "map, repeated": lambda _: partial(StatefulDataLoader, ds.Numbers(9), 2, shuffle=True, seed=3, at_end="repeat"),
    "map, skipping": lambda _: partial(StatefulDataLoader, Broken(40), batch_size=2, on_error="skip"),
    "map, out of order": lambda _: partial(StatefulDataLoader, ds.Numbers(40), batch_size=2, in_order=False),
    "well behaved": lambda _: partial(StatefulDataLoader, ds.WellBehaved(40), batch_size=2, lanes=3),
    "late": lambda _: partial(StatefulDataLoader, ds.Late(40), batch_size=2),
    "coarse": lambda _: partial(StatefulDataLoader, ds.CoarseEntering(40), batch_size=2, lanes=2),
    "trusted": lambda _: partial(StatefulDataLoader, ds.WellBehaved(40), batch_size=2, resume="trust"),
    "repeated": lambda _: partial(StatefulDataLoader, ds.WellBehaved(9), batch_size=2, lanes=2, at_end="repeat"),
    "stream": lambda folder: partial(StatefulDataLoader, jsonl(folder), batch_size=3, lanes=4),
    "stream, lineage": lambda folder: partial(StatefulDataLoader, jsonl(folder), batch_size=3, lanes=4, lineage=True),
    "stream, collated": lambda folder: partial(StatefulDataLoader, jsonl(folder), 3, lanes=4, collate_fn=tuples),
    "stream, single rows": lambda folder: partial(StatefulDataLoader, jsonl(folder), None, lanes=4),
    "stream, repeated": lambda folder: partial(StatefulDataLoader, jsonl(folder), 3, lanes=4, at_end="repeat"),
}


def tuples(rows: list[dict[str, int]]) -> Any:
    return [(row["x"], torch.tensor(row["x"])) for row in rows]


class Broken(ds.Numbers):
    """Some rows raise."""

    def __getitem__(self, index: int) -> Any:
        if index % 7 == 3:
            raise ValueError(f"row {index} is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_every_lag_is_told_on_worker_processes_too(way: str, num_workers: int, tmp_path: Path) -> None:
    loader = WAYS[way](tmp_path)(num_workers=num_workers, multiprocessing_context="fork" if num_workers else None)
    with closing(loader):
        assert follow(loader, 30) > LENGTH


# The law


@settings(max_examples=60)
@given(data=st.data(), ahead=st.integers(0, LENGTH - 1))
def test_a_loop_that_looks_ahead_resumes_exactly(data: st.DataObject, ahead: int) -> None:
    kind, setup = data.draw(st.one_of(draws.map_style_setups(), draws.iterable_setups()))
    if setup.arguments.get("batch_size", 1) is None or setup.sampler == "one row at a time":
        reject()
    try:
        assert_resumes_exactly(lambda: LooksAhead(setup(), ahead), restore_points=[data.draw(draws.chains())], epochs=2)
    except InexactDataset:
        if kind not in draws.REFUSED_OR_EXACT:
            raise
    except ValueError as error:
        if "nothing to compare" not in str(error):
            raise
        reject()


@pytest.mark.parametrize("way", ["map, seeded", "map, sampler", "late", "coarse", "stream"])
def test_it_does_so_when_workers_come_and_go(way: str, tmp_path: Path) -> None:
    make = WAYS[way](tmp_path)
    topologies = [{"num_workers": 2, "multiprocessing_context": "fork"}, {}]
    topologies[1] = {"num_workers": 0} if way == "stream" or "map" in way else topologies[0]
    assert_resumes_exactly(
        lambda **topology: LooksAhead(make(seed=3, **topology) if "seeded" not in way else make(**topology)),
        topologies=topologies,
        restore_points=[[1, 4, 9]],
        epochs=1,
    )


@pytest.mark.parametrize("dataset", ["map", "iterable", "stream"])
def test_it_does_so_on_several_ranks_and_on_others_after_that(dataset: str, tmp_path: Path) -> None:
    def make_loader(dp_rank: int, dp_world_size: int) -> LooksAhead:
        arguments: dict[str, Any] = {"lanes": 4} if dataset != "map" else {"shuffle": True}
        data: Any = {"map": ds.Numbers, "iterable": ds.WellBehaved}.get(dataset, partial(jsonl, tmp_path))(48)
        return LooksAhead(
            StatefulDataLoader(data, 2, seed=1, dp_rank=dp_rank, dp_world_size=dp_world_size, **arguments)
        )

    topologies = [{"dp_world_size": world} for world in (2, 4, 1)]
    assert_resumes_exactly(make_loader, topologies=topologies, restore_points=[[2, 4]], epochs=1, compare="rows")


@pytest.mark.parametrize("at_end", ["stop", "pad"])
@pytest.mark.parametrize("lengths", [[9, 0, 30, 4], [3, 3, 3, 3], [40, 1, 40, 2]])
def test_ranks_that_end_together_are_told_at_every_lag(at_end: str, lengths: list[int]) -> None:
    """Some make batches ahead for their vote, others deliver batches with no row in them."""

    def run(peer: Peer) -> int:
        loader = StatefulDataLoader(Words(lengths, torch.tensor), 2, lanes=4, seed=1, group=peer, at_end=at_end)
        return follow(loader)

    assert len(set(on_ranks(2, run))) == 1


def test_states_of_ranks_that_are_ahead_of_each_other_are_of_one_step() -> None:
    """Each rank has looked ahead as far as it likes; the states after the same step go together."""
    loaders = [StatefulDataLoader(ds.WellBehaved(80), 2, lanes=4, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    batches = [list(itertools.islice(loader, 5 + 3 * rank)) for rank, loader in enumerate(loaders)]
    state = merged([loader.state_after(taken[3]) for loader, taken in zip(loaders, batches, strict=True)])
    again = StatefulDataLoader(ds.WellBehaved(80), 2, lanes=4, dp_rank=0, dp_world_size=2)
    again.load_state_dict(state)
    assert next(iter(again)).tolist() == batches[0][4].tolist()


# A training run


def train(loader: StatefulDataLoader, steps: int, checkpoint: Path, stop_at: int | None = None) -> list[Any]:
    """Trains with the next batch already taken, and saves after every second step. Killed within a step."""
    seen = []
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        loader.load_state_dict(saved["loader"])
        seen = saved["seen"]
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    batch = next(batches)
    while len(seen) < steps:
        upcoming = next(batches)  # its copy to the device would be under way during the step
        seen.append(batch["x"].tolist())
        if len(seen) == stop_at:
            raise KeyboardInterrupt
        if len(seen) % 2 == 0:
            checkpoint.write_text(json.dumps({"loader": loader.state_after(batch), "seen": seen}))
        batch = upcoming
    return seen


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_training_loop_that_prefetches_a_batch_is_exact_when_it_is_killed(num_workers: int, tmp_path: Path) -> None:
    context = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
    stream = jsonl(tmp_path)

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(stream, batch_size=3, lanes=4, seed=1, **context)

    with closing(loader()) as undisturbed:
        expected = train(undisturbed, 40, tmp_path / "never")
    for stop_at in (3, 13, 14, 15, 27, 28, 29):  # an epoch is 14 batches
        with closing(loader()) as killed, pytest.raises(KeyboardInterrupt):
            train(killed, 40, tmp_path / "saved", stop_at)
    with closing(loader()) as last:
        assert train(last, 40, tmp_path / "saved") == expected
