"""Likely causes: patterns in what differs, and what a close look at the dataset showed. None without evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, final

from unbroken.audit.compare import Delivered, delivered, rows_in
from unbroken.audit.crash import Reference, Run
from unbroken.audit.findings import Cause, Trial
from unbroken.audit.plan import Topology
from unbroken.audit.records import Row
from unbroken.audit.remedies import REMEDIES
from unbroken.audit.resume import FEW, Resume, contents, counted, epoch_starts, matches

__all__ = ["Evidence", "find_causes"]

Pattern: TypeAlias = "tuple[str, Callable[[Resume], str | None]]"
"""The name of a cause, and what speaks for it at a resume, in words."""

_MANY: Final = 0.8  # of the rows that differ must differ in the same way


@final
@dataclass(frozen=True)
class Evidence:
    """All that was seen. ``again``: the reference under the same seeds; ``other``: under others."""

    references: Mapping[Topology, Reference]
    batches: int
    again: Reference
    other: Reference
    runs: tuple[tuple[Run, Trial], ...]
    probe: Mapping[str, Any] = field(default_factory=dict)

    def with_probe(self, probe: Mapping[str, Any]) -> Evidence:
        return replace(self, probe=probe)

    @property
    def rows(self) -> list[Delivered]:
        """Those of the reference under the first topology, as far as it was run again."""
        steps = next(iter(self.references.values())).steps
        return rows_in(steps if self.again.ended else steps[: len(self.again.steps)])

    @property
    def repeatable(self) -> bool:
        """Whether two fresh runs under the same seeds gave the same rows."""
        return [row for _, row in self.rows] == [row for _, row in rows_in(self.again.steps)]

    def differed_at_once(self, run: Run) -> bool:
        """Whether what came differed before the first stop already, in a process that had loaded nothing."""
        known = rows_in(self.references[run.plan.first].steps)
        came = rows_in([each for gone in (False, True) for each in delivered(run.stretches[0], rolled_back=gone)])
        return any(a[1] != b[1] for a, b in zip(came, known, strict=False))

    def resumes(self) -> list[Resume]:
        """One for each inexact trial that kept its number of ranks, and differed after a resume only."""
        found, repeatable = [], self.repeatable
        for run, trial in self.runs:
            if repeatable and self.differed_at_once(run):
                continue
            if trial.verdict == "inexact" and not run.plan.changes_world:
                found += [resume] if (resume := _first(run, self.references[run.plan.first])) else []
        return found


def _first(run: Run, reference: Reference) -> Resume | None:
    known = rows_in(reference.steps)
    place = 0
    for number, stretch in enumerate(run.stretches):
        after = rows_in([*delivered(stretch), *delivered(stretch, rolled_back=True)])
        expected = known[place:]
        differs = any(a[1] != b[1] for a, b in zip(after, expected, strict=False)) or len(after) > len(expected)
        short = len(after) < len(expected) and stretch.saved is None
        if number and (differs or (short and not after)):
            window = max(1, len(rows_in(reference.steps[:1])))
            workers = run.plan.topologies[number - 1][0] or 0
            return Resume(run.plan.number, place, known, after, window, workers)
        place += len(rows_in(stretch.kept))
    return None


def find_causes(evidence: Evidence) -> list[Cause]:
    """The causes that the evidence speaks for, the strongest first; none where every trial is exact."""
    bound = list(_bound(evidence))
    inexact = [trial for _, trial in evidence.runs if trial.verdict == "inexact"]
    if not inexact:
        return bound
    found = [*bound, *_not_repeatable(evidence), *_saving(evidence, len(inexact)), *_live(evidence)]
    resumes = evidence.resumes()
    # A resume may fit several patterns: the first ones say most. Of those side by side, the commoner one has it.
    behind = _behind_pattern(resumes, evidence)
    start: Pattern = ("load_state_dict after iter, or without effect", _from_the_start)
    patterns: list[list[Pattern]] = [
        [start, ("epoch not in the state", _other_epoch), *([behind] if behind[1] is _late else [])],
        [("augmentation not seeded", lambda resume: _augmented(resume, evidence))],
        [("order not seeded", lambda resume: _other_order(resume, evidence))],
        [behind],
        [("state ahead of what was delivered", _ahead)],
        [("buffer shuffle forgotten", _forgotten)],
    ]
    told: list[tuple[int, Cause]] = []
    left = list(resumes)
    for beside in patterns:
        for _ in beside:
            fitting = [(name, [(each, text) for each in left if (text := pattern(each))]) for name, pattern in beside]
            name, seen = max(fitting, key=lambda each: len(each[1]))
            if seen:
                left = [each for each in left if all(each is not other for other, _ in seen)]
                text = f"In {len(seen)} of {len(inexact)} inexact trials: {seen[0][1]}{_probed(name, evidence)}"
                told.append((len(seen), Cause(name, text, REMEDIES[name])))
    return found + [cause for _, cause in sorted(told, key=lambda each: -each[0])]


def _bound(evidence: Evidence) -> Iterator[Cause]:
    """Where resumes on another number of workers (or ranks) fail, all of them, and no other does."""
    for place, (name, option) in enumerate((("workers", "--workers"), ("ranks", "--ranks"))):
        failed: dict[bool, list[int]] = {True: [], False: []}
        went_on: dict[bool, list[int]] = {True: [], False: []}
        for run, trial in evidence.runs:
            for number in range(1, len(run.stretches)):
                before, now = run.plan.topologies[number - 1][place], run.plan.topologies[number][place]
                broke = run.error and number == len(run.stretches) - 1
                if not broke and not run.stretches[number - 1].saved:
                    continue  # at the start there may be nothing to load
                (failed if broke else went_on)[before != now].append(trial.number)
            if run.error and (len(run.stretches) == 1 or run.stretches[-1].steps):
                failed[False].append(trial.number)  # it failed, and not at a load
        if failed[True] and went_on[False] and not failed[False] and not went_on[True]:
            yield Cause(
                f"state bound to the number of {name}",
                f"Each resume on another number of {name} failed before its first batch (in "
                f"{_trials(failed[True])}), and none on the same number did.",
                f"Resume on as many {name} as the run was saved on, and audit with one number ({option} N); or keep in "
                f"the state what is the same on any number of {name}, such as the rows that were delivered.",
            )


def _trials(numbers: Sequence[int]) -> str:
    return f"trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _behind_pattern(resumes: Sequence[Resume], evidence: Evidence) -> Pattern:
    """One row a worker that comes again at every resume is a late state; other numbers of them are a coarse one."""
    late = [resume for resume in resumes if _late(resume)]
    coarse = any(_behind(resume) for resume in resumes if resume not in late)
    asked = evidence.probe.get("asked", 0)
    if coarse or (asked and not evidence.probe["late"]):
        return "state behind what was delivered", _behind
    return "state updated after yield", _late


def _probed(name: str, evidence: Evidence) -> str:
    probe = evidence.probe
    key = {"state updated after yield": "late", "load_state_dict after iter, or without effect": "start"}.get(name, "")
    count = probe.get(key, 0)
    if not count:
        return ""
    came = "the row before the place once more" if key == "late" else "its first row again"
    return (
        f" Opened by itself at {probe['asked']} of its own states, {probe['dataset']} gave {came} at {count} of them."
    )


def _not_repeatable(evidence: Evidence) -> Iterator[Cause]:
    one, other = evidence.rows, rows_in(evidence.again.steps)
    places = [place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a[1] != b[1]]
    if places or len(one) != len(other):
        first = places[0] if places else min(len(one), len(other))
        what = "the order of rows" if counted(one) == counted(other) else "the rows themselves"
        yield Cause(
            "not repeatable",
            f"Two fresh runs under the same seeds differ, from row {first} on, in {what}.",
            REMEDIES["not repeatable"],
        )


def _saving(evidence: Evidence, inexact: int) -> Iterator[Cause]:
    name = "saving changes what comes"
    early = [trial for run, trial in evidence.runs if trial.verdict == "inexact" and evidence.differed_at_once(run)]
    if early and evidence.repeatable:
        first = min(trial.first.batch for trial in early if trial.first)
        text = (
            f"In {len(early)} of {inexact} inexact trials rows differed before the first stop, from batch {first} of "
        )
        text += "the run on; up to there saves are all that sets it apart from the run without a stop."
        yield Cause(name, text, REMEDIES[name])


def _live(evidence: Evidence) -> Iterator[Cause]:
    name = "live buffer handed out"
    for run, _ in evidence.runs:
        for stretch in run.stretches:
            if "live" in stretch.said:
                saved, seen = stretch.said["live"]
                text = f"The state handed out after {saved} batches had changed by batch {seen}, in the same object."
                yield Cause(name, text, REMEDIES[name])
                return
    if evidence.probe.get("live") is not None:
        text = (
            f"{evidence.probe['dataset']} by itself: the state handed out after {evidence.probe['live']} rows had "
            "changed, in the same object, when more rows were made. A worker that sends it sends what it is by then."
        )
        yield Cause(name, text, REMEDIES[name])


def _from_the_start(resume: Resume) -> str | None:
    rows = resume.rows
    if resume.same >= resume.window:
        return None
    epoch = resume.expected[0][0] if resume.expected else 0
    starts = epoch_starts(rows)
    following, left = starts.get(epoch + 1), sum(1 for each, _ in resume.expected if each == epoch)
    few = left <= FEW * resume.window * max(1, resume.workers)
    if few and following is not None and matches(resume.after, rows[following:], resume.window):
        return None  # the rest of the epoch was passed over, and the next one has the same order
    for name, start in (("the run", 0), (f"epoch {epoch}", starts.get(epoch, 0))):
        if start != resume.place and matches(resume.after, rows[start:], resume.window):
            return f"resumed after {resume.place} rows, the loader began at the start of {name}."
    return None


def _other_epoch(resume: Resume) -> str | None:
    rows = resume.rows
    same, starts = resume.same, epoch_starts(rows)
    if same >= len(resume.expected):
        return None
    here = resume.place + same
    epoch = rows[here][0]
    offset = here - starts[epoch]
    most = sum(1 for other, _ in rows if other == epoch) - offset
    for other, start in starts.items():
        there = rows[start + offset :]
        if other != epoch and matches(resume.after[same : same + most], there, min(most, resume.window)):
            return f"from row {offset} of epoch {epoch} on, the resumed run delivered what belongs to epoch {other}."
    return None


def _augmented(resume: Resume, evidence: Evidence) -> str | None:
    pairs = [(a[1], b[1]) for a, b in zip(resume.after, resume.expected, strict=False) if a[1] != b[1]]
    names = next(iter(evidence.references.values())).said.get("fields", [])
    altered: Counter[tuple[int, ...]] = Counter()
    for a, b in pairs:
        other = _other_fields(a, b)
        if other:
            altered[other] += 1
    if altered and altered.total() >= max(FEW, _MANY * len(pairs)):
        which = sorted({place for places in altered for place in places})
        told = ", ".join(repr(names[place]) if place < len(names) else f"field {place}" for place in which)
        return f"{altered.total()} rows came in their place, but with other values of {told}; their other fields agree."
    if _drawn(evidence) == "rows" and pairs and not _shares(resume):
        return "the rows are others after the resume, and a fresh run under other seeds has other rows too."
    return None


def _other_fields(a: Row, b: Row) -> tuple[int, ...]:
    """The places of the fields that differ, where some are equal; empty otherwise."""
    if len(a.fields) != len(b.fields):
        return ()
    other = tuple(place for place, (x, y) in enumerate(zip(a.fields, b.fields, strict=True)) if x != y)
    return other if len(other) < len(a.fields) else ()


def _shares(resume: Resume) -> bool:
    """Whether rows that were expected after the resume came at all."""
    return bool(contents(resume.after) & contents(resume.expected))


def _drawn(evidence: Evidence) -> str:
    """What depends on the seeds of the process: the ``"order"``, the ``"rows"``, or nothing."""
    one, other = rows_in(evidence.again.steps), rows_in(evidence.other.steps)
    size = min(len(one), len(other))
    if [row for _, row in one[:size]] == [row for _, row in other[:size]]:
        return ""
    common = contents(one) & contents(other)
    return "rows" if common.total() < size / 2 else "order"


def _other_order(resume: Resume, evidence: Evidence) -> str | None:
    if _drawn(evidence) == "order" and resume.same < len(resume.expected) and _shares(resume):
        return (
            "the rows came in another order after the resume, and a fresh run under other seeds has another order too."
        )
    return None


def _again(resume: Resume) -> Counter[tuple[int, bytes]]:
    """The rows that came again, where they all lie before the resume and nothing is lost; else none."""
    again = counted(resume.after) - counted(resume.expected)
    before = counted(resume.rows[: resume.place])
    return again if again <= before and not _lost(resume) else Counter()


def _late(resume: Resume) -> str | None:
    again = _again(resume)
    most = max(1, resume.workers)
    batch = resume.rows[max(0, resume.place - resume.window) : resume.place]  # of a loader that yields batches itself
    whole = again.total() == resume.window and counted(batch) == again
    if not again or (again.total() > most and not whole):
        return None
    first = next(row.brief for epoch, row in resume.after if (epoch, row.digest) in again)
    return f"the last {'row' if again.total() == 1 else 'rows'} before the save came again ({again.total()}: {first})."


def _behind(resume: Resume) -> str | None:
    again = _again(resume)
    rows = f"row{'s' if again.total() > 1 else ''} from before the save came again"
    return f"{again.total()} {rows}, and then the rest as expected." if again else None


def _ahead(resume: Resume) -> str | None:
    lost = len(_lost(resume))
    if not lost or not _order_kept(resume):
        return None
    rows = "row was" if lost == 1 else f"{lost} rows were"
    return f"the next {rows} passed over; what followed came in its order."


def _forgotten(resume: Resume) -> str | None:
    places = _lost(resume)
    if len(places) < FEW or _order_kept(resume):
        return None
    return (
        f"{len(places)} of the next {places[-1] + 1} rows never came, and the others came in another order: rows had "
        "been read, and waited to be drawn."
    )


def _lost(resume: Resume) -> list[int]:
    """Which of the rows that were expected next never came; none where what came is mostly unknown to the reference."""
    known = contents(resume.rows)
    if sum(row.digest in known for _, row in resume.after) < _MANY * len(resume.after):
        return []
    # Rows may come late: only those are looked for that have had as many rows again to come in.
    near = len(resume.after) // 2 or len(resume.after)
    lost = counted(resume.expected[:near]) - counted(resume.after)
    return [place for place, (epoch, row) in enumerate(resume.expected[:near]) if lost[epoch, row.digest]]


def _order_kept(resume: Resume) -> bool:
    """Whether the rows of each worker came in their order: workers take turns by batches."""
    places = {(epoch, row.digest): place for place, (epoch, row) in enumerate(resume.rows)}
    last: dict[int, int] = {}
    for epoch, row in resume.after:
        place = places.get((epoch, row.digest))
        if place is None:
            continue
        worker = place // resume.window % max(1, resume.workers)
        if place < last.get(worker, -1):
            return False
        last[worker] = place
    return True
