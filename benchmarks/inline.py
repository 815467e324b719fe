"""Batches made in the training process: what isolated randomness and a captured position cost there."""

from __future__ import annotations

from benchmarks.datasets import Preloaded, token_rows
from benchmarks.measure import OURS, Goal, Line, Settings, medians, steady_side_by_side
from benchmarks.peers import side_by_side


def run(settings: Settings) -> list[Line]:
    makers = side_by_side(Preloaded(token_rows()), batch_size=8, num_workers=0)
    wall, _ = steady_side_by_side(makers, settings, batches=10_000, warm_up=500)
    more = medians(wall)[OURS] - medians(wall)["torch"]
    goal = Goal("at most 40 µs more than torch", more, 40, "µs")
    return [Line("inline, 8x2049 int64", "µs/batch", wall, (goal,))]
