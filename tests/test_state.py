"""Sealing, and the checks that a position passes before anything of it is used."""

from __future__ import annotations

import base64
import collections
import enum
import json
import math
import pickle
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from unbroken.errors import IncompleteState, InvalidState, StateMismatch, UnsealableState
from unbroken.state import (
    HEADER,
    VERSION,
    Difference,
    check_fingerprint,
    counts_otherwise,
    fields_of_gone,
    parse_header,
    parse_leaf,
    seal,
    unseal,
)

# torch says this once a process, wherever the first such tensor is made.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and bits: NaN equals NaN, -0.0 and 0.0 differ, 1 and True differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype.newbyteorder("=") == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return sorted(map(seal, a)) == sorted(map(seal, b))
    return repr(a) == repr(b)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary(max_size=5) | st.complex_numbers(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
DTYPES = (
    arrays.boolean_dtypes()
    | arrays.integer_dtypes(endianness="<")
    | arrays.unsigned_integer_dtypes(endianness="<")
    | arrays.floating_dtypes(endianness="<")
    | arrays.complex_number_dtypes(endianness="<")
    | arrays.datetime64_dtypes(endianness="<")
    | arrays.timedelta64_dtypes(endianness="<")
    | arrays.byte_string_dtypes(endianness="<", min_len=1, max_len=4)
    | arrays.unicode_string_dtypes(endianness="<", min_len=1, max_len=4)
)
ARRAYS = DTYPES.flatmap(lambda d: arrays.arrays(d, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)))
SCALARS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, (1,))).map(lambda array: array[0])
TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        data = bytes(byte % 2 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


STATES = st.recursive(
    HASHABLE | st.binary(max_size=5).map(bytearray) | ARRAYS | SCALARS | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(TEXT | st.just("!"), inner, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=2)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=8,
)


@given(STATES)
def test_a_sealed_state_comes_back_with_every_type_and_bit(state: Any) -> None:
    text = seal(state)
    json.loads(text)
    assert same(unseal(text), state)


@given(STATES)
def test_a_state_that_went_through_sealing_seals_to_the_same_text(state: Any) -> None:
    assert seal(unseal(seal(state))) == seal(state)


@pytest.mark.parametrize(
    "state",
    [
        2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, [2**63], [0, -(2**70)], [1, True], float("nan"), [math.inf],
        -0.0, complex(math.nan, -0.0), {"!": "tuple"}, {"!": 1, 2: "!"}, {1: "int", "1": "text"}, {(1, ("a",)): {None}},
        np.float64("nan"), np.str_("é"), np.datetime64("NaT"), np.array(["", "ab"]), np.zeros((0, 3)), np.array(5),
        np.longdouble(1) / 3, torch.zeros(0, 3, dtype=torch.int32), torch.tensor(1.5, dtype=torch.bfloat16),
        torch.get_rng_state()[:64], np.random.RandomState(3).get_state(),
    ],
    ids=repr,
)  # fmt: skip
def test_awkward_states_come_back_as_they_were(state: Any) -> None:
    assert same(unseal(seal(state)), state)


@pytest.mark.parametrize(
    "view",
    [
        np.arange(12).reshape(3, 4).T,
        np.arange(12)[::-2],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        torch.arange(12).reshape(3, 4).T,
        torch.arange(3).expand(2, 3),
        torch.arange(8)[::8],
        torch.ones(2, requires_grad=True),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    ],
    ids=[
        "transposed",
        "backwards",
        "fortran",
        "big-endian",
        "tensor transposed",
        "expanded",
        "one apart",
        "leaf",
        "conj",
        "neg",
    ],
)
def test_views_are_sealed_by_their_content(view: Any) -> None:
    again = unseal(seal(view))
    assert again.tolist() == view.tolist()
    assert again.shape == view.shape


def test_sets_seal_to_the_same_text_in_whatever_order_they_were_filled() -> None:
    words = [f"word {i}" for i in range(50)]
    backwards: set[str] = set()
    backwards.update(reversed(words))
    assert seal(set(words)) == seal(backwards)


def test_a_sealed_state_does_not_follow_later_changes() -> None:
    """Case 8: the live buffer, given out by reference and changed in place."""
    state = {"list": [1, 2], "deep": [{"set": {1}}], "bytes": bytearray(b"ab"), "array": np.zeros(3)}
    state |= {"tensor": torch.zeros(3), "plain": ["a", None]}
    sealed, before = seal(state), unseal(seal(state))
    state["list"].append(3)
    state["deep"][0]["set"].add(2)
    state["bytes"][0] = 0
    state["array"][0] = 1
    state["tensor"][0] = 1
    state["plain"].clear()
    assert same(unseal(sealed), before)


def test_an_unsealed_state_can_be_changed_without_reaching_the_sealed_one() -> None:
    sealed = seal({"array": np.zeros(2), "tensor": torch.zeros(2)})
    state = unseal(sealed)
    state["array"][:] = 1
    state["tensor"].fill_(1)
    assert unseal(sealed)["array"].tolist() == unseal(sealed)["tensor"].tolist() == [0, 0]


class Point(NamedTuple):
    x: int


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class Opaque:
    pass


class OwnTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Opaque(), "tests.test_state.Opaque"),
        (len, "builtins.builtin_function_or_method"),
        (int, "builtins.type"),
        (iter([1]), "builtins.list_iterator"),
        (range(3), "builtins.range"),
        (Path("a"), "pathlib.PosixPath"),
        (Point(1), "tests.test_state.Point"),
        (Color.RED, "tests.test_state.Color"),
        (Text("a"), "tests.test_state.Text"),
        (collections.OrderedDict(a=1), "collections.OrderedDict"),
        (np.array([None]), "numpy.ndarray"),
        (np.zeros(1, dtype=[("a", "i4")]), "numpy.ndarray"),
        (torch.nn.Parameter(torch.zeros(1)), "torch.nn.parameter.Parameter"),
        (torch.zeros(1).as_subclass(OwnTensor), "tests.test_state.OwnTensor"),
        (torch.zeros(2, 2).to_sparse(), "torch.Tensor"),
        (torch.zeros(2, device="meta"), "torch.Tensor"),
        (torch.Generator(), "torch._C.Generator"),
    ],
)
def test_what_no_position_can_carry_is_refused_by_path_and_type(value: Any, name: str) -> None:
    state = {"epoch": 1, "readers": [0, {("a", 2): value}]}
    with pytest.raises(UnsealableState) as caught:
        seal(state, "the state_dict() of Reader")
    first = str(caught.value).splitlines()[0]
    path = "the state_dict() of Reader['readers'][1][('a', 2)]"
    assert first == f"{path} is a {name}, which a position cannot carry."


def test_the_refusal_names_the_ways_out() -> None:
    with pytest.raises(UnsealableState, match="Return plain values from state_dict\\(\\): numbers, text, bytes, lists"):
        seal(Opaque())


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ((1, Opaque()), "state[1]"),
        ({Point(1): 2}, "a key of state"),
        ([0.5, [Opaque()]], "state[1][0]"),
        ({"a": {"b": frozenset([Color.RED])}}, "state['a']['b']"),
    ],
)
def test_the_path_leads_through_every_container(state: Any, path: str) -> None:
    with pytest.raises(UnsealableState) as caught:
        seal(state)
    assert str(caught.value).startswith(f"{path} is a ")


def test_a_masked_array_is_refused_or_keeps_its_mask() -> None:
    masked = np.ma.masked_array([1, 2, 3], [False, True, False])
    try:
        again = unseal(seal(masked))
    except UnsealableState:
        return
    assert isinstance(again, np.ma.MaskedArray)
    assert again.tolist() == [1, None, 3]


def nested(depth: int) -> list[Any]:
    state: list[Any] = []
    for _ in range(depth):
        state = [state]
    return state


@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_state_nested_too_deeply_is_refused(depth: int) -> None:
    with pytest.raises(UnsealableState, match="nested too deeply"):
        seal(nested(depth))


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(UnsealableState, match="state contains itself"):
        seal(state)


@pytest.mark.parametrize("state", [{"file": "\udcff.txt"}, {"\udcff.txt": 1}], ids=["value", "key"])
def test_text_with_surrogates_comes_back_or_is_refused_by_name(state: Any) -> None:
    """A file name that is not valid UTF-8 has them."""
    try:
        sealed = seal(state)
    except UnsealableState as error:
        assert "state" in str(error)
    else:
        assert unseal(sealed) == state


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nan",
        '{"!": "unknown", "v": 1}',
        '{"!": "tuple"}',
        '{"!": "int", "v": "x"}',
        '{"!": "bytes", "v": "not base64"}',
        '{"!": "tensor", "dtype": "torch.nothing", "shape": [1], "v": ""}',
        '{"!": "tensor", "dtype": "torch.int64", "shape": [3], "v": "AAAA"}',
        '{"!": "array", "dtype": "<i8", "shape": [3], "v": "AAAA"}',
        '{"!": ["tuple"], "v": []}',
        '{"!": "dict", "v": [[{}, 1]]}',
    ],
)
def test_what_was_not_sealed_is_an_invalid_state(text: str) -> None:
    with pytest.raises(InvalidState):
        unseal(text)


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def test_nothing_in_a_state_is_ever_unpickled() -> None:
    data = base64.b64encode(pickle.dumps(Bomb())).decode()
    for dtype in ("|O", "O"):
        with pytest.raises(InvalidState):
            unseal(json.dumps({"!": "array", "dtype": dtype, "shape": [1], "v": data}))


# The header and the leaves


def header(**fields: Any) -> dict[str, str]:
    return {HEADER: json.dumps({"version": VERSION, "fingerprint": {}, **fields})}


def test_a_header_is_read() -> None:
    assert parse_header(header(kind="map"))["kind"] == "map"


@pytest.mark.parametrize("state", [None, [], "text", 5])
def test_a_position_that_is_no_dict_is_refused(state: Any) -> None:
    with pytest.raises(InvalidState, match=f"dict of str to str, but got a {type(state).__name__}"):
        parse_header(state)


def test_a_state_of_another_loader_is_refused_by_the_keys_it_has() -> None:
    """Case 27: torchdata's, for instance."""
    with pytest.raises(InvalidState, match=r"not a position of unbroken.*found '_sampler_iter_state', '_snapshot'"):
        parse_header({"_snapshot": {}, "_sampler_iter_state": None})


@pytest.mark.parametrize(
    "state",
    [
        {HEADER: ""},
        {HEADER: '{"version": 1, "finger'},
        {HEADER: "[]"},
        {HEADER: 7},
        {HEADER: None},
        {HEADER: '{"fingerprint": {}}'},
        {HEADER: '{"version": "1", "fingerprint": {}}'},
        {HEADER: '{"version": 1}'},
        {HEADER: '{"version": 1, "fingerprint": []}'},
    ],
)
def test_a_header_cut_short_or_changed_is_refused(state: Any) -> None:
    """Case 27."""
    with pytest.raises(InvalidState):
        parse_header(state)


def test_a_later_version_is_refused_by_both_numbers() -> None:
    """Case 27."""
    with pytest.raises(InvalidState, match=f"version {VERSION + 1}, and this unbroken reads up to {VERSION}"):
        parse_header(header(version=VERSION + 1))


def test_a_missing_leaf_says_how_to_merge() -> None:
    with pytest.raises(IncompleteState, match=r"'rank-0001' is missing.*\n.*\{\*\*a, \*\*b\}"):
        parse_leaf({"rank-0000": "{}"}, "rank-0001")


@pytest.mark.parametrize("text", ["", "{", '"text"', "[1]", "3", "null", 3, None, b"\xff"])
def test_a_leaf_that_is_no_json_object_is_refused_by_its_name(text: Any) -> None:
    with pytest.raises(InvalidState, match="'lane-000002'"):
        parse_leaf({"lane-000002": text}, "lane-000002")


# The fingerprint

KINDS = {"window": "order", "workers": "safe", "seed": "order", "files": "data, held"}


def held(
    saved: dict[str, Any], now: dict[str, Any], *, strict: bool = True, mid_epoch: bool = False
) -> list[Difference]:
    return check_fingerprint(saved, now, KINDS, mid_epoch=mid_epoch, strict=strict)


def test_equal_fingerprints_and_safe_differences_pass_in_silence() -> None:
    assert held({"window": 3, "workers": 1}, {"window": 3, "workers": 8}) == []


def test_the_report_of_a_mismatch_is_a_table_of_saved_and_now() -> None:
    """Case 26: to the letter, as it is documented."""
    saved = {"tokenizer": "sha256:1f0c", "window": 10000}
    now = {"tokenizer": "sha256:77ab", "window": 50000}
    with pytest.raises(StateMismatch) as caught:
        held(saved, now)
    text = "".join(traceback.format_exception_only(caught.value)).removeprefix("unbroken.errors.")
    assert text == (
        "StateMismatch: this position was saved for another pipeline.\n"
        "  tokenizer   saved sha256:1f0c   now sha256:77ab   (data-changing)\n"
        "  window      saved 10000         now 50000         (order-changing)\n"
        "Rebuild the pipeline as it was, or accept the difference with load_state_dict(state, strict=False).\n"
    )


def test_the_report_lists_every_difference_and_no_equal_or_safe_field() -> None:
    saved = {"length": 10, "window": 1, "workers": 0, "seed": None, "gone": {"a": [1]}}
    now = {"length": 10, "window": 2, "workers": 4, "seed": 3, "new": True}
    with pytest.raises(StateMismatch) as caught:
        held(saved, now)
    lines = [" ".join(line.split()) for line in str(caught.value).splitlines()[1:-1]]
    assert sorted(lines) == [
        'gone saved {"a":[1]} now nothing (data-changing)',
        "new saved nothing now true (data-changing)",
        "seed saved nothing now 3 (order-changing)",
        "window saved 1 now 2 (order-changing)",
    ]


def test_a_long_value_is_cut_in_the_middle() -> None:
    with pytest.raises(StateMismatch, match=r"saved a{30}…a{6} "):
        held({"files": "a" * 100}, {"files": "b"})


def test_strict_false_accepts_order_and_data_and_says_what() -> None:
    accepted = held({"window": 1, "length": 5}, {"window": 2, "length": 6}, strict=False)
    assert sorted((d.field, d.saved, d.now, d.kind) for d in accepted) == [
        ("length", 5, 6, "data"),
        ("window", 1, 2, "order"),
    ]


def test_what_is_fixed_in_mid_epoch_is_never_accepted() -> None:
    with pytest.raises(StateMismatch) as caught:
        held({"files": ["a"], "window": 1}, {"files": ["b"], "window": 2}, strict=False, mid_epoch=True)
    assert "window" not in str(caught.value)
    assert "In the middle of an epoch files cannot change without losing or repeating rows" in str(caught.value)


def test_with_something_fixed_the_report_does_not_offer_strict_false() -> None:
    with pytest.raises(StateMismatch) as caught:
        held({"files": ["a"], "window": 1}, {"files": ["b"], "window": 2}, mid_epoch=True)
    assert "strict=False" not in str(caught.value)
    assert "window" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "now", "expected"),
    [
        ("files", "b", True),
        ("files[1]", "b", True),
        ("web: files", "b", True),
        ("web: files[2]", "b", True),
        ("seq_len", 2, True),
        ("window", 2, False),
        ("new: files", "b", False),  # a source that was added
    ],
)
def test_what_a_place_in_mid_epoch_counts_is_told_from_the_rest(field: str, now: Any, expected: bool) -> None:
    saved = {"files": "a", "files[1]": "a", "web: files": "a", "web: files[2]": "a", "seq_len": 1, "window": 1}
    kinds = dict.fromkeys(saved, "data, held") | {"seq_len": "held", "window": "order", "new: files": "data, held"}
    assert counts_otherwise(saved, {**saved, field: now}, kinds) is expected
    for strict in (True, False):
        if expected:
            with pytest.raises(StateMismatch, match="In the middle of an epoch"):
                check_fingerprint(saved, {**saved, field: now}, kinds, mid_epoch=True, strict=strict)
    accepted = check_fingerprint(saved, {**saved, field: now}, kinds, mid_epoch=False, strict=False)
    assert [d.field for d in accepted] == [field] * (field not in ("seq_len", "new: files"))


def test_the_fields_of_sources_that_are_gone_are_what_is_held_against_them_later() -> None:
    saved = {"stages": "mix", "web: files": "a", "code: files": "b", "code: in: window": 3}
    assert fields_of_gone(saved, {"stages": "mix", "web: files": "a"}) == {"code: files": "b", "code: in: window": 3}
    assert fields_of_gone(saved, saved) == {}
