"""Mix: rows of several named sources, by weights that may change."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.seeding import key
from unbroken.streams.arguments import check_one_of, check_whole, read_state
from unbroken.streams.course import Course
from unbroken.streams.stage import GONE, Stage, StageIterator
from unbroken.streams.weights import History, Moment, Plan, Weights, plan_of

__all__ = ["Mix", "mix"]

# Passes of a source within one epoch are epochs of their own to it.
_PASSES = 1 << 20


def mix(
    sources: Mapping[str, Stage],
    weights: Weights | Mapping[int, Weights] | None = None,
    *,
    by: str = "rows",
    stop: str = "first",
    seed: int | None = None,
) -> Stage:
    """A stream that takes each row from one of several streams, which it knows by name.

    ``weights`` gives each source its share, as numbers of at least 0 that need not add up to 1; ``None`` is the same
    for all. Or it is a schedule, ``{0: {...}, 1_000_000: {...}}``: from which row of the global order of the epoch on
    (row n of lane l is row ``n * lanes + l``) which weights hold; its first key is 0. A source of weight 0 keeps its
    place.

    ``by="rows"``: each row is drawn at random, by a number that is a function of (seed, epoch, lane, row); ``seed``
    is 64 bits, ``None`` takes the loader's. ``by="tokens"``: the source next in turn is the one furthest behind its
    share of the tokens; rows are documents with ``input_ids``, so ``tokenize`` comes before ``mix``. The first row of
    a lane is drawn.

    ``stop="first"`` ends a lane when the source whose turn it is has no more rows; ``"all"`` leaves such a source out
    and ends when none has any; ``"repeat"`` begins it again (its next epoch) and ends when each has come to its end.

    At a resume weights may be other ones, and sources may have been added or taken out: each goes on from its place,
    and the position has the history of the weights. Rows of a source that was taken out which were read and not yet
    delivered (in a shuffle window, say) are left out, also if it is added again later; to lose none, keep the source in
    the mix with weight 0.

    Raises ``TypeError`` and ``ValueError`` on what is no such mapping. The iterator raises ``BadRow`` where a mix by
    tokens meets a row without ``input_ids``.
    """
    return Mix(_checked_sources(sources), plan_of(sources, weights), by, stop, seed)


@final
@dataclass(frozen=True, repr=False, eq=False)
class Mix(Stage):
    """Rows of several sources; ``mix`` makes it. ``plan`` lists ``[row of the global order, weights from there]``."""

    NAME: ClassVar[str] = "mix"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {
        "mix_sources": "safe",
        "mix_weights": "safe",
        "mix_by": "order",
        "mix_stop": "order",
        "mix_seed": "order",
    }

    children: Mapping[str, Stage]
    plan: Plan
    by: str = "rows"
    stop: str = "first"
    seed: int | None = None

    def __post_init__(self) -> None:
        check_one_of("mix", "by", self.by, ("rows", "tokens"))
        check_one_of("mix", "stop", self.stop, ("first", "all", "repeat"))
        if self.seed is not None:
            check_whole("mix", "seed", self.seed, 0, (1 << 64) - 1)

    @property
    def sources(self) -> tuple[Stage, ...]:
        return tuple(self.children.values())

    @property
    def named(self) -> Mapping[str, Stage]:
        return self.children

    @property
    def keeps_record(self) -> bool:
        return True

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        record = course.journal.keep(f"{course.path}mix", lambda: History(self.plan, lane.epoch))
        return _MixIterator(self, lane, course, record)

    def fields(self) -> dict[str, Any]:
        return {
            "mix_sources": list(self.children),
            "mix_weights": self.plan,
            "mix_by": self.by,
            "mix_stop": self.stop,
            "mix_seed": self.seed,
        }

    def arguments(self) -> str:
        plan = {int(entry[0]): entry[1] for entry in self.plan}
        given = {"by": (self.by, "rows"), "stop": (self.stop, "first"), "seed": (self.seed, None)}
        said = [f"{name}={value!r}" for name, (value, default) in given.items() if value != default]
        return ", ".join([f"weights={plan[0] if len(plan) == 1 else plan}", *said])


@final
@dataclass(slots=True)
class _Place:
    """Where a source stands: ``passes`` begun before this one and whether this one is ``fresh``, without a row so far;
    whether it came to its end (``done``) and has no more (``ended``); ``rows`` and ``tokens`` taken, how many tokens it
    is ``behind`` its share, and rows ``owed``: to be passed over once it is in the mix again.

    ``state`` is its own position as it was loaded, where it is not in the mix.
    """

    passes: int = 0
    fresh: bool = True
    done: bool = False
    ended: bool = False
    rows: int = 0
    tokens: int = 0
    behind: float = 0.0
    owed: int = 0
    state: Any = None

    def fields(self, state: Any) -> dict[str, Any]:
        """What is saved of it, with its own position."""
        counts = {"rows": self.rows, "tokens": self.tokens, "behind": self.behind, "owed": self.owed}
        flags = {"fresh": self.fresh, "done": self.done, "ended": self.ended}
        return {**counts, **flags, "passes": self.passes, "position": state}

    @staticmethod
    def read(name: str, saved: Any) -> _Place:
        """The inverse of ``fields``. Raises ``InvalidState``."""
        if not isinstance(saved, dict):
            raise InvalidState(f"mix: the position of source {name!r} must be a dict, but it is {saved!r}.")
        flags = {flag: saved.get(flag) is True for flag in ("fresh", "done", "ended")}
        counts = {field: value for field, value in saved.items() if field not in flags}
        kinds: dict[str, Any] = {"rows": int, "tokens": int, "behind": (int, float), "owed": int}
        rows, tokens, behind, owed, passes, state = read_state(
            counts, f"mix, source {name!r}", **kinds, passes=int, position=dict
        )
        return _Place(passes, **flags, rows=rows, tokens=tokens, behind=float(behind), owed=owed, state=state)


@final
class _MixIterator(StageIterator):
    """Position: the number of the row, and of each source its own position and its counts. A source that is not in the
    mix any more keeps what it had.
    """

    def __init__(self, stage: Mix, lane: Lane, course: Course, history: History) -> None:
        self._stage = stage
        self._lane = lane
        self._course = course
        self._history = history
        seed = lane.seed if stage.seed is None else stage.seed
        path = [course.path] if course.path else []
        self._key = key(seed, "mix", *path, stage.depth, lane.epoch, lane.index)
        self._row = 0
        self._places = {name: _Place() for name in stage.children}
        self._open = {name: self._begin(name, 0) for name in stage.children}
        self._saved: dict[str, Any] = {}
        self._from = ""  # the source of the row that was yielded last

    def _begin(self, name: str, passes: int) -> StageIterator:
        epoch = self._lane.epoch * (_PASSES if self._stage.stop == "repeat" else 1) + passes
        return self._stage.children[name].begin(replace(self._lane, epoch=epoch), self._course.into(name))

    def __next__(self) -> Any:
        moment = Moment(self._lane.epoch, self._row)
        weights = self._weights(moment)
        while True:
            name = self._choose(weights, moment)
            try:
                row = self._take(name, moment)
            except StopIteration:
                self._end(name, moment)
                continue
            break
        self._count(name, row, weights)
        self._from = name
        self._row += 1
        self._history.reach(Moment(self._lane.epoch, self._row))
        return row

    def _weights(self, moment: Moment) -> Weights:
        plan = self._history.plan_at(moment)
        if len(plan) == 1:
            return plan[0][1]  # type: ignore[no-any-return]
        here = moment.row * self._lane.count + self._lane.index
        return plan[bisect_right(plan, here, key=lambda entry: entry[0]) - 1][1]  # type: ignore[no-any-return]

    def _choose(self, weights: Weights, moment: Moment) -> str:
        """The source whose turn it is. Raises ``StopIteration`` where none has a turn."""
        live = {name: weight for name, weight in weights.items() if weight > 0 and self._takes_part(name, moment)}
        if not live:
            raise StopIteration
        if len(live) == 1:
            return next(iter(live))
        if self._stage.by == "tokens" and self._row:
            return max(live, key=lambda name: self._places[name].behind if name in self._places else -math.inf)
        point = key(self._key, self._row) / 2**64 * math.fsum(live.values())
        for name, weight in live.items():
            point -= weight
            if point < 0:
                return name
        return name

    def _takes_part(self, name: str, moment: Moment) -> bool:
        place = self._places.get(name)
        if name not in self._open and self._stage.stop == "all":
            return not self._history.ended(name, moment)
        return place is None or not place.ended or self._stage.stop == "first"

    def _take(self, name: str, moment: Moment) -> Any:
        if name not in self._open:
            return self._gone(name, moment)
        place, rows = self._places[name], self._open[name]
        while place.owed:
            next(rows)
            place.owed -= 1
            self._saved.pop(name, None)
        return next(rows)

    def _gone(self, name: str, moment: Moment) -> Any:
        """A row of a source that was taken out of the mix after the row was made."""
        if moment >= self._history.reached or self._stage.by == "tokens":
            raise InvalidState(
                f"mix: the source {name!r} was taken out while rows of it that were read are not yet delivered, and in "
                "a mix by tokens the turns after them depend on their lengths.\n"
                f"Keep {name!r} in the mix with weight 0 until the next checkpoint, and take it out then."
            )
        self._places.setdefault(name, _Place()).owed += 1
        return GONE

    def _end(self, name: str, moment: Moment) -> None:
        """A source has no more rows: begin it again or leave it out. Raises ``StopIteration`` where that is the end."""
        self._saved.pop(name, None)
        stop, place = self._stage.stop, self._places[name]
        self._history.end(name, moment)
        if stop == "first":
            raise StopIteration
        place.done = True
        place.ended = stop == "all" or place.fresh  # a pass without any row would be followed by others
        if stop == "repeat":
            weighed = [other for other, weight in self._weights(moment).items() if weight > 0]
            if all(self._places[other].done for other in weighed if other in self._places):
                raise StopIteration
        if not place.ended:
            place.passes, place.fresh = place.passes + 1, True
            self._open[name].close()
            self._open[name] = self._begin(name, place.passes)

    def _count(self, name: str, row: Any, weights: Weights) -> None:
        place = self._places[name]
        tokens = self._tokens_of(name, row) if self._stage.by == "tokens" else 0
        place.rows, place.fresh = place.rows + 1, False
        self._saved.pop(name, None)
        if not tokens:
            return
        place.tokens += tokens
        live = [other for other, weight in weights.items() if weight > 0 and not self._places[other].ended]
        total = math.fsum(weights[other] for other in live) or 1.0
        for other in live:
            self._places[other].behind += weights[other] / total * tokens
            self._saved.pop(other, None)
        place.behind -= tokens

    def _tokens_of(self, name: str, row: Any) -> int:
        try:
            return len(row["input_ids"])
        except (KeyError, IndexError, TypeError):
            raise BadRow(
                f"mix: a row of {name!r} has no 'input_ids' to count, in {self._open[name].where()}.\n"
                'Put tokenize() into each source before mix(..., by="tokens"), or mix by rows.'
            ) from None

    def state_dict(self) -> dict[str, Any]:
        saved = self._saved
        for name, place in self._places.items():
            if name not in saved:
                rows = self._open.get(name)
                saved[name] = place.fields(place.state if rows is None else rows.state_dict())
        return {"row": self._row, "sources": {name: saved[name] for name in self._places}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        row, sources = read_state(state, "mix", row=int, sources=dict)
        read = {name: _Place.read(name, saved) for name, saved in sources.items()}
        for name, place in read.items():
            if name in self._open:
                if place.passes:
                    self._open[name] = self._begin(name, place.passes)
                self._open[name].load_state_dict(place.state)
            self._places[name] = place
        self._row, self._saved = row, {}

    def close(self) -> None:
        for rows in self._open.values():
            rows.close()

    def where(self) -> str:
        if not self._from:
            return "the first row"
        inner = self._open[self._from].where() if self._from in self._open else "a row that is gone"
        return f"{inner} (source {self._from!r})"

    def origin(self) -> tuple[Origin, ...]:
        return self._open[self._from].origin() if self._from in self._open else ()


def _checked_sources(sources: Any) -> dict[str, Stage]:
    if not isinstance(sources, Mapping) or not sources:
        raise TypeError(f"mix: sources must be a dict of names to streams, with one at least, but got {sources!r}.")
    for name, stream in sources.items():
        if not isinstance(name, str) or not name or ": " in name or "/" in name:
            raise ValueError(f"mix: a name must be text without ': ' and '/', but got {name!r}.")
        if not isinstance(stream, Stage):
            raise TypeError(f"mix: the source {name!r} must be a stream, but is a {type(stream).__name__}.")
    return dict(sources)
