"""unbroken feeds training jobs in PyTorch and never loses its place.

``StatefulDataLoader`` takes the place of ``torch.utils.data.DataLoader``; the functions ``read_*`` and ``from_*`` start
a stream, ``mix`` and ``concat`` combine several. A run that is killed and started again, on as many ranks and workers
as there are then, sees exactly the batches it would have seen.
"""

from unbroken.errors import (
    BadRow,
    IncompleteState,
    InexactDataset,
    InvalidState,
    LaneError,
    PeerFailed,
    StateError,
    StateMismatch,
    TooManySkipped,
    UnbrokenError,
    UncopyableDataset,
    UnsealableState,
    UnsendableBatch,
    WorkerDied,
    WorkerTimeout,
)
from unbroken.lanes import Lane
from unbroken.lineage import Lineage, Origin
from unbroken.loader import StatefulDataLoader
from unbroken.streams.concat import concat
from unbroken.streams.mix import mix
from unbroken.streams.read import read
from unbroken.streams.reading.arrow import read_arrow
from unbroken.streams.reading.huggingface import from_hf
from unbroken.streams.reading.indexed import from_map
from unbroken.streams.reading.iterables import from_iterable
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.reading.parquet import read_parquet
from unbroken.streams.reading.tar import read_tar
from unbroken.streams.reading.tokens import read_tokens
from unbroken.streams.stage import Stage

__version__ = "0.1.0"

__all__ = [
    "BadRow",
    "IncompleteState",
    "InexactDataset",
    "InvalidState",
    "Lane",
    "LaneError",
    "Lineage",
    "Origin",
    "PeerFailed",
    "Stage",
    "StateError",
    "StateMismatch",
    "StatefulDataLoader",
    "TooManySkipped",
    "UnbrokenError",
    "UncopyableDataset",
    "UnsealableState",
    "UnsendableBatch",
    "WorkerDied",
    "WorkerTimeout",
    "concat",
    "from_hf",
    "from_iterable",
    "from_map",
    "mix",
    "read",
    "read_arrow",
    "read_jsonl",
    "read_parquet",
    "read_tar",
    "read_tokens",
]
