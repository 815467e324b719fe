"""What makes two values the same: structure, types and content, and nothing of how they lie in memory."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from unbroken.audit.records import brief, digest_of, row_of, rows_of
from unbroken.errors import AuditError


class Batch:
    """A plain class, as in PyTorch's documentation of memory pinning."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slots:
    __slots__ = ("__hidden", "value")

    def __init__(self, value: Any, hidden: int = 0) -> None:
        self.value, self.__hidden = value, hidden


class Own:
    """What it consists of is for it to say: its cache is no part of it."""

    def __init__(self, value: int, cache: int) -> None:
        self.value, self.cache = value, cache

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value}


class Text(str):
    def __repr__(self) -> str:
        return "Text()"


class Number(int):
    def __repr__(self) -> str:
        return "Number()"


class Named(dict[str, Any]):
    label = ""


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Pair:
    one: Any
    other: Any = None


class Tensor:
    """It has the name of another class, and nothing else of it."""

    def __init__(self, value: int) -> None:
        self.value = value


class Unwilling(Tensor):
    def __repr__(self) -> str:
        raise RuntimeError("no")


def labelled(label: str) -> Named:
    made = Named(x=1)
    made.label = label
    return made


def objects(text: str) -> Any:
    made = np.zeros(2, dtype=[("a", "i4"), ("b", object)])
    made["b"] = [text, "".join(["t", "wo"])]
    return made


def gaps(filled: int, value: int) -> Any:
    """A byte and a long, and between them what happened to be there."""
    kind = np.dtype([("a", "u1"), ("b", "i8")], align=True)
    made = np.frombuffer(bytes([filled] * kind.itemsize), dtype=kind).copy()
    made["a"], made["b"] = 1, value
    return made


def masked(value: int, mask: bool) -> Any:
    return np.ma.masked_array([value, 2], mask=[mask, False], fill_value=7)


def sparse(place: int) -> torch.Tensor:
    return torch.sparse_coo_tensor([[0], [place]], [1.0], (1, 4), check_invariants=True)


ARANGE = torch.arange(100)
SAME: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: Batch(x=ARANGE[2:4]), lambda: Batch(x=torch.tensor([2, 3]))),
    (lambda: Batch(a=["tag", "tag"]), lambda: Batch(a=["tag", "".join(["t", "ag"])])),
    (lambda: Batch(a={"x", "y", "z"}), lambda: Batch(a={"z", "y", "x"})),
    (lambda: Own(1, 2), lambda: Own(1, 3)),
    (lambda: objects("one"), lambda: objects("".join(["o", "ne"]))),
    (lambda: gaps(0, 5), lambda: gaps(9, 5)),
    (lambda: torch.tensor([1 + 2j]).conj(), lambda: torch.tensor([1 - 2j])),
    (lambda: torch.tensor([1 + 2j]).conj().imag, lambda: torch.tensor([-2.0])),
    (lambda: torch.ones(3, 2).t(), lambda: torch.ones(2, 3)),
    (lambda: pa.table({"a": ["x", "y", "z"]}).slice(1, 1), lambda: pa.table({"a": ["y"]})),
    (lambda: Pair(1), lambda: Pair(1)),
    (lambda: (Pair, len), lambda: (Pair, len)),
    (lambda: float("nan"), lambda: float("nan")),
    (lambda: pathlib.Path("a"), lambda: pathlib.Path(str(pathlib.Path("a")))),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_has_the_same_content_is_the_same(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    assert digest_of(one()) == digest_of(other())


OTHER: list[tuple[Any, Any]] = [
    (Batch(x=ARANGE[2:4]), Batch(x=ARANGE[3:5])),
    (Slots(1), Slots(2)),
    (Slots(1, 1), Slots(1, 2)),
    (Own(1, 2), Own(2, 2)),
    (Text("a"), Text("b")),
    (Text("a"), "a"),
    (Number(1), Number(2)),
    (10**5000, 10**5000 + 1),
    (labelled("a"), labelled("b")),
    (Color.RED, Color.BLUE),
    (Pair, Batch),
    (Pair(1), Pair(2)),
    (objects("one"), objects("other")),
    (gaps(0, 5), gaps(0, 6)),
    (masked(1, False), masked(1, True)),
    (masked(7, False), masked(7, True)),
    (sparse(0), sparse(1)),
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.tensor([1]), torch.tensor([1], dtype=torch.int32)),
    (pa.table({"a": ["x"]}), pa.table({"a": ["y"]})),
    (pa.array([1]), pa.array([1], pa.int32())),
    (collections.deque([1]), collections.deque([2])),
    (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
    (decimal.Decimal(1), decimal.Decimal(2)),
    (pathlib.Path("a"), pathlib.Path("b")),
    (re.compile("a"), re.compile("b")),
    (range(3), range(4)),
    ("\udc80", "\udc81"),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (1, True),
]


@pytest.mark.parametrize(("one", "other"), OTHER, ids=range(len(OTHER)))
def test_what_has_other_content_differs(one: Any, other: Any) -> None:
    assert digest_of(one) != digest_of(other)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_the_tensors_in_them() -> None:
    made = [torch.nested.nested_tensor([torch.ones(size), torch.ones(2)]) for size in (3, 3, 4)]
    assert digest_of(made[0]) == digest_of(made[1]) != digest_of(made[2])


def around() -> Any:
    ring: list[Any] = [1]
    ring.append({"again": ring})
    return ring


def deep() -> Any:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (around(), "cannot compare a list of a batch: it contains itself"),
        (deep(), "cannot compare a list of a batch: it is nested too deep"),
        (torch.empty(2, device="meta"), "cannot compare a torch.Tensor of a batch: it is on the device meta"),
        ((row for row in ()), "cannot compare a generator of a batch: it has no content that can be read"),
    ],
)
def test_what_cannot_be_compared_is_named(value: Any, text: str) -> None:
    with pytest.raises(AuditError, match=text):
        digest_of(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Batch(x=torch.tensor([1, 2]), y="a"), "Batch(x=int64[2] [1, 2], y='a')"),
        (Tensor(3), "Tensor(value=3)"),
        (sparse(0), "<torch.Tensor>"),
        ("a \udc80", "'a \\udc80'"),
        ([torch.tensor([0.5])], "[float32[1] [0.5]]"),
    ],
)
def test_short_texts(value: Any, text: str) -> None:
    assert brief(value) == text


def test_a_value_that_has_no_text_has_one_nevertheless() -> None:
    assert "Unwilling" in brief(Unwilling(1))
    assert brief(10**5000)


def test_a_sparse_batch_is_one_row() -> None:
    batch = sparse(1)
    assert [row_of(row).digest for row in rows_of(batch)] == [row_of(batch).digest]
