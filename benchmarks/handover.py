"""Handing a batch over from one worker process: wall clock, and CPU of the training process."""

from __future__ import annotations

import torch

from benchmarks.datasets import Preloaded, token_rows
from benchmarks.measure import OURS, Goal, Line, Settings, medians, steady_side_by_side, times_faster
from benchmarks.peers import side_by_side


def tokens(settings: Settings) -> list[Line]:
    """8x2049 int64. Both figures come from the same passes."""
    makers = side_by_side(Preloaded(token_rows()), batch_size=8, num_workers=1)
    wall, cpu = steady_side_by_side(makers, settings, batches=2000, warm_up=200)
    goals = tuple(times_faster(wall, 10, than) for than in ("torch", "torchdata"))
    share = medians(cpu)[OURS] / medians(cpu)["torch"]
    return [
        Line("hand over 8x2049 int64, 1 worker", "µs/batch", wall, goals),
        Line(
            "CPU of the training process, 8x2049, 1 worker",
            "µs/batch",
            cpu,
            (Goal("at most 0.1x torch", share, 0.1, "x"),),
        ),
    ]


def small_dict(settings: Settings) -> list[Line]:
    """Batches of 8 dicts of 5 tensors of 16 numbers each."""
    names = ("input_ids", "labels", "position_ids", "attention_mask", "weights")
    samples = [{name: torch.arange(16) + number for name in names} for number in range(64)]
    makers = side_by_side(Preloaded(samples), batch_size=8, num_workers=1)
    wall, _ = steady_side_by_side(makers, settings, batches=1000, warm_up=100)
    what = "hand over a dict of 5 small tensors, 1 worker"
    return [Line(what, "µs/batch", wall, (times_faster(wall, 25, "torch"),))]


def images(settings: Settings) -> list[Line]:
    """128x3x224x224 float32, 77 MB a batch."""
    samples = list(torch.rand(32, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
    makers = side_by_side(Preloaded(samples), batch_size=128, num_workers=1)
    wall, _ = steady_side_by_side(makers, settings, batches=24, warm_up=6)
    wall = {name: [value / 1000 for value in values] for name, values in wall.items()}
    what = "hand over 128x3x224x224 float32, 1 worker"
    return [Line(what, "ms/batch", wall, (times_faster(wall, 8, "torch"),))]


def run(settings: Settings) -> list[Line]:
    return [*tokens(settings), *small_dict(settings), *images(settings)]
