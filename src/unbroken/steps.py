"""Ranges of the steps of a run, which are left out: ``[first, stop)`` each, in order, with a gap between any two."""

from __future__ import annotations

from typing import Any, TypeAlias

from unbroken.state import list_of, whole

__all__ = ["Steps", "joined", "lies_in", "read_steps", "to_leave_out"]

Steps: TypeAlias = tuple[tuple[int, int], ...]


def lies_in(step: int, steps: Steps) -> bool:
    """Whether a step is one of them."""
    return any(first <= step < stop for first, stop in steps)


def joined(steps: Steps, first: int, stop: int) -> Steps:
    """With one more range, which may touch or overlap others."""
    found: list[tuple[int, int]] = []
    for start, end in sorted((*steps, (first, stop))):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif start < end:
            found.append((start, end))
    return tuple(found)


def to_leave_out(batches: Any, step: int) -> tuple[int, int]:
    """The range that ``loader.skip(batches)`` means at a step. Raises ``TypeError`` or ``ValueError``."""
    if isinstance(batches, range):
        if batches.step != 1 or batches.start < step:
            raise ValueError(
                f"skip() got {batches!r}, but the next step is {step}: steps that were delivered cannot be left out "
                "any more, and a range goes up by one.\n"
                "Load a position that was saved before them, and call skip() then."
            )
        return batches.start, max(batches.start, batches.stop)
    if isinstance(batches, bool) or not hasattr(batches, "__index__"):
        raise TypeError(f"skip() takes a number of batches, or a range of steps, but got {batches!r}.")
    number = batches.__index__()
    if number < 0:
        raise ValueError(f"skip() got {number} batches. To go back, load a position that was saved before them.")
    return step, step + number


def read_steps(saved: Any) -> Steps:
    """As they are read from JSON. Raises ``ValueError`` where they are none."""
    found: list[tuple[int, int]] = []
    for first, stop in list_of(saved):
        found.append((whole(first, found[-1][1] + 1 if found else 0), whole(stop, whole(first) + 1)))
    return tuple(found)
