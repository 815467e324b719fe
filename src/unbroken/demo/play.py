"""The demo: one run that never stops, the same run killed and resumed, and its checkpoint resumed on two ranks."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from unbroken.demo.corpus import END_OF_TEXT, train_tokenizer, write_corpus
from unbroken.demo.data import Data, study
from unbroken.demo.processes import RunningTraining, TrainingRun
from unbroken.demo.report import draw_losses, show_checks
from unbroken.demo.verdict import Check, Log, compare_digests, compare_losses, compare_rows
from unbroken.errors import DemoError

__all__ = ["Plan", "run_demo"]

_MARK = "unbroken-demo.json"  # says that a folder is the demo's own, so that the next demo may empty it
_RANKS = 2
_ATTEMPTS = 3


@final
@dataclass(frozen=True)
class Plan:
    """What the demo does. Steps after ``restore`` are compared; the kill comes after one of them.

    ``skip_loader_state`` resumes model and optimizer but not the data's place: the comparison must then fail.
    ``data`` is what is trained on; ``None`` stands for the sources of Python's standard library. Of these
    ``corpus_bytes`` are written, and of other data so many are looked at.
    """

    out: Path
    trainer: Path
    steps: int = 30
    save_every: int = 5
    restore: int = 15
    kill_at: int | None = None
    skip_loader_state: bool = False
    keep: bool = False
    data: Data | None = None
    corpus_bytes: int = 3_000_000
    vocab_size: int = 2048
    options: tuple[str, ...] = ("--batch-size=8", "--seq-len=256", "--lanes=16", "--window=64")

    def __post_init__(self) -> None:
        if self.restore % self.save_every or not 0 < self.restore < self.steps - 2:
            raise DemoError(
                f"The demo resumes at a step that is saved and not among the last two: restore={self.restore} with "
                f"save_every={self.save_every} and steps={self.steps} is none."
            )
        if self.kill_at is not None and not self.restore < self.kill_at < self.steps:
            raise DemoError(
                f"The kill must come after a step between {self.restore + 1} and {self.steps - 1}, but kill_at is "
                f"{self.kill_at}."
            )

    @property
    def compared(self) -> range:
        """The steps after the checkpoint."""
        return range(self.restore + 1, self.steps + 1)

    def draw_kill(self) -> int:
        """The step after which to kill: as asked for, or by chance. Not the last two: the run must still be alive."""
        if self.kill_at is not None:
            return self.kill_at
        return random.SystemRandom().randint(self.restore + 1, self.steps - 2)


@final
class _Bars:
    """Progress bars, one a run; each counts steps and shows the last loss."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    @contextmanager
    def run(self, name: str, start: int, total: int) -> Iterator[Callable[[int, float], None]]:
        """A bar for a run from step ``start`` to ``total``; gives what to call after each step."""
        task = self._progress.add_task(name, completed=start, total=total, note="starting")

        def on_step(step: int, loss: float) -> None:
            self._progress.update(task, completed=step, note=f"loss {loss:.4f}")

        yield on_step
        self._progress.stop_task(task)  # the clock of a run that was killed stands still too

    @contextmanager
    def wait(self, name: str) -> Iterator[Callable[[str], None]]:
        """A bar for one thing that is either done or not; gives what to call with a note on it."""
        task = self._progress.add_task(escape(name), total=1, note="")

        def note(words: str) -> None:
            self._progress.update(task, note=words)

        yield note
        self._progress.update(task, completed=1)


@final
@dataclass(frozen=True)
class _Found:
    """The logs of all runs: the reference, what was killed, what was resumed, and the two ranks."""

    reference: Log
    killed: Log
    resumed: Log
    ranks: tuple[Log, ...]


def _empty(out: Path) -> None:
    """Make ``out`` an empty folder. Only what an earlier demo has made is removed."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / _MARK).exists())):
        raise DemoError(f"{out} holds something that is not the demo's. Name an empty folder with --out.")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / _MARK).write_text(json.dumps({"made by": "unbroken demo; the next demo empties this folder"}) + "\n")


def _checkpoint(plan: Plan, run: str) -> Path:
    path = plan.out / run / f"step-{plan.restore:06d}"
    if not (path / ".metadata").exists():
        raise DemoError(f"The run in {path.parent} was to save step {plan.restore}, but {path} is not complete.")
    return path


def _training(plan: Plan, run: str, *, workers: int, ranks: int = 1) -> TrainingRun:
    options = (
        f"--steps={plan.steps}",
        f"--save-every={plan.save_every}",
        f"--workers={workers}",
        *plan.options,
    )
    return TrainingRun(plan.trainer, plan.out / run, options, ranks)


def _resume_options(plan: Plan) -> tuple[str, ...]:
    return ("--resume", "--skip-loader-state") if plan.skip_loader_state else ("--resume",)


@contextmanager
def _running(
    plan: Plan, bars: _Bars, name: str, training: TrainingRun, *more: str, start: int = 0
) -> Iterator[tuple[RunningTraining, Callable[[int, float], None]]]:
    """A run with its bar; gives both."""
    with bars.run(name, start, plan.steps) as on_step, training.start(*more) as running:
        yield running, on_step


def _unbroken_run(plan: Plan, bars: _Bars) -> Log:
    """(a) From the first step to the last without a stop."""
    training = _training(plan, "a", workers=0)
    with _running(plan, bars, "(a) never stopped, 0 workers", training, "--async-save") as (running, on_step):
        running.watch(on_step)
        return running.log(0)


def _killed_run(plan: Plan, bars: _Bars, console: Console) -> Log:
    """(b) The same run, killed: what it logged up to then. Its checkpoints after ``plan.restore`` are deleted."""
    for _ in range(_ATTEMPTS):
        kill_at = plan.draw_kill()
        training = _training(plan, "b", workers=2)
        with _running(plan, bars, f"(b) to be killed at {kill_at}, 2 workers", training) as (running, on_step):
            killed = running.watch(on_step, until=kill_at) and running.kill()
            log = running.log(0)
        if killed:
            break
        console.print("    the run was done before the kill reached it; once more")
        shutil.rmtree(plan.out / "b")
    else:
        raise DemoError(f"The run was done before the kill reached it, {_ATTEMPTS} times: choose an earlier kill_at.")
    kept = _checkpoint(plan, "b")
    later = sorted(path for path in kept.parent.glob("step-*") if path.name > kept.name)
    for path in later:
        shutil.rmtree(path)
    gone = ", ".join(str(int(path.name.removeprefix("step-"))) for path in later) or "none"
    console.print(f"    SIGKILL after step {max(log)}; checkpoints after step {plan.restore} deleted: {gone}")
    return log


def _resumed_run(plan: Plan, bars: _Bars) -> Log:
    """(b) Started again, with another number of workers."""
    name, training, start = f"(b) resumed at {plan.restore}, 1 worker", _training(plan, "b", workers=1), plan.restore
    with _running(plan, bars, name, training, *_resume_options(plan), start=start) as (running, on_step):
        running.watch(on_step, start)
        return running.log(start)


def _ranks_run(plan: Plan, bars: _Bars) -> tuple[Log, ...]:
    """(c) The checkpoint of (a), resumed on two ranks."""
    shutil.copytree(_checkpoint(plan, "a"), plan.out / "c" / f"step-{plan.restore:06d}")
    name, start = f"(c) resumed at {plan.restore}, {_RANKS} ranks", plan.restore
    training = _training(plan, "c", workers=1, ranks=_RANKS)
    with _running(plan, bars, name, training, *_resume_options(plan), start=start) as (running, on_step):
        running.watch(on_step, start)
        return tuple(running.log(start, rank) for rank in range(_RANKS))


def _data_options(plan: Plan, bars: _Bars) -> tuple[str, ...]:
    """The trainer's options about its data, which is made where there is none, and the tokenizer trained."""
    corpus, tokenizer = plan.out / "corpus.jsonl", plan.out / "tokenizer.json"
    if plan.data is not None:
        with bars.wait(f"data: {plan.data.name}") as note:
            return study(plan.data, tokenizer, plan.corpus_bytes, plan.vocab_size, note)
    with bars.wait("corpus: Python's standard library"):
        rows = write_corpus(corpus, plan.corpus_bytes)
    with bars.wait(f"tokenizer: BPE on {rows} files"):
        train_tokenizer(corpus, tokenizer, plan.vocab_size)
    return f"--data={corpus}", f"--tokenizer={tokenizer}", f"--eos={END_OF_TEXT}"


def _run_all(plan: Plan, console: Console) -> _Found:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=14),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = _Bars(progress)
        plan = replace(plan, options=(*plan.options, *_data_options(plan, bars)))
        reference = _unbroken_run(plan, bars)
        killed = _killed_run(plan, bars, console)
        resumed = _resumed_run(plan, bars)
        return _Found(reference, killed, resumed, _ranks_run(plan, bars))


def _checks(plan: Plan, found: _Found) -> list[Check]:
    before = range(1, max(found.killed, default=0) + 1)
    after = plan.compared
    return [
        compare_losses("(b) until kill: losses", found.reference, found.killed, before),
        compare_digests("(b) until kill: batches", found.reference, found.killed, before),
        compare_losses("(b) resumed: losses", found.reference, found.resumed, after),
        compare_digests("(b) resumed: batches", found.reference, found.resumed, after),
        compare_rows(f"(c) {_RANKS} ranks: rows a step", found.reference, found.ranks, after),
    ]


def run_demo(plan: Plan, console: Console) -> bool:
    """Run everything, show what was found; returns whether all of it was equal.

    Checkpoints are removed after a success unless ``plan.keep``; logs and the picture stay.

    Raises:
        DemoError: a run failed or could not be started, so there is nothing to compare.
    """
    if plan.data is not None and any(plan.out.resolve() in Path(p).resolve().parents for p in plan.data.paths):
        raise DemoError(f"--data {plan.data.name} lies in {plan.out}, which is emptied first. Name another --out.")
    _empty(plan.out)
    if plan.skip_loader_state:
        console.print("[yellow]--skip-loader-state: the data's place is not restored, so this should fail.[/]")
    found = _run_all(plan, console)
    passed = show_checks(console, _checks(plan, found))
    picture = plan.out / "losses.png"
    draw_losses(picture, found.reference, found.killed, found.resumed, plan.restore)
    console.print(f"Loss curves: {picture}", soft_wrap=True)
    if passed and not plan.keep:
        for path in plan.out.glob("?/step-*"):
            shutil.rmtree(path)
        (plan.out / "corpus.jsonl").unlink(missing_ok=True)
    else:
        console.print(f"Checkpoints, logs and output of all runs: {plan.out}", soft_wrap=True)
    return passed
