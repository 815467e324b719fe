"""Sealing: how a position becomes text, and how text is checked before anything of it is used.

A position is a flat ``dict[str, str]`` with valid JSON in each value. One value, ``"unbroken"``, is the header:
version, number of lanes and the fingerprint of the pipeline. The others are leaves.

States that a dataset or sampler hands out are sealed as tagged JSON: what JSON has is written as it is, the rest as
``{"!": tag, "v": ...}`` with the tags ``tuple``, ``set``, ``frozenset``, ``bytes`` (base64), ``int`` (beyond 64 bits),
``float`` (nan, inf), ``complex``, ``dict`` (keys that are not str, or a key ``"!"``), ``scalar``, ``array`` and
``tensor`` (dtype, shape, base64 of the little-endian bytes in C order). Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import orjson
import torch

from unbroken.errors import IncompleteState, InvalidState, StateMismatch, UnsealableState

__all__ = [
    "HEADER",
    "VERSION",
    "Difference",
    "check_fingerprint",
    "checked_sampler",
    "counts_otherwise",
    "fields_of_gone",
    "fragment",
    "parse_header",
    "parse_leaf",
    "resealed",
    "seal",
    "unseal",
    "whole",
]

HEADER = "unbroken"
VERSION = 1
_PLAIN = frozenset({str, bool, type(None)})
_TENSOR_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def seal(value: Any, what: str = "state") -> str:
    """Tagged JSON of a state; later changes to ``value`` do not reach it.

    ``what`` names the state in the error. Raises ``UnsealableState`` with the path and the type of the first thing
    that no position can carry.
    """
    try:
        return orjson.dumps(_tag(value, what)).decode()
    except RecursionError:
        raise UnsealableState(f"{what} contains itself, or is nested too deeply to be saved.") from None
    except TypeError as error:
        if isinstance(error, UnsealableState):
            raise
        if "ecursion" in str(error):
            raise UnsealableState(f"{what} contains itself, or is nested too deeply to be saved.") from None
        raise UnsealableState(f"{what} holds something that is no text of UTF-8 or no JSON: {error}.") from error


def unseal(text: str) -> Any:
    """The state that ``seal`` was given. Raises ``InvalidState`` on anything else."""
    try:
        return _untag(orjson.loads(text))
    except InvalidState:
        raise
    except Exception as error:
        raise InvalidState(f"A sealed state cannot be read: {error}") from error


def _tag(value: Any, path: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else {"!": "int", "v": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"!": "float", "v": repr(value)}
    if kind is list:
        return [_tag(v, f"{path}[{i}]") for i, v in enumerate(value)] if not _all_plain(value) else value.copy()
    if kind is dict:
        if all(type(k) is str for k in value) and "!" not in value:
            return {k: _tag(v, f"{path}[{k!r}]") for k, v in value.items()}
        pairs = [[_tag(k, f"a key of {path}"), _tag(v, f"{path}[{k!r}]")] for k, v in value.items()]
        return {"!": "dict", "v": pairs}
    return _tag_rare(value, kind, path)


def _all_plain(value: list[Any]) -> bool:
    kinds = set(map(type, value))
    return kinds <= _PLAIN or (kinds == {int} and -(1 << 63) <= min(value) and max(value) < 1 << 63)


def _tag_rare(value: Any, kind: type, path: str) -> Any:
    if kind is tuple:
        return {"!": "tuple", "v": _tag(list(value), path)}
    if kind is set or kind is frozenset:
        return {"!": kind.__name__, "v": sorted((_tag(v, path) for v in value), key=orjson.dumps)}
    if kind is bytes or kind is bytearray:
        return {"!": kind.__name__, "v": base64.b64encode(value).decode()}
    if kind is complex:
        return {"!": "complex", "v": [_tag(value.real, path), _tag(value.imag, path)]}
    if (kind in (np.ndarray, np.memmap) or isinstance(value, np.generic)) and value.dtype.kind in "biufcmMSU":
        name = "array" if isinstance(value, np.ndarray) else "scalar"
        array = np.asarray(value)
        return _tag_data(
            name, array.dtype.newbyteorder("<").str, array.shape, array.astype(array.dtype.newbyteorder("<"))
        )
    if kind is torch.Tensor and value.layout is torch.strided and not (value.is_quantized or value.is_meta):
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        data = plain.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
        return _tag_data("tensor", str(value.dtype), tuple(value.shape), data)
    raise UnsealableState(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a position cannot carry.\n"
        "Return plain values from state_dict(): numbers, text, bytes, lists, tuples, dicts, sets, arrays or tensors."
    )


def _tag_data(tag: str, dtype: str, shape: tuple[int, ...], data: np.ndarray[Any, Any]) -> dict[str, Any]:
    text = base64.b64encode(np.ascontiguousarray(data).tobytes()).decode()
    return {"!": tag, "dtype": dtype, "shape": list(shape), "v": text}


def _untag(value: Any) -> Any:
    if isinstance(value, list):
        return [_untag(v) for v in value]
    if not isinstance(value, dict):
        return value
    tag = value.get("!")
    if tag is None:
        return {k: _untag(v) for k, v in value.items()}
    inner = value["v"]
    if tag == "dict":
        return {_untag(k): _untag(v) for k, v in inner}
    if tag in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](_untag(v) for v in inner)
    if tag == "int":
        return int(inner)
    if tag == "float":
        return float(inner)
    if tag == "complex":
        return complex(_untag(inner[0]), _untag(inner[1]))
    data = base64.b64decode(inner, validate=True)
    if tag == "bytes":
        return data
    if tag == "bytearray":
        return bytearray(data)
    if tag in ("array", "scalar"):
        array = np.frombuffer(bytearray(data), np.dtype(value["dtype"])).reshape(value["shape"])
        return array if tag == "array" else array[()]
    if tag == "tensor":
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(_TENSOR_DTYPES[value["dtype"]]).reshape(value["shape"])
    raise InvalidState(f"A sealed state has the tag {tag!r}, which this version does not know.")


def fragment(sealed: str | None) -> orjson.Fragment | None:
    """A sealed state as a part of other JSON."""
    return None if sealed is None else orjson.Fragment(sealed)


def resealed(value: Any) -> str | None:
    """The sealed state that was a part of the JSON that this value was read from."""
    return None if value is None else orjson.dumps(value).decode()


def whole(value: Any, least: int = 0) -> int:
    """A whole number of at least ``least``, as read from JSON. Raises ``ValueError`` on anything else."""
    if type(value) is not int or value < least:
        raise ValueError(f"expected a whole number of at least {least}, found {value!r}")
    return value


def list_of(value: Any) -> list[Any]:
    """A list, as read from JSON. Raises ``ValueError`` on anything else."""
    if type(value) is not list:
        raise ValueError(f"expected a list, found {value!r}")
    return value


def checked_sampler(saved: Any) -> dict[str, Any] | None:
    """What draws an order again: a seed, or sealed states under one of the names that ``sampling`` gives them."""
    if saved == {}:
        raise ValueError("a sampler cannot be made again from nothing")
    for name, value in ({} if saved is None else saved).items():
        if name == "seed":
            whole(value)
        elif name in ("generator", "before", "state", "globals") and isinstance(value, str):
            unseal(value)
        else:
            raise ValueError(f"a sampler cannot be made again from {name!r}")
    return saved  # type: ignore[no-any-return]


def parse_header(state: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a position. Raises ``InvalidState`` where it is not ours, cut short or of a later version."""
    if not isinstance(state, Mapping):
        raise InvalidState(f"A position is a dict of str to str, but got a {type(state).__name__}.")
    if HEADER not in state:
        found = ", ".join(sorted(map(repr, state))[:6])
        raise InvalidState(
            f"This is not a position of unbroken: the key {HEADER!r} is missing (found {found}).\n"
            "Pass what state_dict() of an unbroken loader returned; a state of another loader cannot be read."
        )
    header = parse_leaf(state, HEADER)
    version = header.get("version")
    if not isinstance(version, int) or not isinstance(header.get("fingerprint"), dict):
        raise InvalidState("The header of this position has no version or no fingerprint: it was cut short or changed.")
    if version > VERSION:
        raise InvalidState(
            f"This position has format version {version}, and this unbroken reads up to {VERSION}.\n"
            "Install the version of unbroken that wrote it, or a later one."
        )
    return header


def parse_leaf(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One value of a position, read. Raises ``InvalidState`` where it is no JSON, ``IncompleteState`` where missing."""
    if name not in state:
        raise IncompleteState(
            f"The leaf {name!r} is missing from this position (it has {len(state)} keys).\n"
            "Merge the states of all ranks with {**a, **b}, or load through torch.distributed.checkpoint."
        )
    text = state[name]
    try:
        leaf = orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError) as error:
        raise InvalidState(f"The leaf {name!r} of this position is not JSON ({error}): cut short or changed.") from None
    if not isinstance(leaf, dict):
        raise InvalidState(f"The leaf {name!r} of this position is a JSON {type(leaf).__name__}, not an object.")
    return leaf


@final
@dataclass(frozen=True)
class Difference:
    """A field of the fingerprint that was saved with one value and has another now."""

    field: str
    saved: Any
    now: Any
    kind: str

    @property
    def held(self) -> bool:
        """Whether it can never be accepted in the middle of an epoch."""
        return self.kind.endswith("held")

    @property
    def meaning(self) -> str:
        """The kind in words."""
        return "cuts rows otherwise" if self.kind == "held" else f"{self.kind.removesuffix(', held')}-changing"

    def __str__(self) -> str:
        return _table([self])


def _table(differences: list[Difference]) -> str:
    rows = [(d.field, _short(d.saved), _short(d.now), d.meaning) for d in differences]
    field, saved, now = (max(len(row[column]) for row in rows) for column in range(3))
    return "\n".join(
        f"  {row[0]:<{field}}   saved {row[1]:<{saved}}   now {row[2]:<{now}}   ({row[3]})" for row in rows
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode() if value is not None else "nothing"
    return text if len(text) <= 40 else f"{text[:30]}…{text[-6:]}"


def _source_of(field: str) -> str:
    """The named source that a field is about (``web`` of ``web: files``); empty for one of the whole pipeline."""
    return field.rpartition(": ")[0]


def _sources_of(fingerprint: Mapping[str, Any]) -> set[str]:
    return {"", *map(_source_of, fingerprint)}


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], kinds: Mapping[str, str]) -> list[Difference]:
    """All but the safe ones. A named source that is only on one side has come or gone, which is none."""
    both = _sources_of(saved) & _sources_of(now)
    return [
        Difference(name, saved.get(name), now.get(name), kinds.get(name, "data"))
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name) and kinds.get(name, "data") != "safe" and _source_of(name) in both
    ]


def fields_of_gone(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of named sources that are in the saved fingerprint only: what they must be if they come back."""
    gone = _sources_of(saved) - _sources_of(now)
    return {field: value for field, value in saved.items() if _source_of(field) in gone}


def counts_otherwise(saved: Mapping[str, Any], now: Mapping[str, Any], kinds: Mapping[str, str]) -> bool:
    """Whether a place in the middle of an epoch of the one pipeline means nothing in the other."""
    return any(difference.held for difference in _differences(saved, now, kinds))


def check_fingerprint(
    saved: Mapping[str, Any], now: Mapping[str, Any], kinds: Mapping[str, str], *, mid_epoch: bool, strict: bool
) -> list[Difference]:
    """Hold two fingerprints against each other; return the differences that ``strict=False`` accepted.

    ``kinds`` says of each field whether a difference is ``"safe"``, ``"order"`` or ``"data"`` (the default). With
    ``", held"`` it is never accepted in the middle of an epoch; ``"held"`` alone is safe elsewhere. Raises
    ``StateMismatch`` with every difference.
    """
    found = [d for d in _differences(saved, now, kinds) if mid_epoch or d.kind != "held"]
    held = {d.field for d in found if mid_epoch and d.held}
    refused = [d for d in found if strict or d.field in held]
    if not refused:
        return found
    report = _table(found if strict else refused)
    if held:
        names = ", ".join(sorted(held))
        way_out = (
            f"In the middle of an epoch {names} cannot change without losing or repeating rows: rebuild it as it was, "
            "and change it between epochs."
        )
    else:
        way_out = "Rebuild the pipeline as it was, or accept the difference with load_state_dict(state, strict=False)."
    raise StateMismatch(f"this position was saved for another pipeline.\n{report}\n{way_out}")
