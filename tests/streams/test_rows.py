"""Map, filter and flat_map: a function of each row or of several, and the random numbers that it draws."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.streams.runs import assert_law, resumed, run, run_lanes, saved, write_jsonl
from unbroken.lanes import Lane
from unbroken.streams.concat import concat
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage


@pytest.fixture
def corpus(tmp_path: Path) -> Stage:
    return read_jsonl(write_jsonl(tmp_path / "a.jsonl", [{"id": n} for n in range(30)]))


def augmented(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))]}


def often(row: dict[str, Any]) -> bool:
    return random.random() < 0.6


def drawn(row: Any, rng: np.random.Generator) -> list[float]:
    return [row["id"], float(rng.random()), float(rng.normal())]


def drawn_together(rows: list[Any], rng: np.random.Generator) -> list[list[float]]:
    return [[row["id"], float(rng.random())] for row in rows]


def drawn_often(row: Any, rng: np.random.Generator) -> Iterator[list[float]]:
    """A generator: it draws while it is being listed."""
    for _ in range(int(rng.integers(4))):
        yield drawn(row, rng)


def kept_at_random(row: Any, rng: np.random.Generator) -> bool:
    return rng.random() < 0.5


def doubled(row: Any) -> list[Any]:
    return [row, row]


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


# ---- a generator of its own


@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 3, epoch=1, seed=4)])
def test_the_generator_draws_the_same_numbers_after_a_resume(corpus: Stage, lane: Lane) -> None:
    """Case 17."""
    stream = corpus.filter(kept_at_random, rng=True).shuffle(8, seed=1).flat_map(drawn_often, rng=True)
    assert_law(stream, lane, [1, 0, 4])
    assert_law(corpus.map(drawn_together, rng=True, batched=4), lane, [1, 0, 4])


def test_the_generators_numbers_differ_by_row_lane_epoch_seed_stage_and_branch(corpus: Stage) -> None:
    def again(row: list[float], rng: np.random.Generator) -> list[float]:
        return [*row, float(rng.random())]

    one = corpus.map(drawn, rng=True)
    stream = concat([one, one]).map(again, rng=True)
    places: list[dict[str, int]] = [{}, {"epoch": 1}, {"seed": 1}, {"seed": (1 << 64) - 1}]
    found = [x for place in places for rows in run_lanes(stream, 2, **place) for row in rows for x in row[1:]]
    assert len(set(found)) == len(found) == 4 * 60 * 3


def test_a_row_gets_its_numbers_whatever_was_drawn_for_the_one_before(corpus: Stage) -> None:
    """Also half of a 64-bit number that was left over."""

    def uneven(row: Any, rng: np.random.Generator) -> list[int]:
        rng.integers(0, 9, size=row["id"], dtype=np.int32)
        return []

    def ids(row: Any, rng: np.random.Generator) -> int:
        return int(rng.integers(0, 1 << 20, dtype=np.int32))

    stream = corpus.map(
        lambda row, rng: [uneven(row, rng), ids(row, rng)] if row["id"] % 2 else ids(row, rng), rng=True
    )
    ref = run(corpus.map(ids, rng=True))
    assert run(stream)[::2] == ref[::2]
    assert len(set(ref)) == 30


def test_a_batch_gets_the_numbers_of_its_first_row(corpus: Stage) -> None:
    each = [row[:2] for row in run(corpus.map(drawn, rng=True))]
    assert run(corpus.map(drawn_together, rng=True, batched=4))[::4] == each[::4]
    firsts = corpus.flat_map(lambda rows, rng: drawn_together(rows, rng) * (rows[0]["id"] > 9), rng=True, batched=4)
    assert [row for row in run(firsts) if row[0] % 4 == 0] == [
        row[:2]
        for row in run(corpus.flat_map(lambda row, rng: [drawn(row, rng)], rng=True))
        if row[0] in range(12, 30, 4)
    ]


def test_with_a_generator_nobody_seeds_the_global_ones(corpus: Stage) -> None:
    """Case 18, also where they are not put back afterwards."""
    stream = corpus.map(drawn, rng=True).filter(lambda row, rng: True, rng=True)
    assert not any(stage.SEEDS for stage in stream._all())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    ref = numbers()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    run(stream)
    assert numbers() == ref


def test_random_numbers_are_the_same_in_every_version(corpus: Stage) -> None:
    """Rows that are made again on a resume depend on them, so they may never change."""
    always, lane = corpus.filter(lambda row: True), Lane(1, 3, epoch=2, seed=5)

    def seeded(row: Any) -> int:
        return random.getrandbits(32)

    def bits(row: Any, rng: np.random.Generator) -> Any:
        return rng.bit_generator.random_raw(2).tolist()

    assert run(corpus.map(seeded))[0] == 1387223809
    assert run(always.map(seeded), lane)[0] == 1652134390
    assert run(corpus.map(bits, rng=True))[:2] == [
        [12795890198171680903, 17215906446948331255],
        [16987154256440999904, 9721090763266791174],
    ]
    assert run(always.map(bits, rng=True), lane)[0] == [3484948937164869612, 17892526716078492105]


# ---- several rows at a time, and any number of rows from one


def test_a_flat_map_yields_what_is_in_what_the_function_returns(corpus: Stage) -> None:
    def below(row: dict[str, int]) -> Iterator[int]:
        yield from range(row["id"] % 4)

    assert run(corpus.flat_map(below))[:12] == [0, 0, 1, 0, 1, 2, 0, 0, 1, 0, 1, 2]
    assert run(corpus.flat_map(lambda row: (row["id"], None))) == [x for n in range(30) for x in (n, None)]
    assert run(corpus.flat_map(lambda row: [])) == []
    assert run(corpus.flat_map(lambda row: np.arange(row["id"] % 2))) == [0] * 15


@pytest.mark.parametrize("size", [1, 4, 30, 100])
def test_batches_are_of_the_size_that_was_said(corpus: Stage, size: int) -> None:
    sizes: list[int] = []

    def noted(rows: list[Any]) -> list[Any]:
        sizes.append(len(rows))
        return rows

    for method in ("map", "flat_map"):
        assert run(getattr(corpus, method)(noted, batched=size)) == [{"id": n} for n in range(30)]
    assert sizes == [*[size] * (30 // size), *[30 % size] * bool(30 % size)] * 2
    even = corpus.filter(lambda rows: [row["id"] % 2 == 0 for row in rows], batched=size)
    assert run(even) == [{"id": n} for n in range(0, 30, 2)]
    assert run(corpus.flat_map(lambda rows: [len(rows)], batched=size)) == sizes[: len(sizes) // 2]


@pytest.mark.parametrize("verdicts", [tuple, np.array, torch.tensor, iter])
def test_a_filter_of_batches_takes_bools_of_any_kind(corpus: Stage, verdicts: Any) -> None:
    stream = corpus.filter(lambda rows: verdicts([row["id"] > 3 for row in rows]), batched=7)
    assert run(stream) == [{"id": n} for n in range(4, 30)]


@pytest.mark.parametrize("lane", [Lane(0, 1), Lane(1, 3, epoch=1, seed=4)])
def test_every_restore_point_in_a_batch_is_exact(corpus: Stage, lane: Lane) -> None:
    batched = corpus.map(drawn_together, rng=True, batched=4).flat_map(lambda row: [row] * int(row[0] % 3))
    assert_law(batched, lane, [1, 0, 4])
    kept = corpus.filter(lambda rows, rng: rng.random(len(rows)) < 0.5, rng=True, batched=3).shuffle(5, seed=1)
    assert_law(kept.flat_map(lambda rows: rows + rows[:2], batched=4), lane, [1, 0, 4])


def test_without_rows_a_function_is_not_called(tmp_path: Path) -> None:
    empty = read_jsonl(write_jsonl(tmp_path / "empty.jsonl", []))
    for size in (None, 4):
        for method in ("map", "filter", "flat_map"):
            stream = getattr(empty, method)(pytest.fail, batched=size)
            assert assert_law(stream, Lane(0, 1)) == []


def test_rows_that_came_to_nothing_are_not_read_again(corpus: Stage) -> None:
    seen: list[int] = []

    def late(row: dict[str, int]) -> list[Any]:
        seen.append(row["id"])
        return [row, row] * (row["id"] >= 20)

    for stream in (corpus.flat_map(late), corpus.flat_map(lambda rows: late(rows[0]), batched=5)):
        rows = stream.open(Lane(0, 1))
        next(rows)
        seen.clear()
        assert next(resumed(stream, Lane(0, 1), saved(rows))) == {"id": 20}
        assert seen == [20]


def test_another_size_of_batches_at_a_resume_loses_and_repeats_nothing(corpus: Stage) -> None:
    """A batch is finished as it was begun."""
    ref = run(corpus)
    rows = corpus.flat_map(list, batched=7).open(Lane(0, 1))
    assert [next(rows), next(rows)] == ref[:2]
    sizes = corpus.flat_map(lambda rows: [len(rows)] * len(rows), batched=9)
    assert list(resumed(sizes, Lane(0, 1), saved(rows))) == [7] * 5 + [9] * 18 + [5] * 5
    for before, after in [(7, 3), (3, 7), (1, 30)]:
        for taken in range(31):
            rows = corpus.flat_map(list, batched=before).open(Lane(0, 1))
            found = [next(rows) for _ in range(taken)]
            assert found + list(resumed(corpus.flat_map(list, batched=after), Lane(0, 1), saved(rows))) == ref


def test_how_a_function_is_called_is_in_the_fingerprint_and_in_print(corpus: Stage) -> None:
    plain, other = corpus.map(augmented), corpus.map(drawn_together, rng=True, batched=8)
    assert ", " not in plain.describe()["map[0]"]
    assert other.describe()["map[0]"].endswith(", rng=True, batched=8")
    both = corpus.filter(kept_at_random, rng=True).flat_map(doubled)
    assert repr(both).endswith(".filter(kept_at_random, rng=True).flat_map(doubled)")
    assert [both.difference_class(field) for field in ("filter[0]", "flat_map[0]")] == ["data", "data"]


@pytest.mark.parametrize("taken", [0, 1, 5, 8])
def test_a_row_comes_from_what_the_function_was_given(corpus: Stage, taken: int) -> None:
    def ids(rows: list[Any]) -> list[list[int]]:
        return [[row["id"] for row in rows]] * 2

    streams = {
        "map": corpus.map(lambda row: [row["id"]]),
        "map, batched": corpus.map(lambda rows: [[row["id"]] for row in rows], batched=4),
        "filter": corpus.filter(kept_at_random, rng=True).map(lambda row: [row["id"]]),
        "filter, batched": corpus.filter(lambda rows: [row["id"] % 3 > 0 for row in rows], batched=4).map(
            lambda row: [row["id"]]
        ),
        "flat_map": corpus.flat_map(lambda row: ids([row])),
        "flat_map, batched": corpus.flat_map(ids, batched=4),
    }
    places = [0]
    for n in range(30):
        places.append(places[-1] + len(json.dumps({"id": n})) + 1)
    for name, stream in streams.items():
        before = stream.open(Lane(0, 1))
        for _ in range(taken):
            next(before)
        rows = stream.open(Lane(0, 1), lineage=True)
        rows.load_state_dict(before.state_dict())
        for row in rows:
            assert [places.index(int(origin.row)) for origin in rows.origin()] == row, name
