"""The loaders that the tests of ranks are about. The tests and the ranks under torchrun make them alike, by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests import datasets as ds
from unbroken import Stage, StatefulDataLoader, read_jsonl

# Every number of ranks in the tests divides the global batch and the lanes of the text; 3 does not divide 8 lanes.
MAP_ROWS = 24 * 6 + 7
LANES, LANE_ROWS = 8, 17
TEXT_LANES, DOCUMENTS = 48, 1500
GLOBAL_BATCH = 24


def write_corpus(path: Path) -> Path:
    """Documents of 0 to some 160 characters, no two alike but the empty ones."""
    with path.open("w") as file:
        for number in range(DOCUMENTS):
            text = f"document {number} says {number * 37 % 101} " * (number % 7)
            file.write(json.dumps({"text": text, "number": number}) + "\n")
    return path


def is_wanted(row: dict[str, Any]) -> bool:
    return row["number"] % 5 != 3


def encode(text: str) -> list[int]:
    return list(text.encode())


def text_stream(corpus: str | Path, window: int = 400) -> Stage:
    """Rows of 64 tokens, with a shuffle window and a token buffer in every position."""
    return read_jsonl(corpus).shuffle(window, seed=3).filter(is_wanted).tokenize(encode, append=0).pack(64)


def _map(corpus: str, world: int) -> tuple[Any, dict[str, Any]]:
    return ds.Numbers(MAP_ROWS), {"batch_size": GLOBAL_BATCH // world, "shuffle": True}


def _lanes(corpus: str, world: int) -> tuple[Any, dict[str, Any]]:
    return ds.Late(LANES * LANE_ROWS), {"batch_size": 2, "lanes": LANES}


def _uneven(corpus: str, world: int) -> tuple[Any, dict[str, Any]]:
    return ds.Uneven([5, 9, 13, 8, 6, 9, 12, 7]), {"batch_size": 2, "lanes": LANES}


def _text(corpus: str, world: int) -> tuple[Any, dict[str, Any]]:
    return text_stream(corpus), {"batch_size": GLOBAL_BATCH // world, "lanes": TEXT_LANES}


def _adopted(corpus: str, world: int) -> tuple[Any, dict[str, Any]]:
    dataset = ds.Numbers(GLOBAL_BATCH * 8)
    alone = {} if dist.is_initialized() else {"num_replicas": 1, "rank": 0}
    return dataset, {"batch_size": GLOBAL_BATCH // world, "sampler": DistributedSampler(dataset, seed=5, **alone)}


KINDS: dict[str, Callable[[str, int], tuple[Any, dict[str, Any]]]] = {
    "map": _map,
    "lanes": _lanes,
    "uneven": _uneven,
    "text": _text,
    "adopted": _adopted,
    "plain map": lambda corpus, world: (ds.Numbers(40), {"batch_size": 4, "shuffle": True}),
    "plain iterable": lambda corpus, world: (ds.Late(40), {"batch_size": 4}),
}
# One whose sampler finds out about ranks, and those that nobody tells of them.
WITHOUT_DP_ARGUMENTS = {"adopted", "plain map", "plain iterable"}


def make_loader(kind: str, corpus: str | Path, rank: int = 0, world: int = 1, **others: Any) -> StatefulDataLoader:
    """A loader of dp rank ``rank`` of ``world``; ``others`` are further arguments, or other values of them."""
    dataset, arguments = KINDS[kind](str(corpus), world)
    if kind not in WITHOUT_DP_ARGUMENTS:
        arguments |= {"seed": 7, "dp_rank": rank, "dp_world_size": world}
    if "mesh" in others:
        del arguments["dp_rank"], arguments["dp_world_size"]
    return StatefulDataLoader(**{"dataset": dataset, **arguments, **others})


def lanes_in(state: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The fields of the lanes in a position."""
    return {name: json.loads(leaf)["lane"] for name, leaf in state.items() if name.startswith("lane-")}


def ended_of(state: Mapping[str, str]) -> bool:
    """Whether a lane of this position has ended."""
    return any(lane["ended"] for lane in lanes_in(state).values())


def rows_of(batch: Any) -> list[Any]:
    """The rows of a batch in values that compare: numbers, or digests of packed rows."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()  # type: ignore[no-any-return]
    rows = zip(*(batch[name].numpy() for name in sorted(batch)), strict=True)
    return [hashlib.blake2b(b"".join(field.tobytes() for field in row), digest_size=8).hexdigest() for row in rows]
