"""Launches of torchrun for the tests, and what came of them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, final

from tests.distributed.loaders import write_corpus
from tests.distributed.program import Run

__all__ = ["KINDS", "Launches", "RunOfRanks", "Step", "flat", "torchrun"]

ROOT = Path(__file__).parent.parent.parent
SECONDS = 110
KINDS = ("map", "lanes", "text", "adopted")
REFUSED = {"more lanes": {"lanes": 16}, "fewer lanes": {"lanes": 4}, "other seed": {"seed": 8}}


class Step(NamedTuple):
    """One step of one rank. ``ended``: whether one of its lanes has ended."""

    epoch: int
    rows: list[Any]
    ended: bool


def torchrun(ranks: int, module: str, *arguments: str) -> None:
    """Run a module on some ranks. Raises ``RuntimeError`` with what they said where one fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", module, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **output) as process:
        try:
            said, _ = process.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        raise RuntimeError(f"torchrun ended with {process.returncode}:\n{said}")


@final
class RunOfRanks:
    """What the ranks of one run wrote down: ``steps[rank]``, and ``states[rank]`` by the step they were taken after."""

    def __init__(self, logs: list[list[dict[str, Any]]]) -> None:
        self.errors = [line for log in logs for line in log if "error" in line]
        self.refusals = [line["refused"] for log in logs for line in log if "refused" in line]
        self.steps = [[Step(*(line[f] for f in Step._fields)) for line in log if "rows" in line] for log in logs]
        self.states = [{line["after"]: line["state"] for line in log if "state" in line} for log in logs]

    def batches(self, epoch: int, last: int | None = None) -> Iterator[list[list[Any]]]:
        """The batches of all ranks for each step of an epoch, as far as the run's step ``last``."""
        mine = [[step.rows for step in steps[:last] if step.epoch == epoch] for steps in self.steps]
        return map(list, itertools.zip_longest(*mine, fillvalue=[]))

    def whole_steps(self, epoch: int) -> int:
        """How many steps of an epoch came before a lane had ended on any rank."""
        ended = [[step.ended for step in steps if step.epoch == epoch] for steps in self.steps]
        return min(([*mine, True]).index(True) for mine in ended)


def flat(kind: str, steps: Iterable[list[list[Any]]]) -> list[Any]:
    """Rows in the global order: ranks take rows by turns; or whole batches, where a turn is a batch."""
    if kind == "lanes":
        return [row for step in steps for batch in step for row in batch]
    by_turns = (row for step in steps for rows in itertools.zip_longest(*step) for row in rows)
    return [row for row in by_turns if row is not None]


@final
class Launches:
    """Launches of torchrun, each made when it is first asked for, and once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, dict[str, RunOfRanks] | BaseException] = {}
        self.corpus = write_corpus(folder / "corpus.jsonl")

    def at(self, name: str, after: int) -> str:
        """The path of a checkpoint: of a run, after a step."""
        return str(self._folder / "checkpoints" / f"{name} after {after}")

    def saves(self, name: str, how: dict[int, str]) -> list[dict[str, Any]]:
        return [{"after": after, "how": manner, "to": self.at(name, after)} for after, manner in how.items()]

    def two_save(self) -> dict[str, RunOfRanks]:
        """Two ranks, with workers; and two that know nothing of each other."""
        runs = []
        for kind in KINDS:
            name, workers = f"two, {kind}", {"num_workers": 0 if kind == "adopted" else 2}
            runs.append(Run(name, kind, arguments=workers, saves=self.saves(name, {3: "sync"})))
        for kind in ("plain map", "plain iterable"):
            runs.append(Run(kind, kind, draw=1, saves=self.saves(kind, {3: "async held"})))
            runs.append(Run(f"{kind} again", kind, draw=2, begun=1, load=self.at(kind, 3)))
        return self.launch("two save", 2, lambda: runs)

    def four_load_and_save(self) -> dict[str, RunOfRanks]:
        """Four ranks: they load what two saved, run from the start, and run as two pairs."""

        def runs() -> Iterator[Run]:
            self.two_save()
            for kind in KINDS:
                name = f"two to four, {kind}"
                yield Run(name, kind, load=self.at(f"two, {kind}", 3), saves=self.saves(name, {1: "async"}))
                name = f"four, {kind}"
                how = {0: "sync", 2: "async held", 5: "async staged"}
                yield Run(name, kind, saves=self.saves(name, how))
                name = f"one epoch, {kind}"
                yield Run(name, kind, epochs=1, saves=self.saves(name, {-1: "sync"}))
            for name, kind in (("peers", "lanes"), ("mesh", "lanes"), ("map peers", "map")):
                saves = self.saves(name, {3: "sync"})
                yield Run(name, kind, epochs=1, peers=2, mesh=name == "mesh", saves=saves)

        return self.launch("four load and save", 4, runs)

    def load(self, ranks: int) -> dict[str, RunOfRanks]:
        """Any number of ranks load what four saved."""

        def runs() -> Iterator[Run]:
            self.four_load_and_save()
            workers = {"num_workers": 2 if ranks == 2 else 0}
            for kind in KINDS:
                saved = f"four, {kind}"
                yield Run(f"{kind} from 2", kind, begun=1, load=self.at(saved, 2))
                yield Run(f"{kind} from 5", kind, arguments=workers, load=self.at(saved, 5))
                yield Run(f"chain, {kind}", kind, load=self.at(f"two to four, {kind}", 1))
                load = self.at(f"one epoch, {kind}", -1)
                yield Run(f"next epoch, {kind}", kind, first_epoch=1, epochs=1, load=load)
            yield Run("smaller batches", "text", arguments={"batch_size": 5}, load=self.at("four, text", 5))
            if ranks == 1:
                for kind in ("plain map", "plain iterable"):
                    yield Run(kind, kind, load=self.at(kind, 3))
            if ranks == 2:
                for name in ("peers", "mesh"):
                    yield Run(name, "lanes", epochs=1, load=self.at(name, 3))
                for name, arguments in REFUSED.items():
                    yield Run(name, "lanes", arguments=arguments, load=self.at("four, lanes", 5))

        return self.launch(f"{ranks} load", ranks, runs)

    def launch(self, name: str, ranks: int, runs: Callable[[], Iterable[Run]]) -> dict[str, RunOfRanks]:
        """What the runs wrote down, by name. A launch that failed fails again."""
        if name not in self._made:
            try:
                self._made[name] = self._launch(self._folder / name, ranks, list(runs()))
            except BaseException as error:
                self._made[name] = error
        made = self._made[name]
        if isinstance(made, BaseException):
            raise made
        return made

    def _launch(self, out: Path, ranks: int, runs: Sequence[Run]) -> dict[str, RunOfRanks]:
        out.mkdir()
        plan = out / "plan.json"
        plan.write_text(json.dumps({"corpus": str(self.corpus), "runs": [asdict(run) for run in runs]}))
        torchrun(ranks, "tests.distributed.program", str(plan), str(out))
        texts = [(out / f"rank-{rank}.jsonl").read_text() for rank in range(ranks)]
        logs = [[json.loads(line) for line in text.splitlines()] for text in texts]
        return {
            run.name: RunOfRanks([[line for line in log if line["run"] == run.name] for log in logs]) for run in runs
        }
