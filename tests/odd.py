"""Samples as odd as people's, and the classes that they are of. Each is made from the number of a row."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import types
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence


class Pair(NamedTuple):
    a: Any
    b: Any


class Color(enum.Enum):
    RED = 0
    BLUE = 1


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


@dataclasses.dataclass
class Record:
    name: str
    data: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    data: Any


class OwnTensor(torch.Tensor):
    pass


class OwnArray(np.ndarray):
    pass


class OwnDict(dict[Any, Any]):
    """Has an attribute besides."""

    note: Any = None


class OwnList(list[Any]):
    pass


class OwnTuple(tuple[Any, ...]):
    pass


class OwnText(str):
    pass


class OwnInt(int):
    pass


class Plain:
    """Nothing that anybody knows."""

    def __init__(self, data: Any) -> None:
        self.data = data


class Slots:
    """Without a ``__dict__``; ``data`` is pickled by its ``__getstate__``."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getstate__(self) -> Any:
        return (None, {"data": self.data})

    def __repr__(self) -> str:
        return f"Slots({self.data})"


class OwnMapping(collections.abc.Mapping[Any, Any]):
    """Cannot be changed."""

    def __init__(self, inner: dict[Any, Any]) -> None:
        self.inner = inner

    def __getitem__(self, name: Any) -> Any:
        return self.inner[name]

    def __iter__(self) -> Any:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def noted(**inner: Any) -> OwnDict:
    made = OwnDict(inner)
    made.note = "from here"
    return made


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


TENSORS: dict[str, Callable[[int], Any]] = {
    "a view": lambda i: (torch.arange(12) + i)[2:9:3],
    "no elements": lambda i: torch.zeros(0, 3),
    "no dimension": lambda i: torch.tensor(i),
    "transposed": lambda i: (torch.arange(6) + i).reshape(2, 3).T,
    "expanded": lambda i: torch.tensor([float(i)]).expand(5),
    "channels last": lambda i: torch.full((2, 3, 4, 5), float(i)).contiguous(memory_format=torch.channels_last),
    "bool": lambda i: torch.tensor([True, False, i > 0]),
    "bfloat16": lambda i: torch.full((3,), i, dtype=torch.bfloat16),
    "float8": lambda i: torch.full((3,), float(i)).to(torch.float8_e4m3fn),
    "uint16": lambda i: torch.tensor([i, 65535], dtype=torch.uint16),
    "complex": lambda i: torch.tensor([1 + 1j * i]),
    "conjugated": lambda i: torch.tensor([1 + 1j * i]).conj(),
    "negated lazily": lambda i: torch.tensor([1 + 1j * i]).conj().imag,
    "sparse": lambda i: torch.eye(3).mul(i + 1).to_sparse(),
    "sparse by rows": lambda i: torch.eye(3).mul(i + 1).to_sparse_csr(),
    "nested": lambda i: torch.nested.nested_tensor([torch.full((2,), float(i)), torch.ones(3)]),
    "quantized": lambda i: torch.quantize_per_tensor(torch.full((3,), float(i)), 0.1, 0, torch.quint8),
    "without memory": lambda i: torch.ones(2, device="meta"),
    "subclass": lambda i: torch.arange(i, i + 3).as_subclass(OwnTensor),
    "parameter": lambda i: torch.nn.Parameter(torch.full((3,), float(i))),
    "size": lambda i: torch.Size([i, 2]),
    "dtype": lambda i: torch.float16,
    "packed": lambda i: pack_sequence([torch.arange(3) + i, torch.arange(2)]),
}
ARRAYS: dict[str, Callable[[int], Any]] = {
    "array": lambda i: np.arange(3) + i,
    "array without elements": lambda i: np.zeros((0, 2)),
    "array without dimension": lambda i: np.array(float(i)),
    "array backwards": lambda i: (np.arange(4) + i)[::-1].copy(),
    "array in fortran order": lambda i: np.asfortranarray(np.arange(6).reshape(2, 3) + i),
    "big-endian array": lambda i: np.array([i, 2], ">i4"),
    "array of uint16": lambda i: np.array([i, 65535], np.uint16),
    "array of float16": lambda i: np.array([i, 2], np.float16),
    "array of text": lambda i: np.array(["a", "b" * i]),
    "array of bytes": lambda i: np.array([b"a", b"b"]),
    "array of times": lambda i: np.array(["2020-01-01"], "datetime64[D]") + i,
    "array of objects": lambda i: np.array([i, "a", None, [1]], dtype=object),
    "array of arrays": lambda i: np.array([np.arange(2), np.arange(3)], dtype=object),
    "structured array": lambda i: np.array([(i, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "structured array with text": lambda i: np.array([(i, "x")], dtype=[("a", "i4"), ("b", "U3")]),
    "structured array with objects": lambda i: np.array([(i, None)], dtype=[("a", "i4"), ("b", object)]),
    "record array": lambda i: np.rec.array([(i, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "masked array": lambda i: np.ma.masked_array([i, 2], [True, False]),
    "matrix": lambda i: np.arange(4).reshape(2, 2).view(OwnArray),
    "a number of numpy's": lambda i: np.float32(i),
    "a time of numpy's": lambda i: np.datetime64("2020-01-01") + i,
    "a text of numpy's": lambda i: np.str_("a"),
    "a record of numpy's": lambda i: np.array([(i, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
}
OBJECTS: dict[str, Callable[[int], Any]] = {
    "None": lambda i: None,
    "nothing": lambda i: (),
    "ellipsis": lambda i: ...,
    "int": lambda i: i,
    "an int too large": lambda i: 2**70 + i,
    "bool": lambda i: i > 0,
    "complex": lambda i: 1j * i,
    "bytes": lambda i: b"ab",
    "bytearray": lambda i: bytearray(b"ab"),
    "text": lambda i: "a" * i,
    "half a character": lambda i: "\ud800",
    "own text": lambda i: OwnText("a"),
    "own int": lambda i: OwnInt(i),
    "set": lambda i: {i, 7},
    "frozenset": lambda i: frozenset([i, 7]),
    "range": lambda i: range(i, i + 2),
    "slice": lambda i: slice(i, 3),
    "decimal": lambda i: decimal.Decimal(i),
    "fraction": lambda i: fractions.Fraction(i, 3),
    "date": lambda i: datetime.date(2020, 1, 1 + i),
    "uuid": lambda i: uuid.UUID(int=i),
    "path": lambda i: pathlib.PurePosixPath("/a"),
    "enum": lambda i: Color(i % 2),
    "enum of ints": lambda i: Level(i % 2),
    "dataclass": lambda i: Record("r", torch.tensor(i)),
    "dataclass, frozen": lambda i: Frozen(torch.tensor(i)),
    "namedtuple": lambda i: Pair(torch.tensor(i), "a"),
    "namedtuple in namedtuple": lambda i: Pair(Pair(i, 1.5), [np.arange(2)]),
    "own tuple": lambda i: OwnTuple([i, 1.5]),
    "own list": lambda i: OwnList([i, 1.5]),
    "own dict": lambda i: noted(a=torch.tensor(i)),
    "own mapping": lambda i: OwnMapping({"a": i}),
    "ordered dict": lambda i: collections.OrderedDict(b=i, a=1),
    "default dict": lambda i: collections.defaultdict(list, a=i),
    "counter": lambda i: collections.Counter("aab"),
    "chain map": lambda i: collections.ChainMap({"a": i}, {"b": 1}),
    "user dict": lambda i: collections.UserDict(a=i),
    "user list": lambda i: collections.UserList([i, 1]),
    "deque": lambda i: collections.deque([i, 1], maxlen=5),
    "namespace": lambda i: types.SimpleNamespace(a=torch.tensor(i)),
    "object": lambda i: Plain(torch.tensor(i)),
    "object with slots": lambda i: Slots(i),
    "class": lambda i: Plain,
    "function": lambda i: noted,
    "partial function": lambda i: functools.partial(noted, a=i),
    "exception": lambda i: ValueError("as a sample"),
    "image": lambda i: Image.new("RGB", (2, 2), (i, 0, 0)),
    "deep": lambda i: {"a": [{"b": (torch.tensor(i), {"c": [np.float32(i), "t"]})}]},
    "keys of all kinds": lambda i: {1: i, "a": i, None: i, (1, 2): i},
    "one thing twice": lambda i: [shared := torch.tensor([i]), shared],
}
SENDABLE = TENSORS | ARRAYS | OBJECTS
