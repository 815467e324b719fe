"""What an audit found, told on a terminal, and as JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

import orjson
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unbroken.audit.findings import Difference, Findings, Trial, Verdict

__all__ = ["show", "tell", "to_json"]

_COLORS: Final[dict[Verdict, str]] = {"exact": "green", "inexact": "red", "failed": "yellow"}
_COUNTED: Final = ("lost", "repeated", "reordered", "altered")  # of a trial, in rows
_VARIED: Final = {"num_workers": "workers", "dp_world_size": "ranks"}
_MOST_ERROR_LINES: Final = 16
_WIDE: Final = 100  # columns of a terminal


def to_json(findings: Findings) -> str:
    """All of it as JSON; ``counts`` of a trial in base64, one byte a row. Trials count from 1, as everywhere."""
    values = {"verdict": findings.verdict, **asdict(findings)}
    for trial in values["trials"]:
        trial["counts"] = base64.b64encode(trial["counts"]).decode()
    return orjson.dumps(values, option=orjson.OPT_INDENT_2).decode() + "\n"


def tell(findings: Findings, width: int = 110) -> str:
    """The same text as on a terminal, without colours."""
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        show(findings, console)
    return capture.get()


def show(findings: Findings, console: Console) -> None:
    """Trials, the first difference of the first trial that has one, causes, the verdict."""
    console.print(Text(_title(findings), "italic"))
    console.print(_table(findings, narrow=console.width < _WIDE))
    for note in findings.notes:
        console.print(Text(note, "dim"))
    shown = next((trial for trial in findings.trials if trial.first is not None), None)
    if shown is not None and shown.first is not None:
        console.print()
        console.print(_difference(shown, shown.first))
    for error in _errors(findings):
        console.print()
        console.print(error)
    for cause in findings.causes:
        console.print()
        console.print(Text.assemble("Likely cause: ", (cause.name, "bold")))
        console.print(Padding(Text(cause.evidence), (0, 0, 0, 2)))
        console.print(Padding(Text(f"Way out: {cause.remedy}"), (0, 0, 0, 2)))
    console.print()
    console.print(_verdict(findings))


def _title(findings: Findings) -> str:
    """What was judged, and what was the same in all of it."""
    given = next((each for trial in findings.trials for each in trial.topologies), {})
    fixed = [name for name in _VARIED if name in given and not _varies(findings, name)]
    return ", ".join(
        [
            f"{findings.factory}: {findings.loader.rpartition('.')[2]}",
            *(f"{_VARIED[name]}: {given[name]}" for name in fixed),
        ]
    )


def _varies(findings: Findings, name: str) -> bool:
    """Whether an argument of the factory was given, and not the same one each time."""
    return len({each.get(name) for trial in findings.trials for each in trial.topologies}) > 1


def _table(findings: Findings, *, narrow: bool) -> Table:
    """A line a stop. What is the same for all, or empty for all, has no column: a terminal may have but 80."""
    table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0))
    varied = {name: column for name, column in _VARIED.items() if _varies(findings, name)}
    counted = [name for name in _COUNTED if any(getattr(trial, name) for trial in findings.trials)]
    for column in ("trial", "saved", "ended", "how", *varied.values(), "verdict", *counted):
        words = column in ("how", "verdict")
        table.add_column(column, justify="left" if words else "right", no_wrap=column != "how")
    for trial in findings.trials:
        stops = [(str(stop.saved), str(stop.ended), stop.how) for stop in trial.stops] or [("", "", "not at all")]
        under = [">".join(str(each.get(name, "")) for each in trial.topologies) for name in varied]
        counts = [str(getattr(trial, name) or "") for name in counted]
        table.add_row(str(trial.number), *stops[0], *under, Text(trial.verdict, _COLORS[trial.verdict]), *counts)
        for stop in stops[1:]:
            table.add_row("", *stop)
    return table


def _difference(trial: Trial, first: Difference) -> RenderableType:
    where = f"batch {first.batch} of the run (epoch {first.epoch}, batch {first.step} of it)"
    sides = Table(box=None, padding=(0, 2, 0, 2))
    sides.add_column("expected", ratio=1)
    sides.add_column("found", ratio=1)
    sides.add_row(Text(first.expected), Text(first.found))
    return Group(Text(f"First difference of trial {trial.number}: {where}"), sides)


def _errors(findings: Findings) -> Iterator[RenderableType]:
    """Each error once, with the trials that it ended."""
    for numbers, error in findings.errors():
        lines = error.splitlines()
        left_out = ["..."] if len(lines) > _MOST_ERROR_LINES else []
        text = "\n".join([lines[0], *left_out, *lines[1:][-_MOST_ERROR_LINES + 1 :]])
        title = f"Trial{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} ended with an error:"
        yield Group(Text(title), Padding(Text(text), (0, 0, 0, 2)))


def _verdict(findings: Findings) -> Text:
    count = len(findings.trials)
    inexact = sum(trial.verdict == "inexact" for trial in findings.trials)
    failed = sum(trial.verdict == "failed" for trial in findings.trials)
    broke = f"{failed} ended with an error" if failed else ""
    batches = f"the {findings.batches} batches ({findings.rows} rows) of the run without a stop"
    delivered = "what the run without a stop delivers"
    if count == 1:
        texts: dict[Verdict, str] = {
            "exact": f"EXACT: the one trial, ended and resumed, delivered {batches}.",
            "inexact": f"INEXACT: the one trial did not deliver {delivered}.",
            "failed": "FAILED: the one trial ended with an error.",
        }
    else:
        others = "the other is" if count - failed == 1 else "the others are"
        texts = {
            "exact": f"EXACT: {count} trials, ended and resumed, each delivered {batches}.",
            "inexact": f"INEXACT: {inexact} of {count} trials did not deliver {delivered}"
            + (f"; {broke}." if broke else "."),
            "failed": f"FAILED: of {count} trials, {broke}; {others} exact."
            if failed < count
            else f"FAILED: {count} trials, and none came to its end without an error.",
        }
    return Text(f"{texts[findings.verdict]} ({findings.seconds:.0f} s)", f"bold {_COLORS[findings.verdict]}")
