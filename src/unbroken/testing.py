"""The law as one function: a run that is stopped and resumed equals the run that never stopped.

::

    def make_loader(num_workers=0):
        return StatefulDataLoader(MyDataset(), batch_size=4, num_workers=num_workers)

    def test_my_dataset_resumes_exactly():
        assert_resumes_exactly(make_loader, topologies=[{"num_workers": 2}, {"num_workers": 0}])

    def test_my_dataset_survives_kills():
        assert_resumes_exactly(make_loader, topologies=[{"num_workers": 2}], mode="subprocess")

Nothing is known of the loader but ``iter`` and its ``state_dict`` (see ``audit/subject.py``): any can be judged.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
import torch

from unbroken.audit.findings import Findings
from unbroken.audit.judging import run_audit
from unbroken.audit.plan import Audit
from unbroken.audit.records import Record, record, rows_of
from unbroken.audit.subject import state_methods
from unbroken.audit.telling import tell
from unbroken.errors import AuditError
from unbroken.factories import name_of

__all__ = ["NotExact", "Point", "assert_resumes_exactly", "rows_of"]

Compare: TypeAlias = Literal["batches", "steps", "rows"]


class NotExact(AssertionError):
    """A resumed run is not the run that never stopped. ``findings``: all that was found, in subprocess mode."""

    findings: Findings | None = None


class Point(NamedTuple):
    """A restore point: ``step`` batches of epoch ``epoch`` (on every rank) are delivered, the loop is still inside.

    ``step=0`` is right after ``iter()``; ``step=-1`` is before it: a new loader, or one whose last epoch has ended
    with StopIteration. A step beyond the last batch means the end of the epoch, StopIteration included.
    """

    epoch: int
    step: int


Chain: TypeAlias = tuple[Point, ...]


def assert_resumes_exactly(
    make_loader: Callable[..., Any] | str,
    *,
    topologies: Sequence[Mapping[str, Any]] = ({},),
    restore_points: Iterable[int | Point | Sequence[int | Point]] | None = None,
    epochs: int = 3,
    compare: Compare | None = None,
    rows: Callable[[Any], Iterable[Any]] | None = None,
    stop_after: int | None = None,
    mode: Literal["in-process", "subprocess"] = "in-process",
    **audit: Any,
) -> None:
    """Assert that a loader, stopped and resumed, delivers what it delivers without a stop: all of it, in order.

    For each restore point a new loader runs to it, its state goes through JSON into another new loader, and that one
    runs on. What was delivered before and after is compared with the reference, over all epochs: structure, types,
    dtypes, shapes and bytes. The global random generators are seeded alike at the start of every run and otherwise at
    every resume of a run that has begun, as in a new process, and put back at the end.

    In ``mode="subprocess"`` it is ``unbroken audit``: each run is a process of its own, killed at random places. Of the
    arguments only ``make_loader`` and ``topologies`` apply; ``audit`` may hold ``batches`` (30), ``trials`` (6),
    ``kill``, ``save``, ``seed``, ``timeout`` and ``jobs``, which are the options of the command.

    Args:
        make_loader: makes a new loader over a new dataset; called with a topology as keyword arguments. In subprocess
            mode a function of a module, or its name: ``"module:function"`` or ``"file.py:function"``.
        topologies: keyword arguments of ``make_loader`` before the first restore point (and for the reference), after
            it, after the second, and so on, starting over when they run out. One with ``dp_world_size`` and without
            ``dp_rank`` makes a loader for each rank; they run in step in this process, and their states are merged.
        restore_points: each a point, or a sequence of points that one run goes through. A number counts the batches
            since the run began. Default: every point of every epoch, and one chain through all those of epoch 0. With
            several ranks, choose points where every rank still has a batch, or none; the default does.
        epochs: how many epochs restore points lie in; the run is one epoch longer, so that something follows.
        compare: ``"batches"``: each rank gets the same batches in the same order. ``"steps"``: each step has the same
            rows over all ranks. ``"rows"``: each epoch has the same rows. Default: ``"batches"``, or ``"rows"`` when
            the number of ranks changes.
        rows: the rows of a batch; default :func:`rows_of`.
        stop_after: for data without an end: the run is one epoch, cut after so many batches.

    Raises:
        NotExact: the runs differ; the message says where, and what was expected and found.
        ValueError: the reference run delivers nothing in some epoch; or arguments do not go with the mode.
        AuditError: in subprocess mode, where the run without a stop fails or delivers too little.
    """
    __tracebackhide__ = True  # pytest shows the message, and not how it came about
    if mode == "subprocess":
        other = {"restore_points": restore_points, "compare": compare, "rows": rows, "stop_after": stop_after}
        given = [name for name, value in other.items() if value is not None] + ["epochs"] * (epochs != 3)
        _in_subprocesses(make_loader, topologies, given, audit)
        return
    if mode != "in-process" or audit or isinstance(make_loader, str):
        raise ValueError(_objection(mode, make_loader, audit))
    _in_process(make_loader, tuple(topologies), restore_points, epochs, compare, rows or rows_of, stop_after)


def _in_process(
    make_loader: Callable[..., Any],
    topologies: tuple[Mapping[str, Any], ...],
    restore_points: Iterable[int | Point | Sequence[int | Point]] | None,
    epochs: int,
    compare: Compare | None,
    rows: Callable[[Any], Iterable[Any]],
    stop_after: int | None,
) -> None:
    __tracebackhide__ = True
    if compare is None:
        compare = "batches" if len({t.get("dp_world_size") for t in topologies}) == 1 else "rows"
    trial = _Trial(make_loader, topologies, epochs + 1 if stop_after is None else 1, stop_after, rows)
    with _globals_put_back():
        reference = trial.run((), None)
        if not all(reference):
            empty = f"epoch {reference.index([])} of {trial.dataset} with {dict(topologies[0])}"
            raise ValueError(f"The run without a stop delivered no batch in {empty}: there is nothing to compare.")
        lengths = [_rows(steps).total() for steps in reference]
        for chain in _chains(reference, restore_points):
            found = trial.run(chain, lengths)
            where = _first_difference(reference, found, compare)
            if where is not None:
                raise NotExact(_report(trial, chain, reference, found, where))


_Step: TypeAlias = tuple[Record | None, ...]  # one batch of each rank, None of a rank whose epoch has ended
_Log: TypeAlias = list[list[_Step]]  # the steps of each epoch


def _objection(mode: str, make_loader: object, audit: Mapping[str, Any]) -> str:
    if mode != "in-process":
        return f'mode is "in-process" or "subprocess"; found {mode!r}'
    found = f"the function by name, {make_loader!r}" if isinstance(make_loader, str) else ", ".join(sorted(audit))
    return f'{found} goes with mode="subprocess" only'


def _in_subprocesses(
    make_loader: Callable[..., Any] | str,
    topologies: Sequence[Mapping[str, Any]],
    given: Sequence[str],
    audit: Mapping[str, Any],
) -> None:
    """Audit it. Raises ``NotExact`` with the findings."""
    __tracebackhide__ = True
    known = {field.name for field in dataclasses.fields(Audit)} - {"factory", "workers", "ranks"}
    if given or not audit.keys() <= known:
        names = ", ".join([*given, *sorted(audit.keys() - known)])
        raise ValueError(f'{names} does not go with mode="subprocess", which takes {", ".join(sorted(known))}.')
    if strange := sorted({name for each in topologies for name in each} - {"num_workers", "dp_world_size"}):
        raise ValueError(f'mode="subprocess" changes num_workers and dp_world_size; found {", ".join(strange)}')
    chosen = {
        option: tuple(dict.fromkeys(each[name] for each in topologies if name in each)) or None
        for option, name in (("workers", "num_workers"), ("ranks", "dp_world_size"))
    }
    name = make_loader if isinstance(make_loader, str) else name_of(make_loader)
    try:
        findings = run_audit(Audit(name, **{"batches": 30, "trials": 6, **chosen, **audit}))
    except AuditError as error:
        raise error.with_traceback(None) from None
    if findings.verdict != "exact":
        inexact = NotExact(f"A resumed run differs from the run that never stopped.\n{tell(findings)}")
        inexact.findings = findings
        raise inexact


@final
class _Stretch:
    """The loaders of all ranks under one topology, from one restore point to the next."""

    def __init__(self, make_loader: Callable[..., Any], topology: Mapping[str, Any], seed: int, state: str | None):
        world = topology.get("dp_world_size")
        places = [{}] if world is None or "dp_rank" in topology else [{"dp_rank": rank} for rank in range(world)]
        self.loaders: list[Any] = []
        self.iterators: list[Iterator[Any] | None] | None = None
        self.pending: Any = None  # a state that is loaded into iterators, once there are some
        try:
            for place in places:
                _seed_globals(seed)
                self.loaders.append(make_loader(**topology, **place))
                methods = self._methods(len(self.loaders) - 1)
                if state is not None and methods is not None:
                    methods[1](json.loads(state))
                elif state is not None:
                    self.pending = json.loads(state)
        except BaseException:
            self.close()
            raise

    def open(self) -> None:
        self.iterators = [iter(loader) for loader in self.loaders]
        for rank in range(len(self.iterators)) if self.pending is not None else ():
            if (methods := self._methods(rank)) is not None:
                methods[1](self.pending)
        self.pending = None

    def _methods(self, rank: int) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
        """How the state of a rank is taken and put back: on the loader, its dataset, or the iterator that there is."""
        loader, iterator = self.loaders[rank], self.iterators[rank] if self.iterators else None
        return state_methods(loader) or state_methods(getattr(loader, "dataset", None)) or state_methods(iterator)

    def step(self, rows: Callable[[Any], Iterable[Any]]) -> _Step | None:
        """The next batch of each rank; None, and no longer open, when all have ended."""
        taken: list[Record | None] = []
        for rank, iterator in enumerate(iterators := self.iterators or []):
            try:
                taken.append(None if iterator is None else record(next(iterator), rows))
            except StopIteration:
                iterators[rank] = None
                taken.append(None)
        if any(batch is not None for batch in taken):
            return tuple(taken)
        self.iterators = None
        return None

    def state(self) -> str | None:
        """The states of all ranks in one; None of a loader whose iterators alone have one, before there are any."""
        states = [methods[0]() for rank in range(len(self.loaders)) if (methods := self._methods(rank)) is not None]
        if not states and self.iterators is not None:
            raise TypeError(f"{_name(self.loaders[0])} has no state_dict, nor have its dataset and its iterator.")
        if len(states) == 1:
            return json.dumps(states[0])
        return json.dumps({key: value for state in states for key, value in state.items()}) if states else None

    def close(self) -> None:
        self.iterators = None
        for loader in self.loaders:
            getattr(loader, "close", lambda: None)()


@final
@dataclasses.dataclass
class _Trial:
    """What is judged: runs it, with and without stops."""

    make_loader: Callable[..., Any]
    topologies: tuple[Mapping[str, Any], ...]
    epochs: int
    stop_after: int | None
    rows: Callable[[Any], Iterable[Any]]
    dataset: str = "a dataset"

    def topology(self, stretch: int) -> Mapping[str, Any]:
        return self.topologies[stretch % len(self.topologies)]

    def run(self, chain: Chain, lengths: list[int] | None) -> _Log:
        """All epochs, stopped and resumed at each point; ``lengths``: the rows of each epoch, where they are known."""
        log: _Log = [[]]
        state: str | None = None
        begun = False
        for number, point in enumerate((*chain, Point(self.epochs, -1))):
            if lengths is not None and log[-1] and _rows(log[-1]).total() >= lengths[len(log) - 1]:
                log.append([])  # the position is at the end of an epoch: what follows is the next
            stretch = _Stretch(self.make_loader, self.topology(number), number if begun else 0, state)
            try:
                self.dataset = _name(getattr(stretch.loaders[0], "dataset", self.dataset))
                if not self._advance(stretch, point, log, lengths):
                    break
                state = stretch.state() if number < len(chain) else None
                begun = begun or point > (0, -1)
            finally:
                stretch.close()
        return log[: self.epochs]

    def _advance(self, stretch: _Stretch, point: Point, log: _Log, lengths: list[int] | None) -> bool:
        """Deliver up to a point; False when the run is over before it, or goes on where the reference ended."""
        while True:
            epoch, done = len(log) - 1, len(log[-1])
            if (epoch, done if done or stretch.iterators is not None else -1) >= point:
                return True
            if done >= (self.stop_after or (2 * lengths[epoch] + 8 if lengths and epoch < len(lengths) else np.inf)):
                return False
            if stretch.iterators is None:
                stretch.open()
                continue
            step = stretch.step(self.rows)
            if step is None:
                log.append([])
            else:
                log[-1].append(step)


def _chains(reference: _Log, restore_points: Iterable[int | Point | Sequence[int | Point]] | None) -> Iterable[Chain]:
    if restore_points is None:
        points = [Point(epoch, s) for epoch, steps in enumerate(reference[:-1]) for s in range(-1, len(steps) + 1)]
        points += [Point(len(reference) - 1, s) for s in range(-1, len(reference[-1]) if len(reference) == 1 else 0)]
        even = [p for p in points if _is_even(reference, p)]
        return [*((p,) for p in even), tuple(p for p in even if p.epoch == 0)]
    listed = [[each] if isinstance(each, int | Point) else each for each in restore_points]
    return [tuple(_point(point, reference) for point in points) for points in listed]


def _point(point: int | Point, reference: _Log) -> Point:
    if isinstance(point, Point):
        return point
    if point == 0:
        return Point(0, -1)
    for epoch, steps in enumerate(reference):
        if point <= len(steps):
            return Point(epoch, point)
        point -= len(steps)
    raise ValueError(f"A restore point lies {point} batches after the end of the run: pass more epochs.")


def _is_even(reference: _Log, point: Point) -> bool:
    """Whether up to a point, and for one batch after it, no rank has ended before another."""
    before = [step for steps in reference[: point.epoch] for step in steps]
    here = reference[point.epoch][: max(0, point.step) + 1]
    return all(batch is not None for step in (*before, *here) for batch in step)


def _rows(steps: Iterable[_Step]) -> Counter[bytes]:
    return Counter(row for step in steps for batch in step if batch is not None for row in batch.rows)


def _first_difference(reference: _Log, found: _Log, compare: Compare) -> Point | None:
    """Epoch and step of the first difference; of the first step when rows of an epoch are compared."""
    for epoch, expected in enumerate(reference):
        got = found[epoch] if epoch < len(found) else []
        if compare == "rows":
            if _rows(expected) != _rows(got):
                return Point(epoch, 0)
            continue
        for number, (a, b) in enumerate(itertools.zip_longest(expected, got)):
            if a is None or b is None or (_rows([a]) != _rows([b]) if compare == "steps" else a != b):
                return Point(epoch, number)
    return None


def _report(trial: _Trial, chain: Chain, reference: _Log, found: _Log, where: Point) -> str:
    epoch, number = where
    expected, got = reference[epoch], found[epoch] if epoch < len(found) else []
    missing, extra = _rows(expected) - _rows(got), _rows(got) - _rows(expected)
    known = _rows(step for steps in reference for step in steps)
    repeated = sum(count for row, count in extra.items() if row in known)
    places = "; ".join(
        f"epoch {p.epoch}, " + ("before iter()" if p.step < 0 else f"after {p.step} batches") for p in chain
    )
    lines = {
        "dataset": trial.dataset,
        "topology": " -> ".join(str(dict(trial.topology(n))) for n in range(len(chain) + 1)),
        "restored at": places or "nowhere",
        "differs at": f"epoch {epoch}, step {number}",
        "expected": _show(expected, number),
        "found": _show(got, number),
        "over the epoch": f"{missing.total()} rows missing, {repeated} repeated, {extra.total() - repeated} unknown to "
        f"the reference; {len(expected)} steps expected, {len(got)} found",
    }
    table = "\n".join(f"  {name:<15} {text}" for name, text in lines.items())
    return f"A resumed run differs from the run that never stopped.\n{table}"


def _show(steps: Sequence[_Step], number: int) -> str:
    if number >= len(steps):
        return "the end of the epoch"
    briefs = ["ended" if batch is None else batch.brief for batch in steps[number]]
    return briefs[0] if len(briefs) == 1 else "  ".join(f"rank {rank}: {text}" for rank, text in enumerate(briefs))


def _name(dataset: Any) -> str:
    text = dataset if isinstance(dataset, str) else repr(dataset)
    return type(dataset).__name__ if " at 0x" in text else text[:100]


def _seed_globals(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def _globals_put_back() -> Iterator[None]:
    aside = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(aside[0])
        np.random.set_state(aside[1])
        random.setstate(aside[2])
