"""The loaders that are measured side by side. Each gets the same dataset and the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.data
import torchdata.stateful_dataloader

import unbroken
from benchmarks.measure import OURS

LOADERS: dict[str, Callable[..., Any]] = {
    OURS: unbroken.StatefulDataLoader,
    "torch": torch.utils.data.DataLoader,
    "torchdata": torchdata.stateful_dataloader.StatefulDataLoader,
}


def side_by_side(dataset: Any, **arguments: Any) -> dict[str, Callable[[], Any]]:
    """For each of the three, a function that makes a fresh loader over the dataset."""
    return {name: lambda kind=kind: kind(dataset, **arguments) for name, kind in LOADERS.items()}
