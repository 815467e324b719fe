"""``save_prefetched=True`` over datasets that have a state: the order is that of the run that never stopped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests import strategies as draws
from tests.engine.test_any_order import any_may_answer
from unbroken.testing import assert_resumes_exactly

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# Those whose state is the place after the sample: nothing is checked or made again here.
KINDS = [
    "well-behaved",
    "stays at the end",
    "live buffer",
    "openings counted",
    "epoch counted",
    "own iterator, going on",
]
KINDS += ["own iterator", "state on the iterator", "state on both", "live state", "large state"]


@st.composite
def loaders(draw: st.DrawFn, kind: str) -> draws.Setup:
    batch_size = draw(st.sampled_from([None, 1, 2, 3, 5]))
    arguments = {
        "batch_size": batch_size,
        "drop_last": draw(st.booleans()) if batch_size else False,
        "lanes": draw(st.sampled_from([None, 2, 3, 5])),
        "seed": draw(st.sampled_from([None, 0])),
        "save_prefetched": True,
    }
    return draws.Setup(draws.EXACT[kind], draw(st.integers(5, 40)), arguments)


def hold(arrange: draws.Setup, topologies: list[dict[str, Any]], data: st.DataObject) -> None:
    try:
        assert_resumes_exactly(arrange, topologies=topologies, restore_points=[data.draw(draws.chains())], epochs=2)
    except ValueError as error:
        if "nothing to compare" not in str(error):
            raise


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(data=st.data())
def test_the_law_holds_with_what_was_made_ahead_in_the_position(kind: str, data: st.DataObject) -> None:
    topologies = data.draw(st.lists(draws.workers(2), min_size=1, max_size=3))
    with any_may_answer(lambda number: 0):
        hold(data.draw(loaders(kind)), topologies, data)


@settings(max_examples=20)
@given(data=st.data(), chain=st.lists(st.integers(0, 24), min_size=1, max_size=4).map(sorted))
def test_the_law_holds_where_lanes_go_on_with_epochs_of_their_own(data: st.DataObject, chain: list[int]) -> None:
    arrange = data.draw(loaders("well-behaved"))
    arrange.arguments.update(at_end="repeat", drop_last=False, lanes=data.draw(st.integers(1, 4)))
    topologies = data.draw(st.lists(draws.workers(1), min_size=1, max_size=3))
    with any_may_answer(lambda number: 0):
        assert_resumes_exactly(arrange, topologies=topologies, restore_points=[chain], epochs=1, stop_after=25)


@settings(max_examples=15, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_the_law_holds_on_worker_processes(kind: str, data: st.DataObject) -> None:
    topologies = data.draw(st.lists(draws.workers(2), min_size=2, max_size=3))
    hold(data.draw(loaders(kind)), topologies, data)
