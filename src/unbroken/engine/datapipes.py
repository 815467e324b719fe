"""torch's datapipes: pipelines that a loader has to share out, and to give one random order on all workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

__all__ = ["sharer"]


def sharer(dataset: Any, lane: int, lanes: int, seed: int) -> Callable[[], None] | None:
    """What is done with a datapipe whenever it is opened; ``None`` for any other dataset.

    Its ``sharding_filter`` takes the rows of this lane, and its ``shuffle`` before that the order of ``seed``, which is
    the same in all lanes of an epoch: they shuffle all rows and take every ``lanes``-th.
    """
    return partial(_share, dataset, lane, lanes, seed) if isinstance(dataset, IterDataPipe) else None


def _share(dataset: Any, lane: int, lanes: int, seed: int) -> None:
    apply_sharding(dataset, lanes, lane)
    apply_random_seed(dataset, torch.Generator().manual_seed(seed))
