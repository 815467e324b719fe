"""Stage and StageIterator: what every stream is, and what moves through it.

A stage is a frozen description. ``open(lane)`` gives its iterator, and only that has a position. A stage is also a
torch ``IterableDataset``, so it works under any loader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch.utils.data import IterableDataset, get_worker_info

from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.meters import IDLE, Meter
from unbroken.seeding import alone, put_back_globals, take_globals
from unbroken.streams.arguments import read_state
from unbroken.streams.course import Course, Journal

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GONE", "Stage", "StageIterator"]


@final
class _Gone:
    """The type of ``GONE``."""

    def __repr__(self) -> str:
        return "GONE"

    def __reduce__(self) -> str:
        return "GONE"


GONE = _Gone()
"""In place of a row of a source that was taken out of a mix after the row was read and before it was delivered.

It keeps its place in windows and batches that are made again, and is dropped where rows leave the stream.
"""


class StageIterator(Iterator[Any]):
    """Rows of one lane, with a position that is exact after every row. It is a context manager that closes itself."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position: plain values, small and constant in shape. No later step changes what was returned.

        An iterator that is opened freshly and loads it yields just what would have come next.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position. Allowed after ``open`` and before the first row.

        Raises ``InvalidState`` where ``state`` is not a position of such a pipeline; nothing of it is used then.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what is held of files. The position can still be taken; closing twice does no harm."""

    @abstractmethod
    def where(self) -> str:
        """The place of the row that was read last, in words, for an error."""

    @abstractmethod
    def origin(self) -> tuple[Origin, ...]:
        """The stored rows behind the row that was yielded last; to be asked where ``lineage`` was, after a row."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stage(IterableDataset[Any], ABC):
    """One step of a stream, on top of those before it.

    ``default_lanes`` is the number of lanes where a loader is told none. ``NAME`` is the function or method that
    makes the stage. ``DIFFERENCES`` says of each field of the stage what another value means for a position saved
    before, as ``difference_class`` has it; or ``"cut"``: rows are others from there on, which is safe as long as no
    later stage counts them. Held is whatever lanes have to agree on within an epoch, how chunks are dealt above all:
    some have begun with the old value, and others would begin with the new. ``SEEDS`` is whether the stage seeds the
    global generators, ``COUNTS_TOKENS`` whether it counts the tokens that it reads.
    """

    default_lanes: int = 64
    NAME: ClassVar[str]
    DIFFERENCES: ClassVar[Mapping[str, str]] = {}
    SEEDS: ClassVar[bool] = False
    COUNTS_TOKENS: ClassVar[bool] = False

    @property
    @abstractmethod
    def sources(self) -> tuple[Stage, ...]:
        """The stages that this one reads from; none for a stage that reads files."""

    @abstractmethod
    def begin(self, lane: Lane, course: Course) -> StageIterator:
        """An iterator at the start of a lane's epoch, for the stage that reads from this one.

        Nothing is read before its first row.
        """

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """What of this stage alone belongs in the fingerprint. A name that ends in ``[]`` is always numbered."""

    @abstractmethod
    def arguments(self) -> str:
        """The arguments as they are written in ``repr(stream)``."""

    @property
    def named(self) -> Mapping[str, Stage]:
        """Its sources by name, where they may come and go between a save and a load."""
        return {}

    @property
    def keeps_record(self) -> bool:
        """Whether its iterator keeps a record in the lane's journal."""
        return False

    @property
    def counts_rows(self) -> bool:
        """Whether its iterator makes rows again by their number from an anchor, and needs them to be the same."""
        return False

    def extent(self, lanes: int) -> str:
        """How much there is to read, and in how many chunks for so many lanes, in words; empty where it reads none."""
        return ""

    @final
    def open(self, lane: Lane, *, lineage: bool = False, meter: Meter = IDLE) -> StageIterator:
        """An iterator at the start of a lane's epoch. Nothing is read before its first row.

        With ``lineage`` its ``origin()`` tells which stored rows are behind the row that was yielded last. In
        ``meter`` its stages count and time what they do.
        """
        course = Course(lineage=lineage, meter=meter)
        return _Opened(self.begin(lane, course), course.journal)

    @final
    def describe(self) -> dict[str, Any]:
        """The fingerprint of the whole pipeline: flat, of JSON values.

        A field of a second stage of a kind has its number: ``window``, ``window[1]``; functions have one from the
        first on: ``map[0]``. Those of a named source begin with its name: ``web: files``.
        """
        described: dict[str, Any] = {"stages": self._outline()}
        seen: Counter[str] = Counter()
        for stage in self._chain():
            for field, value in stage.fields().items():
                name = field.removesuffix("[]")
                described[f"{name}[{seen[name]}]" if seen[name] or name != field else name] = value
                seen[name] += 1
            for name, source in stage.named.items():
                described |= {f"{name}: {field}": value for field, value in source.describe().items()}
        return described

    @final
    def difference_class(self, field: str) -> str:
        """What another value of a field of ``describe()`` means: ``"safe"``, ``"order"`` or ``"data"``.

        ``"order, held"`` and ``"data, held"`` are that between epochs, and never accepted within one; ``"held"`` is
        safe between epochs.
        """
        return "data, held" if field == "stages" else self._class_of(field, counted=False)

    def _class_of(self, field: str, *, counted: bool) -> str:
        """``counted``: whether a stage after this one makes its rows again by their number."""
        chain = list(self._chain())
        source, named, rest = field.partition(": ")
        if named:
            for place, stage in enumerate(chain):
                if source in stage.named:
                    counted = counted or any(later.counts_rows for later in chain[place + 1 :])
                    return "data, held" if rest == "stages" else stage.named[source]._class_of(rest, counted=counted)
            return "safe" if any(stage.named for stage in chain) else "data"  # a source that is in the mix no more
        name, _, number = field.removesuffix("]").partition("[")
        holders = [place for place, stage in enumerate(chain) if name in stage.DIFFERENCES]
        if not holders:
            return "data"
        place = holders[min(int(number or 0), len(holders) - 1)]
        kind = chain[place].DIFFERENCES[name]
        if kind != "cut":
            return kind
        return "held" if counted or any(later.counts_rows for later in chain[place + 1 :]) else "safe"

    @property
    def depth(self) -> int:
        """How many stages there are on the longest way from files to here; sources that come and go do not count."""
        return 1 + (0 if self.named else max((source.depth for source in self.sources), default=0))

    def __iter__(self) -> StageIterator:
        """Epoch 0, for any loader: a worker of torch is a lane, and without workers there is one lane.

        Ranks are not looked at: a loader that knows them opens lanes itself. In the main process the global
        generators are put back after every row.
        """
        info = get_worker_info()
        if info is not None:
            return self.open(Lane(info.id, info.num_workers))
        rows = self.open(Lane(0, 1))
        return _Isolated(rows) if any(stage.SEEDS for stage in self._all()) else rows

    def __repr__(self) -> str:
        before = self.sources
        call = f"{self.NAME}({self.arguments()})"
        return f"{before[0]!r}.{call}" if len(before) == 1 and not self.named else call

    def __str__(self) -> str:
        """The pipeline as a tree, the last stage first, with what there is to read and how it is cut into chunks."""
        return "\n".join(self._tree("", "", ""))

    def _tree(self, first: str, others: str, name: str) -> Iterator[str]:
        extent = self.extent(self.default_lanes)
        label = f"{name}: " if name else ""
        yield f"{first}{label}{self.NAME}({self.arguments()})" + (f"   {extent}" if extent else "")
        names = list(self.named) or [""] * len(self.sources)
        for number, (inner, source) in enumerate(zip(names, self.sources, strict=True), 1):
            last = number == len(names)
            yield from source._tree(others + ("└─ " if last else "├─ "), others + ("   " if last else "│  "), inner)

    def _all(self) -> Iterator[Stage]:
        for source in self.sources:
            yield from source._all()
        yield self

    def _chain(self) -> Iterator[Stage]:
        """All stages but those inside of named sources."""
        for source in () if self.named else self.sources:
            yield from source._chain()
        yield self

    def _outline(self) -> str:
        before = () if self.named else tuple(source._outline() for source in self.sources)
        listed = f"[{', '.join(before)}]" if len(before) > 1 else "".join(before)
        return f"{listed} > {self.NAME}" if listed else self.NAME

    def map(self, fn: Callable[..., Any], *, rng: bool = False, batched: int | None = None) -> Stage:
        """``fn(row)`` in place of each row. See ``unbroken.streams.rows.Map``."""
        from unbroken.streams.rows import Map

        return Map(self, fn, rng, batched)

    def filter(self, fn: Callable[..., Any], *, rng: bool = False, batched: int | None = None) -> Stage:
        """Only the rows for which ``fn(row)`` is true. See ``unbroken.streams.rows.Filter``."""
        from unbroken.streams.rows import Filter

        return Filter(self, fn, rng, batched)

    def flat_map(self, fn: Callable[..., Iterable[Any]], *, rng: bool = False, batched: int | None = None) -> Stage:
        """The rows of ``fn(row)``, any number of them, in place of each row. See ``unbroken.streams.rows.FlatMap``."""
        from unbroken.streams.rows import FlatMap

        return FlatMap(self, fn, rng, batched)

    def shuffle(self, window: int, seed: int | None = None) -> Stage:
        """Chunks in a random order, and rows at random within a window. See ``unbroken.streams.shuffle.Shuffle``."""
        from unbroken.streams.shuffle import Shuffle

        return Shuffle(self, window, seed)

    def take(self, rows: int) -> Stage:
        """The first ``rows`` rows of each epoch, over all lanes. See ``unbroken.streams.limits.Take``."""
        from unbroken.streams.limits import Take

        return Take(self, rows)

    def skip(self, rows: int) -> Stage:
        """All but the first ``rows`` rows of each epoch, over all lanes. See ``unbroken.streams.limits.Skip``."""
        from unbroken.streams.limits import Skip

        return Skip(self, rows)

    def repeat(self, epochs: int | None = None) -> Stage:
        """So many passes over the rows in one epoch; ``None``: without end. See ``unbroken.streams.repeat.Repeat``."""
        from unbroken.streams.repeat import Repeat

        return Repeat(self, epochs)

    def tokenize(
        self,
        tokenizer: Any,
        text: str = "text",
        append: int | str | Iterable[int] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Stage:
        """Token ids of one text field. See ``unbroken.streams.tokenize.Tokenize``."""
        from unbroken.streams.tokenize import Tokenize

        return Tokenize(self, tokenizer, text, append, add_special_tokens)

    def pack(
        self,
        seq_len: int,
        layout: str = "concat",
        *,
        overflow: str = "split",
        last: str = "pad",
        window: int = 1 << 18,
        pad_id: int = 0,
        document_ids: bool = False,
        cu_seqlens: bool = False,
    ) -> Stage:
        """Rows of ``seq_len`` tokens, made of documents. See ``unbroken.streams.pack.Pack``."""
        from unbroken.streams.pack import Pack
        from unbroken.streams.packed import Columns

        return Pack(self, seq_len, layout, overflow, last, window, Columns(pad_id, document_ids, cu_seqlens))


@final
class _Opened(StageIterator):
    """The rows of a whole stream. Position: that of the rows; where a stage keeps a record, both.

    A stage may keep a record now and have kept none when the position was saved, or the other way round.
    """

    def __init__(self, rows: StageIterator, journal: Journal) -> None:
        self._rows = rows
        self._journal = journal

    def __next__(self) -> Any:
        row = next(self._rows)
        while row is GONE:
            row = next(self._rows)
        return row

    def state_dict(self) -> dict[str, Any]:
        if not self._journal:
            return self._rows.state_dict()
        return {"rows": self._rows.state_dict(), "journal": self._journal.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or "journal" not in state:
            self._rows.load_state_dict(state)
            return
        rows, journal = read_state(state, "stream", rows=dict, journal=dict)
        before = self._journal.state_dict()
        self._journal.load_state_dict(journal)  # first: rows may be chosen by what is in it
        try:
            self._rows.load_state_dict(rows)
        except BaseException:
            self._journal.load_state_dict(before)
            raise

    def close(self) -> None:
        self._rows.close()

    def where(self) -> str:
        return self._rows.where()

    def origin(self) -> tuple[Origin, ...]:
        return self._rows.origin()


@final
class _Isolated(StageIterator):
    """Rows of a stream that seeds the global generators, which are put back after every row."""

    def __init__(self, rows: StageIterator) -> None:
        self._rows = rows

    def __next__(self) -> Any:
        with alone():
            aside = take_globals()
            try:
                return next(self._rows)
            finally:
                put_back_globals(aside)

    def state_dict(self) -> dict[str, Any]:
        return self._rows.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rows.load_state_dict(state)

    def close(self) -> None:
        self._rows.close()

    def where(self) -> str:
        return self._rows.where()

    def origin(self) -> tuple[Origin, ...]:
        return self._rows.origin()
