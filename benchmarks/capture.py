"""A dataset with a large state: what it costs a step that positions must be taken of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from benchmarks.datasets import token_rows
from benchmarks.measure import OURS, Goal, Line, Settings, medians, steady_side_by_side
from benchmarks.peers import LOADERS

ROWS_IN_STATE = 10_000
WITHOUT = " without state"


class Buffered(IterableDataset[Any]):
    """Holds 10 000 rows, as a shuffle buffer does, and changes one at each sample. This one cannot say its state."""

    def __init__(self) -> None:
        self.samples = token_rows()
        self.buffer = [[number % 16, number] for number in range(ROWS_IN_STATE)]
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.taken += 1
            self.buffer[self.taken % ROWS_IN_STATE] = [self.taken % 16, ROWS_IN_STATE + self.taken]
            yield self.samples[self.taken % len(self.samples)]


class BufferedStateful(Buffered):
    """The same with a state: the file and the place of each row in the buffer."""

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken, self.buffer = state["taken"], list(state["buffer"])


def run(settings: Settings) -> list[Line]:
    """Ours runs at its default, which adapts: it needs enough steps for several captures. torchdata captures each."""
    wall = {}
    for name, batches in ((OURS, 20_000), ("torchdata", 200)):
        makers = {
            name + suffix: lambda kind=kind, name=name: LOADERS[name](kind(), batch_size=8, num_workers=1)
            for suffix, kind in (("", BufferedStateful), (WITHOUT, Buffered))
        }
        wall |= steady_side_by_side(makers, settings, batches, warm_up=batches // 20)[0]
    middle = medians(wall)
    more = (middle[OURS] / middle[OURS + WITHOUT] - 1) * 100
    goal = Goal("at most 5 % more than without state", more, 5, "%")
    return [Line(f"a step, dataset with a {ROWS_IN_STATE}-row state, 1 worker", "µs/batch", wall, (goal,))]
