"""unbroken feeds training jobs in PyTorch and never loses its place.

``StatefulDataLoader`` takes the place of ``torch.utils.data.DataLoader``; ``read_jsonl`` starts a stream of text. A
run that is killed and started again, on as many ranks and workers as there are then, sees exactly the batches it
would have seen.
"""

from unbroken.errors import (
    BadRow,
    IncompleteState,
    InexactDataset,
    InvalidState,
    LaneError,
    StateError,
    StateMismatch,
    UnbrokenError,
    UncopyableDataset,
    UnsealableState,
    UnsendableBatch,
    WorkerDied,
    WorkerTimeout,
)
from unbroken.lanes import Lane
from unbroken.loader import StatefulDataLoader
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage

__version__ = "0.1.0"

__all__ = [
    "BadRow",
    "IncompleteState",
    "InexactDataset",
    "InvalidState",
    "Lane",
    "LaneError",
    "Stage",
    "StateError",
    "StateMismatch",
    "StatefulDataLoader",
    "UnbrokenError",
    "UncopyableDataset",
    "UnsealableState",
    "UnsendableBatch",
    "WorkerDied",
    "WorkerTimeout",
    "read_jsonl",
]
