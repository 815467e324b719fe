"""How a dataset is opened at a state, and how its state is captured.

Three kinds of subject share one shape: a torch iterable dataset (or a sampler), whose state may live on itself, on its
iterator or on both; the same without its state (``resume="replay"``, or where it has none); and a lane stream.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, final

import orjson
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import Dataset

from unbroken.errors import UnsealableState
from unbroken.lanes import Lane, LaneStream
from unbroken.meters import IDLE, Meter
from unbroken.state import seal, unseal

__all__ = ["UNTOUCHED", "Opening", "StreamOpening", "TorchOpening", "lane_info", "pristine_of", "set_worker_info"]


class _LaneInfo(torch_worker.WorkerInfo):
    """torch's worker info, which also knows whether anybody looked at it."""

    looked_at = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "num_workers", "seed"):
            object.__setattr__(self, "looked_at", True)
        return super().__getattribute__(name)


def lane_info(number: int, count: int, seed: int, dataset: Dataset[Any]) -> Any:
    """What ``torch.utils.data.get_worker_info()`` is to answer: the lane as torch's worker.

    Its ``looked_at`` tells whether the dataset asked: one that never does is repeated by every lane.
    """
    return _LaneInfo(id=number, num_workers=count, seed=seed & (1 << 63) - 1, dataset=dataset)


@final
class _Untouched:
    """The type of ``UNTOUCHED``."""

    looked_at = True


UNTOUCHED = _Untouched()
"""In place of a worker info where lanes run in threads: what belongs to the process is left as it is. That is what
``get_worker_info()`` answers, and the global generators.
"""


def set_worker_info(info: Any) -> Any:
    """Make ``get_worker_info()`` answer this; returns what it answered. torch has no public way (this is the place)."""
    if info is UNTOUCHED:
        return info
    before = torch_worker._worker_info
    torch_worker._worker_info = info
    return before


class Opening(ABC):
    """A subject that can be opened at a state. States are sealed; ``None`` is the state of one that has none."""

    exact: bool
    """Whether its state is exact by construction, so that nothing has to be checked."""
    name: str

    @property
    @abstractmethod
    def stateful(self) -> bool:
        """Whether there is any state to capture, as far as is known after ``enter``."""

    @abstractmethod
    def enter(self, state: str | None) -> Iterator[Any]:
        """A new iterator, placed at a state (``None``: as the subject is now)."""

    @abstractmethod
    def capture(self) -> str | None:
        """The state between two samples."""

    @abstractmethod
    def carry(self) -> str | None:
        """The state that a subject takes from one epoch into the next."""

    def origin(self) -> tuple[Any, ...]:
        """The stored rows behind the last sample; nothing is known of those of a dataset that is not a stream."""
        return ()


@final
class TorchOpening(Opening):
    """A torch iterable dataset, or a sampler.

    State on the dataset: load, then open. State on the iterator, a dataset that is its own iterator included: open,
    then load. Both: dataset, open, iterator.
    """

    exact = False

    def __init__(self, dataset: Any, *, use_state: bool, what: str) -> None:
        self._dataset = dataset
        self._use_state = use_state
        self._iterator: Iterator[Any] | None = None
        self._epoch: int | None = None
        self._share: Callable[[], None] | None = None
        self._what = what
        self.name = type(dataset).__qualname__

    @property
    def stateful(self) -> bool:
        return self._use_state and (_stateful(self._dataset) or _stateful(self._iterator))

    def set_epoch(self, epoch: int | None) -> None:
        """The ``epoch`` that the user's dataset had when the loader's epoch began; put into this copy at opening."""
        self._epoch = epoch

    def set_share(self, share: Callable[[], None] | None) -> None:
        """What makes of the dataset the part of a lane, at every opening."""
        self._share = share

    def enter(self, state: str | None) -> Iterator[Any]:
        saved = unseal(state) if state is not None else {}
        late = hasattr(self._dataset, "__next__")  # it may be its own iterator: loaded once it is opened
        if "dataset" in saved and not late and _stateful(self._dataset):
            self._dataset.load_state_dict(saved["dataset"])
        if self._epoch is not None and getattr(self._dataset, "epoch", None) != self._epoch:
            self._dataset.set_epoch(self._epoch)
        if self._share is not None:
            self._share()
        self._iterator = iter(self._dataset)
        of_iterator = saved.get("iterator", saved.get("dataset") if late else None)
        if of_iterator is not None and _stateful(self._iterator):
            self._iterator.load_state_dict(of_iterator)  # type: ignore[union-attr]
        return self._iterator

    def capture(self) -> str | None:
        state = {}
        if self._use_state and _stateful(self._dataset) and self._iterator is not self._dataset:
            state["dataset"] = self._dataset.state_dict()
        if self._use_state and _stateful(self._iterator):
            state["iterator"] = self._iterator.state_dict()  # type: ignore[union-attr]
        return seal(state, self._what) if state else None

    def carry(self) -> str | None:
        if not (self._use_state and _stateful(self._dataset)):
            return None
        where = "iterator" if self._iterator is self._dataset else "dataset"
        return seal({where: self._dataset.state_dict()}, self._what)


@final
class StreamOpening(Opening):
    """One lane of a stream: its iterator's state is exact after every row. It gets a meter, if it has a use for one."""

    exact = True

    def __init__(self, stream: LaneStream, lane: Lane, meter: Meter = IDLE, *, lineage: bool = False) -> None:
        self._stream = stream
        self._lane = lane
        self._options: dict[str, Any] = {"lineage": True} if lineage else {}
        if _takes_meter(type(stream)):
            self._options["meter"] = meter
        self._iterator: Any = None
        self.name = type(stream).__qualname__

    @property
    def stateful(self) -> bool:
        return True

    def enter(self, state: str | None) -> Iterator[Any]:
        self._iterator = self._stream.open(self._lane, **self._options)
        if state is not None:
            self._iterator.load_state_dict(orjson.loads(state))
        return self._iterator  # type: ignore[no-any-return]

    def capture(self) -> str | None:
        state = self._iterator.state_dict()
        try:
            return orjson.dumps(state).decode()
        except TypeError as error:
            raise UnsealableState(
                f"The state_dict() of the iterator of {self.name} holds more than JSON values: {error}.\n"
                "Return numbers, text, lists and dicts with keys of text."
            ) from error

    def carry(self) -> str | None:
        return None

    def origin(self) -> tuple[Any, ...]:
        return self._iterator.origin()  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=16)  # it is asked for each lane
def _takes_meter(kind: type[Any]) -> bool:
    try:
        return "meter" in inspect.signature(kind.open).parameters
    except (AttributeError, TypeError, ValueError):  # made in C, or an attribute of the object
        return False


def pristine_of(subject: Any) -> str | None:
    """The sealed state of the user's object before it was ever opened, where it has one."""
    what = f"the state_dict() of {type(subject).__qualname__}"
    return TorchOpening(subject, use_state=True, what=what).carry()


def _stateful(subject: Any) -> bool:
    return callable(getattr(subject, "state_dict", None)) and callable(getattr(subject, "load_state_dict", None))
