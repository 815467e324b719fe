"""Datasets of Hugging Face: by index, and streamed with their own state.

Nothing is imported of ``datasets``: whoever has an object of it has imported it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from unbroken.lanes import Lane
from unbroken.options import say_once
from unbroken.streams.identity import identity_of
from unbroken.streams.reading.checked import Checked, Supply
from unbroken.streams.reading.files import Access
from unbroken.streams.reading.indexed import Indexed
from unbroken.streams.reading.source import Source
from unbroken.streams.stage import Stage

__all__ = ["from_hf"]

_MOST_ROWS, _ROWS_AT_ONCE = 1024, 32
_MOST_TEXT = 400
_TABLES = ("arrow", "pandas", "polars")
_BUFFER = "BufferShuffledExamplesIterable"
_TURN_TO_ROWS = "Rows are dicts here: call with_format(None), or with_format('numpy') or ('torch'), before."


def from_hf(dataset: Any, *, resume: str = "checked") -> Stage:
    """A stream of the rows of a ``datasets.Dataset`` or a ``datasets.IterableDataset``.

    A ``Dataset`` is read by index, in batches, in the format and through the selection that it has. Rows are what
    torch's loader gets from it: fields of a batch, cut into dicts. Where it has a transform (``with_transform``), the
    global generators are seeded before each call of that, by (seed, epoch, first index).

    An ``IterableDataset`` is split over lanes by its shards, and its epoch is set to the lane's (which reorders the
    shards from epoch 1 on). More lanes than shards are without rows, which is told once. Rows are those of
    ``dataset.iter(batch_size=1)``. On a resume its own state is loaded and checked: a few rows are made again and must
    come out as they were; lane 0 tries that once after some rows, as not every version of ``datasets`` has states that
    lead back. A buffer of ``IterableDataset.shuffle`` is in no state of it, so that one is refused: shuffle
    here. ``resume="replay"`` takes it, and makes everything again from the start of the epoch. The global generators
    are seeded before each row as by ``from_iterable``; functions under ``interleave_datasets`` run in threads and must
    draw no global random numbers.

    Raises ``TypeError`` where ``dataset`` is none of the two, and ``ValueError`` where its format is a table's, where
    it was split by rank, where it has a buffer, or where ``resume`` is not known; the iterator as ``from_iterable``.
    """
    names = {kind.__name__ for kind in type(dataset).__mro__ if kind.__module__.partition(".")[0] == "datasets"}
    if "IterableDataset" in names:
        return _streamed(dataset, resume)
    if "Dataset" in names:
        return _by_index(dataset)
    if names & {"DatasetDict", "IterableDatasetDict"}:
        splits = ", ".join(map(repr, dataset))
        raise TypeError(f"from_hf: this is a {type(dataset).__name__}. Pass one of its splits ({splits}).")
    raise TypeError(
        f"from_hf: dataset must be a Dataset or an IterableDataset of datasets, but got a {type(dataset).__name__}.\n"
        "Pass another map-style dataset to from_map, another iterable one to from_iterable."
    )


def _by_index(dataset: Any) -> Stage:
    form = dataset.format["type"]
    if form in _TABLES:
        raise ValueError(f"from_hf: this dataset has the format {form!r}. {_TURN_TO_ROWS}")
    length = len(dataset)
    files = f"{length} rows, fingerprint {dataset._fingerprint}"
    seeds = form == "custom"
    return Source(
        Indexed("from_hf", dataset, length, _slice, _ROWS_AT_ONCE, files, _MOST_ROWS, seeds), Access(retries=0)
    )


def _slice(dataset: Any, start: int, stop: int) -> list[dict[str, Any]]:
    rows = _rows_of(dataset[start:stop])
    if len(rows) != stop - start:
        raise ValueError(
            f"from_hf: rows {start} to {stop - 1} of the dataset came out as {len(rows)} rows.\n"
            "A transform must keep the number of rows, and at least one column."
        )
    return rows


def _rows_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A batch of columns as rows, as ``Dataset.__getitems__`` cuts it."""
    names = list(batch)
    columns = [batch[name] for name in names]
    return [{name: column[i] for name, column in zip(names, columns, strict=True)} for i in range(_length(columns))]


def _length(columns: list[Any]) -> int:
    return len(columns[0]) if columns else 0


def _streamed(dataset: Any, resume: str) -> Stage:
    form = getattr(getattr(dataset, "_formatting", None), "format_type", None)
    if form in _TABLES:
        raise ValueError(f"from_hf: this dataset has the format {form!r}. {_TURN_TO_ROWS}")
    if getattr(dataset, "_distributed", None) is not None:
        raise ValueError(
            "from_hf: this dataset was split by rank (split_dataset_by_node), and lanes do that here.\n"
            "Pass the whole dataset on every rank, and dp_rank and dp_world_size to the loader."
        )
    missing = [name for name in ("shard", "state_dict", "load_state_dict") if not hasattr(dataset, name)]
    if missing:
        raise ValueError(
            f"from_hf: IterableDataset has no {missing[0]} in this version of datasets. Install 3.1 or later."
        )
    if resume == "checked" and any(_loses_rows(step) for step in _steps(dataset._ex_iterable)):
        raise ValueError(
            "from_hf: IterableDataset.shuffle keeps rows in a buffer that no state holds: a resume would lose them.\n"
            "Leave it out and shuffle here: from_hf(dataset).shuffle(window=...). "
            'Or pass resume="replay", which makes everything again from the start of the epoch.'
        )
    return Checked(_Shards(dataset, _shards_of(dataset)), resume)


def _steps(iterable: Any) -> Iterator[Any]:
    """All parts of what is behind an ``IterableDataset``, from the last one down."""
    yield iterable
    for below in _below(iterable):
        yield from _steps(below)


def _below(iterable: Any) -> list[Any]:
    one = getattr(iterable, "ex_iterable", None)
    return [one] if one is not None else list(getattr(iterable, "ex_iterables", ()))


def _loses_rows(step: Any) -> bool:
    """A buffer of one row only reorders shards, which the state tells."""
    return type(step).__name__ == _BUFFER and getattr(step, "buffer_size", 0) != 1


def _own(iterable: Any) -> Any:
    """The same parts as objects of their own, over the same data and functions: their state lives in them."""
    own = object.__new__(type(iterable))
    own.__dict__.update(iterable.__dict__)
    if getattr(own, "ex_iterable", None) is not None:
        own.ex_iterable = _own(own.ex_iterable)
    elif hasattr(own, "ex_iterables"):
        own.ex_iterables = [_own(below) for below in own.ex_iterables]
    return own


def _shards_of(dataset: Any) -> int:
    return int(dataset.num_shards if hasattr(dataset, "num_shards") else dataset.n_shards)


@final
@dataclass(frozen=True)
class _Shards(Supply):
    """An ``IterableDataset``, dealt to lanes by its shards: lane l of L has the shards l, l + L, and so on."""

    NAME: ClassVar[str] = "from_hf"
    DIFFERENCES: ClassVar[Mapping[str, str]] = {"files": "data, held", "steps": "data"}
    APART: ClassVar[bool] = True
    HINT: ClassVar[str] = (
        "\nThe states of older versions of datasets skip rows behind map, filter and batch; those of 5.2 do not."
    )

    dataset: Any
    shards: int

    def open(self, lane: Lane) -> Iterable[Any] | None:
        if lane.count > self.shards:
            say_once(
                f"from_hf: the dataset has {self.shards} shards, so that {lane.count - self.shards} of {lane.count} "
                "lanes are without rows.\n"
                f"Pass lanes={self.shards} or fewer to the loader, or cut the dataset into more shards (reshard(), "
                "to_iterable_dataset(num_shards=...), more files)."
            )
        if lane.index >= self.shards:
            return None
        whole = object.__new__(type(self.dataset))  # copy() would share its attributes
        whole.__dict__.update(self.dataset.__dict__)
        whole._ex_iterable = _own(self.dataset._ex_iterable)
        own = whole.shard(num_shards=lane.count, index=lane.index, contiguous=False)
        own.set_epoch(lane.epoch)
        return _Rows(own)

    def what(self) -> str:
        return "IterableDataset"

    def fields(self) -> dict[str, Any]:
        info, names = self.dataset.info, self.dataset.column_names
        parts = [str(part) for part in (info.builder_name, info.config_name, self.dataset.split) if part is not None]
        columns = "unknown columns" if names is None else "columns " + ", ".join(names)
        return {
            "files": f"{' '.join([*parts, 'IterableDataset'])}, {self.shards} shards",
            "steps": _short(f"{_outline(self.dataset._ex_iterable)}, {columns}"),
        }

    def arguments(self) -> str:
        return self.what()

    def extent(self, lanes: int) -> str:
        return f"{self.shards} shard{'s' * (self.shards != 1)} on {lanes} lanes"


def _outline(iterable: Any) -> str:
    """What is done to the rows, the last step first: kinds of steps, and the functions in them."""
    name = type(iterable).__name__.removesuffix("Iterable").removesuffix("Examples")
    function = getattr(iterable, "function", None)
    said = name if function is None else f"{name}({identity_of(function)})"
    below = [_outline(part) for part in _below(iterable)]
    return said if not below else f"{said} < {below[0]}" if len(below) == 1 else f"{said} < [{'; '.join(below)}]"


def _short(text: str) -> str:
    if len(text) <= _MOST_TEXT:
        return text
    return (
        f"{text[: _MOST_TEXT // 2]}..., sha256:{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"
    )


@final
class _Rows:
    """The rows of one lane's dataset. Its state is the dataset's.

    ``iter(dataset)`` would look for torch's worker, and split a second time by that. ``dataset.iter(batch_size=1)``
    would not, but formats some rows twice.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, row in self._dataset._prepare_ex_iterable_for_iteration():
            yield row

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._dataset.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dataset.load_state_dict(state)
