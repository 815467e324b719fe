"""Digests of what was delivered: how a resume is checked, and what a run can be compared by.

A digest is 64 bits of xxh3 (https://github.com/Cyan4973/xxHash). At most ``cap`` bytes of a tensor or array are read,
in blocks spread evenly over it, so that a batch of any size costs a few microseconds.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

__all__ = ["digest", "fold"]

_BLOCK = 1024
_hash: Callable[..., int] = xxhash.xxh3_64_intdigest


def digest(value: Any, cap: int = 16384) -> int:
    """64 bits that stand for a sample or a batch; equal content gives equal digests in every process.

    Reads tensors, arrays, numbers, text, bytes and containers of these; another object counts by its pickle, or by
    its type where it has none.
    """
    kind = type(value)
    if kind is torch.Tensor:
        return _of_tensor(value, cap)
    if kind is np.ndarray and not value.dtype.hasobject:
        return _of_array(value, cap)
    if kind is int or kind is float or kind is bool or value is None:
        return _hash(repr(value).encode(), 1)
    if kind is str:
        return _hash(value.encode("utf-8", "surrogatepass"), 2)
    if kind is bytes:
        return _hash(value, 3)
    return _of_container(value, cap)


def fold(ledger: int, digests: list[int]) -> int:
    """The rolling digest after some more deliveries."""
    return _hash(ledger.to_bytes(8, "little") + b"".join(d.to_bytes(8, "little") for d in digests))


def _of_tensor(value: torch.Tensor, cap: int) -> int:
    if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.device.type == "meta":
        return _hash(repr(value).encode(), 4)
    plain = value.detach().cpu().resolve_conj().resolve_neg() if value.requires_grad or value.is_conj() else value
    try:
        return _of_array(plain.numpy(), cap)
    except (TypeError, RuntimeError):  # a dtype that numpy has not (bfloat16), another device, or negated lazily
        flat = plain.detach().cpu().resolve_neg().contiguous().reshape(-1)
        return _of_array(flat.view(torch.uint8).numpy(), cap)


def _of_array(array: np.ndarray[Any, Any], cap: int) -> int:
    size = array.nbytes
    if size <= cap:
        return _hash(np.ascontiguousarray(array), array.size)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    blocks = max(1, cap // _BLOCK)
    stride = size // blocks
    head = data[: stride * blocks].reshape(blocks, stride)[:, :_BLOCK]
    return _hash(np.ascontiguousarray(head), array.size) ^ _hash(data[-_BLOCK:], array.size)


def _of_container(value: Any, cap: int) -> int:
    if isinstance(value, Mapping):
        parts = [d for k, v in value.items() for d in (digest(k, cap), digest(v, cap))]
    elif isinstance(value, list | tuple):
        parts = [digest(v, cap) for v in value]
    elif isinstance(value, set | frozenset):
        parts = sorted(digest(v, cap) for v in value)
    elif isinstance(value, np.generic):
        return _hash(value.tobytes(), 5)
    elif isinstance(value, torch.Tensor):
        return _of_tensor(value.as_subclass(torch.Tensor), cap)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [digest(getattr(value, f.name), cap) for f in dataclasses.fields(value)]
    else:
        try:
            return _hash(pickle.dumps(value, 5), 6)
        except Exception:  # whatever its __reduce__ raises: its type is all that can be told of it
            return _hash(type(value).__qualname__.encode(), 7)
    return fold(len(parts), parts)
