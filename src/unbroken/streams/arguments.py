"""Checks of what users pass to a stage, and of the positions that are loaded into its iterator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.errors import InvalidState

__all__ = ["check_bool", "check_function", "check_one_of", "check_whole", "read_state"]


def check_bool(stage: str, name: str, value: Any) -> None:
    """Raises ``TypeError`` where an argument is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{stage}: {name} must be True or False, but got {value!r}.")


def check_one_of(stage: str, name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raises ``ValueError`` where an argument is none of the known words."""
    if value not in known:
        raise ValueError(f"{stage}: {name} must be {' or '.join(map(repr, known))}, but got {value!r}.")


def check_whole(stage: str, name: str, value: Any, least: int, most: int = (1 << 63) - 1) -> None:
    """Raises ``TypeError`` where an argument is no whole number, ``ValueError`` where it is out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{stage}: {name} must be a whole number, but got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{stage}: {name} must be at least {least}, but got {value}.")
    if value > most:
        raise ValueError(f"{stage}: {name} must be at most {most}, but got {value}.")


def check_function(stage: str, fn: Any) -> None:
    """Raises ``TypeError`` where ``fn`` cannot be called."""
    if not callable(fn):
        raise TypeError(f"{stage}: fn must be a function of one row, but got {fn!r} ({type(fn).__name__}).")


def read_state(state: Any, stage: str, **kinds: type | tuple[type, ...]) -> tuple[Any, ...]:
    """The values of a position, in the order of ``kinds``.

    Raises ``InvalidState`` where a key is missing or unknown, a value has another type, or a number is negative.
    """
    way_out = "Load what state_dict() of the same pipeline returned."
    if not isinstance(state, Mapping):
        raise InvalidState(f"{stage}: a position is a dict, but got a {type(state).__name__}.\n{way_out}")
    if set(state) != set(kinds):
        expected, found = ", ".join(kinds), ", ".join(map(str, state)) or "nothing"
        raise InvalidState(f"{stage}: a position has the keys {expected}, but this one has {found}.\n{way_out}")
    for name, kind in kinds.items():
        value = state[name]
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            names = names.replace("NoneType", "null").replace("int", "whole number of at least 0")
            raise InvalidState(f"{stage}: {name} in a position must be a {names}, but it is {value!r}.\n{way_out}")
    return tuple(state[name] for name in kinds)
