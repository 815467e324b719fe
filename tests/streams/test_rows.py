"""Map and filter: a function of each row, and the random numbers that it draws."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.streams.runs import assert_law, run, run_lanes, saved, write_jsonl
from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage


@pytest.fixture
def corpus(tmp_path: Path) -> Stage:
    return read_jsonl(write_jsonl(tmp_path / "a.jsonl", [{"id": n} for n in range(30)]))


def augmented(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))]}


def often(row: dict[str, Any]) -> bool:
    return random.random() < 0.6


def numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_map_and_filter_do_what_their_names_say(corpus: Stage) -> None:
    assert run(corpus.map(lambda row: row["id"] * 2).filter(lambda n: n % 3 == 0)) == list(range(0, 60, 6))
    assert run(corpus.filter(lambda row: False)) == []
    assert run(corpus.map(lambda row: None)) == [None] * 30


def test_a_filter_passes_the_row_itself(corpus: Stage) -> None:
    assert run(corpus.filter(lambda row: row["id"])) == [{"id": n} for n in range(1, 30)]


@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 3, epoch=1, seed=4)])
def test_random_numbers_are_drawn_again_after_a_resume(corpus: Stage, lane: Lane) -> None:
    """Case 17: augmentation with torch, numpy and random, before and behind a window."""
    assert_law(corpus.filter(often).map(augmented).shuffle(8, seed=1).map(augmented), lane, [1, 0, 4])


def test_random_numbers_differ_by_row_lane_epoch_seed_and_stage(corpus: Stage) -> None:
    stream = corpus.map(lambda row: random.random()).map(lambda drawn: (drawn, random.random()))
    places: list[dict[str, int]] = [{}, {"epoch": 1}, {"seed": 1}]
    drawn = [x for place in places for rows in run_lanes(stream, 2, **place) for pair in rows for x in pair]
    assert len(set(drawn)) == len(drawn) == 3 * 30 * 2


def test_random_numbers_do_not_depend_on_what_else_draws(corpus: Stage) -> None:
    """Case 17."""
    ref = run(corpus.map(augmented))
    rows, found = corpus.map(augmented).open(Lane(0, 1)), []
    for _ in range(30):
        numbers()
        found.append(next(rows))
    assert found == ref


def test_iterating_a_stream_leaves_the_global_generators_alone(corpus: Stage) -> None:
    """Case 18: in the process of the training loop."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    ref = numbers() + numbers()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    rows = iter(corpus.map(augmented).filter(often))
    found = numbers()
    for _ in rows:
        pass
    with pytest.raises(StopIteration):
        next(rows)
    assert found + numbers() == ref


def test_a_stream_that_is_iterated_has_its_position_too(corpus: Stage) -> None:
    stream = corpus.map(augmented)
    ref = list(stream)
    with iter(stream) as rows:
        assert [next(rows), next(rows)] == ref[:2]
        state = rows.state_dict()
        assert "a.jsonl, byte " in rows.where()
    again = iter(stream)
    again.load_state_dict(state)
    assert list(again) == ref[2:]


def test_an_error_of_the_function_keeps_its_type_and_the_next_row_comes(corpus: Stage) -> None:
    def fail_at_3(row: dict[str, int]) -> dict[str, int]:
        if row["id"] == 3:
            raise KeyError("mine")
        return row

    rows = corpus.map(fail_at_3).open(Lane(0, 1))
    assert [next(rows)["id"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="mine"):
        next(rows)
    assert next(rows)["id"] == 4


@pytest.mark.parametrize("method", ["map", "filter"])
def test_what_is_no_function_fails_at_construction(corpus: Stage, method: str) -> None:
    with pytest.raises(TypeError, match=rf"{method}: fn must be a function of one row, but got 3 \(int\)"):
        getattr(corpus, method)(3)


@pytest.mark.parametrize("method", ["map", "filter"])
def test_what_is_no_position_is_refused(corpus: Stage, method: str) -> None:
    """Case 27."""
    rows = getattr(corpus, method)(often).open(Lane(0, 1))
    before = saved(rows)
    for state in ({}, {"source": {}, "rows": 0}, {**rows.state_dict(), "rows": None}):
        with pytest.raises(InvalidState, match=r"in a position must be|a position has the keys"):
            rows.load_state_dict(state)
        assert saved(rows) == before
