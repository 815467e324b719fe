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

__all__ = ["Evidence", "Resume", "find_causes"]

Pattern: TypeAlias = "tuple[str, Callable[[Resume], str | None]]"
"""The name of a cause, and what speaks for it at a resume, in words."""

_FEW: Final = 2  # rows that must agree before a pattern is taken for more than chance
_MANY: Final = 0.8  # of the rows that differ must differ in the same way
_REMEDIES: Final = {
    "not repeatable": "Give every generator a seed, sort listings of files, and let nothing depend on the clock, on "
    "the process or on the order of a set. No resume can be exact before two fresh runs are equal.",
    "live buffer handed out": "Copy what is changed in place before it leaves state_dict(): list(self.buffer), or "
    "copy.deepcopy(self.state). A state is often read later than it is taken, by another thread or process.",
    "state updated after yield": "Move the position before the yield: self.done += 1, then yield row. While a row is "
    "out, the code after its yield has not been run.",
    "buffer shuffle forgotten": "Save what is in the shuffle buffer and the state of its generator, or better the "
    "place from which it is filled, and fill it again on a resume.",
    "epoch not in the state": "Put the epoch into state_dict(), and draw the order as a function of seed and epoch.",
    "augmentation not seeded": "Draw random numbers from a generator whose seed is a function of the row (its index "
    "and the epoch), or put the generator's state into state_dict().",
    "order not seeded": "Give the sampler or the shuffle a seed, or put the permutation's generator into the state.",
    "load_state_dict after iter, or without effect": "Load before iter() is called, and let __iter__ begin at what "
    "was loaded. A factory must return a loader that has not begun; where workers are used, the state must reach them.",
    "state behind what was delivered": "Let the state say which row was delivered last: where it says the shard or the "
    "document only, put the number of rows delivered of it beside that.",
    "state ahead of what was delivered": "Let the state describe the row that was delivered last, and not what was "
    "read or prefetched: rows that were made and not handed out must be made again.",
}


@final
@dataclass(frozen=True)
class Resume:
    """The first resume of a trial whose batches differ: ``after`` came where ``expected`` was to come.

    ``rows``: all of the reference. ``place``: the number of rows before the resume. ``window``: the rows of a step.
    ``workers``: those of the run that saved.
    """

    trial: int
    place: int
    rows: Sequence[Delivered]
    after: Sequence[Delivered]
    window: int
    workers: int

    @property
    def expected(self) -> Sequence[Delivered]:
        return self.rows[self.place :]

    @property
    def same(self) -> int:
        """How many rows came as expected before the first that differs."""
        pairs = enumerate(zip(self.after, self.expected, strict=False))
        return next((number for number, (a, b) in pairs if a[1] != b[1]), min(len(self.after), len(self.expected)))


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
        """Those of the reference under the first topology."""
        return rows_in(next(iter(self.references.values())).steps)

    def resumes(self) -> list[Resume]:
        """One for each inexact trial that kept its number of ranks."""
        found = []
        for run, trial in self.runs:
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
    inexact = [trial for _, trial in evidence.runs if trial.verdict == "inexact"]
    if not inexact:
        return []
    found = [*_not_repeatable(evidence), *_live(evidence)]
    resumes = evidence.resumes()
    patterns: list[Pattern] = [
        ("load_state_dict after iter, or without effect", _from_the_start),
        ("epoch not in the state", _other_epoch),
        ("augmentation not seeded", lambda resume: _augmented(resume, evidence)),
        ("order not seeded", lambda resume: _other_order(resume, evidence)),
        *_behind_patterns(resumes, evidence),
        ("state ahead of what was delivered", _ahead),
        ("buffer shuffle forgotten", _forgotten),
    ]
    told: set[int] = set()
    for name, pattern in patterns:
        seen = [(resume, text) for resume in resumes if resume.trial not in told and (text := pattern(resume))]
        if seen:
            told |= {resume.trial for resume, _ in seen}
            evidence_text = f"In {len(seen)} of {len(inexact)} inexact trials: {seen[0][1]}"
            found.append(Cause(name, evidence_text + _probed(name, evidence), _REMEDIES[name]))
    return found


def _behind_patterns(resumes: Sequence[Resume], evidence: Evidence) -> list[Pattern]:
    """One row a worker that comes again at every resume is a late state; other numbers of them are a coarse one."""
    late = [resume for resume in resumes if _late(resume)]
    coarse = any(_behind(resume) for resume in resumes if resume not in late)
    asked = evidence.probe.get("asked", 0)
    if coarse or (asked and not evidence.probe["late"]):
        return [("state behind what was delivered", _behind)]
    return [("state updated after yield", _late)]


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
        what = "the order of rows" if _counted(one) == _counted(other) else "the rows themselves"
        yield Cause(
            "not repeatable",
            f"Two fresh runs under the same seeds differ, from row {first} on, in {what}.",
            _REMEDIES["not repeatable"],
        )


def _live(evidence: Evidence) -> Iterator[Cause]:
    name = "live buffer handed out"
    for run, _ in evidence.runs:
        for stretch in run.stretches:
            if "live" in stretch.said:
                saved, seen = stretch.said["live"]
                text = f"The state handed out after {saved} batches had changed by batch {seen}, in the same object."
                yield Cause(name, text, _REMEDIES[name])
                return
    if evidence.probe.get("live") is not None:
        text = (
            f"{evidence.probe['dataset']} by itself: the state handed out after {evidence.probe['live']} rows had "
            "changed, in the same object, when more rows were made. A worker that sends it sends what it is by then."
        )
        yield Cause(name, text, _REMEDIES[name])


def _from_the_start(resume: Resume) -> str | None:
    rows = resume.rows
    if resume.same >= resume.window:
        return None
    epoch = resume.expected[0][0] if resume.expected else 0
    starts = _epoch_starts(rows)
    for name, start in (("the run", 0), (f"epoch {epoch}", starts.get(epoch, 0))):
        if start != resume.place and _matches(resume.after, rows[start:], resume.window):
            return f"resumed after {resume.place} rows, the loader began at the start of {name}."
    return None


def _other_epoch(resume: Resume) -> str | None:
    rows = resume.rows
    same, starts = resume.same, _epoch_starts(rows)
    if same >= len(resume.expected):
        return None
    here = resume.place + same
    epoch = rows[here][0]
    offset = here - starts[epoch]
    most = sum(1 for other, _ in rows if other == epoch) - offset
    for other, start in starts.items():
        there = rows[start + offset :]
        if other != epoch and _matches(resume.after[same : same + most], there, min(most, resume.window)):
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
    if altered and altered.total() >= max(_FEW, _MANY * len(pairs)):
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
    return bool(_contents(resume.after) & _contents(resume.expected))


def _drawn(evidence: Evidence) -> str:
    """What depends on the seeds of the process: the ``"order"``, the ``"rows"``, or nothing."""
    one, other = rows_in(evidence.again.steps), rows_in(evidence.other.steps)
    size = min(len(one), len(other))
    if [row for _, row in one[:size]] == [row for _, row in other[:size]]:
        return ""
    common = _contents(one) & _contents(other)
    return "rows" if common.total() < size / 2 else "order"


def _other_order(resume: Resume, evidence: Evidence) -> str | None:
    if _drawn(evidence) == "order" and resume.same < len(resume.expected) and _shares(resume):
        return (
            "the rows came in another order after the resume, and a fresh run under other seeds has another order too."
        )
    return None


def _again(resume: Resume) -> Counter[tuple[int, bytes]]:
    """The rows that came again, where they all lie before the resume and nothing is lost; else none."""
    again = _counted(resume.after) - _counted(resume.expected)
    before = _counted(resume.rows[: resume.place])
    return again if again <= before and not _lost(resume) else Counter()


def _late(resume: Resume) -> str | None:
    again = _again(resume)
    if not again or again.total() > max(1, resume.workers):
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
    if len(places) < _FEW or _order_kept(resume):
        return None
    return (
        f"{len(places)} of the next {places[-1] + 1} rows never came, and the others came in another order: rows had "
        "been read, and waited to be drawn."
    )


def _lost(resume: Resume) -> list[int]:
    """Which of the rows that were expected next never came; none where what came is mostly unknown to the reference."""
    known = _contents(resume.rows)
    if sum(row.digest in known for _, row in resume.after) < _MANY * len(resume.after):
        return []
    # Rows may come late: only those are looked for that have had as many rows again to come in.
    near = len(resume.after) // 2 or len(resume.after)
    lost = _counted(resume.expected[:near]) - _counted(resume.after)
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


def _epoch_starts(rows: Sequence[Delivered]) -> dict[int, int]:
    starts: dict[int, int] = {}
    for place, (epoch, _) in enumerate(rows):
        starts.setdefault(epoch, place)
    return starts


def _matches(found: Sequence[Delivered], rows: Sequence[Delivered], most: int) -> bool:
    """Whether the first rows are the same: at least a few, and ``most`` where there are as many."""
    count = min(len(found), len(rows), max(most, _FEW))
    return count >= _FEW and all(a[1] == b[1] for a, b in zip(found[:count], rows[:count], strict=True))


def _contents(rows: Sequence[Delivered]) -> Counter[bytes]:
    return Counter(row.digest for _, row in rows)


def _counted(rows: Sequence[Delivered]) -> Counter[tuple[int, bytes]]:
    return Counter((epoch, row.digest) for epoch, row in rows)
