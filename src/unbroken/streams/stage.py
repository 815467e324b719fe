"""Stage and StageIterator: what every stream is, and what moves through it.

A stage is a frozen description. ``open(lane)`` gives its iterator, and only that has a position. A stage is also a
torch ``IterableDataset``, so it works under any loader.
"""

from __future__ import annotations

import functools
import hashlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch.utils.data import IterableDataset, get_worker_info

from unbroken.errors import InvalidState
from unbroken.lanes import Lane
from unbroken.seeding import Permutation, key, put_back_globals, take_globals

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ChunkOrder", "Stage", "StageIterator", "check_function", "check_whole", "identity_of", "read_state"]


@final
@dataclass(frozen=True)
class ChunkOrder:
    """That a source deals its chunks in a permuted order, another in every epoch. A shuffle tells its source so."""

    seed: int

    def of(self, chunks: int, epoch: int) -> Permutation:
        """The order of an epoch: place to chunk."""
        return Permutation(chunks, key(self.seed, "chunks", epoch))


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
    before: ``"safe"``, ``"order"`` or ``"data"``. ``SEEDS`` is whether the stage seeds the global generators.
    """

    default_lanes: int = 64
    NAME: ClassVar[str]
    DIFFERENCES: ClassVar[Mapping[str, str]] = {}
    SEEDS: ClassVar[bool] = False

    @property
    @abstractmethod
    def sources(self) -> tuple[Stage, ...]:
        """The stages that this one reads from; none for a stage that reads files."""

    @abstractmethod
    def open(self, lane: Lane, order: ChunkOrder | None = None) -> StageIterator:
        """An iterator at the start of a lane's epoch. Nothing is read before its first row.

        ``order`` is the order of chunks; ``None`` is that of the files. It is for stages that read from this one.
        """

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """What of this stage alone belongs in the fingerprint. A name that ends in ``[]`` is always numbered."""

    @abstractmethod
    def arguments(self) -> str:
        """The arguments as they are written in ``print(stream)``."""

    def describe(self) -> dict[str, Any]:
        """The fingerprint of the whole pipeline: flat, of JSON values.

        A field of a second stage of a kind has its number: ``window``, ``window[1]``; functions have one from the
        first on: ``map[0]``.
        """
        described: dict[str, Any] = {"stages": " > ".join(stage.NAME for stage in self._all())}
        seen: Counter[str] = Counter()
        for stage in self._all():
            for field, value in stage.fields().items():
                name = field.removesuffix("[]")
                described[f"{name}[{seen[name]}]" if seen[name] or name != field else name] = value
                seen[name] += 1
        return described

    def difference_class(self, field: str) -> str:
        """What another value of a field of ``describe()`` means: ``"safe"``, ``"order"`` or ``"data"``."""
        name = re.sub(r"\[\d+\]$", "", field)
        found = (stage.DIFFERENCES[name] for stage in self._all() if name in stage.DIFFERENCES)
        return next(found, "data")

    @property
    def depth(self) -> int:
        """How many stages there are, this one counted."""
        return sum(1 for _ in self._all())

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
        call = f"{self.NAME}({self.arguments()})"
        return ".".join([*map(repr, self.sources), call])

    def _all(self) -> Iterator[Stage]:
        for source in self.sources:
            yield from source._all()
        yield self

    def map(self, fn: Callable[[Any], Any]) -> Stage:
        """``fn(row)`` in place of each row. See ``unbroken.streams.rows.Map``."""
        from unbroken.streams.rows import Map

        return Map(self, fn)

    def filter(self, fn: Callable[[Any], Any]) -> Stage:
        """Only the rows for which ``fn(row)`` is true. See ``unbroken.streams.rows.Filter``."""
        from unbroken.streams.rows import Filter

        return Filter(self, fn)

    def shuffle(self, window: int, seed: int | None = None) -> Stage:
        """Chunks in a random order, and rows at random within a window. See ``unbroken.streams.shuffle.Shuffle``."""
        from unbroken.streams.shuffle import Shuffle

        return Shuffle(self, window, seed)

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

    def pack(self, seq_len: int, layout: str = "concat", *, pad_id: int = 0, document_ids: bool = False) -> Stage:
        """Rows of ``seq_len`` tokens, cut from documents. See ``unbroken.streams.pack.Pack``."""
        from unbroken.streams.pack import Pack

        return Pack(self, seq_len, layout, pad_id, document_ids)


@final
class _Isolated(StageIterator):
    """Rows of a stream that seeds the global generators, which are put back after every row."""

    def __init__(self, rows: StageIterator) -> None:
        self._rows = rows

    def __next__(self) -> Any:
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


def check_whole(stage: str, name: str, value: Any, least: int, most: int = (1 << 63) - 1) -> None:
    """Raises ``TypeError`` where an argument is no whole number, ``ValueError`` where it is out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{stage}: {name} must be a whole number, but got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{stage}: {name} must be at least {least}, but got {value}.")
    if value > most:
        raise ValueError(f"{stage}: {name} must be at most {most}, but got {value}.")


def check_function(stage: str, fn: Any) -> None:
    """Raises ``TypeError`` where ``fn`` cannot be called."""
    if not callable(fn):
        raise TypeError(f"{stage}: fn must be a function of one row, but got {fn!r} ({type(fn).__name__}).")


def read_state(state: Any, stage: str, **kinds: type | tuple[type, ...]) -> tuple[Any, ...]:
    """The values of a position, in the order of ``kinds``.

    Raises ``InvalidState`` where a key is missing or unknown, a value has another type, or a number is negative.
    """
    way_out = "Load what state_dict() of the same pipeline returned."
    if not isinstance(state, Mapping):
        raise InvalidState(f"{stage}: a position is a dict, but got a {type(state).__name__}.\n{way_out}")
    if set(state) != set(kinds):
        expected, found = ", ".join(kinds), ", ".join(map(str, state)) or "nothing"
        raise InvalidState(f"{stage}: a position has the keys {expected}, but this one has {found}.\n{way_out}")
    for name, kind in kinds.items():
        value = state[name]
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            names = names.replace("NoneType", "null").replace("int", "whole number of at least 0")
            raise InvalidState(f"{stage}: {name} in a position must be a {names}, but it is {value!r}.\n{way_out}")
    return tuple(state[name] for name in kinds)


def identity_of(fn: Any) -> str:
    """``name:digest`` of a function: its qualified name, and 16 hex digits over its code and the values it holds.

    The same in every process that runs the same version of Python; no memory address is in it. Values that are
    not plain (numbers, text, tuples of them) count by their type only, and what ``fn`` calls counts by its name.
    """
    hasher = hashlib.sha256()
    _feed(hasher.update, fn)
    return f"{_name_of(fn)}:{hasher.hexdigest()[:16]}"


def _name_of(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return f"partial({_name_of(fn.func)})"
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def _feed(update: Callable[[bytes], object], value: Any, within: tuple[int, ...] = ()) -> None:
    """Name, code and held values of a function; plain values as they are, others by their type.

    ``within`` are the ids of what is being fed already: a function that holds itself must come to an end.
    """
    kind = type(value)
    feed = functools.partial(_feed, update, within=(*within, id(value)))
    if id(value) in within:
        update(b"itself\0")
    elif value is None or kind in (bool, int, float, complex, str, bytes):
        update(f"{kind.__name__} {value!r}\0".encode(errors="surrogatepass"))
    elif kind in (tuple, list, dict, frozenset, set):
        items = value.items() if kind is dict else value if kind in (tuple, list) else sorted(value, key=repr)
        update(f"{kind.__name__} {len(value)}\0".encode())
        for item in items:
            feed(item)
    elif kind is CodeType:
        update(value.co_code)
        feed((value.co_consts, value.co_names, value.co_varnames))
    elif kind is functools.partial:
        feed(("partial", value.func, value.args, value.keywords))
    elif hasattr(value, "__func__"):
        feed(("method", value.__func__, type(value.__self__).__qualname__))
    elif hasattr(value, "__code__"):
        held = [cell.cell_contents if _is_full(cell) else None for cell in value.__closure__ or ()]
        feed((value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, held))
    else:
        update(f"{kind.__qualname__} {_name_of(value)}\0".encode())
        call = vars(kind).get("__call__")
        if hasattr(call, "__code__"):
            feed(call)


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
