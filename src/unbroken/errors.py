"""The exceptions of unbroken.

::

    UnbrokenError
    +-- StateError (ValueError)          a position cannot be used
    |   +-- InvalidState                 not ours, cut short, or of a later version
    |   +-- IncompleteState              leaves are missing, or do not belong together
    |   +-- StateMismatch                saved for another pipeline
    +-- InexactDataset (RuntimeError)    the dataset's own state does not lead back to the place
    +-- UnsealableState (TypeError)      a captured state holds something no position can carry
    +-- LaneError (ValueError)           lanes, ranks and workers do not fit together
    +-- UncopyableDataset (TypeError)    several lanes in one process, and the dataset cannot be copied
    +-- UnsendableBatch (TypeError)      a batch cannot travel from a worker process
    +-- BadRow (ValueError)              a row of a source cannot be read
    +-- TooManySkipped (RuntimeError)    more samples failed than may be left out
    +-- WorkerDied (RuntimeError)        a worker process ended without being asked to
    +-- WorkerTimeout (RuntimeError)     no batch within ``timeout`` seconds
    +-- PeerFailed (RuntimeError)        another rank failed, or is not where this one is
    +-- DemoError (RuntimeError)         the demo could not be run to its end
    +-- AuditError (RuntimeError)        a loader could not be audited
    +-- ReplayError (ValueError)         the batch of a step cannot be made again
    +-- FactoryError (ValueError)        a function that makes a loader cannot be found, or failed

Each message says what failed, where, what was found against what was expected, and the way out. Errors raised by a
dataset, a sampler or a ``collate_fn`` keep their own type; wrong arguments that torch knows keep torch's.
"""

from __future__ import annotations

__all__ = [
    "AuditError",
    "BadRow",
    "DemoError",
    "FactoryError",
    "IncompleteState",
    "InexactDataset",
    "InvalidState",
    "LaneError",
    "PeerFailed",
    "ReplayError",
    "StateError",
    "StateMismatch",
    "TooManySkipped",
    "UnbrokenError",
    "UncopyableDataset",
    "UnsealableState",
    "UnsendableBatch",
    "WorkerDied",
    "WorkerTimeout",
]


class UnbrokenError(Exception):
    """The root: ``except UnbrokenError`` catches all that this library raises in its own name."""


class StateError(UnbrokenError, ValueError):
    """A position cannot be used. Nothing of it was loaded."""


class InvalidState(StateError):
    """What was given is not a position: not ours, cut short, or written by a later version."""


class IncompleteState(StateError):
    """Leaves are missing from a position, or come from different steps or runs."""


class StateMismatch(StateError):
    """A position was saved for another pipeline; the message lists each field, saved and now."""


class InexactDataset(UnbrokenError, RuntimeError):
    """Opened at its saved state, the dataset did not make again what it had delivered."""


class UnsealableState(UnbrokenError, TypeError):
    """A state that a dataset or sampler handed out holds something that no position can carry."""


class LaneError(UnbrokenError, ValueError):
    """Lanes, ranks and workers do not fit together; the message says what to set."""


class UncopyableDataset(UnbrokenError, TypeError):
    """Several lanes share one process and the dataset cannot be copied."""


class UnsendableBatch(UnbrokenError, TypeError):
    """A batch holds something that cannot travel from a worker process."""


class BadRow(UnbrokenError, ValueError):
    """A row of a source cannot be read; the message names file, offset and reason."""


class TooManySkipped(UnbrokenError, RuntimeError):
    """More samples of a dataset failed than may be left out; the message names the last of them."""


class WorkerDied(UnbrokenError, RuntimeError):
    """A worker process ended without being asked to."""


class WorkerTimeout(UnbrokenError, RuntimeError):
    """No batch arrived within ``timeout`` seconds."""


class PeerFailed(UnbrokenError, RuntimeError):
    """Ranks that end an epoch together cannot go on: one of them failed, or is at another step."""


class DemoError(UnbrokenError, RuntimeError):
    """The demo could not be run to its end, so nothing was proved or disproved. The message names the way out."""


class AuditError(UnbrokenError, RuntimeError):
    """A loader could not be audited, so nothing was proved or disproved. The message names the way out."""


class ReplayError(UnbrokenError, ValueError):
    """The batch of a step cannot be made again; the message says from where it could be."""


class FactoryError(UnbrokenError, ValueError):
    """A function that makes a loader, named as ``module:function``, cannot be found, or failed."""
