"""How ranks end an epoch together: a small vote, now and then, on how many batches all of them can deliver.

Each rank makes some batches ahead and announces how many it holds. All deliver as many as the one that holds fewest,
without another vote, and vote again. So no rank ever waits in a step that another cannot fill, and few steps need a
vote. The words of a vote are whole numbers of which the least over all ranks is taken (a greatest one travels negated).
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
import torch.distributed as dist

from unbroken.engine.empty import emptied
from unbroken.engine.feeds import Feed, Prepared
from unbroken.errors import InexactDataset, PeerFailed
from unbroken.options import Options
from unbroken.position import LanesPosition, Position
from unbroken.sampling import MapOrder
from unbroken.seeding import key

__all__ = ["Ballot", "Group", "Together", "TorchGroup", "new_ballot"]

_MOST_HELD = 8
_MORE = 4
_ANY = 1 << 40
_PADDING = object()


class Group(ABC):
    """The ranks that have to agree. Each of them calls ``announce`` and ``exchange`` in the same order."""

    @abstractmethod
    def rank(self) -> int:
        """This rank, in ``[0, size())``."""

    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    @abstractmethod
    def announce(self, words: list[int]) -> Callable[[], list[int]]:
        """Give some words. What is returned waits for those of all ranks, and gives the least of each; it may be called
        again where an interrupt came between. Both raise ``PeerFailed`` where a rank does not answer.
        """

    @abstractmethod
    def exchange(self, data: bytes) -> list[bytes]:
        """What each rank gave, by rank. Raises ``PeerFailed`` where a rank does not answer."""


@final
class TorchGroup(Group):
    """A process group of torch.distributed. Votes travel on the CPU if it can do that, else on the current device."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def announce(self, words: list[int]) -> Callable[[], list[int]]:
        def found() -> list[int]:
            try:
                under_way.wait()
                return ballot.tolist()
            except RuntimeError as error:
                raise self._no_answer(error) from error

        ballot = torch.tensor(words, dtype=torch.int64, device=self._device())
        try:
            under_way = dist.all_reduce(ballot, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._no_answer(error) from error
        return found

    def exchange(self, data: bytes) -> list[bytes]:
        found: list[Any] = [None] * self.size()
        try:
            dist.all_gather_object(found, data, group=self._group)
        except RuntimeError as error:
            raise self._no_answer(error) from error
        return found

    def _device(self) -> torch.device:
        backends = dist.get_backend_config(self._group)  # such as "cpu:gloo,cuda:nccl"
        devices = [part.partition(":")[0] for part in backends.split(",")]
        if "cpu" in devices:
            return torch.device("cpu")
        return torch.device(devices[0], torch.get_device_module(devices[0]).current_device())

    def _no_answer(self, error: Exception) -> PeerFailed:
        return PeerFailed(
            f"The ranks of the group could not agree on their next step: {error}\n"
            f"This is rank {self.rank()} of {self.size()}; another one has ended, or is not at this step. Its own "
            "output says why. Nothing that was delivered is lost: state_dict() still gives the position."
        )


@final
class Ballot:
    """What the ranks have agreed on in one pass. It outlives a feed that an interrupt ended.

    It began at step ``first`` of the position, and no vote is needed before step ``until``. ``epoch`` is that of the
    pass (None before the first vote), ``apart`` whether some lanes stand in a later one. ``template`` is a batch
    without rows, where they are needed. Whether a pass is ``resumed``, from a position that was loaded, has to be the
    same on all ranks.
    """

    def __init__(self, group: Group, *, pads: bool, resumed: bool = False, template: Any = None) -> None:
        self.group = group
        self.pads = pads
        self.resumed = resumed
        self.template = template
        self.first: int | None = None
        self.until = 0
        self.epoch: int | None = None
        self.apart = False
        self._announced: Callable[[], list[int]] | None = None

    def anew(self, *, resumed: bool) -> Ballot:
        """For another pass."""
        return Ballot(self.group, pads=self.pads, resumed=resumed, template=self.template)

    def begin(self, step: int) -> None:
        """The pass stands at this step, for the first time or again."""
        if self.first is None:
            self.first = self.until = step

    def grant(self, until: int) -> None:
        """What all voted on is done. At once, so that no interrupt parts it: the others have the answer only once."""
        self.until, self._announced = until, None

    def waits(self, position: Position) -> bool:
        """Whether this rank stands in a later epoch than the pass is of."""
        return self.epoch is not None and position.epoch > self.epoch

    def vote(self, able: int, held: int, lacks: bool, position: LanesPosition) -> tuple[int, int, bool]:
        """Announce what this rank can do; returns what all can, the most that any holds, and whether any ``lacks`` a
        template. The first vote without an error sets ``epoch`` and ``apart``.

        Raises ``PeerFailed`` where ranks stand at different places.
        """
        at_end = "pad" if self.pads else "stop"
        delivered = position.step - (self.first or 0)
        mark = key(at_end, int(self.resumed), delivered) >> 2  # 62 bits, so that it can be negated
        latest = max(lane.epoch for lane in position.lanes.values())
        words = [able, -held, -int(lacks), position.epoch, -latest, mark, -mark]
        if self._announced is None:  # else an interrupt came before it was heeded, and the others heed it
            self._announced = self.group.announce(words)
        found = self._announced()
        if found[5] != -found[6] or found[0] < 0:
            self._announced = None
        if found[5] != -found[6]:
            raise PeerFailed(
                f"The ranks of the group are not at the same step. This is rank {self.group.rank()} of "
                f'{self.group.size()}: {delivered} batches delivered in this pass, at_end="{at_end}", '
                f"{'resumed' if self.resumed else 'not resumed'}; another rank differs.\n"
                "Load the same position on all ranks, leave the loop on all of them after the same step, and make "
                "their loaders with the same arguments."
            )
        if found[0] >= 0 and self.epoch is None:
            apart = found[3] < -found[4]
            self.epoch, self.apart, self._announced = found[3], apart, None if apart else self._announced
        return found[0], -found[1], found[2] < 0

    def share_template(self) -> None:
        """Some rank has seen no batch yet and needs the shape of one: give it ours. Raises ``PeerFailed`` if none has
        one that can be sent.
        """
        try:
            data = b"" if self.template is None else pickle.dumps(self.template)
        except Exception:  # of a class that cannot be found by name; another rank may have it as it is
            data = b""
        found = next(filter(None, self.group.exchange(data)), None)
        if found is None:
            raise PeerFailed(
                "A rank without data needs batches with no row in them, and no other rank has one that can be sent.\n"
                'Return tensors, dicts and tuples from collate_fn, or use at_end="stop".'
            )
        if self.template is None:
            self.template = pickle.loads(found)


def new_ballot(options: Options, order: MapOrder | None) -> Ballot | None:
    """For the vote of ranks of lanes. Of a map-style dataset each rank knows what the others have."""
    if order is not None or options.ends not in ("stop", "pad"):
        return None
    group = options.group
    return Ballot(group if isinstance(group, Group) else TorchGroup(group), pads=options.ends == "pad")


@final
class Together(Feed):
    """A feed that delivers as many batches as the feeds of all ranks; or that pads: as the one that has most.

    An error of its own is raised when what was made before it is delivered, and on the others as ``PeerFailed``.
    """

    def __init__(self, feed: Feed, ballot: Ballot, position: LanesPosition) -> None:
        self._feed = feed
        self._ballot = ballot
        self._position = position
        ballot.begin(position.step)
        self._held: deque[Prepared] = deque()
        self._goal = 1
        self._ended = False
        self._failure: Exception | None = None

    def make(self) -> Prepared:
        ballot = self._ballot
        if self._position.step >= ballot.until:
            self._agree()
        if not ballot.waits(self._position):
            if not self._held and not self._ended:  # an interrupt lost what was made
                self._hold(1)
            if self._held:
                return self._held.popleft()
            if self._failure is not None:
                failure, self._failure = self._failure, None
                try:
                    raise failure
                finally:
                    del failure  # or it would keep itself, by its traceback
            if not ballot.pads:
                raise InexactDataset(
                    "Fewer batches came when they were made again after an interrupt: the dataset is not the same at "
                    "each opening. Other ranks count on this step; start all of them from the last checkpoint."
                )
        return Prepared(emptied(ballot.template), _PADDING)

    @property
    def passing(self) -> bool:
        return self._position.passing

    def commit(self, record: Any) -> None:
        if record is _PADDING:
            self._position.step += 1
        else:
            self._feed.commit(record)

    def depth(self) -> int:
        return len(self._held) + self._feed.depth()

    def end(self) -> None:
        if not self._held and not self._ballot.waits(self._position):
            self._feed.end()

    def knows(self, error: Exception) -> bool:
        return self._feed.knows(error)

    @property
    def keeps(self) -> bool:
        return self._feed.keeps

    def again(self) -> None:
        self._held.clear()
        self._goal, self._ended, self._failure = 1, False, None
        self._feed.again()

    def settled(self) -> AbstractContextManager[None]:
        return self._feed.settled()

    def let_go(self) -> None:
        self._feed.let_go()

    @property
    def apart(self) -> bool:
        return self._ballot.apart

    def _hold(self, number: int) -> None:
        """Make batches ahead: at least one, more while that takes no waiting, until an end or an error."""
        while len(self._held) < number and not self._ended and self._failure is None:
            try:
                if self._held and not self._feed.ready():
                    break
                self._held.append(self._feed.make())
                if self._ballot.pads:
                    self._ballot.template = emptied(self._held[-1].batch)
            except StopIteration:
                self._ended = True
            except Exception as error:
                self._failure = error

    def _agree(self) -> None:
        """Find out how many batches all ranks deliver. Raises ``StopIteration`` where it is none."""
        ballot = self._ballot
        opening = ballot.epoch is None
        able, most, lacking = self._vote()
        if opening and ballot.apart:  # a rank that is ahead has nothing for this epoch, and knows it now
            able, most, lacking = self._vote()
        granted = min(able, most)
        if not granted:
            raise StopIteration
        if lacking:
            ballot.share_template()
        ballot.grant(self._position.step + granted)

    def _vote(self) -> tuple[int, int, bool]:
        ballot = self._ballot
        waits = ballot.waits(self._position)
        if not waits:
            self._hold(self._goal)
            self._goal = min(_MOST_HELD, self._goal * _MORE)
        held = 0 if waits else len(self._held)
        failed = self._failure is not None and not held and not waits
        idle = ballot.pads and (waits or self._ended)
        able = -1 - ballot.group.rank() if failed else _ANY if idle else held
        found = ballot.vote(able, held, idle and ballot.template is None, self._position)
        if found[0] < 0:
            self._fail(-1 - found[0], failed)
        return found

    def _fail(self, rank: int, failed: bool) -> None:
        failure, self._failure = self._failure, self._failure if not failed else None
        if failed and failure is not None:
            try:
                raise failure
            finally:
                del failure
        raise PeerFailed(
            f"Rank {rank} of the group could not make its next batch; the error that it raised says why.\n"
            "This rank could go on, and did not. Nothing that was delivered is lost: state_dict() gives the position "
            "of each rank, and next() on all of them tries again."
        )
