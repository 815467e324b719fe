"""Randomness as a function of place, never of process.

``key`` turns a place (seed, epoch, lane, sample, ...) into 64 bits; ``seed_globals`` sets the generators of torch,
numpy and random from it; ``isolated`` puts them back afterwards; ``Permutation`` is a shuffled order that needs no
list.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

__all__ = [
    "Globals",
    "Permutation",
    "alone",
    "isolated",
    "key",
    "put_back_globals",
    "read_globals",
    "seed_globals",
    "take_globals",
    "write_globals",
]

_MASK64 = (1 << 64) - 1
Globals = tuple[torch.Tensor, Any, Any]


def key(*place: int | str) -> int:
    """64 bits from a place: numbers (64 bits of each count) and words, in order. Stable for ever: it is in positions.

    Defined as xxh3-64 over each part in turn: a number as 8 bytes little-endian, a word as its UTF-8 bytes and a NUL.
    """
    parts = [struct.pack("<Q", p & _MASK64) if type(p) is int else str(p).encode() + b"\0" for p in place]
    return xxhash.xxh3_64_intdigest(b"".join(parts))


def seed_globals(place: int) -> None:
    """Seed the CPU generators of torch, numpy and random with a 64-bit key (8 µs).

    ``torch.manual_seed`` would reseed CUDA too and cost 95 µs.
    """
    torch.default_generator.manual_seed(place)
    random.seed(place)
    np.random.seed(place & 0xFFFFFFFF)


# numpy keeps one hidden generator; another bit generator can be swapped in for 0.2 µs where reading and writing the
# state costs 70. Ours is used whenever the user's has been set aside; nesting gets its own.
_get_bit_generator = np.random.get_bit_generator  # type: ignore[attr-defined]
_set_bit_generator = np.random.set_bit_generator  # type: ignore[attr-defined]
# The bit generator that was looked at last, its words, and those that stood there when no normal was left over.
_none_left: tuple[Any, Any, Any] = (None, None, None)
_guard = threading.RLock()
_spare_bit_generators: list[np.random.MT19937] = []


def alone() -> AbstractContextManager[Any]:
    """To be held by ``with`` around ``take_globals`` and ``put_back_globals``: other threads wait. An interrupt cannot
    come between it and the block, so that it is always let go of.
    """
    return _guard


def take_globals() -> Globals:
    """Set the global generators aside, to be reseeded at will until ``put_back_globals``. See ``alone``."""
    aside = _get_bit_generator()
    left_over = _normal_left_over(aside)
    spare = _spare_bit_generators.pop() if _spare_bit_generators else np.random.MT19937(0)
    _set_bit_generator(spare)
    return torch.default_generator.get_state(), random.getstate(), (aside, left_over)


def put_back_globals(aside: Globals) -> None:
    """Put the global generators back as ``take_globals`` found them."""
    torch.default_generator.set_state(aside[0])
    random.setstate(aside[1])
    used, (bit_generator, left_over) = _get_bit_generator(), aside[2]
    _set_bit_generator(bit_generator)
    if left_over is not None:
        np.random.set_state(left_over)
    if isinstance(used, np.random.MT19937) and used is not bit_generator:
        _spare_bit_generators.append(used)


def _normal_left_over(bit_generator: Any) -> dict[str, Any] | None:
    """numpy's state where its legacy normals, which come in pairs, have one left over: a swap would drop that.

    Reading the state costs 23 µs, and is left out where nothing was drawn since it was read last.
    """
    global _none_left
    if not isinstance(bit_generator, np.random.MT19937):
        state = np.random.get_state(legacy=False)
        return state if state["has_gauss"] else None
    if _none_left[0] is not bit_generator:
        # 624 words of key, and the place among them
        words = (ctypes.c_uint32 * 625).from_address(bit_generator.ctypes.state_address)
        _none_left = bit_generator, words, None
    _, words, seen = _none_left
    mark = (words[624], words[0], words[623])
    if mark == seen:
        return None
    state = np.random.get_state(legacy=False)
    if state["has_gauss"]:
        return state
    _none_left = bit_generator, words, mark
    return None


def _forked() -> None:
    global _guard
    _guard = threading.RLock()  # a thread that held it is not in this process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def read_globals() -> Globals:
    """The states of the global generators of torch, numpy and random, as values that can be sealed."""
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def write_globals(states: Globals) -> None:
    """Set the global generators to states that ``read_globals`` gave."""
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@contextmanager
def isolated(place: int) -> Iterator[None]:
    """The global generators, seeded by a key inside and put back afterwards."""
    with alone():
        aside = take_globals()
        try:
            seed_globals(place)
            yield
        finally:
            put_back_globals(aside)


@final
class Permutation:
    """A permutation of ``range(length)`` as a function of the index: nothing to store, O(1) to start anywhere.

    A balanced Feistel network of six rounds over the smallest even number of bits that covers ``length``, walked until
    the value falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The round function is
    the 64-bit finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    """

    def __init__(self, length: int, place: int) -> None:
        self.length = length
        bits = max(2, (length - 1).bit_length())
        self._half = np.uint64((bits + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._round_keys = [np.uint64(key(place, "round", r)) for r in range(6)]

    def __len__(self) -> int:
        return self.length

    def block(self, start: int, stop: int, step: int = 1) -> npt.NDArray[np.int64]:
        """The values at ``range(start, stop, step)``, int64."""
        values = self._encrypt(np.arange(start, stop, step, dtype=np.uint64))
        outside = np.flatnonzero(values >= self.length)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.length]
        return values.astype(np.int64)

    def __getitem__(self, index: int) -> int:
        return int(self.block(index, index + 1)[0])

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for round_key in self._round_keys:
            mixed = right ^ round_key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
            left, right = right, left ^ (mixed & self._mask)
        return np.asarray((left << self._half) | right, np.uint64)
