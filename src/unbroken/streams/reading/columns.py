"""Columns to rows: what the values of record batches are in Python."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unbroken.streams.reading.files import one_line
from unbroken.streams.reading.source import Bad

__all__ = ["batch_rows", "check_columns", "check_schema", "rows_of", "values_of"]

# Of each lane a batch is held as Python values, so batches are small.
_BATCH_BYTES, _MOST_BATCH_ROWS = 1 << 18, 1024


def check_columns(reader: str, columns: Any) -> tuple[str, ...] | None:
    """The columns that were asked for; raises ``TypeError`` and ``ValueError`` as the messages say."""
    if columns is None:
        return None
    if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
        raise TypeError(f"{reader}: columns must be a list of names, or None for all, but got {columns!r}.")
    if not columns:
        raise ValueError(f"{reader}: columns is empty. Name at least one, or pass None for all.")
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise ValueError(f"{reader}: columns names {twice[0]!r} more than once. Name it once.")
    return tuple(columns)


def check_schema(reader: str, path: str, schema: pa.Schema, columns: tuple[str, ...] | None) -> None:
    """Raises ``ValueError`` where a file lacks a column that was asked for, or has two of one name."""
    count = Counter(schema.names)
    for name in schema.names if columns is None else columns:
        if not count[name]:
            there = ", ".join(map(repr, schema.names[:20])) + (", ..." if len(schema.names) > 20 else "")
            raise ValueError(
                f"{reader}: {path!r} has no column {name!r}. It has {there or 'none'}.\n"
                "Name columns that every file has; of a nested column, its outermost name."
            )
        if count[name] > 1:
            raise ValueError(
                f"{reader}: {path!r} has {count[name]} columns of the name {name!r}, and a row is a dict.\n"
                "Write it again with other names, or pass columns without this one."
            )


def batch_rows(size: int, rows: int) -> int:
    """How many rows a batch has where ``rows`` of them are ``size`` bytes: some 256 KiB, at most 1024 rows."""
    return max(1, min(_MOST_BATCH_ROWS, _BATCH_BYTES * rows // max(1, size)))


def rows_of(
    batches: Iterable[Any], place: int, columns: tuple[str, ...] | None, *, validate: bool
) -> Iterator[tuple[int, int, Any]]:
    """``(its place, the place after it, row)`` for the rows of record batches, of which the first is at ``place``.

    A row is a dict of ``columns`` in their order, or of all. ``Bad`` stands for a row that has no values in Python
    (text that is no UTF-8, a date beyond year 9999); with ``validate``, also for one whose parts point out of
    their buffers, which pyarrow does not look at when it opens Arrow data.
    """
    for batch in batches:
        names = batch.schema.names if columns is None else columns
        rows: Iterable[Any]
        try:
            rows = _rows(batch, names, validate)
        except Exception:  # one of them is bad: find it
            rows = (_row_or_bad(batch.slice(number, 1), names, validate) for number in range(batch.num_rows))
        for row in rows:
            yield place, place + 1, row
            place += 1


def _rows(batch: Any, names: Sequence[str], validate: bool) -> Iterable[dict[str, Any]]:
    if validate:
        batch.validate(full=True)
    return _dicts(names, [values_of(batch.column(name)) for name in names], batch.num_rows)


def _row_or_bad(batch: Any, names: Sequence[str], validate: bool) -> Any:
    for name in names:
        try:
            list(_rows(batch.select([name]), [name], validate))
        except MemoryError:
            raise
        except Exception as error:
            return Bad(
                f"the value of column {name!r} cannot be read ({_why(batch.column(name), error)})",
                'Correct it, leave its column out of columns, or pass on_error="skip".',
            )
    return next(iter(_rows(batch, names, validate)))


def _why(array: Any, error: Exception) -> str:
    """What is wrong with a value; where it is damaged, pyarrow says so more plainly when asked."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as plainer:
        error = plainer
    return one_line(error)


def _dicts(names: Sequence[str], values: list[list[Any]], count: int) -> Iterable[dict[str, Any]]:
    if not names:
        return ({} for _ in range(count))
    return map(dict, map(zip, itertools.repeat(names), zip(*values, strict=True)))


def values_of(array: Any) -> list[Any]:
    """The values of an Arrow array in Python; a null is ``None``.

    Numbers are int and float, text str, binary bytes, a struct a dict, a list a list, a map a list of pairs; a
    dictionary-encoded value is the value itself, and one of an extension type what it is stored as. A list of numbers
    or booleans is a numpy array of shape [length] and of their dtype, which owns its memory; where a null is among
    them, that list alone is a Python list. Decimals, dates, times, timestamps and durations are those of ``decimal``
    and ``datetime``, but in nanoseconds ``numpy.datetime64`` (in UTC) and ``numpy.timedelta64`` (a time of day counts
    from midnight).

    Raises what pyarrow raises where a value is none in Python: of ``ValueError``, ``OverflowError``,
    ``ArrowException``.
    """
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    make: Callable[[Any], list[Any]] | None = _MAKERS.get(array.type.id)
    return array.to_pylist() if make is None else make(array)


def _with_nulls(values: list[Any], array: Any) -> list[Any]:
    if array.null_count:
        for place in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            values[place] = None
    return values


def _filled(array: Any) -> Any:
    """The numbers of an array in numpy, with 0 in place of nulls, which would turn integers into floats."""
    return (array.fill_null(False if pa.types.is_boolean(array.type) else 0) if array.null_count else array).to_numpy(
        zero_copy_only=False
    )


def _objects(array: Any) -> list[Any]:
    values: list[Any] = array.to_numpy(zero_copy_only=False).tolist()
    return values


def _plain_numbers(array: Any) -> list[Any]:
    return _with_nulls(_filled(array).tolist(), array)


def _moments(array: Any) -> list[Any]:
    """Of nanoseconds pyarrow would make values of pandas where that is installed, and cut times of a day."""
    if array.type.unit != "ns":
        values: list[Any] = array.to_pylist()
        return values
    kind = "datetime64[ns]" if pa.types.is_timestamp(array.type) else "timedelta64[ns]"
    return _with_nulls(list(_filled(array.view(pa.int64())).view(kind)), array)


def _lists(array: Any) -> list[Any]:
    flat = array.flatten()  # without what lies under nulls
    lengths = _filled(pc.list_value_length(array)).astype(np.int64)
    stops = np.cumsum(lengths)
    spans = list(zip((stops - lengths).tolist(), stops.tolist(), strict=True))
    if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type) or pa.types.is_boolean(flat.type)):
        values = values_of(flat)
        return _with_nulls([values[start:stop] for start, stop in spans], array)
    numbers = _filled(flat)
    found: list[Any] = [numbers[start:stop].copy() for start, stop in spans]
    if flat.null_count:
        places = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))
        for number in np.unique(np.searchsorted(stops, places, side="right")).tolist():
            start, stop = spans[number]
            found[number] = values_of(flat.slice(start, stop - start))
    return _with_nulls(found, array)


def _structs(array: Any) -> list[Any]:
    names = [field.name for field in array.type]
    if len(set(names)) < len(names):
        raise ValueError("a struct has two fields of one name")
    return _with_nulls(list(_dicts(names, [values_of(part) for part in array.flatten()], len(array))), array)


def _maps(array: Any) -> list[Any]:
    kind = array.type
    pair = pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)])
    lists = _lists(array.cast(pa.list_(pair)))
    return [found and [(item["key"], item["value"]) for item in found] for found in lists]


def _decoded(array: Any) -> list[Any]:
    return values_of(array.dictionary_decode())


def _run_ends(array: Any) -> list[Any]:
    return values_of(pc.run_end_decode(array))


_KINDS: dict[Callable[[Any], list[Any]], str] = {
    _objects: "NA BOOL STRING LARGE_STRING STRING_VIEW BINARY LARGE_BINARY BINARY_VIEW FIXED_SIZE_BINARY",
    _plain_numbers: "INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 HALF_FLOAT FLOAT DOUBLE",
    _moments: "TIMESTAMP DURATION TIME64",
    _lists: "LIST LARGE_LIST FIXED_SIZE_LIST LIST_VIEW LARGE_LIST_VIEW",
    _structs: "STRUCT",
    _maps: "MAP",
    _decoded: "DICTIONARY",
    _run_ends: "RUN_END_ENCODED",
}
# Older versions of pyarrow do not know all of them.
_MAKERS = {
    getattr(pa.lib, f"Type_{name}"): make
    for make, names in _KINDS.items()
    for name in names.split()
    if hasattr(pa.lib, f"Type_{name}")
}
