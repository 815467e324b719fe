"""Ranges of the steps of a run, in order, with a gap between any two.

Those that are left out are ``[first, stop)`` each.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, final

from unbroken.state import list_of, whole

__all__ = ["Ranges", "Steps", "joined", "lies_in", "read_beyond", "read_steps", "to_leave_out"]

Steps: TypeAlias = tuple[tuple[int, int], ...]

_MOST = 1 << 53


@final
class Ranges(NamedTuple):
    """Steps of a map-style dataset: those ``passed`` over, and those delivered ``beyond`` the first that was not."""

    passed: Steps = ()
    beyond: Steps = ()


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


def to_leave_out(batches: Any, step: int, passed: Steps = ()) -> tuple[int, int]:
    """The range that ``loader.skip(batches)`` means at a step, where some steps were ``passed`` over already.

    Raises ``TypeError`` or ``ValueError``.
    """
    if isinstance(batches, range):
        over = min(step, batches.stop)
        known = batches.start >= over or any(first <= batches.start and over <= stop for first, stop in passed)
        if batches.step != 1 or not 0 <= batches.start <= _MOST or batches.stop > _MOST or not known:
            raise ValueError(
                f"skip() got {batches!r}, but the next step is {step}: steps that were delivered cannot be left out "
                "any more, and a range goes up by one, to 2**53 at most.\n"
                "Load a position that was saved before them, and call skip() then."
            )
        return batches.start, max(batches.start, batches.stop)
    if isinstance(batches, bool) or not hasattr(batches, "__index__"):
        raise TypeError(f"skip() takes a number of batches, or a range of steps, but got {batches!r}.")
    number = batches.__index__()
    if not 0 <= number <= _MOST - step:
        raise ValueError(
            f"skip() got {number} batches, and takes 0 to 2**53. To go back, load a position that was saved earlier."
        )
    return step, step + number


def read_steps(saved: Any) -> Steps:
    """As they are read from JSON. Raises ``ValueError`` where they are none."""
    found: list[tuple[int, int]] = []
    for first, stop in list_of(saved):
        found.append((whole(first, found[-1][1] + 1 if found else 0), whole(stop, whole(first) + 1)))
    return tuple(found)


def read_beyond(saved: Any) -> Steps:
    """Ranges behind the first step that was not delivered, the first and the last of each, as read from JSON.

    Raises ``ValueError`` where they are none.
    """
    found: list[tuple[int, int]] = []
    for first, last in list_of(saved):
        least = found[-1][1] + 2 if found else 1
        found.append((whole(first, least), whole(last, first)))
    return tuple(found)
