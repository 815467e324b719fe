"""Audit public loaders, as their documentation sets them up, and print a table of what was found.

    pip install torchdata grain datasets mosaicml-streaming
    python examples/audit_others.py
    python examples/audit_others.py --only grain --only unbroken --reports out

Each loader is a function below. It is run without a stop, then killed at random places and resumed, with 0 and 2
workers, and held against the run without a stop, batch by batch. One that is not installed is left out, and said so.
Files for the loaders that read some are written to a folder of the system for such files, once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from torch import Generator, Tensor, tensor
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info

FOLDER = Path(tempfile.gettempdir()) / "unbroken-audit-others"
DOCUMENTS = 160
SEQ_LEN = 32


def document(number: int) -> list[int]:
    """Token ids, 10 to 59 of them, that no other document has. An epoch is some 40 batches of any loader here."""
    return [number * 100 + place for place in range(10 + number * 7 % 50)]


class Packed(IterableDataset[Tensor]):
    """Rows of ``SEQ_LEN`` tokens, with the tokens that are left in its state, as trainers of language models do it."""

    def __init__(self) -> None:
        self.next = 0
        self.buffer: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        mine = range(info.id, DOCUMENTS, info.num_workers) if info else range(DOCUMENTS)
        while self.next < len(mine):
            self.buffer.extend(document(mine[self.next]))
            self.next += 1
            while len(self.buffer) >= SEQ_LEN:
                row = tensor(self.buffer[:SEQ_LEN])
                del self.buffer[:SEQ_LEN]
                yield row
        self.next, self.buffer = 0, []

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.buffer = state["next"], list(state["buffer"])


def torchdata_loader(num_workers: int = 0) -> Any:
    """torchdata's StatefulDataLoader over a dataset that packs."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Packed(), batch_size=4, num_workers=num_workers)


def torchdata_nodes(num_workers: int = 0) -> Any:
    """torchdata's nodes: a random sampler with a seed, a map in threads, batches."""
    from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher, SamplerWrapper

    sampler = RandomSampler(range(DOCUMENTS), generator=Generator().manual_seed(1))
    rows = ParallelMapper(SamplerWrapper(sampler), document, num_workers or 1, method="thread")
    return Loader(Prefetcher(Batcher(rows, 4), 2))


def grain(num_workers: int = 0) -> Any:
    """Grain: shuffled, mapped, without end, in batches, in processes."""
    import grain.python as pygrain

    rows = pygrain.MapDataset.range(DOCUMENTS).shuffle(seed=1).map(lambda number: np.array(document(number)[:10]))
    batches = rows.repeat().to_iter_dataset().batch(4)
    if num_workers:
        batches = batches.mp_prefetch(pygrain.MultiprocessingOptions(num_workers=num_workers))
    return batches


def hugging_face(num_workers: int = 0) -> Any:
    """datasets, streamed and shuffled with a buffer, under torchdata's StatefulDataLoader."""
    from datasets import Dataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = Dataset.from_dict({"number": list(range(DOCUMENTS))}).to_iterable_dataset(num_shards=8)
    return StatefulDataLoader(rows.shuffle(seed=1, buffer_size=40), batch_size=4, num_workers=num_workers)


def mosaic(num_workers: int = 0) -> Any:
    """MosaicML's StreamingDataLoader over shards on disk, shuffled."""
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()  # as its documentation says for a run after one that was killed
    if not (FOLDER / "mds" / "index.json").exists():
        with MDSWriter(out=str(FOLDER / "mds"), columns={"number": "int"}) as writer:
            for number in range(DOCUMENTS):
                writer.write({"number": number})
    rows = StreamingDataset(local=str(FOLDER / "mds"), shuffle=True, shuffle_seed=1, batch_size=4)
    return StreamingDataLoader(rows, batch_size=4, num_workers=num_workers)


def unbroken(num_workers: int = 0, dp_rank: int | None = None, dp_world_size: int | None = None) -> Any:
    """The loader of this library over the same dataset as torchdata's."""
    from unbroken import StatefulDataLoader

    ranks = {"dp_rank": dp_rank, "dp_world_size": dp_world_size}
    return StatefulDataLoader(Packed(), batch_size=4, num_workers=num_workers, lanes=4, seed=1, **ranks)


LOADERS = {
    "torchdata": (torchdata_loader, "torchdata"),
    "torchdata nodes": (torchdata_nodes, "torchdata"),
    "grain": (grain, "grain"),
    "datasets": (hugging_face, "datasets"),
    "mosaicml": (mosaic, "mosaicml-streaming"),
    "unbroken": (unbroken, "unbroken"),
}


def audited(name: str, args: argparse.Namespace, workers: tuple[int, ...]) -> str:
    """One line of the table."""
    from unbroken.audit.judging import run_audit
    from unbroken.audit.plan import Audit
    from unbroken.audit.report import write_report
    from unbroken.errors import AuditError

    function, package = LOADERS[name]
    changed = " to ".join(map(str, workers))
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"| {name} | {changed} | not installed | | | | | |"
    factory = f"{Path(__file__).resolve()}:{function.__name__}"
    # Two runs at a time would share what MosaicML keeps in shared memory.
    jobs = 1 if name == "mosaicml" else None
    try:
        found = run_audit(
            Audit(factory, batches=args.batches, trials=args.trials, workers=workers, seed=args.seed, jobs=jobs)
        )
    except AuditError as error:
        return f"| {name} {version} | {changed} | {str(error).splitlines()[0]} | | | | | |"
    if args.reports:
        write_report(found, args.reports / f"{name.replace(' ', '-')}-{'-'.join(map(str, workers))}.html")
    bad = [trial for trial in found.trials if trial.verdict != "exact"]
    verdict = found.verdict if not bad else f"{found.verdict}, {len(bad)} of {len(found.trials)} runs"
    sums = [sum(getattr(trial, kind) for trial in bad) for kind in ("lost", "repeated", "reordered", "altered")]
    errors = sorted({trial.error.splitlines()[0] for trial in bad if trial.error})
    why = "; ".join([*(cause.name for cause in found.causes), *errors])
    return f"| {name} {version} | {changed} | {verdict} | {' | '.join(map(str, sums))} | {why} |"


def main() -> int:
    """Audit each loader with the same number of workers after a stop, and with another."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text, allow_abbrev=False)
    parser.add_argument("--only", action="append", choices=list(LOADERS), help="only this; may be given several times")
    parser.add_argument("--batches", type=int, default=60, help="of each run (%(default)s)")
    parser.add_argument("--trials", type=int, default=8, help="runs that are killed (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the places where runs are killed (%(default)s)")
    parser.add_argument("--reports", type=Path, metavar="DIR", help="write a page of each audit there")
    args = parser.parse_args()
    print("| Loader | Workers | Verdict | Lost | Repeated | Reordered | Altered | Likely cause, or the error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in args.only or LOADERS:
        for workers in ((0,), (2,), (2, 0)):
            print(audited(name, args, workers), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
