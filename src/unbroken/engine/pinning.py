"""Batches in page-locked memory, as torch's ``pin_memory=True`` gives them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

from unbroken.lineage import Lineage

__all__ = ["pin", "should_pin"]


def should_pin(asked: bool, device: str = "") -> bool:
    """Whether there is an accelerator to pin for; warns, as torch does, where it was asked for and there is none, and
    where a ``device`` was named, which has no effect.
    """
    if asked and device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,ignore "
            f"pin_memory_device='{device}'.",
            stacklevel=4,
        )
    if asked and not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be "
            "used.",
            stacklevel=4,
        )
        return False
    if asked and (found := torch.accelerator.current_accelerator()) is not None and found.type == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used.",
            stacklevel=4,
        )
        return False
    return asked


def pin(batch: Any) -> Any:
    """The same batch with every tensor, and everything that has ``pin_memory()``, pinned."""
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, str | bytes | Lineage):
        return batch
    if isinstance(batch, Mapping):
        pinned = {name: pin(value) for name, value in batch.items()}
        try:
            if not isinstance(batch, MutableMapping):
                return type(batch)(pinned)  # type: ignore[call-arg]
            mapping = copy.copy(batch)
            mapping.update(pinned)
        except TypeError:  # one that cannot be copied, or made of a dict
            return pinned
        return mapping
    if isinstance(batch, tuple):
        values = [pin(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, Sequence):
        values = [pin(value) for value in batch]
        try:
            if not isinstance(batch, MutableSequence):
                return type(batch)(values)  # type: ignore[call-arg]
            sequence = copy.copy(batch)
            for place, value in enumerate(values):
                sequence[place] = value
        except TypeError:  # one that cannot be copied, or made of a list: a range
            return values
        return sequence
    return batch
