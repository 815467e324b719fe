"""Mix: rows of several named sources, by weights that may change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn, final

import numpy as np

from unbroken.errors import BadRow, InvalidState, StateMismatch
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.seeding import key
from unbroken.streams.arguments import check_one_of, check_whole, read_state
from unbroken.streams.course import Course, epoch_of_pass
from unbroken.streams.stage import GONE, Stage, StageIterator
from unbroken.streams.weights import History, Plan, Turns, Weights, plan_of

__all__ = ["Mix", "mix"]

# A source is left out after so many passes in a row without a row, for each lane that there is, and at least so many.
_EMPTY_PASSES_PER_LANE, _LEAST_EMPTY_PASSES = 8, 32


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
    place. The order in which sources are written down does not count.

    ``by="rows"``: each row is drawn at random, by a number that is a function of (seed, epoch, lane, row); ``seed``
    is 64 bits, ``None`` takes the loader's. ``by="tokens"``: turns are taken so that no source is ever further from its
    share of the tokens of a lane than the longest document; rows are documents with ``input_ids``, so ``tokenize``
    comes before ``mix``, and one without tokens counts as one token. The first row of a lane is drawn.

    ``stop="first"`` ends a lane when the source whose turn it is has no more rows; ``"all"`` leaves such a source out
    and ends when none that has a weight has any; ``"repeat"`` begins it again (its next epoch), leaves it out only
    after a long run of passes without a row (8 for each lane, at least 32), and ends when each that has a weight has
    come to its end. Each lane has a part of each source: one with fewer chunks than lanes has no rows on some of them,
    which ends those lanes early with ``"first"``, and makes its share smaller with the others. The logger tells.

    At a resume weights may be other ones, and sources may have been added or taken out: each goes on from its place,
    and the position has the history of the weights. What holds now holds for rows that were not yet read; a lane that
    was read to its end stays at its end, and new weights and sources begin there with the next epoch. Rows of a source
    that was taken out which were read and not yet delivered (in a shuffle window, say) are left out, and not repeated
    if it is added again later; to lose none, keep the source in the mix with weight 0.

    Raises ``TypeError`` and ``ValueError`` on what is no such mapping. Loading a position raises ``StateMismatch``
    where a source that had begun has other files now. The iterator raises ``BadRow`` where a mix by tokens meets a row
    without ``input_ids``, and ``InvalidState`` where rows after those of a source that was taken out depend on it.
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
        "mix_by": "order, held",
        "mix_stop": "order, held",
        "mix_seed": "order, held",
    }

    children: Mapping[str, Stage]
    plan: Plan
    by: str = "rows"
    stop: str = "first"
    seed: int | None = None
    files: Mapping[str, str] = field(init=False)  # a digest of the files of each source

    def __post_init__(self) -> None:
        check_one_of("mix", "by", self.by, ("rows", "tokens"))
        check_one_of("mix", "stop", self.stop, ("first", "all", "repeat"))
        if self.seed is not None:
            check_whole("mix", "seed", self.seed, 0, (1 << 64) - 1)
        object.__setattr__(self, "files", {name: _files_of(source) for name, source in self.children.items()})

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
    """Where a source stands: ``passes`` begun before this one; ``empty``, how many of them in a row up to this one are
    without a row; whether it ``ended`` (1) and is left out; ``rows`` and ``tokens`` taken; rows ``owed``, to be passed
    over once it is in the mix again.

    ``files`` is a digest of its files. ``rows_of`` is its iterator; where it is not in the mix that is None, and
    ``position`` is the one that was loaded.
    """

    passes: int = 0
    empty: int = 1
    ended: int = 0
    rows: int = 0
    tokens: int = 0
    owed: int = 0
    files: str = ""
    position: Any = None
    rows_of: StageIterator | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "passes": self.passes,
            "empty": self.empty,
            "ended": self.ended,
            "rows": self.rows,
            "tokens": self.tokens,
            "owed": self.owed,
            "files": self.files,
            "position": self.position if self.rows_of is None else self.rows_of.state_dict(),
        }

    @staticmethod
    def read(name: str, saved: Any) -> _Place:
        """The inverse of ``state_dict``. Raises ``InvalidState``."""
        counts = dict.fromkeys(("passes", "empty", "ended", "rows", "tokens", "owed"), int)
        return _Place(*read_state(saved, f"mix, source {name!r}", **counts, files=str, position=(dict, type(None))))


@final
@dataclass(slots=True)
class _Shares:
    """By tokens: how many each source is ``behind`` its share, and how many the ``longest`` document had."""

    behind: dict[str, float]
    longest: int = 0


@final
class _MixIterator(StageIterator):
    """Position: the number of the row, and of each source its own position and its counts; by tokens the shares too.

    A source that is not in the mix any more keeps what it had.
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
        self._shares = _Shares(dict.fromkeys(stage.children if stage.by == "tokens" else (), 0.0))
        self._places = {name: self._placed(name, _Place()) for name in stage.children}
        self._turns: Turns | None = None
        self._saved: dict[str, Any] = {}
        self._moved = dict.fromkeys(self._places)  # those whose saved place is not up to date, as an ordered set
        self._from = ""  # the source of the row that was yielded last

    def _placed(self, name: str, place: _Place) -> _Place:
        """The place, with an iterator that stands there where the source is in the mix."""
        stage = self._stage
        if name in stage.children:
            if place.files not in ("", stage.files[name]) and (place.rows or place.passes or place.owed):
                raise StateMismatch(
                    f"mix: the source {name!r} stands in the middle of other files than it has now.\n"
                    "Give it the files that it had when the position was saved, or the new ones another name."
                )
            place.files, place.rows_of = stage.files[name], self._begin(name, place.passes)
            if place.position is not None:
                place.rows_of.load_state_dict(place.position)
        return place

    def _begin(self, name: str, passes: int) -> StageIterator:
        lane = replace(self._lane, epoch=epoch_of_pass(self._lane.epoch, passes))
        return self._stage.children[name].begin(lane, self._course.into(name))

    def __next__(self) -> Any:
        while True:
            turns = self._turns
            if turns is None or self._row >= turns.until:
                turns = self._turns = self._look_up()
            if self._stage.by == "tokens" and self._row:
                name = turns.due(self._shares.behind, self._shares.longest)
            else:
                name = turns.drawn(self._key, self._row)
            place = self._places.get(name)
            if place is None or place.rows_of is None:
                row = self._owe(name)
                break
            self._moved[name] = None
            try:
                while place.owed:
                    next(place.rows_of)
                    place.owed, place.rows, place.empty = place.owed - 1, place.rows + 1, 0
                row = next(place.rows_of)
            except StopIteration:
                self._end(name, place, turns)
                continue
            place.rows, place.empty = place.rows + 1, 0
            if self._stage.by == "tokens":
                self._count(name, place, row, turns)
            elif type(row) is dict and isinstance(ids := row.get("input_ids"), list | np.ndarray):
                place.tokens += int(np.size(ids)) if isinstance(ids, np.ndarray) else len(ids)
            if name in turns.gone:  # and added again since
                row = GONE
            break
        self._from = name
        self._row += 1
        self._history.reach((self._lane.epoch, self._row))
        return row

    def _look_up(self) -> Turns:
        """Raises ``StopIteration`` where the lane came to its end."""
        ended = {name for name, place in self._places.items() if place.ended}
        return self._history.turns_at((self._lane.epoch, self._row), self._lane, ended) or self._finish()

    def _owe(self, name: str) -> Any:
        """In place of a row of a source that was taken out of the mix after the row was made."""
        if self._stage.by == "tokens" or not self._history.made((self._lane.epoch, self._row)):
            raise self._cannot_go_on_without(f"the source {name!r}")
        self._places.setdefault(name, _Place()).owed += 1
        self._moved[name] = None
        return GONE

    def _cannot_go_on_without(self, source: str) -> InvalidState:
        return InvalidState(
            f"mix: {source} was taken out while rows of it that were read are not yet delivered, and which rows came "
            "after them cannot be known without it"
            + (": that depends on their lengths" * (self._stage.by == "tokens"))
            + ".\nKeep it in the mix with weight 0 until they are delivered, and take it out then."
        )

    def _end(self, name: str, place: _Place, turns: Turns) -> None:
        """A source has no more rows: begin it again or leave it out. Raises ``StopIteration`` where the lane ends."""
        stop, self._turns = self._stage.stop, None
        if stop == "first" or (stop == "repeat" and self._all_ended(name, turns)):
            self._finish()
        # A pass can be without a row on one lane and not on others, so it takes many of them to leave a source out.
        if stop == "all" or place.empty >= max(_LEAST_EMPTY_PASSES, _EMPTY_PASSES_PER_LANE * self._lane.count):
            place.ended = 1
            self._history.end(name, (self._lane.epoch, self._row))
        elif place.rows_of is not None:
            place.passes, place.empty = place.passes + 1, place.empty + 1
            place.rows_of.close()
            place.rows_of = self._begin(name, place.passes)

    def _all_ended(self, name: str, turns: Turns) -> bool:
        """Whether each source that has turns came to its end, this one now."""
        if self._history.made((self._lane.epoch, self._row)):
            return False
        if turns.gone:
            raise self._cannot_go_on_without(f"the source {min(turns.gone)!r}")
        return all(other == name or self._places[other].passes for other in turns.names)

    def _finish(self) -> NoReturn:
        self._history.end("", (self._lane.epoch, self._row))
        raise StopIteration

    def _count(self, name: str, place: _Place, row: Any, turns: Turns) -> None:
        """The tokens of a row: at least 1, or a source of empty documents would have all the turns."""
        if row is GONE:
            raise self._cannot_go_on_without(f"a source of {name!r}")
        try:
            tokens = max(1, len(row["input_ids"]))
        except (KeyError, IndexError, TypeError):
            raise BadRow(
                f"mix: a row of {name!r} has no 'input_ids' to count, in {(place.rows_of or self).where()}.\n"
                'Put tokenize() into each source before mix(..., by="tokens"), or mix by rows.'
            ) from None
        place.tokens, self._shares.longest = place.tokens + tokens, max(tokens, self._shares.longest)
        for other, share in zip(turns.names, turns.shares, strict=True):
            self._shares.behind[other] = self._shares.behind.get(other, 0.0) + share * tokens
        self._shares.behind[name] -= tokens

    def state_dict(self) -> dict[str, Any]:
        for name in self._moved:
            self._saved[name] = self._places[name].state_dict()
        self._moved.clear()
        counts = {"row": self._row, "longest": self._shares.longest, "behind": self._shares.behind.copy()}
        return {**counts, "sources": self._saved.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        row, longest, behind, sources = read_state(state, "mix", row=int, longest=int, behind=dict, sources=dict)
        if self._from:
            raise InvalidState("mix: rows were read already. Load a position right after open().")
        for name, tokens in behind.items():
            if type(tokens) not in (int, float) or not math.isfinite(tokens):
                raise InvalidState(f"mix: {name!r} cannot be {tokens!r} tokens behind its share.")
        places = {name: _Place() for name in self._stage.children}
        places |= {name: _Place.read(name, saved) for name, saved in sources.items()}
        places = {name: self._placed(name, place) for name, place in places.items()}
        self.close()
        self._row, self._shares.longest, self._places = row, longest, places
        self._shares.behind = dict.fromkeys(self._shares.behind, 0.0) | behind
        self._turns, self._saved, self._moved = None, {}, dict.fromkeys(places)

    def close(self) -> None:
        for place in self._places.values():
            if place.rows_of is not None:
                place.rows_of.close()

    def where(self) -> str:
        place = self._places.get(self._from)
        if place is None:
            return "the first row"
        inner = "a row that is gone" if place.rows_of is None else place.rows_of.where()
        return f"{inner} (source {self._from!r})"

    def origin(self) -> tuple[Origin, ...]:
        place = self._places.get(self._from)
        return () if place is None or place.rows_of is None else place.rows_of.origin()


def _checked_sources(sources: Any) -> dict[str, Stage]:
    if not isinstance(sources, Mapping) or not sources:
        raise TypeError(f"mix: sources must be a dict of names to streams, with one at least, but got {sources!r}.")
    for name, stream in sources.items():
        if not isinstance(name, str) or not name or ": " in name or "/" in name:
            raise ValueError(f"mix: a name must be text without ': ' and '/', but got {name!r}.")
        if not isinstance(stream, Stage):
            raise TypeError(f"mix: the source {name!r} must be a stream, but is a {type(stream).__name__}.")
    return dict(sources)


def _files_of(source: Stage) -> str:
    """A digest of the files behind a source; sources of a mix in it have their own."""
    files = [repr(stage.fields().get("files")) for stage in source._chain() if not stage.sources]
    return f"{key(*files):016x}"[:8]
