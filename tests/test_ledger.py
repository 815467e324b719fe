"""Digests: equal content gives equal digests in every process, other content another, at a bounded cost."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken import ledger
from unbroken.ledger import digest, fold

ROOT = Path(__file__).parent.parent


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    name: str
    data: Any


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class NoPickle:
    def __reduce__(self) -> Any:
        raise RuntimeError("holds a handle")


class OwnTensor(torch.Tensor):
    pass


def sparse(value: float, at: int = 0) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[at]]), torch.tensor([value]), (3,), check_invariants=True)


# Each makes, from a number, one value whose content is that number's.
MAKERS: dict[str, Any] = {
    "int": lambda i: i,
    "large int": lambda i: 2**80 + i,
    "float": lambda i: i + 0.5,
    "complex": lambda i: complex(i, 1),
    "text": lambda i: f"text {i}",
    "surrogate": lambda i: f"\udcff{i}",
    "bytes": lambda i: b"%d" % i,
    "bytearray": lambda i: bytearray(b"%d" % i),
    "bool tensor": lambda i: torch.tensor([i % 2 == 0, i % 4 < 2, i % 8 < 4]),
    "bfloat16": lambda i: torch.tensor([i, 1], dtype=torch.bfloat16),
    "bfloat16, no dimension": lambda i: torch.tensor(i, dtype=torch.bfloat16),
    "float8": lambda i: torch.tensor([i, 1], dtype=torch.float32).to(torch.float8_e4m3fn),
    "complex64": lambda i: torch.tensor([complex(i, 2)]),
    "conjugate": lambda i: torch.tensor([complex(i, 2)]).conj(),
    "negated": lambda i: torch.tensor([complex(1, i)]).conj().imag,
    "bfloat16, one apart": lambda i: torch.tensor([[i, 1]], dtype=torch.bfloat16)[:, 0],
    "no dimension": lambda i: torch.tensor(i),
    "transposed": lambda i: torch.arange(i, i + 6).reshape(2, 3).T,
    "expanded": lambda i: torch.tensor([i]).expand(4),
    "leaf with gradient": lambda i: torch.tensor([float(i)], requires_grad=True),
    "parameter": lambda i: torch.nn.Parameter(torch.tensor([float(i)])),
    "subclass": lambda i: torch.tensor([i]).as_subclass(OwnTensor),
    "sparse": lambda i: sparse(float(i)),
    "sparse, nearly equal": lambda i: sparse(1 + i * 1e-6),
    "sparse, place": lambda i: sparse(1.0, i % 3),
    "sparse, many": lambda i: torch.cat([torch.ones(600), torch.tensor([float(i)]), torch.ones(600)]).to_sparse(),
    "array": lambda i: np.array([i, 0]),
    "array of text": lambda i: np.array(["a", str(i)]),
    "array of times": lambda i: np.array([i], "datetime64[s]"),
    "array of objects": lambda i: np.array([f"{i}", None], dtype=object),
    "structured array": lambda i: np.array([(i, 0.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "masked array": lambda i: np.ma.masked_array([i, 2], [False, True]),
    "backwards": lambda i: np.arange(i, i + 5)[::-1],
    "fortran": lambda i: np.asfortranarray(np.arange(i, i + 6).reshape(2, 3)),
    "numpy scalar": lambda i: np.float32(i),
    "numpy text": lambda i: np.str_(i),
    "list": lambda i: [1, [i]],
    "tuple": lambda i: (i, None),
    "namedtuple": lambda i: Pair(1, i),
    "dict": lambda i: {"a": {"b": [i]}},
    "key": lambda i: {i: 0},
    "key that is no text of UTF-8": lambda i: {f"\udcff{i}": np.zeros(1)},
    "features": lambda i: {"a": np.array([i]), "b": torch.tensor([[0.5]]), "c": "text", "d": torch.zeros(9000)},
    "negated feature": lambda i: {"a": torch.tensor([complex(1, i)] * 2).conj().imag},
    "ordered dict": lambda i: collections.OrderedDict(a=i),
    "mapping": lambda i: MappingProxyType({"a": i}),
    "user dict": lambda i: collections.UserDict(a=torch.tensor(i)),
    "set": lambda i: {i, "x", (1, 2)},
    "frozenset": lambda i: frozenset({f"{i}", "x", "y"}),
    "dataclass": lambda i: Record("r", [torch.tensor(i)]),
    "object": lambda i: Plain(i),
    "date": lambda i: datetime.date(2000, 1, 1 + i % 28),
}


@pytest.mark.parametrize("name", MAKERS)
def test_equal_content_has_an_equal_digest(name: str) -> None:
    assert digest(MAKERS[name](5)) == digest(MAKERS[name](5))


@pytest.mark.parametrize("name", MAKERS)
def test_other_content_has_another_digest(name: str) -> None:
    assert digest(MAKERS[name](5)) != digest(MAKERS[name](6))


def test_values_that_python_calls_equal_are_told_apart_by_type() -> None:
    values: list[Any] = [1, 1.0, True, "1", b"1", None, 0, 0.0, -0.0, "", b"", (1,), [[1]], {1: 1}]
    assert len({digest(value) for value in values}) == len(values)


@pytest.mark.parametrize("value", [float("nan"), torch.tensor([float("nan")]), np.array([np.nan]), [float("nan")]])
def test_nan_is_equal_to_itself(value: Any) -> None:
    assert digest(value) == digest(value)


LAYOUTS = {
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed twice": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "part of a larger one": lambda t: torch.cat([t, t], 3)[..., : t.shape[3]],
    "with gradient": lambda t: t.clone().requires_grad_() if t.dtype.is_floating_point or t.is_complex() else t,
    "conjugated twice": lambda t: t.conj().resolve_conj().conj() if t.is_complex() else t,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.cfloat])
@pytest.mark.parametrize("side", [3, 40])
def test_content_counts_and_layout_does_not(side: int, dtype: torch.dtype, layout: str) -> None:
    """Side 40 lies beyond the bytes that are read."""
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 2, (2, 3, side, side), generator=generator).to(dtype)
    assert digest(LAYOUTS[layout](tensor)) == digest(tensor)


def test_a_tensor_and_an_array_of_the_same_content_are_the_same() -> None:
    assert digest(torch.arange(5)) == digest(np.arange(5))


def test_an_array_is_the_same_whether_it_lies_in_memory_or_in_a_file(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "rows", np.int32, "w+", shape=(50, 200))
    mapped[:] = np.arange(10_000).reshape(50, 200)
    assert digest(mapped[3]) == digest(np.array(mapped[3]))
    assert digest(mapped) == digest(np.array(mapped))


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_a_digest_knows_how_many_elements_there_are(make: Any) -> None:
    assert len({digest(make(n)) for n in (0, 1, 2, 3)}) == 4
    assert len({digest(make(n)) for n in (5_000, 5_001, 50_000, 50_001)}) == 4


def test_values_without_content_of_their_own_count_by_their_type() -> None:
    assert digest(NoPickle()) == digest(NoPickle())
    assert digest(NoPickle()) != digest(lambda: None)
    assert digest(torch.zeros(2, device="meta")) == digest(torch.zeros(2, device="meta"))


def test_a_sample_that_contains_itself_has_a_digest() -> None:
    """torch's loader hands it out, so it must not end the run."""
    sample: list[Any] = [1]
    sample.append(sample)
    assert digest(sample) == digest(sample)


def test_digests_never_change_because_positions_hold_them() -> None:
    known = [0x9E7B6DE7BE6A8063, 0xAA71CEE2AADFD727, 0x7D104F302F9D93FC]
    assert [digest(v) for v in (0, "a", torch.arange(3))] == known
    assert fold(0, [1, 2]) == 0x7FB6F0C094F81C5D


def test_dtypes_shapes_and_the_bounds_of_fields_count_too() -> None:
    values = [
        np.zeros(4, np.int32),
        np.zeros(4, np.float32),
        np.zeros((2, 2), np.int32),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, dtype=torch.float16),
        torch.zeros(2, 2, dtype=torch.bfloat16),
        {"a": np.array([1, 0, 98, 0, 2], np.uint8)},
        {"a": np.array([1], np.uint8), "b": np.array([2], np.uint8)},
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.zeros(4, dtype=torch.int32)) == digest(values[0])
    negated = torch._neg_view(torch.ones(3))
    assert digest(negated) == digest(np.full(3, -1, np.float32)) == digest(torch.full((3,), -1.0))


SCRIPT = """
from tests.test_ledger import MAKERS, Plain, Record
from unbroken.ledger import digest
print([digest(make(5)) for make in MAKERS.values()])
print(digest(Record("words", {f"word {i}" for i in range(20)})))
print(digest(Plain({f"word {i}" for i in range(20)})))
"""


def test_digests_are_the_same_in_every_process() -> None:
    """Whatever seed Python's hashes have there: of sets in samples, and of sets in objects that are samples."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    assert len({process.communicate(timeout=60)[0] for process in started}) == 1
    assert [process.returncode for process in started] == [0, 0]


# The cap


@contextlib.contextmanager
def bytes_read() -> Iterator[list[int]]:
    """How many bytes each call of the hash is given."""
    read: list[int] = []
    original = ledger._hash

    def counting(data: Any, seed: int = 0) -> int:
        if seed != 6:  # dtype and shape, told once
            read.append(memoryview(data).nbytes)
        return original(data, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "_hash", counting)
        yield read


@given(nbytes=st.integers(0, 300_000), cap=st.sampled_from([1024, 4096, 16384]))
def test_no_more_than_the_cap_is_read_of_an_array(nbytes: int, cap: int) -> None:
    with bytes_read() as read:
        digest(np.zeros(nbytes, np.uint8), cap)
    assert min(nbytes, cap // 2) <= sum(read) <= cap


def test_no_more_than_the_cap_is_read_of_a_mapped_file(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "rows", np.uint8, "w+", shape=(1 << 20,))
    with bytes_read() as read:
        digest(mapped, 16384)
    assert sum(read) <= 16384


@pytest.mark.parametrize("at", [0, 1, -1, -2])
@pytest.mark.parametrize("nbytes", [16_384, 16_385, 100_003, 1 << 20])
def test_a_change_at_either_end_shows_beyond_the_cap(nbytes: int, at: int) -> None:
    array = np.zeros(nbytes, np.uint8)
    changed = array.copy()
    changed[at] = 1
    assert digest(changed) != digest(array)


def test_what_is_read_lies_all_over_the_data() -> None:
    """A change of any two fifths of the data shows."""
    array = np.zeros(1_000_000, np.uint8)
    for start in range(0, 600_001, 50_000):
        changed = array.copy()
        changed[start : start + 400_000] = 1
        assert digest(changed) != digest(array)


# The rolling digest


def test_the_rolling_digest_depends_on_what_came_and_on_its_order() -> None:
    assert len({fold(0, [1, 2]), fold(0, [2, 1]), fold(0, [1]), fold(1, [1, 2]), fold(0, [])}) == 5


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1)))
def test_the_rolling_digest_has_64_bits(ledger: int, digests: list[int]) -> None:
    assert 0 <= fold(ledger, digests) < 2**64
