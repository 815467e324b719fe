"""Train a small GPT on text or token ids. Stop it in any way, start it again: it goes on to the last bit.

    python examples/train.py --data corpus.jsonl --tokenizer tok.json --out runs/one
    python examples/train.py --data corpus.jsonl --tokenizer tok.json --out runs/one --resume --workers 3
    torchrun --nproc-per-node 2 examples/train.py --data corpus.jsonl --tokenizer tok.json --out runs/one --resume

    python examples/train.py --data corpus.jsonl --tokenizer tok.json --out runs/one --resume --skip 1010:1030

    python examples/train.py --data 'web/*.parquet' --text content --tokenizer tok.json --out runs/two
    python examples/train.py --data tokens.bin --dtype uint16 --vocab-size 50257 --out runs/three
    python examples/train.py --data my_mix.py:make_stream --tokenizer tok.json --out runs/four

``--batch-size`` is the number of rows in a global step. It is divided by the ranks, so each step holds the same rows
whatever their number. Each rank writes OUT/log-rank<r>.jsonl, one line a step; checkpoints are OUT/step-<n>. The first
Ctrl-C (or SIGTERM) ends the run after the step under way, with a checkpoint; a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from training_data import add_data_options, check_ids, load_data

import unbroken

FIELDS = ("input_ids", "labels", "position_ids")
Batch = dict[str, Tensor]


# --- Options -----------------------------------------------------------------------------------------------------


def steps(text: str) -> range:
    """``FIRST:STOP``, as in a slice."""
    first, stop = map(int, text.split(":"))
    return range(first, stop)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line, checked."""
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text, allow_abbrev=False)
    add = parser.add_argument
    add_data_options(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--width", type=int, default=128, help="(%(default)s)")
    model.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    model.add_argument("--heads", type=int, default=4, help="(%(default)s)")
    model.add_argument("--dropout", type=float, default=0.1, help="(%(default)s)")
    model.add_argument("--lr", type=float, default=1e-3, help="(%(default)s)")
    add("--steps", type=int, default=30, help="steps in all, those before a resume included (%(default)s)")
    add("--save-every", type=int, default=5, metavar="N", help="steps between checkpoints (%(default)s)")
    add("--out", type=Path, required=True, metavar="DIR", help="where checkpoints and logs go")
    add("--resume", action="store_true", help="go on from the newest complete checkpoint in --out")
    skip = "leave out these steps of the data, from 0, FIRST up to STOP without it: around a spike of the loss, say"
    add("--skip", type=steps, metavar="FIRST:STOP", help=f"{skip}. It is kept in the checkpoints")
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--seed", type=int, default=0, help="of weights, dropout and data order (%(default)s)")
    add("--threads", type=int, default=1, help="of torch; losses are equal for equal numbers (%(default)s)")
    skip = "restore model and optimizer but not the data's place: shows what an inexact resume looks like"
    add("--skip-loader-state", action="store_true", help=skip)
    args = parser.parse_args(argv)
    for name in ("batch_size", "seq_len", "lanes", "window", "vocab_size", "steps", "save_every", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but is {getattr(args, name)}")
    return args


# --- Checkpoints -------------------------------------------------------------------------------------------------


class Training:
    """Model, optimizer and step as one object that torch.distributed.checkpoint can save and load."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        # get_state_dict names parameters without DDP's prefix, and creates the moments of an optimizer that has not
        # stepped yet, so that a fresh process has the keys that are to be loaded.
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.step = state["step"]


class Randomness:
    """torch's generator, which draws the dropout. Each rank's under a key of its own."""

    def __init__(self, rank: int) -> None:
        self.key = f"rank-{rank:04d}"

    def state_dict(self) -> dict[str, Tensor]:
        return {self.key: torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state[self.key])


class Checkpoints:
    """The checkpoints of one run: OUT/step-<n>, each complete once its ``.metadata`` exists (DCP writes it last)."""

    def __init__(self, out: Path, asynchronous: bool, world: int) -> None:
        self.out, self.asynchronous = out, asynchronous
        self.in_flight: Future[Any] | None = None
        # A save in the background talks to the other ranks while the step talks to them too: it needs its own group.
        self.group = dist.new_group(backend="gloo") if asynchronous and world > 1 else None

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        return max((file.parent for file in self.out.glob("step-*/.metadata")), default=None)

    def save(self, step: int, parts: dict[str, Any]) -> None:
        """Save ``parts``; in the background if asked to, but never two at once."""
        self.wait()
        path = self.out / f"step-{step:06d}"
        if self.asynchronous:
            self.in_flight = dcp.async_save(parts, checkpoint_id=path, process_group=self.group)
        else:
            dcp.save(parts, checkpoint_id=path)

    def wait(self) -> None:
        """Wait for the save in flight; an error in it is raised here."""
        if self.in_flight is not None:
            pending, self.in_flight = self.in_flight, None
            pending.result()

    def load(self, path: Path, parts: dict[str, Any], rank: int) -> None:
        """Load ``parts``. A rank that the saved run did not have keeps its own fresh random numbers."""
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        known = f"rng.{parts['rng'].key}" in saved
        dcp.load({name: part for name, part in parts.items() if known or name != "rng"}, checkpoint_id=path)
        if not known:
            torch.manual_seed(torch.initial_seed() + 1_000_003 * parts["training"].step)
            print(f"rank {rank}: not in the saved run, so its dropout starts with fresh random numbers", flush=True)


# --- Data --------------------------------------------------------------------------------------------------------


def make_loader(args: argparse.Namespace, stream: unbroken.Stage, world: int) -> unbroken.StatefulDataLoader:
    """Batches of the stream, dealt to the ranks.

    A step needs every rank, so all end an epoch together, when the first has no full batch left: that is what the
    loader's ``group`` is for. With ``--at-end repeat`` there is no such end.
    """
    if args.batch_size % world:
        raise SystemExit(f"--batch-size {args.batch_size} cannot be divided by {world} ranks: choose a multiple.")
    return unbroken.StatefulDataLoader(
        stream,
        batch_size=args.batch_size // world,
        num_workers=args.workers,
        drop_last=True,
        lanes=args.lanes,
        group=dist.group.WORLD if world > 1 else None,
        at_end=args.at_end,
        seed=args.seed,
    )


def digests(batch: Batch) -> list[str]:
    """One digest for each row of a batch, over all that the model sees of it."""
    columns = [batch[field].contiguous().numpy() for field in FIELDS]
    rows = (b"".join(column[row].tobytes() for column in columns) for row in range(len(columns[0])))
    return [blake2b(row, digest_size=8).hexdigest() for row in rows]


def batches(loader: unbroken.StatefulDataLoader) -> Iterator[tuple[Batch, float]]:
    """Batches, epoch after epoch, and the seconds that each was waited for."""
    while True:
        taken, began = 0, time.perf_counter()
        for batch in loader:
            taken += 1
            yield batch, time.perf_counter() - began
            began = time.perf_counter()
        if not taken:
            raise SystemExit(
                "A whole epoch has no full batch: give more data (of compressed files, at least one for each rank), or "
                "a smaller --batch-size or --seq-len."
            )


# --- Training ----------------------------------------------------------------------------------------------------


class Stop:
    """Ctrl-C or SIGTERM: a wish to end after the step under way. A second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        signal.signal(signal.SIGINT, self._ask)
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        if self.signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or number
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"ending after the step under way\n")


def any_rank(flag: bool, world: int) -> bool:
    """Whether ``flag`` is set on any rank; every rank gets the same answer."""
    if world == 1:
        return flag
    vote = torch.tensor(int(flag))
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, world: int) -> float:
    """One update. Returns the mean loss over the tokens of the global batch."""
    logits = model(batch["input_ids"], batch["position_ids"])
    labels = batch["labels"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    count = (labels != -100).sum()
    if world > 1:
        dist.all_reduce(count)
    loss = total / count
    # DDP takes the mean of the gradients over the ranks; of parts of one loss it must be the sum.
    (loss * world).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    return loss.item()


def open_log(path: Path) -> TextIO:
    """The log, to be added to. A line that a killed run left unfinished is ended, so that it spoils no other."""
    torn = path.exists() and path.read_text(encoding="utf-8")[-1:] not in ("", "\n")
    log = path.open("a", encoding="utf-8")
    log.write("\n" if torn else "")
    return log


def prepare(
    args: argparse.Namespace, stream: unbroken.Stage, vocab_size: int, rank: int, world: int
) -> tuple[Training, dict[str, Any]]:
    """Everything that a checkpoint holds: model, optimizer, random numbers and the data's place."""
    torch.manual_seed(args.seed)
    model: nn.Module = GPT(GPTConfig(vocab_size, args.width, args.layers, args.heads, args.dropout))
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + 1 + rank)  # weights are equal on all ranks, dropout is not
    training = Training(model, optimizer)
    loader = make_loader(args, stream, world)
    return training, {"training": training, "rng": Randomness(rank), "loader": loader}


def resume(args: argparse.Namespace, checkpoints: Checkpoints, parts: dict[str, Any], rank: int) -> None:
    """Load the newest complete checkpoint where ``--resume`` asks for it; else see that there is none."""
    found = [checkpoints.newest()]
    if dist.is_initialized():
        dist.broadcast_object_list(found)  # what rank 0 sees: a shared file system may show others an older state
    path = found[0]
    if not args.resume:
        if path is not None:
            raise SystemExit(f"{args.out} holds a run already: pass --resume to go on from {path}, or another --out.")
        return
    if path is None:
        raise SystemExit(
            f"--resume: {args.out} has no complete checkpoint (a folder step-<n> with a file .metadata).\n"
            f"Start without --resume, or name the folder that has one with --out."
        )
    wanted = {name: part for name, part in parts.items() if not (args.skip_loader_state and name == "loader")}
    checkpoints.load(path, wanted, rank)
    if rank == 0:
        without = " WITHOUT the data's place" if args.skip_loader_state else ""
        print(f"resumed from {path}{without}", flush=True)


def train(args: argparse.Namespace, rank: int, world: int, stop: Stop, checkpoints: Checkpoints) -> int:
    """Run to ``args.steps``, or until a signal; returns the last step."""
    stream, vocab_size = load_data(args)
    training, parts = prepare(args, stream, vocab_size, rank, world)
    resume(args, checkpoints, parts, rank)
    if args.skip is not None:
        parts["loader"].skip(args.skip)
    start = training.step
    if start >= args.steps:
        print(f"step {start} of {args.steps} is already reached: nothing to do", flush=True)
        return start
    with closing(parts["loader"]), open_log(args.out / f"log-rank{rank}.jsonl") as log:
        began = time.perf_counter()
        for batch, wait in batches(parts["loader"]):
            check_ids(batch, vocab_size)
            loss = train_step(training.model, training.optimizer, batch, world)
            training.step += 1
            seconds, began = time.perf_counter() - began, time.perf_counter()
            rows = digests(batch)
            line = {"step": training.step, "rank": rank, "start": start, "loss": loss, "loss_hex": loss.hex()}
            line |= {"digest": blake2b("".join(rows).encode(), digest_size=8).hexdigest(), "rows": rows}
            line |= {"seconds": round(seconds, 6), "wait": round(wait, 6)}
            # One write, flushed: a process that is killed afterwards has lost nothing.
            log.write(json.dumps(line) + "\n")
            log.flush()
            if rank == 0:
                tokens = args.batch_size * batch["input_ids"].shape[1]
                speed = f"{tokens / seconds:8,.0f} tokens/s   waited {wait * 1000:7.2f} ms for data"
                print(f"step {training.step:6d}   loss {loss:.6f}   {speed}", flush=True)
            last = any_rank(stop.signal is not None, world) or training.step == args.steps
            if last or training.step % args.save_every == 0:
                checkpoints.save(training.step, parts)
            if last:
                break
        checkpoints.wait()
    return training.step


def main() -> int:
    """One process, or one of several that torchrun started."""
    args = parse()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    # In a single process DCP says at each save and load that there is just the one.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    stop = Stop()
    if world > 1:
        dist.init_process_group("gloo")
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(args.out, args.async_save, world)
    try:
        step = train(args, rank, world, stop, checkpoints)
    except KeyboardInterrupt:
        print(f"interrupted at once; newest checkpoint: {checkpoints.newest() or 'none'}", file=sys.stderr, flush=True)
        return 130
    if rank == 0:
        ended = f"stopped by {signal.Signals(stop.signal).name}" if stop.signal else "done"
        print(f"{ended} at step {step}; newest checkpoint: {checkpoints.newest()}", flush=True)
    if world > 1:
        dist.destroy_process_group()
    return 128 + stop.signal if stop.signal else 0


if __name__ == "__main__":
    sys.exit(main())
