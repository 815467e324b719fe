"""``multiprocessing_context="thread"``: where it is refused, and how it is said and read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests import datasets as ds
from tests.streams.runs import write_jsonl
from unbroken import Stage, StatefulDataLoader, concat, from_iterable, from_map, read_jsonl


@pytest.fixture
def texts(tmp_path: Path) -> Stage:
    return read_jsonl(write_jsonl(tmp_path / "a.jsonl", ({"text": str(n)} for n in range(20))))


def in_threads(dataset: Any, **arguments: Any) -> StatefulDataLoader:
    return StatefulDataLoader(dataset, **{"num_workers": 2, "multiprocessing_context": "thread", **arguments})


def as_it_is(row: Any) -> Any:
    return row


def drawn(row: Any, rng: Any) -> Any:
    return row


@pytest.mark.parametrize("dataset", [ds.Numbers(4), ds.WellBehaved(4)])
def test_a_dataset_that_is_no_stream_is_refused_with_the_reason_and_the_way_out(dataset: Any) -> None:
    """Its random numbers and its shard would come from what the whole process shares."""
    with pytest.raises(ValueError) as caught:
        in_threads(dataset)
    text = str(caught.value)
    assert f"is for streams, but the dataset is a {type(dataset).__qualname__}" in text
    assert "global generators" in text and "get_worker_info()" in text and "belong to the process" in text
    assert "Use worker processes" in text


@pytest.mark.parametrize(
    ("seeding", "named"),
    [
        (lambda rows: rows.map(as_it_is), "map(as_it_is)"),
        (lambda rows: rows.filter(as_it_is).shuffle(4, seed=1), "filter(as_it_is)"),
        (lambda rows: rows.flat_map(as_it_is, batched=2), "flat_map(as_it_is, batched=2)"),
        (lambda rows: from_map(ds.Numbers(4)), "from_map(Numbers)"),
        (lambda rows: concat([rows, from_iterable(lambda lane, lanes: [lane])]), "from_iterable("),
    ],
)
def test_a_stream_that_gives_random_numbers_through_the_global_generators_is_refused(
    texts: Stage, seeding: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=r"global generators.*\nPass rng=True") as caught:
        in_threads(seeding(texts))
    assert named in str(caught.value)


def test_a_stream_whose_functions_get_a_generator_is_not_refused(texts: Stage) -> None:
    stream = texts.map(drawn, rng=True).filter(drawn, rng=True).shuffle(4, seed=1)
    assert len(list(in_threads(stream, batch_size=None, lanes=2))) == 20


def test_what_a_thread_cannot_do_is_refused(texts: Stage) -> None:
    with pytest.raises(ValueError, match=r"worker_init_fn does not go with .*\nCall it yourself, once"):
        in_threads(texts, worker_init_fn=print)
    with pytest.raises(ValueError, match="a thread that hangs cannot be ended"):
        in_threads(texts, on_timeout="restart", timeout=1)
    with pytest.raises(ValueError, match=r"shared memory of worker processes, .*\n.* smaller prefetch_factor"):
        in_threads(texts, max_prefetch_bytes=1 << 20)


def test_without_workers_it_is_torchs_error(texts: Stage) -> None:
    said = []
    for kind, context in ((DataLoader, "fork"), (StatefulDataLoader, "thread")):
        with pytest.raises(ValueError) as caught:
            kind(texts, multiprocessing_context=context)
        said.append(str(caught.value))
    assert said[1] == said[0]


def test_a_context_that_nobody_knows_is_torchs_error(texts: Stage) -> None:
    with pytest.raises(ValueError, match="valid start method"):
        in_threads(texts, multiprocessing_context="threads")


def test_it_is_read_as_it_was_given_and_goes_along_with_a_copy(texts: Stage) -> None:
    loader = in_threads(texts)
    assert loader.multiprocessing_context == "thread"
    assert copy.copy(loader).multiprocessing_context == "thread"
    assert StatefulDataLoader(texts).multiprocessing_context is None
    loader = in_threads(texts, multiprocessing_context="fork")
    assert loader.multiprocessing_context.get_start_method() == "fork"


def test_what_is_set_later_is_checked_then(texts: Stage) -> None:
    loader = StatefulDataLoader(texts, num_workers=2, lanes=2)
    loader.multiprocessing_context = "thread"
    assert loader.multiprocessing_context == "thread"
    loader.multiprocessing_context = "fork"
    assert loader.multiprocessing_context.get_start_method() == "fork"
    loader.multiprocessing_context = None
    assert loader.multiprocessing_context is None
    for refused in (
        StatefulDataLoader(ds.Numbers(4), num_workers=2),
        StatefulDataLoader(texts, num_workers=2, worker_init_fn=print),
        StatefulDataLoader(texts, num_workers=2, on_timeout="restart", timeout=1),
        StatefulDataLoader(texts, num_workers=2, max_prefetch_bytes=1 << 20),
        StatefulDataLoader(texts),
    ):
        before = refused.multiprocessing_context
        with pytest.raises(ValueError):
            refused.multiprocessing_context = "thread"
        assert refused.multiprocessing_context is before
    loader = in_threads(texts)
    loader.worker_init_fn = print
    with pytest.raises(ValueError, match="worker_init_fn does not go with"):
        iter(loader)
