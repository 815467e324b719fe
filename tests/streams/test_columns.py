"""Columns to rows: what each type of Arrow is in Python, and which values are none."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streams.columnar import comparable
from unbroken.streams.reading.columns import batch_rows, check_columns, check_schema, rows_of, values_of
from unbroken.streams.reading.source import Bad

UTC = datetime.timezone.utc
MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 1, 234567)
NS = 1_700_000_000_123_456_789


def dictionary(values: list[Any]) -> pa.Array:
    return pa.array(values).dictionary_encode()


# Each array is read whole and in slices; what is expected is [value, None where a null stands, ...].
ARRAYS: list[tuple[pa.Array, list[Any]]] = [
    (pa.nulls(2), [None, None]),
    (pa.array([True, None, False]), [True, None, False]),
    (pa.array([1, None, -(2**63)], pa.int64()), [1, None, -(2**63)]),
    (pa.array([2**64 - 1, None], pa.uint64()), [2**64 - 1, None]),
    (pa.array([2**53 + 1, None, 0]), [2**53 + 1, None, 0]),
    (pa.array([1.5, None, float("inf")]), [1.5, None, float("inf")]),
    (pa.array([np.float16(1.5), None], pa.float16()), [1.5, None]),
    (pa.array(["é日", None, ""]), ["é日", None, ""]),
    (pa.array(["a", None, "c"], pa.large_string()), ["a", None, "c"]),
    (pa.array([b"a\xff", None], pa.binary()), [b"a\xff", None]),
    (pa.array([b"abc", None], pa.binary(3)), [b"abc", None]),
    (pa.array([decimal.Decimal("1.23"), None]), [decimal.Decimal("1.23"), None]),
    (pa.array([MOMENT.date(), None], pa.date32()), [MOMENT.date(), None]),
    (pa.array([MOMENT, None], pa.timestamp("us")), [MOMENT, None]),
    (pa.array([MOMENT, None], pa.timestamp("us", "UTC")), [MOMENT.replace(tzinfo=UTC), None]),
    (pa.array([NS, None], pa.timestamp("ns")), [np.datetime64(NS, "ns"), None]),
    (pa.array([NS, None], pa.timestamp("ns", "Europe/Paris")), [np.datetime64(NS, "ns"), None]),
    (pa.array([5, None], pa.duration("s")), [datetime.timedelta(seconds=5), None]),
    (pa.array([5, None], pa.duration("ns")), [np.timedelta64(5, "ns"), None]),
    (pa.array([MOMENT.time(), None], pa.time64("us")), [MOMENT.time(), None]),
    (pa.array([1001, None], pa.time64("ns")), [np.timedelta64(1001, "ns"), None]),
    (dictionary(["a", None, "a", "b"]), ["a", None, "a", "b"]),
    (dictionary([7, None, 7]), [7, None, 7]),
    (pa.RunEndEncodedArray.from_arrays([2, 3], ["a", None]), ["a", "a", None]),
    (pa.array([["a", None], None, []]), [["a", None], None, []]),
    (pa.array([{"a": 1, "b": "x"}, None, {"a": None}]), [{"a": 1, "b": "x"}, None, {"a": None, "b": None}]),
    (
        pa.array([[("k", 1), ("l", None)], None, []], pa.map_(pa.string(), pa.int32())),
        [[("k", 1), ("l", None)], None, []],
    ),
    (pa.array([[("k", NS)]], pa.map_(pa.string(), pa.timestamp("ns"))), [[("k", np.datetime64(NS, "ns"))]]),
    (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, None], pa.binary(16))), [b"0" * 16, None]),
]


@pytest.mark.parametrize(("array", "expected"), ARRAYS, ids=lambda part: str(getattr(part, "type", "")))
def test_a_value_is_what_python_calls_it(array: pa.Array, expected: list[Any]) -> None:
    assert values_of(array) == expected
    assert [type(value) for value in values_of(array)] == [type(value) for value in expected]
    for start in range(len(expected) + 1):
        assert values_of(array.slice(start, 1)) == expected[start : start + 1]
        assert values_of(array.slice(start)) == expected[start:]


@pytest.mark.parametrize("size", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
@pytest.mark.parametrize("kind", [pa.int32(), pa.uint8(), pa.int64(), pa.float32(), pa.float16(), pa.bool_()])
def test_a_list_of_numbers_is_an_array_of_its_own(size: Any, kind: pa.DataType) -> None:
    one = [True, False] if pa.types.is_boolean(kind) else [1, 2, 3]
    array = pa.array([one, None, [], one[:1]], size(kind))
    dtype = np.dtype(kind.to_pandas_dtype())
    for start in range(4):
        found = values_of(array.slice(start))
        assert comparable(found) == comparable(
            [np.array(one, dtype), None, np.array([], dtype), np.array(one[:1], dtype)][start:]
        )
    found = values_of(array)
    assert all(found[place].flags.owndata and found[place].flags.writeable for place in (0, 2, 3))


def test_lists_of_one_size_and_lists_of_lists_are_arrays_too() -> None:
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2))
    assert comparable(values_of(fixed.slice(1))) == [None, ("int16", [3, 4])]
    nested = pa.array([[[1.0], None], None, [[2.0, 3.0]]], pa.list_(pa.list_(pa.float32())))
    assert comparable(values_of(nested)) == [[("float32", [1.0]), None], None, [("float32", [2.0, 3.0])]]
    inside = pa.array([{"ids": [1, 2]}, {"ids": None}])
    assert comparable(values_of(inside)) == [{"ids": ("int64", [1, 2])}, {"ids": None}]


def test_a_null_among_numbers_makes_a_list_of_that_row_alone() -> None:
    array = pa.array([[1, 2], [None, 2**60 + 1], [], [4]], pa.list_(pa.int64()))
    assert comparable(values_of(array)) == [("int64", [1, 2]), [None, 2**60 + 1], ("int64", []), ("int64", [4])]
    assert comparable(values_of(array.slice(1, 2))) == [[None, 2**60 + 1], ("int64", [])]


NESTED = st.recursive(
    st.sampled_from([pa.int8(), pa.float64(), pa.string(), pa.binary(), pa.bool_(), pa.timestamp("us")]),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(lambda kind: pa.list_(kind, 2)),
        st.tuples(inner, inner).map(lambda pair: pa.struct([("a", pair[0]), ("b", pair[1])])),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
    ),
    max_leaves=4,
)


def plain_list(value: Any) -> Any:
    """As ``to_pylist`` has it: arrays are lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain_list(inner) for name, inner in value.items()}
    return type(value)(map(plain_list, value)) if isinstance(value, list | tuple) else value


@given(st.data())
def test_nested_values_are_those_of_pyarrow_but_for_arrays(data: st.DataObject) -> None:
    kind = data.draw(NESTED)
    array = pa.array(data.draw(st.lists(value_of(kind), max_size=6)), kind)
    array = array.slice(data.draw(st.integers(0, len(array))), data.draw(st.integers(0, 4)))
    assert plain_list(values_of(array)) == array.to_pylist()


def value_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, nulls among them."""
    if pa.types.is_map(kind):
        one: Any = st.lists(st.tuples(st.text(max_size=2), value_of(kind.item_type)), max_size=3)
    elif pa.types.is_struct(kind):
        one = st.fixed_dictionaries({field.name: value_of(field.type) for field in kind})
    elif pa.types.is_fixed_size_list(kind):
        one = st.lists(value_of(kind.value_type), min_size=2, max_size=2)
    elif pa.types.is_list(kind):
        one = st.lists(value_of(kind.value_type), max_size=3)
    else:
        one = {
            pa.int8(): st.integers(-128, 127),
            pa.float64(): st.floats(allow_nan=False),
            pa.string(): st.text(max_size=3),
            pa.binary(): st.binary(max_size=3),
            pa.bool_(): st.booleans(),
            pa.timestamp("us"): st.datetimes(),
        }[kind]
    return st.none() | one


def broken_text(*values: bytes) -> pa.Array:
    return pa.array(values, pa.binary()).view(pa.string())


def rows_in(batch: pa.RecordBatch, columns: tuple[str, ...] | None = None, *, validate: bool = False) -> list[Any]:
    found = list(rows_of([batch], 5, columns, validate=validate))
    assert [(place, after) for place, after, _ in found] == [(5 + n, 6 + n) for n in range(batch.num_rows)]
    return [row for _, _, row in found]


def test_a_row_has_the_columns_in_the_order_asked_for() -> None:
    batch = pa.record_batch({"a": [1, 2], "b": ["x", None], "c": [1.5, 2.5]})
    assert rows_in(batch) == [{"a": 1, "b": "x", "c": 1.5}, {"a": 2, "b": None, "c": 2.5}]
    assert [list(row) for row in rows_in(batch, ("c", "a"))] == [["c", "a"], ["c", "a"]]
    assert rows_in(pa.record_batch({"a": [1, 2]}).select([])) == [{}, {}]


@pytest.mark.parametrize("validate", [False, True])
def test_only_the_row_whose_value_cannot_be_read_is_bad(validate: bool) -> None:
    texts = broken_text(b"good", b"bad \xff", b"good again")
    found = rows_in(pa.record_batch({"id": [0, 1, 2], "text": texts}), validate=validate)
    assert [row for row in found if type(row) is dict] == [{"id": 0, "text": "good"}, {"id": 2, "text": "good again"}]
    assert type(found[1]) is Bad and "the value of column 'text' cannot be read (" in found[1].reason
    assert "UTF" in found[1].reason or "utf-8" in found[1].reason
    beyond = pa.record_batch({"day": pa.array([0, 10**8], pa.int32()).view(pa.date32())})
    good, bad = rows_in(beyond)
    assert good == {"day": datetime.date(1970, 1, 1)} and "out of range" in bad.reason


def test_offsets_that_lead_out_of_the_text_are_seen_before_they_are_followed() -> None:
    offsets = pa.py_buffer(np.array([0, 2, 1 << 30, 6], np.int32))
    text = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"abcdef"))
    found = rows_in(pa.record_batch({"text": text}), validate=True)
    assert found[0] == {"text": "ab"}
    assert type(found[1]) is Bad and type(found[2]) is Bad


def test_a_struct_with_two_fields_of_one_name_has_no_value() -> None:
    array = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    (bad,) = rows_in(pa.record_batch({"s": array}))
    assert "a struct has two fields of one name" in bad.reason


def test_batches_are_small_whatever_the_size_of_rows() -> None:
    assert batch_rows(1_000, 1_000_000) == 1024
    assert batch_rows(1_000_000, 1_000) == 262
    assert batch_rows(1 << 40, 10) == 1
    assert batch_rows(0, 10) == 1024
    assert batch_rows(0, 0) == 1


@pytest.mark.parametrize(
    ("columns", "error", "text"),
    [
        ("text", TypeError, "columns must be a list of names, or None for all, but got 'text'"),
        ([b"a"], TypeError, "columns must be a list of names"),
        ({"a"}, TypeError, "columns must be a list of names"),
        ([], ValueError, "columns is empty"),
        (["a", "b", "a"], ValueError, "columns names 'a' more than once"),
    ],
)
def test_columns_that_are_no_names_are_refused(columns: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        check_columns("read_x", columns)
    assert text in str(caught.value)


def test_two_columns_of_one_name_are_no_dict() -> None:
    schema = pa.schema([("a", pa.int8()), ("a", pa.int8()), ("b", pa.int8())])
    with pytest.raises(ValueError, match="'x' has 2 columns of the name 'a', and a row is a dict"):
        check_schema("read_x", "x", schema, None)
    check_schema("read_x", "x", schema, ("b",))
