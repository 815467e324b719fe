"""Audit public loaders, as their documentation sets them up, and print a table of what was found.

    pip install torchdata grain datasets mosaicml-streaming
    python examples/audit_others.py
    python examples/audit_others.py --only grain --only unbroken --reports out

Each loader is a function below. ``unbroken audit`` runs it without a stop, then kills it at random places, resumes it,
and holds what it delivers against the run without a stop, batch by batch: with 0 workers, with 2, and with another
number after half of the stops. A loader that is not installed is left out, and said so. What is written on the way lies
in a folder of the system for such files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from torch import Generator, Tensor, tensor
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info

import unbroken

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


def ours(num_workers: int = 0) -> Any:
    """The loader of this library over the same dataset as torchdata's."""
    return unbroken.StatefulDataLoader(Packed(), batch_size=4, num_workers=num_workers, lanes=4, seed=1)


LOADERS = {
    "torchdata": (torchdata_loader, "torchdata"),
    "torchdata nodes": (torchdata_nodes, "torchdata"),
    "grain": (grain, "grain"),
    "datasets": (hugging_face, "datasets"),
    "mosaicml": (mosaic, "mosaicml-streaming"),
    "unbroken": (ours, "unbroken"),
}


def audited(name: str, args: argparse.Namespace, workers: str) -> str:
    """One line of the table: what ``unbroken audit`` finds of a loader, with these numbers of workers."""
    function, package = LOADERS[name]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"| {name} | {workers} | not installed | | | | | |"
    out = FOLDER / "found.json"
    command = [sys.executable, "-m", "unbroken.cli", "audit", f"{Path(__file__).resolve()}:{function.__name__}"]
    command += [f"--workers={workers}", f"--batches={args.batches}", f"--trials={args.trials}", f"--seed={args.seed}"]
    command += [f"--json={out}"]
    if name == "mosaicml":  # two runs at a time would share what it keeps in shared memory
        command.append("--jobs=1")
    if args.reports:
        command.append(f"--report={args.reports / f'{name}-{workers}.html'.replace(' ', '-')}")
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        return f"| {name} {version} | {workers} | not audited: {' '.join(done.stderr.split())[:200]} | | | | | |"
    found = json.loads(out.read_text())
    bad = [trial for trial in found["trials"] if trial["verdict"] != "exact"]
    verdict = f"{found['verdict']}, {len(bad)} of {len(found['trials'])} runs" if bad else found["verdict"]
    sums = [str(sum(trial[kind] for trial in bad)) for kind in ("lost", "repeated", "reordered", "altered")]
    errors = sorted({trial["error"].splitlines()[0] for trial in bad if trial["error"]})
    why = "; ".join([*(cause["name"] for cause in found["causes"]), *errors])
    return f"| {name} {version} | {workers} | {verdict} | {' | '.join(sums)} | {why} |"


def main() -> int:
    """Audit each loader with the same number of workers after a stop, and with another."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text, allow_abbrev=False)
    parser.add_argument("--only", action="append", choices=list(LOADERS), help="only this; may be given several times")
    parser.add_argument("--batches", type=int, default=60, help="of each run (%(default)s)")
    parser.add_argument("--trials", type=int, default=10, help="runs that are killed (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the places where runs are killed (%(default)s)")
    parser.add_argument("--reports", type=Path, metavar="DIR", help="write a page of each audit there")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    print("| Loader | Workers | Verdict | Lost | Repeated | Reordered | Altered | Likely cause, or the error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in args.only or LOADERS:
        for workers in ("0", "2", "2,0"):
            print(audited(name, args, workers), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
