"""The judge is judged: it passes loaders that are exact and catches each way of not being so."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import datasets
from tests.audit import victims
from tests.audit.here import Here, globals_put_back
from unbroken import testing
from unbroken.audit.judging import run_audit
from unbroken.errors import AuditError
from unbroken.testing import NotExact, Point, assert_resumes_exactly, rows_of


class Toy:
    """An exact loader in a few lines: batches of two of ``n`` numbers, shared out to ranks by row."""

    def __init__(self, n: int = 9, dp_rank: int = 0, dp_world_size: int = 1, per_rank: int = 2) -> None:
        self.dataset = f"Toy({n})"
        self.n, self.rank, self.world, self.per_rank = n, dp_rank, dp_world_size, per_rank
        self.epoch, self.done, self.resumed = -1, 0, False
        self.closed = False

    def batch(self, rows: list[int]) -> Any:
        return torch.tensor(rows)

    def __iter__(self) -> Iterator[Any]:
        if self.resumed and self.done < self.n:
            self.resumed = False
        else:
            self.epoch, self.done, self.resumed = self.epoch + 1, 0, False
        return self.run()

    def run(self) -> Iterator[Any]:
        while self.done < self.n:
            here = range(self.done, min(self.n, self.done + self.per_rank * self.world))
            self.done = here.stop
            mine = [100 * self.epoch + row for row in here if row % self.world == self.rank]
            if mine:
                yield self.batch(mine)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.done, self.resumed = state["epoch"], state["done"], state["epoch"] >= 0

    def close(self) -> None:
        self.closed = True


def test_an_exact_loader_passes_at_every_point() -> None:
    assert_resumes_exactly(Toy)


def test_an_exact_loader_passes_through_a_chain() -> None:
    assert_resumes_exactly(Toy, restore_points=[[1, 1, 2, 4, 7], [Point(0, 0), Point(1, -1), Point(2, 0)]])


def test_a_step_beyond_the_last_batch_means_the_end_of_the_epoch() -> None:
    assert_resumes_exactly(Toy, restore_points=[Point(1, 99), [Point(0, 99), Point(0, 100), Point(1, 99)]])


def test_ranks_run_in_step_and_their_states_are_merged() -> None:
    assert_resumes_exactly(Toy, topologies=[{"dp_world_size": 2}])


def test_ranks_may_change_when_each_step_has_the_same_rows() -> None:
    worlds = [{"dp_world_size": 4, "per_rank": 1}, {"dp_world_size": 2}, {"dp_world_size": 1, "per_rank": 4}]
    assert_resumes_exactly(lambda **t: Toy(16, **t), topologies=worlds, compare="steps")


def test_ranks_may_change_when_the_epoch_has_the_same_rows() -> None:
    worlds = [{"dp_world_size": 4}, {"dp_world_size": 1}, {"dp_world_size": 3}]
    assert_resumes_exactly(lambda **t: Toy(41, **t), topologies=worlds, restore_points=[1, 3, [1, 3, 4]])


def test_rows_that_the_new_ranks_do_not_get_are_missed() -> None:
    class Forgetful(Toy):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.world = 4  # as it was before

    with pytest.raises(NotExact, match=r"8 rows missing, 0 repeated, 0 unknown"):
        assert_resumes_exactly(
            lambda **t: Forgetful(32, **t),
            topologies=[{"dp_world_size": 4}, {"dp_world_size": 3}],
            restore_points=[0],
        )


def test_two_ranks_that_change_places_are_caught() -> None:
    class Swapped(Toy):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.rank = 1 - self.rank

    def judge(**arguments: Any) -> None:
        assert_resumes_exactly(lambda **t: Swapped(16, **t), topologies=[{"dp_world_size": 2}], **arguments)

    judge(compare="steps")
    with pytest.raises(NotExact, match=r"rank 0: int64\[2\] \[0, 2\]  rank 1: int64\[2\] \[1, 3\]"):
        judge(restore_points=[0])


class LosesOne(Toy):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.done += 1


class RepeatsOne(Toy):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.done = max(0, self.done - 1)


class ForgetsTheEpoch(Toy):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "epoch": min(state["epoch"], 0)})


class EmptyEpochAfterTheLastBatch(Toy):
    def __iter__(self) -> Iterator[Any]:
        if self.resumed:
            self.resumed = False
            return self.run()
        return super().__iter__()


class AnotherType(Toy):
    def batch(self, rows: list[int]) -> Any:
        return torch.tensor(rows, dtype=torch.int64 if self.rank == 0 else torch.int32)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rank, self.world = 1, 1
        self.run = lambda: (b.to(torch.int32) for b in Toy.run(self))  # type: ignore[method-assign]


class Ignores(Toy):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class MovedByLooking(Toy):
    def state_dict(self) -> dict[str, Any]:
        self.done = min(self.n, self.done + 1)
        return super().state_dict()


class DrawsAgain(Toy):
    def run(self) -> Iterator[Any]:
        return (batch + torch.rand(()) for batch in super().run())


class NeverEnds(Toy):
    def run(self) -> Iterator[Any]:
        resumed = self.done > 0
        yield from super().run()
        while resumed:
            yield torch.tensor([0])


FAULTY = [
    LosesOne,
    RepeatsOne,
    ForgetsTheEpoch,
    EmptyEpochAfterTheLastBatch,
    Ignores,
    MovedByLooking,
    DrawsAgain,
    NeverEnds,
]


@pytest.mark.parametrize("loader", FAULTY, ids=lambda loader: loader.__name__)
def test_a_loader_with_a_fault_is_caught(loader: type[Toy]) -> None:
    with pytest.raises(NotExact):
        assert_resumes_exactly(loader)


def changed(change: Callable[[torch.Tensor], Any], also_before: Callable[[torch.Tensor], Any] = lambda b: b) -> type:
    """A toy whose batches are changed after a load."""

    class Changed(Toy):
        loaded = False

        def run(self) -> Iterator[Any]:
            return (change(batch) if self.loaded else also_before(batch) for batch in super().run())

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.loaded = True

    return Changed


@pytest.mark.parametrize(
    ("change", "before"),
    [
        (lambda b: b.to(torch.int32), lambda b: b),
        (lambda b: b.numpy(), lambda b: b),
        (lambda b: b[None], lambda b: b),
        (lambda b: b.tolist(), lambda b: tuple(b.tolist())),
        (lambda b: {"b": b, "a": 1}, lambda b: {"a": 1, "b": b}),
        (lambda b: [b, 1.0], lambda b: [b, 1]),
        (lambda b: [b, True], lambda b: [b, 1]),
        (lambda b: ["ab", "c", b], lambda b: ["a", "bc", b]),
        (lambda b: -0.0 * b, lambda b: 0.0 * b),
        (lambda b: np.array(["a", b], dtype=object), lambda b: np.array(["b", b], dtype=object)),
        (lambda b: {1, 2}, lambda b: {1, 3}),
        (lambda b: b.to(torch.bfloat16), lambda b: b.to(torch.float16)),
    ],
)
def test_a_difference_of_type_or_structure_is_caught(change: Any, before: Any) -> None:
    with pytest.raises(NotExact):
        assert_resumes_exactly(changed(change, before))


def test_nan_equals_nan_and_sets_have_no_order() -> None:
    nan = float("nan")
    assert_resumes_exactly(
        changed(
            lambda b: [b * nan, nan, np.float32(nan), {"b", "a"}, np.array([nan, "x"], dtype=object)],
            lambda b: [b * nan, nan, np.float32(nan), {"a", "b"}, np.array([nan, "x"], dtype=object)],
        )
    )


def test_the_message_says_what_where_found_and_expected() -> None:
    with pytest.raises(NotExact) as caught:
        assert_resumes_exactly(
            lambda num_workers: LosesOne(9),
            topologies=[{"num_workers": 2}, {"num_workers": 0}],
            restore_points=[[1, 3]],
        )
    assert (
        str(caught.value)
        == """\
A resumed run differs from the run that never stopped.
  dataset         Toy(9)
  topology        {'num_workers': 2} -> {'num_workers': 0} -> {'num_workers': 2}
  restored at     epoch 0, after 1 batches; epoch 0, after 3 batches
  differs at      epoch 0, step 1
  expected        int64[2] [2, 3]
  found           int64[2] [3, 4]
  over the epoch  2 rows missing, 0 repeated, 0 unknown to the reference; 5 steps expected, 4 found"""
    )


def test_repeated_and_unknown_rows_are_told_apart() -> None:
    with pytest.raises(NotExact, match="0 rows missing, 1 repeated, 0 unknown"):
        assert_resumes_exactly(RepeatsOne, restore_points=[2])
    with pytest.raises(NotExact, match="5 rows missing, 0 repeated, 5 unknown"):
        assert_resumes_exactly(changed(lambda b: b + 0.5, lambda b: b + 0.0), restore_points=[2])


def test_data_without_an_end_is_judged_up_to_a_number_of_batches() -> None:
    assert_resumes_exactly(lambda: Toy(10**9), stop_after=7)
    with pytest.raises(NotExact):
        assert_resumes_exactly(lambda: LosesOne(10**9), stop_after=7)


def test_a_run_that_delivers_nothing_proves_nothing() -> None:
    with pytest.raises(ValueError, match=r"no batch in epoch 0 of Toy\(0\)"):
        assert_resumes_exactly(lambda: Toy(0))


def test_a_point_after_the_end_of_the_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 batches after the end of the run"):
        assert_resumes_exactly(lambda: Toy(4), epochs=1, restore_points=[5])


def test_the_global_generators_are_put_back_and_every_loader_is_closed() -> None:
    made: list[Toy] = []

    def make_loader() -> Toy:
        made.append(DrawsAgain())
        return made[-1]

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with pytest.raises(NotExact):
        assert_resumes_exactly(make_loader)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert made and all(loader.closed for loader in made)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(3, 2), 3),
        (torch.zeros(()), 1),
        (np.zeros(4), 4),
        ({"x": torch.zeros(3), "y": ["a", "b", "c"]}, 3),
        ([torch.zeros(3), torch.zeros(3)], 3),
        (["a", "b"], 2),
        ([torch.zeros(3), torch.zeros(2)], 2),
        ("a", 1),
    ],
)
def test_rows_are_told_apart(batch: Any, count: int) -> None:
    assert len(rows_of(batch)) == count


class Peer:
    """torchdata's loader, with its state made fit for JSON."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="judging a peer needs torchdata")
        self.loader = stateful.StatefulDataLoader(*args, **kwargs)
        self.dataset = self.loader.dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return {"pickled": pickle.dumps(self.loader.state_dict()).hex()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(pickle.loads(bytes.fromhex(state["pickled"])))


# Within one epoch, where this peer is exact for a dataset that does as it expects.
IN_ONE_EPOCH = [Point(0, 1), Point(0, 2), [Point(0, 1), Point(0, 2), Point(0, 4)]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [datasets.WellBehaved, datasets.StateOnIterator])
def test_another_loader_passes_where_it_is_exact(dataset: Any, num_workers: int) -> None:
    def make_loader() -> Peer:
        return Peer(dataset(22), batch_size=3, num_workers=num_workers)

    assert_resumes_exactly(make_loader, epochs=0, restore_points=IN_ONE_EPOCH)


@pytest.mark.parametrize("dataset", [datasets.Late, datasets.CoarseEntering, datasets.DocumentAhead])
def test_another_loader_is_caught_where_it_is_not_exact(dataset: Any) -> None:
    with pytest.raises(NotExact):
        assert_resumes_exactly(lambda: Peer(dataset(22), batch_size=2), epochs=0, restore_points=IN_ONE_EPOCH)


class OnItsIterator:
    """The state lies on the iterator, as Grain has it; ``shift`` is what a load does wrong."""

    class Pass:
        def __init__(self, shift: int) -> None:
            self.done, self.shift = 0, shift

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.done += 1
            if self.done > 5:
                raise StopIteration
            return self.done

        def get_state(self) -> int:
            return self.done

        def set_state(self, state: int) -> None:
            self.done = state - self.shift

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __iter__(self) -> Any:
        return self.Pass(self.shift)


def plain_torch(dataset: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, batch_size=2)


def test_the_state_may_lie_on_the_iterator_or_on_the_dataset() -> None:
    points = [1, 3, [2, 4]]
    assert_resumes_exactly(OnItsIterator, restore_points=points)
    assert_resumes_exactly(lambda: plain_torch(datasets.WellBehaved(9)), restore_points=points)
    with pytest.raises(NotExact):
        assert_resumes_exactly(lambda: OnItsIterator(1), restore_points=points)
    with pytest.raises(NotExact):
        assert_resumes_exactly(lambda: plain_torch(datasets.Late(9)), restore_points=points)


def test_a_loader_without_a_state_is_an_error() -> None:
    with pytest.raises(TypeError, match="has no state_dict, nor have its dataset and its iterator"):
        assert_resumes_exactly(lambda: [1, 2, 3], restore_points=[2])


@pytest.fixture
def audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be run in processes runs here; the audits are listed."""
    asked: list[Any] = []

    def here(audit: Any) -> Any:
        asked.append(audit)
        with globals_put_back():
            return run_audit(audit, runs=Here(tmp_path / f"runs-{len(asked)}"))

    monkeypatch.setattr(testing, "run_audit", here)
    return asked


def test_in_subprocess_mode_an_exact_loader_passes_under_every_topology(audits: list[Any]) -> None:
    topologies = [{"dp_world_size": 2}, {"dp_world_size": 1}]
    assert_resumes_exactly(victims.ranked, topologies=topologies, mode="subprocess", batches=20, jobs=1)
    (audit,) = audits
    assert (audit.factory, audit.ranks, audit.workers) == ("tests.audit.victims:ranked", (2, 1), None)
    assert (audit.batches, audit.trials) == (20, 6)


def test_in_subprocess_mode_the_error_has_the_findings_and_tells_them(audits: list[Any]) -> None:
    with pytest.raises(NotExact, match="state updated after yield") as caught:
        assert_resumes_exactly("tests.audit.victims:late", mode="subprocess", jobs=1)
    assert "A resumed run differs from the run that never stopped." in str(caught.value)
    assert caught.value.findings is not None
    assert caught.value.findings.verdict == "inexact"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"make_loader": lambda: Toy()}, "is not a function of a module"),
        ({"make_loader": len}, "is not a function of a module"),
        ({"restore_points": [1]}, "restore_points does not go with"),
        ({"epochs": 2, "rows": rows_of}, "rows, epochs does not go with"),
        ({"speed": 2}, "speed does not go with"),
        ({"topologies": [{"n": 3}]}, "changes num_workers and dp_world_size; found n"),
        ({"mode": "thread"}, 'mode is "in-process" or "subprocess"'),
        ({"mode": "in-process", "trials": 3}, 'trials goes with mode="subprocess" only'),
        ({"mode": "in-process", "make_loader": "a:b"}, "the function by name, 'a:b'"),
    ],
)
def test_arguments_that_do_not_go_with_the_mode_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + text.replace("(", r"\(")):
        assert_resumes_exactly(**{"make_loader": victims.exact, "mode": "subprocess", **arguments})


def test_a_function_whose_module_cannot_be_imported_by_name_is_named_by_its_file(
    audits: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(victims.exact, "__module__", "elsewhere.victims")
    assert_resumes_exactly(victims.exact, mode="subprocess", jobs=1, trials=1)
    assert audits[0].factory == f"{Path(victims.__file__).resolve()}:exact"


def test_pytest_shows_the_message_and_none_of_our_source(audits: list[Any]) -> None:
    """Frames with ``__tracebackhide__`` are left out of what pytest shows of a failed test."""
    calls: list[tuple[type[Exception], Any, dict[str, Any]]] = [
        (NotExact, RepeatsOne, {}),
        (NotExact, victims.late, {"mode": "subprocess", "jobs": 1, "trials": 1}),
        (AuditError, victims.number, {"mode": "subprocess", "jobs": 1}),
        (ValueError, lambda: Toy(0), {}),
    ]
    for kind, make_loader, arguments in calls:
        with pytest.raises(kind) as caught:
            assert_resumes_exactly(make_loader, **arguments)
        ours = [entry for entry in caught.traceback if entry.path == Path(testing.__file__)]
        assert ours and all(entry.frame.f_locals.get("__tracebackhide__") for entry in caught.traceback[1:])
