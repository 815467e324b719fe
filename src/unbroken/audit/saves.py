"""States in files, as trainers write them: with ``torch.save``, as JSON, or through torch.distributed.checkpoint.

Each save is a folder ``step-000012`` with one file (DCP: one folder) a rank. It is written under another name and
renamed into place, so that a run which is killed in the middle of it leaves no half save under that name.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from unbroken.errors import AuditError

__all__ = ["Format", "merged", "read_states", "saved_steps", "write_state"]

Format: TypeAlias = Literal["torch", "json", "dcp"]


def _name(step: int, rank: int) -> str:
    return f"step-{step:06d}-rank-{rank:04d}"


def write_state(state: Any, folder: Path, step: int, rank: int, format: Format) -> None:
    """Write the state of a rank after ``step`` batches, whole or not at all.

    Raises what the format raises for a state that it cannot carry.
    """
    path, made = folder / _name(step, rank), folder / f"making-{_name(step, rank)}"
    if format == "torch":
        torch.save({"loader": state, "step": step}, made)
    elif format == "json":
        made.write_text(json.dumps({"loader": state, "step": step}), "utf-8")
    else:
        _write_dcp(state, made)
    os.replace(made, path)


def _write_dcp(state: Any, path: Path) -> None:
    # Imported here: the other formats do not need it, and it takes its time.
    from torch.distributed.checkpoint.state_dict_saver import save

    if not isinstance(state, Mapping):
        raise AuditError(
            f"torch.distributed.checkpoint saves dicts, and this state is of type {type(state).__name__}.\n"
            "Audit it with --save torch."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group, which is known
        save({"loader": dict(state)}, checkpoint_id=path, no_dist=True)


def saved_steps(folder: Path, world: int) -> list[int]:
    """The steps at which every one of ``world`` ranks has a whole save, in order."""
    ranks: dict[int, int] = {}
    for path in folder.glob("step-*"):
        step = int(path.name.split("-")[1])
        ranks[step] = ranks.get(step, 0) + 1
    return sorted(step for step, count in ranks.items() if count == world)


def read_states(folder: Path, step: int, world: int, format: Format) -> list[Any]:
    """The states of all ranks at a step."""
    return [_read(folder / _name(step, rank), format) for rank in range(world)]


def _read(path: Path, format: Format) -> Any:
    if format == "json":
        return json.loads(path.read_text("utf-8"))["loader"]
    if format == "torch":
        # States of other loaders may hold what weights_only refuses. The file is of this very audit.
        return torch.load(path, weights_only=False)["loader"]
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = path.with_name(f"read-{os.getpid()}-{path.name}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(path, whole)
        return torch.load(whole, weights_only=False)["loader"]
    finally:
        whole.unlink(missing_ok=True)


def merged(states: list[Any], rank: int, world: int) -> Any:
    """What a rank of ``world`` loads: all states in one dict where they fit together, else its own.

    Raises ``AuditError`` where they do not and the number of ranks has changed.
    """
    if len(states) == 1:
        return states[0]
    if all(isinstance(state, Mapping) for state in states):
        whole: dict[Any, Any] = {}
        clashing = False
        for state in states:
            clashing = clashing or any(name in whole and not _equal(whole[name], state[name]) for name in state)
            whole.update(state)
        if not clashing:
            return whole
    if len(states) == world:
        return states[rank]
    raise AuditError(
        f"{len(states)} ranks saved states with the same keys and different values, which cannot be merged into one "
        f"for {world}.\nThis loader cannot be resumed on another number of ranks; audit it with one number: "
        f"--ranks {len(states)}."
    )


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays
        return False
