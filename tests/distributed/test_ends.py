"""Finite data on several ranks, against a plain model: ranks are threads here, and every step needs all of them."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests import datasets as ds
from tests.distributed.peers import Model, NoData, Peer, Words, merged, on_ranks
from unbroken import StatefulDataLoader

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

AT_END = ["stop", "pad", "repeat"]
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13]) | st.integers(0, 40), min_size=4, max_size=12)


class Stretch(NamedTuple):
    """A part of a run: ``steps`` on ``world`` ranks, and the end of the epoch too where that comes next."""

    world: int
    size: int
    steps: int
    past_end: bool


STRETCHES = st.lists(
    st.builds(Stretch, st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1, 2, 3, 5, 8, 13]), st.booleans()),
    min_size=1,
    max_size=4,
)


class Saved(NamedTuple):
    """What came of a stretch on one rank."""

    batches: list[list[int] | None]
    state: dict[str, str]
    votes: int


def run(
    peer: Peer, lengths: list[int], by_rows: bool, state: dict[str, str] | None, events: int, **arguments: Any
) -> Saved:
    """A rank goes on from a position for some events: batches, and None where its epoch ends (which ranks that end
    alone do not count).
    """
    dataset = Words(lengths) if by_rows else ds.Uneven(lengths)
    agreed = arguments["at_end"] != "alone"
    ranks = {"group": peer} if agreed else {"dp_rank": peer.rank(), "dp_world_size": peer.size(), "at_end": "stop"}
    loader = StatefulDataLoader(dataset, lanes=len(lengths), seed=1, **(arguments | ranks))
    if state is not None:
        loader.load_state_dict(state)
    found: list[list[int] | None] = []
    iterator = None
    while sum(agreed or batch is not None for batch in found) < events:
        iterator = iter(loader) if iterator is None else iterator
        batch = next(iterator, None)
        if batch is None:
            iterator = None
        elif agreed:
            peer.train()
        found.append(None if batch is None else batch.tolist())
    return Saved(found, loader.state_dict(), len(peer.votes))


def assert_as_the_model(
    lengths: list[int], by_rows: bool, at_end: str, drop_last: bool, stretches: list[Stretch], **arguments: Any
) -> None:
    """A run of several stretches, each on ranks and batches of its own, saved and loaded between them."""
    model, state = Model(lengths, by_rows, at_end, drop_last), None
    arguments |= {"at_end": at_end, "drop_last": drop_last}
    for world, size, steps, past_end in stretches:
        expected = model.play(world, size, steps, resumed=state is not None, past_end=past_end)
        how = {**arguments, "batch_size": size, "lengths": lengths, "by_rows": by_rows}
        ranks = on_ranks(world, partial(run, state=state, events=len(expected), **how))
        assert list(zip(*(rank.batches for rank in ranks), strict=True)) == [
            (None,) * world if step is None else tuple(step) for step in expected
        ]
        assert len({rank.votes for rank in ranks}) == 1
        state = merged([rank.state for rank in ranks])


@pytest.mark.parametrize("at_end", AT_END)
@pytest.mark.parametrize("by_rows", [True, False], ids=["stream", "iterable"])
@settings(max_examples=60)
@given(lengths=LENGTHS, drop_last=st.booleans(), stretches=STRETCHES)
def test_nothing_is_lost_or_repeated_and_all_ranks_take_every_step(
    by_rows: bool, at_end: str, lengths: list[int], drop_last: bool, stretches: list[Stretch]
) -> None:
    """Cases 12, 21, 22 and 24: saved at any step, loaded on other ranks, with batches of another size of a stream."""
    if not by_rows:
        stretches = [stretch._replace(size=stretches[0].size) for stretch in stretches]
    try:
        assert_as_the_model(lengths, by_rows, at_end, drop_last, stretches)
    except NoData:
        reject()


@pytest.mark.parametrize("at_end", AT_END)
@pytest.mark.parametrize("by_rows", [True, False], ids=["stream", "iterable"])
def test_workers_change_nothing_of_it(by_rows: bool, at_end: str) -> None:
    """Case 20."""
    stretches = [Stretch(2, 2, 9, False), Stretch(1, 2, 3, False), Stretch(2, 2, 30, True)]
    assert_as_the_model([13, 0, 22, 9, 3, 14], by_rows, at_end, False, stretches, num_workers=1)
    workers = {"num_workers": 2, "persistent_workers": True}
    assert_as_the_model([13, 4, 22, 9, 3, 14], by_rows, at_end, True, stretches, **workers)


@pytest.mark.slow
@settings(max_examples=4000)
@given(
    lengths=LENGTHS, by_rows=st.booleans(), at_end=st.sampled_from(AT_END), drop_last=st.booleans(), stretches=STRETCHES
)
def test_a_long_sweep(
    lengths: list[int], by_rows: bool, at_end: str, drop_last: bool, stretches: list[Stretch]
) -> None:
    """Cases 12, 21, 22 and 24."""
    if not by_rows:
        stretches = [stretch._replace(size=stretches[0].size) for stretch in stretches]
    try:
        assert_as_the_model(lengths, by_rows, at_end, drop_last, stretches)
    except NoData:
        reject()


# Another end at a resume


MODES = ["alone", *AT_END]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=4, max_size=12),
    by_rows=st.booleans(),
    stretches=STRETCHES,
    modes=st.lists(st.sampled_from(MODES), min_size=4, max_size=4),
)
def test_the_end_may_be_another_at_a_resume(
    lengths: list[int], by_rows: bool, stretches: list[Stretch], modes: list[str]
) -> None:
    """Case 21: each lane goes on with its next row, or begins anew after its last (``"stop"``: after any)."""
    rows: dict[int, list[int]] = {lane: [] for lane in range(len(lengths))}
    state = None
    for (world, size, steps, _), mode in zip(stretches, modes, strict=False):
        how: dict[str, Any] = {"batch_size": size if by_rows else stretches[0].size, "at_end": mode}
        ranks = on_ranks(world, partial(run, lengths=lengths, by_rows=by_rows, state=state, events=steps, **how))
        state = merged([rank.state for rank in ranks])
        for batch in (batch for rank in ranks for batch in rank.batches if batch is not None):
            for row in batch:
                rows[row // 100].append(row % 100)
    cut = "stop" in modes
    for lane, found in rows.items():
        for before, after in zip([lengths[lane] - 1, *found], found, strict=False):
            assert after == before + 1 or (after == 0 and (cut or before == lengths[lane] - 1))
