"""Batches on their way between processes: what arrives is what was sent, and collation is torch's."""

from __future__ import annotations

import collections
import dataclasses
import enum
import gc
import math
import pickle
import threading
import warnings
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data._utils.collate as torch_collate
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch.utils.data import default_collate

from unbroken.engine.ring import Ring
from unbroken.engine.wire import RowLayout, collate, decode, encode, stack_rows, stacked
from unbroken.errors import UnsendableBatch

pytestmark = [
    # torch tells of these once, whoever does it.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def sent(batch: Any) -> Any:
    """A batch as it arrives: in memory of its own, which was something else before."""
    encoded = encode(batch)
    memory = np.full(encoded.nbytes, 0xAB, np.uint8)
    encoded.write(memory)
    return decode(encoded.data, memory if encoded.nbytes else None)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure, layout of tensors and bits; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        about = [(t.dtype, t.shape, t.layout, t.requires_grad) for t in (a, b)]
        if about[0] != about[1]:
            return False
        if a.layout is not torch.strided:
            return same(a.to_dense(), b.to_dense())
        return bits(a) == bits(b)
    if isinstance(a, np.ndarray) and a.dtype.hasobject:
        return a.dtype == b.dtype and a.shape == b.shape and same(a.tolist(), b.tolist())
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, collections.abc.Mapping):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return same(vars(a), vars(b))
    return repr(a) == repr(b) or a == b


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    name: str
    data: Any


class Color(enum.Enum):
    RED = 1


class OwnTensor(torch.Tensor):
    pass


class OwnArray(np.ndarray):
    pass


class OwnDict(dict):
    pass


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, shape and layout."""
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    data = bytearray(draw(st.binary(min_size=1, max_size=4)) * (math.prod(shape) * dtype.itemsize))
    count = math.prod(shape) * dtype.itemsize
    data = data[:count] if dtype is not torch.bool else bytearray(byte % 2 for byte in data[:count])
    flat = torch.frombuffer(data, dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    layout = draw(st.sampled_from(["as it is", "permuted", "strided", "expanded", "leaf", "conj"]))
    if layout == "permuted":
        return tensor.permute(draw(st.permutations(range(len(shape)))))
    if layout == "strided" and shape:
        return torch.stack([tensor, tensor], -1)[..., 0]
    if layout == "expanded":
        return tensor.expand(2, *shape)
    if layout == "leaf" and (dtype.is_floating_point or dtype.is_complex):
        return tensor.detach().requires_grad_()
    return tensor.conj() if layout == "conj" and dtype in (torch.complex64, torch.complex128) else tensor


DTYPES = st.one_of(
    arrays.boolean_dtypes(), arrays.integer_dtypes(), arrays.unsigned_integer_dtypes(), arrays.floating_dtypes(),
    arrays.complex_number_dtypes(), arrays.datetime64_dtypes(), arrays.timedelta64_dtypes(),
    arrays.byte_string_dtypes(), arrays.unicode_string_dtypes(max_len=4),
    arrays.array_dtypes(min_size=1, max_size=2),
)  # fmt: skip


@st.composite
def numpy_arrays(draw: st.DrawFn) -> Any:
    """Any dtype, byte order and layout."""
    array = draw(arrays.arrays(draw(DTYPES), arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)))
    layout = draw(st.sampled_from(["as it is", "transposed", "backwards", "fortran", "read-only"]))
    if layout == "transposed":
        return array.T
    if layout == "backwards" and array.ndim:
        return array[::-1]
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "read-only":
        array.flags.writeable = False
    return array


LEAVES = st.one_of(
    tensors(), numpy_arrays(), st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4),
    st.binary(max_size=4), st.complex_numbers(), st.frozensets(st.integers(), max_size=3), st.sets(st.text(max_size=2)),
    st.just(Color.RED), st.builds(np.float32, st.floats(width=32)),
)  # fmt: skip
BATCHES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Record, st.text(max_size=3), inner),
        st.lists(inner, max_size=2).map(collections.deque),
        st.dictionaries(st.text(max_size=3), inner, max_size=2).map(OwnDict),
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(BATCHES)
def test_a_batch_arrives_as_it_was(batch: Any) -> None:
    assert same(sent(batch), batch)


@given(BATCHES)
def test_parts_do_not_overlap_and_stay_inside(batch: Any) -> None:
    encoded = encode(batch)
    end = 0
    for offset, part in encoded.parts:
        assert offset >= end
        assert offset % 64 == 0
        end = offset + part.nbytes
    assert end == encoded.nbytes


STRIDES = {
    "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels last 3d": torch.rand(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d),
    "transposed": torch.rand(3, 4).T,
    "one image, channels last": torch.rand(1, 3, 4, 5).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", STRIDES)
def test_the_order_of_dimensions_in_memory_is_kept(name: str) -> None:
    tensor = STRIDES[name]
    again = sent([tensor])[0]
    assert again.stride() == tensor.stride()
    assert torch.equal(again, tensor)


def test_arrays_in_fortran_order_stay_so() -> None:
    array = np.asfortranarray(np.arange(12).reshape(3, 4))
    again = sent({"a": array})["a"]
    assert again.flags.f_contiguous
    assert not again.flags.c_contiguous
    assert (again == array).all()


@pytest.mark.parametrize("make", [lambda: torch.arange(4), lambda: np.arange(4)], ids=["tensor", "array"])
def test_what_arrives_can_be_changed_and_what_was_sent_stays(make: Any) -> None:
    original = make()
    again = sent(original)
    again[0] = 9
    assert again.tolist() == [9, 1, 2, 3]
    assert original.tolist() == [0, 1, 2, 3]


VIEWS = {
    "tensor": (lambda: torch.arange(8), lambda x: x),
    "part of a tensor": (lambda: torch.arange(8), lambda x: x[2:3]),
    "array": (lambda: np.arange(8), lambda x: x),
    "part of an array": (lambda: np.arange(8), lambda x: x[2:3]),
    "reshaped array": (lambda: np.arange(8).reshape(2, 4), lambda x: x.reshape(4, 2).T[1:]),
    "structured array": (lambda: np.zeros(4, "i4,f8"), lambda x: x["f1"]),
    "tensor of an array": (lambda: np.arange(8), torch.from_numpy),
    "array of a tensor": (lambda: torch.arange(8), lambda x: x.numpy()[1:]),
    "in a dict": (lambda: {"a": [np.arange(8)]}, lambda x: x["a"][0]),
    "parameter": (lambda: torch.nn.Parameter(torch.rand(4)), lambda x: x.detach()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_whatever_is_kept_of_a_batch_keeps_its_memory(name: str) -> None:
    """Case 37: the memory is that of a slot, which is written again when nobody holds it."""
    make, keep = VIEWS[name]
    encoded = encode(make())
    ring = Ring(lambda *announced: None, lambda *retracted: None)
    ring.want(encoded.nbytes)
    slot = ring.acquire()
    assert slot is not None
    lease = slot.lease(encoded.nbytes)
    encoded.write(lease)
    watch = weakref.ref(lease)
    kept = keep(decode(encoded.data, lease))
    del lease
    gc.collect()
    assert watch() is not None, "the memory is given away while it can be seen"
    del kept
    gc.collect()
    assert watch() is None, "the memory is lost"


def test_one_tensor_in_two_places_arrives_as_one() -> None:
    tensor = torch.arange(3)
    again = sent({"a": tensor, "b": [tensor]})
    assert again["a"] is again["b"][0]


def test_a_leaf_that_requires_grad_arrives_as_one() -> None:
    again = sent(torch.ones(2, requires_grad=True))
    assert again.requires_grad
    assert again.is_leaf
    again.sum().backward()
    assert again.grad.tolist() == [1, 1]


def test_a_tensor_in_the_middle_of_a_graph_is_refused_in_torchs_words() -> None:
    with pytest.raises(RuntimeError, match=r"^Cowardly refusing to serialize non-leaf tensor which requires_grad"):
        encode([torch.ones(2, requires_grad=True) * 2])


UNUSUAL: dict[str, Any] = {
    "sparse": torch.eye(3).to_sparse(),
    "subclass": torch.arange(3).as_subclass(OwnTensor),
    "parameter": torch.nn.Parameter(torch.rand(3)),
    "buffer": torch.nn.Buffer(torch.rand(3)),
    "meta": torch.ones(2, device="meta"),
    "objects": np.array([None, "a", [1]], dtype=object),
    "record array": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "structured": np.array([(1, [2.0, 3.0])], dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "aligned": np.zeros(3, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "masked": np.ma.masked_array([1, 2], [True, False]),
    "own array": np.arange(3).view(OwnArray),
    "namedtuple": Pair(torch.ones(1), [None]),
    "ordered": collections.OrderedDict(b=torch.ones(1), a=1),
    "default": collections.defaultdict(list, a=[torch.ones(1)]),
    "dataclass": Record("r", {"x": np.arange(3)}),
    "range": range(3),
    "slice": slice(1, 2),
    "type": Record,
    "function": math.sqrt,
    "device": torch.device("cpu"),
    "dtype": torch.float16,
    "size": torch.Size([1, 2]),
    "generator state": torch.Generator().get_state(),
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch rebuilds it without being asked
def test_unusual_parts_arrive_as_they_were(name: str) -> None:
    value = UNUSUAL[name]
    again = sent([value])[0]
    if name == "meta":
        assert (type(again), again.device, again.shape) == (type(value), value.device, value.shape)
    else:
        assert same(again, value)
    if name == "masked":
        assert again.mask.tolist() == [True, False]
    if name == "default":
        assert again.default_factory is list


def test_an_array_from_a_file_arrives_as_an_array(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "rows", np.int32, "w+", shape=(4, 3))
    mapped[:] = np.arange(12).reshape(4, 3)
    again = sent(mapped[1:3])
    assert isinstance(again, np.ndarray)
    assert again.tolist() == [[3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize("value", [lambda: None, (i for i in ()), threading.Lock()], ids=["lambda", "gen", "lock"])
def test_what_cannot_be_pickled_is_named_with_its_place_in_the_batch(value: Any) -> None:
    """Case 34: in the words of pickle."""
    kind, text = outcome(pickle.dumps, value)
    assert kind != "value"
    with pytest.raises(UnsendableBatch) as caught:
        encode({"fine": torch.ones(1), "meta": [1, Pair("a", value)]})
    assert str(caught.value).startswith(
        f"A batch holds something that cannot be sent from a worker process, at ['meta'][1][1]: {kind}: {text}.\n"
    )
    with pytest.raises(UnsendableBatch, match=f"from a worker process: {kind}"):
        encode(value)


def test_what_is_nested_too_deeply_is_told() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnsendableBatch, match="nested too deeply"):
        encode(deep)


@pytest.mark.parametrize("name", ["tensor", "int", "dict"])
def test_a_function_that_a_program_put_into_torchs_collation_is_used(name: str, monkeypatch: Any) -> None:
    kinds: dict[str, Any] = {"tensor": torch.Tensor, "int": int, "dict": dict}

    def as_tuple(samples: Any, *, collate_fn_map: Any = None) -> Any:
        return ("own", *samples)

    monkeypatch.setitem(torch_collate.default_collate_fn_map, kinds[name], as_tuple)
    samples = [{"a": torch.ones(1), "b": 1}, {"a": torch.zeros(1), "b": 2}]
    assert same(through_a_slot(samples), default_collate(samples))
    assert RowLayout.of({"a": torch.ones(1)}) is None
    assert stack_rows([{"a": torch.ones(1)}]) is None


@pytest.mark.parametrize("name", ["empty", "stacked"])
def test_a_default_device_does_not_move_what_arrives(name: str) -> None:
    with torch.device("meta"):
        found = sent([torch.zeros(0, 3, device="cpu")])[0] if name == "empty" else None
        found = stack_rows([{"a": np.ones(2)}])["a"] if found is None else found
    assert found.device.type == "cpu"


# Collation


def outcome(act: Any, samples: list[Any]) -> tuple[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch gives each of them once a process
            return "value", act(samples)
    except Exception as error:
        return type(error).__name__, str(error)


def through_a_slot(samples: list[Any]) -> Any:
    """As a worker does it: samples that do not stack are collated by torch instead."""
    encoded = encode(collate(samples))
    memory = np.full(encoded.nbytes, 0xAB, np.uint8)
    try:
        encoded.write(memory)
    except (RuntimeError, ValueError):
        return sent(default_collate(samples))
    return decode(encoded.data, memory if encoded.nbytes else None)


def assert_collated_as_torch_does(samples: list[Any], *, to_the_letter: bool = True) -> None:
    theirs, ours = outcome(default_collate, samples), outcome(through_a_slot, samples)
    assert ours[0] == theirs[0]
    if theirs[0] == "value":
        assert same(ours[1], theirs[1]), (ours[1], theirs[1])
    elif to_the_letter:
        assert ours[1] == theirs[1]
    here = outcome(lambda samples: stacked(collate(samples)), samples)
    assert here[0] == theirs[0] or theirs[0] != "value"
    assert theirs[0] != "value" or same(here[1], theirs[1]), (here[1], theirs[1])


COLLATED: dict[str, list[Any]] = {
    "tensors": [torch.arange(3), torch.arange(3)],
    "one tensor": [torch.rand(2, 2)],
    "no dimension": [torch.tensor(1), torch.tensor(2)],
    "empty tensors": [torch.zeros(0, 3), torch.zeros(0, 3)],
    "bfloat16": [torch.ones(2, dtype=torch.bfloat16)] * 2,
    "mixed dtypes": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    "mixed shapes": [torch.ones(2), torch.ones(3)],
    "mixed shapes, the first empty": [torch.ones(0), torch.ones(3)],
    "mixed shapes, the last empty": [torch.ones(3), torch.ones(0)],
    "shapes that broadcast": [torch.ones(2, 1), torch.ones(1, 2)],
    "boxes, none in the first": [{"boxes": torch.zeros(0, 4)}, {"boxes": torch.ones(2, 4)}],
    "tensor and array": [torch.ones(2), np.ones(2, np.float32)],
    "tensor and number": [torch.tensor(1), 2],
    "subclass": [torch.ones(2).as_subclass(OwnTensor)] * 2,
    "the second a subclass": [torch.ones(2), torch.ones(2).as_subclass(OwnTensor)],
    "transposed": [torch.arange(6).reshape(2, 3).T] * 2,
    "conjugated": [torch.tensor([1 + 2j]).conj()] * 2,
    "arrays": [np.arange(3), np.arange(3)],
    "arrays without dimension": [np.array(1.5), np.array(2.5)],
    "arrays, mixed dtypes": [np.ones(2, np.float32), np.ones(2, np.float64)],
    "arrays, mixed shapes": [np.ones(2), np.ones(3)],
    "arrays, the first empty": [np.ones((0, 2)), np.ones((3, 2))],
    "arrays of uint16": [np.ones(2, np.uint16)] * 2,
    "arrays, big-endian": [np.ones(2, ">f4")] * 2,
    "arrays backwards": [np.arange(4)[::-1].copy()] * 2,
    "arrays of text": [np.array(["a"])] * 2,
    "arrays of objects": [np.array([None])] * 2,
    "bool arrays": [np.array([True, False])] * 2,
    "complex arrays": [np.array([1j])] * 2,
    "ints": [1, 2],
    "bools": [True, False],
    "floats": [1.0, 2.5],
    "int and float": [1, 2.5],
    "large ints": [2**62, 1],
    "too large ints": [2**70, 1],
    "complex": [1j, 2j],
    "numpy scalars": [np.float32(1), np.float32(2)],
    "numpy ints": [np.int8(1), np.int8(2)],
    "numpy bools": [np.bool_(True), np.bool_(False)],
    "numpy text": [np.str_("a"), np.str_("b")],
    "text": ["a", "b"],
    "bytes": [b"a", b"b"],
    "none": [None, None],
    "objects": [object(), object()],
    "none among numbers": [{"a": 1}, {"a": None}],
    "dicts": [{"a": torch.ones(2), "b": "x"}, {"a": torch.zeros(2), "b": "y"}],
    "dicts with other keys": [{"a": 1}, {"b": 1}],
    "dicts with more keys": [{"a": 1}, {"a": 2, "b": 3}],
    "dict and list": [{"a": 1}, [1]],
    "empty dicts": [{}, {}],
    "keys that are numbers": [{1: 2.0}, {1: 3.0}],
    "own dicts": [OwnDict(a=torch.ones(1)), OwnDict(a=torch.ones(1))],
    "ordered dicts": [collections.OrderedDict(a=1), collections.OrderedDict(a=2)],
    "user dicts": [collections.UserDict(a=1), collections.UserDict(a=2)],
    "tuples": [(1, "a"), (2, "b")],
    "tuples of text": [("a", b"b"), ("c", b"d")],
    "tuples of numpy text": [(np.str_("a"), 1), (np.str_("b"), 2)],
    "tuples in tuples": [((1, ("a",)), torch.ones(1)), ((2, ("b",)), torch.ones(1))],
    "lists": [[1, 2.0], [3, 4.0]],
    "lists of text": [["a"], ["b"]],
    "tuple and list": [(1, 2), [3, 4]],
    "list and number": [[1], 2],
    "tuples of other lengths": [(1, 2), (1,)],
    "lists of other lengths": [[1], [1, 2]],
    "empty tuples": [(), ()],
    "empty lists": [[], []],
    "named": [Pair(1, "a"), Pair(2, "b")],
    "named in dicts": [{"p": Pair(torch.ones(1), [1])}, {"p": Pair(torch.zeros(1), [2])}],
    "torch sizes": [torch.Size([1, 2]), torch.Size([3, 4])],
    "ranges": [range(2), range(2)],
    "deques": [collections.deque([1]), collections.deque([2])],
    "dataclasses": [Record("a", 1), Record("b", 2)],
    "sets": [{1}, {2}],
    "nothing": [],
    "sparse": [torch.eye(2).to_sparse()] * 2,
    "requiring grad": [torch.ones(2, requires_grad=True)] * 2,
    "the second requiring grad": [torch.ones(2), torch.ones(2, requires_grad=True)],
    "shapes of one of many": [{"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(2), "b": torch.ones(2)}],
}


@pytest.mark.parametrize("name", [name for name in COLLATED if "grad" not in name])
def test_collation_is_torchs(name: str) -> None:
    assert_collated_as_torch_does(COLLATED[name])


@pytest.mark.parametrize("name", ["requiring grad", "the second requiring grad"])
def test_a_batch_that_is_part_of_a_graph_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"requires?.grad"):
        through_a_slot(COLLATED[name])


ROWS = st.sampled_from(["i8", "f4", "f8", "?", "u1", "c8", "f2", "u2"])


def samples_like(value: Any, number: int) -> Any:
    """Another sample of the same structure."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value) if number % 2 else value.clone()
    if isinstance(value, np.ndarray):
        return np.zeros_like(value) if number % 2 else value.copy()
    if isinstance(value, dict):
        return {name: samples_like(inner, number) for name, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(samples_like(inner, number) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(samples_like(inner, number) for inner in value)
    return value


SAMPLES = st.recursive(
    st.one_of(
        tensors().map(lambda tensor: tensor.detach()),
        ROWS.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=2, min_side=0))),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.booleans(),
        st.text(max_size=2),
        st.binary(max_size=2),
        st.just(np.float32(1)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=4,
)


@given(SAMPLES, st.integers(1, 4))
def test_collation_of_samples_of_one_structure_is_torchs(sample: Any, number: int) -> None:
    assert_collated_as_torch_does([samples_like(sample, i) for i in range(number)])


@given(st.lists(SAMPLES, min_size=2, max_size=3))
def test_collation_of_samples_of_any_structure_is_torchs(samples: list[Any]) -> None:
    """The same batch, or an error of the same type."""
    assert_collated_as_torch_does(samples, to_the_letter=False)


# Rows of a stream


FIELDS = st.dictionaries(
    st.text(max_size=3),
    ROWS.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=2, max_side=4))),
    min_size=1,
    max_size=4,
)


@given(FIELDS, st.integers(1, 5), st.data())
def test_rows_written_into_their_places_are_the_batch_that_torch_collates(
    row: dict[str, Any], number: int, data: st.DataObject
) -> None:
    """By several writers, in any order."""
    rows = [samples_like(row, i) for i in range(number)]
    if data.draw(st.booleans()):
        rows = [{name: torch.from_numpy(np.array(value)) for name, value in row.items()} for row in rows]
    layout = RowLayout.of(rows[0])
    if layout is None:
        assert any(np.asarray(value).dtype == np.uint16 for value in row.values())
        return
    assert all(RowLayout.of(row) == layout for row in rows)
    memory = np.full(layout.nbytes(number), 0xAB, np.uint8)
    order = data.draw(st.permutations(range(number)))
    assert all(layout.places(memory, number).put(place, rows[place]) for place in order)
    assert same(layout.batch(memory, number), default_collate(rows))
    assert same(stack_rows(rows), default_collate(rows))


@pytest.mark.parametrize(
    "row",
    [
        {},
        None,
        [np.ones(2)],
        {"a": 1},
        {"a": [1]},
        {"a": np.ones(2), "b": "text"},
        {1: np.ones(2)},
        {"a": np.zeros(0)},
        {"a": np.array([None])},
        {"a": np.array(["x"])},
        {"a": torch.eye(2).to_sparse()},
        {"a": torch.ones(2, requires_grad=True)},
        {"a": torch.ones(2).as_subclass(OwnTensor)},
        OwnDict(a=np.ones(2)),
    ],
    ids=str,
)
def test_rows_that_are_no_dict_of_plain_arrays_have_no_layout(row: Any) -> None:
    assert RowLayout.of(row) is None
    assert stack_rows([row, row]) is None
    room = RowLayout.of({"a": np.ones(2)}).places(np.zeros(64, np.uint8), 1)  # type: ignore[union-attr]
    assert not room.put(0, row)


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.zeros(3, "i8")},
        {"a": np.zeros(2, "i4")},
        {"a": np.zeros((2, 1), "i8")},
        {"b": np.zeros(2, "i8")},
        {"a": np.zeros(2, "i8"), "b": np.zeros(1)},
    ],
    ids=str,
)
def test_rows_of_another_shape_dtype_or_name_have_another_layout(other: Any) -> None:
    row = {"a": np.zeros(2, "i8")}
    layout = RowLayout.of(row)
    assert layout is not None and RowLayout.of(other) not in (None, layout)
    memory = np.full(64, 0xAB, np.uint8)
    assert not layout.places(memory, 1).put(0, other)
    assert (memory == 0xAB).all()  # nothing of it was written
    assert stack_rows([row, other]) is None


def test_rows_of_a_dtype_that_numpy_lacks_are_stacked_too() -> None:
    rows = [{"a": torch.full((2,), i, dtype=torch.bfloat16)} for i in range(3)]
    assert same(stack_rows(rows), default_collate(rows))


def test_tensors_and_arrays_of_one_dtype_share_a_layout() -> None:
    assert RowLayout.of({"a": np.zeros(2)}) == RowLayout.of({"a": torch.zeros(2, dtype=torch.float64)})
