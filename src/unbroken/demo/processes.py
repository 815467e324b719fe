"""Training runs as processes of their own: started, watched through their logs, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import final

from unbroken.demo.verdict import Log, read_log
from unbroken.errors import DemoError

__all__ = ["RunningTraining", "TrainingRun", "find_trainer"]

_POLL = 0.02  # seconds between two looks at a log
_GRACE = 10.0  # seconds that a run is given to end by itself before it is killed
_GRACE_OF_RANKS = 40.0  # torchrun gives its ranks 30 of them, and only it knows them
_TAIL = 40  # lines of output shown of a run that failed
_TORCHRUN = "torch/distributed/elastic/"


def find_trainer(given: Path | None = None) -> Path:
    """The example trainer: ``given``, or examples/train.py of the checkout this package or the shell is in.

    Raises:
        DemoError: there is none. (An installed package does not carry the examples.)
    """
    if given is not None:
        places = [given]
    else:
        roots = [Path(__file__).resolve().parents[3], Path.cwd()]
        places = [root / "examples" / "train.py" for root in roots]
    for place in places:
        if place.is_file():
            return place.resolve()
    looked = "\n".join(f"  {place}" for place in dict.fromkeys(places))
    raise DemoError(
        f"The demo drives the example trainer, examples/train.py, which is not at\n{looked}\n"
        f"Run the demo from a checkout of the project, or name the file with --trainer PATH."
    )


@final
@dataclass(frozen=True)
class TrainingRun:
    """How to start the example trainer: one process, or ``ranks`` of them under torchrun."""

    trainer: Path
    out: Path
    options: tuple[str, ...]
    ranks: int = 1

    def start(self, *more: str) -> RunningTraining:
        """Start it; its output goes to OUT/output.txt."""
        self.out.mkdir(parents=True, exist_ok=True)
        launcher: list[str] = []
        environment = dict(os.environ)
        if self.ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
            # Two ranks on one machine need no name of that machine, which may not resolve; and torchrun would say at
            # length that it sets this number of threads.
            environment.setdefault("OMP_NUM_THREADS", "1")
            if sys.platform == "linux":
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = [sys.executable, *launcher, str(self.trainer), "--out", str(self.out), *self.options, *more]
        return RunningTraining(command, environment, self.out, _GRACE_OF_RANKS if self.ranks > 1 else _GRACE)


@final
class RunningTraining:
    """A run that was started. As a context manager it leaves no process behind, however the block ends."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], out: Path, grace: float) -> None:
        self.command, self.out, self.output = list(command), out, out / "output.txt"
        self._grace = grace
        with self.output.open("ab") as output:
            # A session of its own: Ctrl-C reaches this process alone, which then ends the run in order.
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> RunningTraining:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self._process.poll() is None:
                self._process.terminate()  # torchrun passes it on to the ranks, which have sessions of their own
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._grace)
        finally:  # a second Ctrl-C ends the wait, not the duty
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def watch(self, on_step: Callable[[int, float], None], start: int = 0, until: int | None = None) -> bool:
        """Report each step (its number and loss) of the process that began at step ``start``.

        Returns True as soon as step ``until`` is in the log, False when the run has ended.

        Raises:
            DemoError: the run failed; the message holds the end of its output.
        """
        shown = start
        while True:
            ended = self._process.poll() is not None  # asked before the log is read: so the last lines are in it
            for step, line in sorted(self.log(start).items()):
                if step > shown:
                    shown = step
                    on_step(step, line.loss)
            if until is not None and shown >= until and not ended:
                return True
            if ended:
                if self._process.returncode != 0:
                    raise DemoError(self._failure())
                return False
            time.sleep(_POLL)

    def log(self, start: int, rank: int = 0) -> Log:
        """What a rank of the process that began at step ``start`` has logged so far."""
        return read_log(self.out / f"log-rank{rank}.jsonl", start)

    def kill(self) -> bool:
        """SIGKILL: the process gets no chance to do anything. False if it had ended by itself before."""
        self._process.kill()
        return self._process.wait() == -signal.SIGKILL

    def _failure(self) -> str:
        lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
        # torchrun ends with a report of its own, longer than the tail, that does not say what failed.
        own = next((line for line, text in enumerate(lines) if _TORCHRUN in text), len(lines))
        shown = "\n".join(lines[:own][-_TAIL:]) or "(no output)"
        code = self._process.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"A training run {how}.\n  {' '.join(self.command)}\nIts output ends with\n\n{shown}"
