"""An audit from end to end: reference runs, trials, comparison, causes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib import metadata
from typing import Final, TypeVar, final

from unbroken.audit.causes import Evidence, find_causes
from unbroken.audit.compare import judge, ran_beyond, rows_in
from unbroken.audit.crash import Reference, Run, run_probe, run_reference, run_trial
from unbroken.audit.findings import Findings, Trial
from unbroken.audit.plan import LEAST_BATCHES, Audit, Topology, TrialPlan, first_topologies, plan_trials
from unbroken.audit.processes import AUDITED, Processes, Runs
from unbroken.errors import AuditError

__all__ = ["Progress", "run_audit"]

_T = TypeVar("_T")
_SHOWN: Final = ("unbroken", "torch", "torchdata", "grain", "datasets", "mosaicml-streaming", "numpy")
_FURTHER: Final = 4  # times the batches, to which the reference goes where trials ran ahead of it
_REPEATS: Final = (("again", 0), ("other", 7919))  # names of the runs that are compared with the reference; seeds


class Progress:
    """What is told while an audit runs; this one tells nothing."""

    def begin(self, parts: int) -> None:
        """So many runs are to be made."""

    def tell(self, text: str) -> None:
        """What is going on."""

    def done(self) -> None:
        """One more run is done."""


def run_audit(audit: Audit, progress: Progress | None = None, runs: Runs | None = None) -> Findings:
    """Carry an audit out. No process and no file is left behind, however it ends.

    ``runs`` carries the stretches out; by default processes that are ended in fact.

    Raises ``AuditError`` where nothing can be found: the options do not fit the factory, or the run without a stop
    fails. An error of the loader in a trial is a finding.
    """
    _check(audit)
    if runs is None and AUDITED in os.environ:
        raise AuditError(
            f"This process is itself a run of an audit: importing {audit.factory} started another one.\n"
            'Put what starts it below if __name__ == "__main__":, or into another file.'
        )
    began = time.monotonic()
    with Processes(audit.timeout) if runs is None else nullcontext(runs) as carried:
        findings = _Auditing(audit, progress or Progress(), carried).run()
    return replace(findings, seconds=time.monotonic() - began)


def _check(audit: Audit) -> None:
    if audit.batches < LEAST_BATCHES:
        raise AuditError(f"An audit takes at least {LEAST_BATCHES} batches, and {audit.batches} were asked for.")
    if audit.trials < 1:
        raise AuditError(f"An audit takes at least one trial, and {audit.trials} were asked for.")
    if audit.timeout <= 0:
        raise AuditError(f"The timeout must be above 0 seconds, and is {audit.timeout:g}.")
    if audit.workers is not None and (not audit.workers or min(audit.workers) < 0):
        raise AuditError(f"--workers takes numbers of 0 and above, such as 0,2,4; found {audit.workers}.")
    if audit.ranks is not None and (not audit.ranks or min(audit.ranks) < 1):
        raise AuditError(f"--ranks takes numbers of 1 and above, such as 1,2; found {audit.ranks}.")


@final
class _Auditing:
    def __init__(self, audit: Audit, progress: Progress, processes: Runs) -> None:
        self.audit, self.progress, self.processes = audit, progress, processes

    def run(self) -> Findings:
        audit = self.audit
        firsts = first_topologies(audit)
        self.progress.begin(len(firsts) + len(_REPEATS) + audit.trials)
        made = self.all(
            [self._reference(first, f"reference-{number}", 0) for number, first in enumerate(firsts)]
            + [self._reference(firsts[0], name, seed) for name, seed in _REPEATS]
        )
        references = dict(zip(firsts, made, strict=False))
        again, other = made[len(firsts) :]
        reference = made[0]
        batches = min(audit.batches, *(each.whole for each in references.values()))
        if batches < LEAST_BATCHES:
            raise AuditError(
                f"The loader of {audit.factory} delivered {batches} batches over all its epochs, and an audit takes at "
                f"least {LEAST_BATCHES}."
            )
        ends = {first: each.epoch_ends() for first, each in references.items()}
        whole = all(each.ended and len(each.steps) == batches for each in references.values())
        plans = plan_trials(audit, ends, batches, whole=whole)
        judged = self.all([self._trial(plan, references[plan.first], batches) for plan in plans])
        references, judged = self._judged_further(references, judged, batches)
        trials = tuple(trial for _, trial in judged)
        evidence = Evidence(references, batches, again, other, tuple(judged))
        if any(trial.verdict == "inexact" for trial in trials):
            self.progress.tell("looking for the cause")
            evidence = evidence.with_probe(run_probe(audit, self.processes))
        return self.findings(reference, batches, trials, evidence)

    def _judged_further(
        self, references: dict[Topology, Reference], judged: list[tuple[Run, Trial]], batches: int
    ) -> tuple[dict[Topology, Reference], list[tuple[Run, Trial]]]:
        """The same, with longer references where trials delivered early what may come after the end of theirs.

        What a reference does not have is taken for altered; it is cut, and what lies behind the cut is not.
        """
        inexact = [run for run, trial in judged if trial.verdict == "inexact"]
        ahead = [run.plan.first for run in inexact if ran_beyond(references[run.plan.first], run, batches)]
        found = dict(references)
        for number, first in enumerate(dict.fromkeys(ahead)):
            self.progress.tell("the run without a stop, further on")
            end = _FURTHER * self.audit.batches
            with suppress(AuditError):  # what it raises there is not what is asked
                made = run_reference(self.audit, self.processes, first, f"further-{number}", self.audit.seed, end)
                found[first] = made if references[first].goes_on_in(made) else references[first]
        for place, (run, trial) in enumerate(judged):
            if trial.verdict == "inexact" and found[run.plan.first] is not references[run.plan.first]:
                judged[place] = run, judge(found[run.plan.first], run, batches)
        return found, judged

    def findings(self, reference: Reference, batches: int, trials: tuple[Trial, ...], evidence: Evidence) -> Findings:
        rows = rows_in(reference.steps[:batches])
        epochs = tuple(place for place, (epoch, _) in enumerate(rows) if place == 0 or rows[place - 1][0] < epoch)
        return Findings(
            factory=self.audit.factory,
            loader=str(reference.said.get("loader", "")),
            versions=dict(_versions()),
            batches=batches,
            rows=len(rows),
            epochs=epochs,
            trials=trials,
            causes=tuple(find_causes(evidence)),
            notes=tuple(self._notes(batches, trials, evidence)),
        )

    def _notes(self, batches: int, trials: tuple[Trial, ...], evidence: Evidence) -> Iterator[str]:
        if batches < self.audit.batches:
            yield f"The data ended after {batches} batches; {self.audit.batches} were asked for."
        if any(not trial.stops for trial in trials):
            yield "Some trials came to the end of the data before they were to be ended, and prove nothing."
        empty = sum(stretch.began_empty for run, _ in evidence.runs for stretch in run.stretches)
        if empty:
            yield (
                f"Saved at the end of an epoch and resumed, the loader first gave an empty pass ({_times(empty)}). "
                "No row is lost by it, but a loop over a fixed number of epochs trains one fewer."
            )
        for run, trial in evidence.runs:
            if trial.altered and ran_beyond(reference := evidence.references[run.plan.first], run, batches):
                yield f"Rows that the run without a stop does not have in {len(reference.steps)} batches are altered."
                break
        if any(run.plan.changes_world for run, _ in evidence.runs):
            yield "Where the number of ranks changed, the rows of each epoch were compared, and not their order."
        if any(run.plan.changes_world and trial.verdict == "inexact" for run, trial in evidence.runs):
            yield (
                "On another number of ranks drop_last, and shares that do not come out even, leave other rows out at "
                "the end of an epoch; a difference there may be that."
            )
        state_of = next((said for run, _ in evidence.runs if (said := run.stretches[0].said.get("state_of"))), "loader")
        if state_of != "loader":
            yield f"The loader itself has no state; that of its {state_of} was saved and loaded."

    def _reference(self, topology: Topology, name: str, seed: int) -> Callable[[], Reference]:
        def make() -> Reference:
            self.progress.tell("the run without a stop" if name.startswith("reference") else "the same run once more")
            return run_reference(self.audit, self.processes, topology, name, self.audit.seed + seed)

        return make

    def _trial(self, plan: TrialPlan, reference: Reference, batches: int) -> Callable[[], tuple[Run, Trial]]:
        def make() -> tuple[Run, Trial]:
            run = run_trial(self.audit, plan, self.processes, reference, self.progress.tell)
            trial = judge(reference, run, batches)
            if trial.verdict == "exact":
                run.forget()
            return run, trial

        return make

    def all(self, parts: list[Callable[[], _T]]) -> list[_T]:
        """The results of all parts, several at a time. The first error, or Ctrl-C, ends every process."""
        jobs = min(len(parts), self.audit.jobs or os.cpu_count() or 1)
        with ThreadPoolExecutor(jobs, thread_name_prefix="unbroken-audit") as pool:
            futures: list[Future[_T]] = [pool.submit(part) for part in parts]
            try:
                waiting = set(futures)
                while waiting:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                        self.progress.done()
            except BaseException:
                for future in futures:
                    future.cancel()
                self.processes.stop()
                raise
        return [future.result() for future in futures]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _versions() -> Iterator[tuple[str, str]]:
    for name in _SHOWN:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
