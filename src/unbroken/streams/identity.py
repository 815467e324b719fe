"""What a function is, for a fingerprint: its name, and a digest of its code and of the values that it holds."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from types import CodeType
from typing import Any

__all__ = ["identity_of"]


def identity_of(fn: Any) -> str:
    """``name:digest`` of a function: its qualified name, and 16 hex digits over its code and the values it holds.

    The same in every process that runs the same version of Python; no memory address is in it. Values that are
    not plain (numbers, text, tuples of them) count by their type only, and what ``fn`` calls counts by its name.
    """
    hasher = hashlib.sha256()
    _feed(hasher.update, fn)
    return f"{_name_of(fn)}:{hasher.hexdigest()[:16]}"


def _name_of(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return f"partial({_name_of(fn.func)})"
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def _feed(update: Callable[[bytes], object], value: Any, within: tuple[int, ...] = ()) -> None:
    """Name, code and held values of a function; plain values as they are, others by their type.

    ``within`` are the ids of what is being fed already: a function that holds itself must come to an end.
    """
    kind = type(value)
    feed = functools.partial(_feed, update, within=(*within, id(value)))
    if id(value) in within:
        update(b"itself\0")
    elif value is None or kind in (bool, int, float, complex, str, bytes):
        update(f"{kind.__name__} {value!r}\0".encode(errors="surrogatepass"))
    elif kind in (tuple, list, dict, frozenset, set):
        items = value.items() if kind is dict else value if kind in (tuple, list) else sorted(value, key=repr)
        update(f"{kind.__name__} {len(value)}\0".encode())
        for item in items:
            feed(item)
    elif kind is CodeType:
        update(value.co_code)
        feed((value.co_consts, value.co_names, value.co_varnames))
    elif kind is functools.partial:
        feed(("partial", value.func, value.args, value.keywords))
    elif hasattr(value, "__func__"):
        feed(("method", value.__func__, type(value.__self__).__qualname__))
    elif hasattr(value, "__code__"):
        held = [cell.cell_contents if _is_full(cell) else None for cell in value.__closure__ or ()]
        feed((value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, held))
    else:
        update(f"{kind.__qualname__} {_name_of(value)}\0".encode())
        call = vars(kind).get("__call__")
        if hasattr(call, "__code__"):
            feed(call)


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
