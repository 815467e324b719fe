"""Where lanes run: torch's ``multiprocessing_context``, and ``"thread"``, for threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from unbroken.lanes import LaneStream

__all__ = ["THREAD", "Context", "check_threads"]

THREAD = "thread"
_of_torch: Any = DataLoader.multiprocessing_context


@final
class Context:
    """The attribute ``multiprocessing_context`` of a loader: torch's property, which knows threads besides."""

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        if loader is None:
            return self
        return THREAD if loader.__dict__.get("_in_threads") else _of_torch.__get__(loader, owner)

    def __set__(self, loader: Any, context: Any) -> None:
        """Raises as torch's does, and as ``check_threads``; at construction the arguments are checked elsewhere."""
        in_threads = isinstance(context, str) and context == THREAD and loader.num_workers > 0
        options = loader.__dict__.get("_options")
        if in_threads and options is not None:
            of_options = options.faults.on_timeout, options.prefetch.max_bytes
            check_threads(loader.dataset, loader.worker_init_fn, *of_options)
        _of_torch.__set__(loader, None if in_threads else context)
        loader.__dict__["_in_threads"] = in_threads


def check_threads(
    dataset: Any,
    worker_init_fn: Callable[[int], None] | None,
    on_timeout: str = "raise",
    max_prefetch_bytes: int | None = None,
) -> None:
    """Raises ``ValueError`` where something would touch what belongs to the whole process, or cannot be done."""
    if not (isinstance(dataset, LaneStream) and isinstance(dataset, IterableDataset)):
        raise ValueError(
            f'multiprocessing_context="thread" is for streams, but the dataset is a {type(dataset).__qualname__}. A '
            "dataset may draw from the global generators of torch, numpy and random, which are seeded for each batch, "
            "and ask torch's get_worker_info(): both belong to the process, so that threads would take them from one "
            "another and from the training loop.\n"
            "Use worker processes (leave multiprocessing_context out), or read the files as a stream: read_jsonl, "
            "read_parquet and the others."
        )
    if seeding := list(_seeding(dataset)):
        raise ValueError(
            f'multiprocessing_context="thread" does not go with {seeding[0]}: it is given random numbers through the '
            "global generators of torch, numpy and random, which belong to the process, so that threads would take "
            "them from one another and from the training loop.\n"
            "Pass rng=True to map, filter and flat_map, whose function then gets a generator as second argument; or "
            "use worker processes (leave multiprocessing_context out)."
        )
    if worker_init_fn is not None:
        raise ValueError(
            'worker_init_fn does not go with multiprocessing_context="thread": it is to set up a process, and the '
            "threads are in this one.\n"
            "Call it yourself, once, before the loop; or use worker processes (leave multiprocessing_context out)."
        )
    if on_timeout == "restart":
        raise ValueError(
            'on_timeout="restart" does not go with multiprocessing_context="thread": a thread that hangs cannot be '
            "ended.\n"
            'Use on_timeout="raise", which says where it hangs, or worker processes (leave multiprocessing_context '
            "out)."
        )
    if max_prefetch_bytes is not None:
        raise ValueError(
            f'max_prefetch_bytes={max_prefetch_bytes} does not go with multiprocessing_context="thread": it bounds the '
            "shared memory of worker processes, and threads hand over rows as they are, of whatever size.\n"
            "Leave it out and use a smaller prefetch_factor; or use worker processes (leave multiprocessing_context "
            "out)."
        )


def _seeding(stream: Any) -> Iterator[str]:
    """The stages of a stream that seed the global generators, as they are written."""
    for source in getattr(stream, "sources", ()):
        yield from _seeding(source)
    if getattr(stream, "SEEDS", False):
        yield f"{stream.NAME}({stream.arguments()})"
