"""Digests of what was delivered: how a resume is checked, and what a run can be compared by.

A digest is 64 bits of xxh3 (https://github.com/Cyan4973/xxHash). At most ``cap`` bytes of a tensor or array are read,
in four parts spread evenly over it, so that a batch of any size costs a few microseconds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

__all__ = ["digest", "entry_of", "fold", "fold_one"]

_PARTS = 4
_SMALL = 1024
_PAIR = struct.Struct("<2Q")
_NUMPY_HAS = frozenset(
    getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
)
# By these a negated tensor, say, has the digest of an array that holds the same.
_NUMPY = {dtype: torch.empty(0, dtype=dtype).numpy().dtype for dtype in _NUMPY_HAS}
_KINDS: dict[tuple[Any, tuple[int, ...]], int] = {}
_MOST_KINDS = 4096
_hash: Callable[..., int] = xxhash.xxh3_64_intdigest


def digest(value: Any, cap: int = 32768) -> int:
    """64 bits that stand for a sample or a batch; equal content gives equal digests in every process.

    Reads tensors, arrays, numbers, text, bytes and containers of these; another object counts by what is in its
    ``__dict__``, if it has one, and by its type. One that contains itself counts as any other of its type.
    """
    try:
        return _digest(value, cap)
    except RecursionError:
        return _hash(type(value).__qualname__.encode(), 8)


def _digest(value: Any, cap: int) -> int:
    kind = type(value)
    if kind is torch.Tensor:
        return _of_tensor(value, cap)
    if kind is np.ndarray and not value.dtype.hasobject:
        return _of_array(value, cap)
    if kind is int or kind is float or kind is bool or value is None:
        return _hash(repr(value).encode(), 1)
    if kind is str:
        return _hash(value.encode("utf-8", "surrogatepass"), 2)
    if kind is bytes or kind is bytearray:
        return _hash(value, 3)
    if kind is dict:
        return _of_dict(value, cap)
    return _of_container(value, cap)


def entry_of(samples: list[Any], last: int) -> int:
    """What stands for a batch in a ledger: how many samples it has, the digest of the ``last``, and that of the one in
    the middle: at most 64 kB are read of a batch. For a single sample it is its digest.
    """
    count = len(samples)
    return last if count == 1 else fold(count, [digest(samples[(count - 1) // 2]), last])


def fold_one(ledger: int, digest: int) -> int:
    """The same as ``fold`` after one more delivery."""
    return _hash(_PAIR.pack(ledger, digest))


def fold(ledger: int, digests: list[int]) -> int:
    """The rolling digest after some more deliveries."""
    if len(digests) == 1:
        return fold_one(ledger, digests[0])
    return _hash(struct.pack(f"<{len(digests) + 1}Q", ledger, *digests))


def _of_tensor(value: torch.Tensor, cap: int) -> int:
    if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        return _of_rare_tensor(value, cap)
    plain = value.detach().cpu().resolve_conj() if value.requires_grad or value.is_conj() else value
    try:
        return _of_array(plain.numpy(), cap)
    except (TypeError, RuntimeError):  # a dtype that numpy has not (bfloat16), another device, or negated lazily
        flat = plain.detach().cpu().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
        return _of_bytes(flat.view(torch.uint8).numpy(), cap, _kind(_NUMPY.get(value.dtype, value.dtype), value.shape))


def _of_rare_tensor(value: torch.Tensor, cap: int) -> int:
    if value.layout is torch.sparse_coo:
        found = value.detach().coalesce()
        return fold(4, [_digest(found.indices(), cap), _digest(found.values(), cap), *value.shape])
    if value.is_nested:
        return fold(5, [_digest(part, cap) for part in value.detach().unbind()])
    return _hash(repr(value).encode(), 4)


def _kind(dtype: Any, shape: tuple[int, ...]) -> int:
    """64 bits that stand for a dtype and a shape."""
    found = _KINDS.get((dtype, shape))
    if found is None:
        if len(_KINDS) >= _MOST_KINDS:
            _KINDS.clear()
        found = _KINDS[dtype, shape] = _hash(f"{dtype}{[*shape]}".encode(), 6)
    return found


def _of_array(array: np.ndarray[Any, Any], cap: int) -> int:
    return _of_bytes(array, cap, _kind(array.dtype, array.shape))


def _of_bytes(array: np.ndarray[Any, Any], cap: int, kind: int) -> int:
    size = array.nbytes
    if size <= cap:
        return _hash(np.ascontiguousarray(array), kind)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    part = cap // _PARTS
    starts = [(size - part) * number // (_PARTS - 1) for number in range(_PARTS)]
    return _hash(b"".join([data[start : start + part] for start in starts]), kind)


def _of_dict(value: dict[Any, Any], cap: int) -> int:
    """Small tensors and arrays, as in a dict of features, are hashed together: a call for each would cost more."""
    parts = []
    for name, field in value.items():
        array = field
        if type(field) is torch.Tensor and field.is_cpu and not field.requires_grad and field.dtype in _NUMPY_HAS:
            array = field.resolve_neg().numpy()
        small = type(array) is np.ndarray and array.nbytes <= _SMALL and not array.dtype.hasobject
        parts.append(
            name.encode("utf-8", "surrogatepass") if type(name) is str else _digest(name, cap).to_bytes(8, "little")
        )
        if small:
            parts.append(_kind(array.dtype, array.shape).to_bytes(8, "little") + array.tobytes())
        else:
            parts.append(_digest(field, cap).to_bytes(8, "little"))
    return _hash(b"\0".join(parts), 8)


def _of_container(value: Any, cap: int) -> int:
    if isinstance(value, Mapping):
        parts = [d for k, v in value.items() for d in (_digest(k, cap), _digest(v, cap))]
    elif isinstance(value, list | tuple):
        parts = [_digest(v, cap) for v in value]
    elif isinstance(value, set | frozenset):
        parts = sorted(_digest(v, cap) for v in value)
    elif isinstance(value, np.generic):
        return _hash(value.tobytes(), 5)
    elif isinstance(value, torch.Tensor):
        return _of_tensor(value.as_subclass(torch.Tensor), cap)
    elif hasattr(value, "__array_interface__") and not isinstance(value, np.ndarray):
        return _digest(np.asarray(value), cap)  # an image, say
    elif isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            return _of_array(np.asarray(value), cap)
        parts = [_digest(value.tolist(), cap)]
    elif hasattr(value, "__dict__"):
        parts = [_digest(vars(value), cap)]
    else:  # a date, a complex number: what tells itself by its text, which is no default with an address in it
        text = repr(value) if any("__repr__" in vars(kind) for kind in type(value).__mro__[:-1]) else ""
        parts = [_hash(text.encode("utf-8", "surrogatepass"), 9)]
    parts.append(_hash(type(value).__qualname__.encode(), 7))
    return fold(len(parts), parts)
