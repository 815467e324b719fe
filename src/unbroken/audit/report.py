"""The report of an audit: one HTML file that needs nothing else."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from unbroken.audit.findings import Difference, Findings, Trial
from unbroken.audit.page import number, page, plural, shown
from unbroken.audit.picture import GLYPHS, delivered_map, legend, losses, say_stop
from unbroken.errors import AuditError

__all__ = ["write_report"]

_OPEN: Final = 8  # differences that stand open; the rest is folded
_COMPARED: Final = 1200  # characters: the comparison by words takes time that grows with their square
_CONTEXT: Final = 200  # equal characters that are kept on either side of a difference


def write_report(findings: Findings, path: Path) -> None:
    """Write the page to ``path``, whole or not at all; its folder is made.

    Raises:
        AuditError: ``path`` cannot be written. What was there before is as it was.
    """
    text = page(f"{_headline(findings)}: audit of {findings.factory}", _body(findings))
    # The last name stands only for a whole page. A short name fits wherever the last one does.
    made = path.parent / f".report-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            made.write_text(text, "utf-8")
            made.replace(path)
        finally:
            with suppress(FileNotFoundError):
                made.unlink()
    except (OSError, ValueError) as error:
        raise AuditError(
            f"the report could not be written to {str(path)!r}: {type(error).__name__}: {error}. The audit itself was "
            f"carried out ({_headline(findings)}); name a file, in a folder that can be written to and has space left, "
            "and run it again"
        ) from error


def _body(findings: Findings) -> str:
    parts = (
        _hero(findings),
        _facts(findings),
        _causes(findings),
        _map(findings),
        _differences(findings),
        _errors(findings),
        _table(findings.trials),
        _notes(findings.notes),
    )
    return "\n".join(part for part in parts if part)


def _headline(findings: Findings) -> str:
    if not findings.trials:
        return "No verdict"
    return {"exact": "Exact", "inexact": "Not exact", "failed": "Failed"}[findings.verdict]


def _hero(findings: Findings) -> str:
    trials = findings.trials
    inexact = sum(trial.verdict == "inexact" for trial in trials)
    failed = sum(trial.verdict == "failed" for trial in trials)
    broke = f"{'one' if failed == 1 else number(failed)} ended with an error instead of batches"
    one = len(trials) == 1
    of = "the one trial" if one else plural(len(trials), "trial")
    if not trials:
        told = "No trial was run, so nothing is known of whether this loader resumes exactly."
    elif inexact:
        which = "The one trial" if one else f"{number(inexact)} of {of}"
        told = f"{which} did not deliver what the run without a stop delivered. {_sums(trials)}."
        told += f" Of the others, {broke}." if failed else ""
    elif failed:
        rest = len(trials) - failed
        told = "The one trial ended with an error instead of batches." if one else f"Of {of}, {broke}."
        told += "" if not rest else " The other was exact." if rest == 1 else f" The other {number(rest)} were exact."
    else:
        told = "Ended and resumed, the loader delivered what the run without a stop delivered: the same batches, "
        told += f"in the same order, in {of if one else f'all {of}'}."
    tone = findings.verdict if trials else "none"
    glyph = f"{GLYPHS[findings.verdict]} " if trials else ""
    return (
        '<p class="eyebrow">unbroken audit: is a resumed run the run that never stopped?</p>\n'
        f'<header class="hero {tone}"><h1>{glyph}{_headline(findings)}.</h1><p>{told}</p></header>'
    )


def _sums(trials: Sequence[Trial]) -> str:
    """All rows that went wrong, in words."""
    whole = Trial(
        0,
        (),
        (),
        "inexact",
        lost=sum(trial.lost for trial in trials),
        repeated=sum(trial.repeated for trial in trials),
        reordered=sum(trial.reordered for trial in trials),
        altered=sum(trial.altered for trial in trials),
    )
    counted = losses(whole)
    return f"Rows over all trials: {', '.join(counted)}" if counted else "Each row came once, yet the batches differ"


def _facts(findings: Findings) -> str:
    tiles = {
        "trial": len(findings.trials),
        "stop": sum(len(trial.stops) for trial in findings.trials),
        "batch in a run": findings.batches,
        "row in a run": findings.rows,
        "epoch": len(findings.epochs),
    }
    many = {"batch in a run": "batches in a run", "row in a run": "rows in a run"}
    counted = [(number(value), name if value == 1 else many.get(name, name + "s")) for name, value in tiles.items()]
    listed = "".join(f"<li><b>{value}</b>{name}</li>" for value, name in (*counted, (_time(findings.seconds), "time")))
    versions = ", ".join(f"{shown(name, 100)} {shown(version, 100)}" for name, version in findings.versions.items())
    return (
        f'<ul class="tiles">{listed}</ul>\n<dl><dt>factory</dt><dd><code>{shown(findings.factory)}</code></dd>'
        f"<dt>loader</dt><dd><code>{shown(findings.loader)}</code></dd>"
        f"<dt>versions</dt><dd>{versions or 'not known'}</dd></dl>"
    )


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _causes(findings: Findings) -> str:
    if not findings.causes:
        if findings.verdict == "exact":
            return ""
        return '<h2>Likely causes</h2>\n<p class="soft">What was seen fits none of the known causes.</p>'
    cards = "\n".join(
        f'<section class="card"><h3>{shown(cause.name)}</h3><dl><dt>seen</dt><dd>{shown(cause.evidence)}</dd>'
        f"<dt>what to do</dt><dd>{shown(cause.remedy)}</dd></dl></section>"
        for cause in findings.causes
    )
    return f"<h2>Likely causes</h2>\n{cards}"


def _map(findings: Findings) -> str:
    drawn = delivered_map(findings)
    if not drawn:
        return "" if not findings.trials else '<h2>Delivered rows</h2>\n<p class="soft">The run has no row to draw.</p>'
    return (
        "<h2>Delivered rows</h2>\n"
        '<p class="soft">Each line is a trial, held against the run without a stop. A line without gaps, bumps or '
        "signs above it is a run that was resumed exactly. Point at a sign to read what it stands for; rows, batches, "
        "epochs and steps are numbered from 0. Stops are drawn where about their batch lies.</p>\n"
        f"{legend()}\n{drawn}"
    )


def _differences(findings: Findings) -> str:
    cards = [_difference(trial, trial.first) for trial in findings.trials if trial.first is not None]
    if not cards:
        return ""
    rest = "\n".join(cards[_OPEN:])
    folded = f"<details><summary>{len(cards) - _OPEN} more</summary>\n{rest}</details>" if rest else ""
    return "<h2>The first difference of each trial</h2>\n" + "\n".join(cards[:_OPEN]) + folded


def _difference(trial: Trial, first: Difference) -> str:
    expected, found = _apart(first.expected, first.found)
    same = '<p class="soft">In short both look alike; they differ in what is not shown.</p>'
    return (
        f'<section class="card {trial.verdict}"><h3><a href="#trial-{trial.number}">Trial {trial.number}</a>: '
        f"batch {number(first.batch)} "
        f'<span class="soft">(epoch {number(first.epoch)}, step {number(first.step)})</span></h3>'
        f'<div class="sides"><div><h4>expected: the run without a stop</h4><pre>{expected}</pre></div>'
        f"<div><h4>found: the resumed run</h4><pre>{found}</pre></div></div>"
        f"{same if first.expected == first.found else ''}</section>"
    )


def _errors(findings: Findings) -> str:
    """Each error once."""
    cards = [
        f'<section class="card failed"><h3>Trial{"s" if len(numbers) > 1 else ""} '
        + ", ".join(f'<a href="#trial-{each}">{each}</a>' for each in numbers)
        + f'</h3><pre class="error">{shown(error, 8000)}</pre></section>'
        for numbers, error in findings.errors()
    ]
    return "<h2>Errors</h2>\n" + "\n".join(cards) if cards else ""


def _apart(expected: str, found: str) -> tuple[str, str]:
    """Both as HTML, with the words marked in which they differ; of long equal parts only the near end is kept."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, found, strict=False)))
    begin = max(0, same - _CONTEXT)
    one, other = (re.findall(r"\w+|\W", text[begin : begin + _COMPARED]) for text in (expected, found))
    dots = "… " if begin else ""
    sides = ([dots], [dots])
    for code, first, last, start, stop in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        for side, text in zip(sides, ("".join(one[first:last]), "".join(other[start:stop])), strict=True):
            if code != "equal":
                side.append(f"<mark>{shown(text)}</mark>" if text else "")
            elif len(text) > 2 * _CONTEXT:
                side.append(f"{shown(text[:_CONTEXT])} … {shown(text[-_CONTEXT:])}")
            else:
                side.append(shown(text))
    for side, text in zip(sides, (expected, found), strict=True):
        left = len(text) - begin - _COMPARED
        side.append(f" … ({number(left)} more characters)" if left > 0 else "")
    return "".join(sides[0]), "".join(sides[1])


def _table(trials: Sequence[Trial]) -> str:
    if not trials:
        return ""
    rows = "\n".join(map(_row, trials))
    return (
        '<h2>Trials</h2>\n<div class="wide"><table><thead><tr><th scope="col">trial</th><th scope="col">verdict</th>'
        '<th scope="col">stops</th><th scope="col">arguments of the factory</th><th scope="col" class="count">lost</th>'
        '<th scope="col" class="count">repeated</th><th scope="col" class="count">reordered</th>'
        f'<th scope="col" class="count">altered</th></tr></thead>\n{rows}\n</table></div>'
    )


def _row(trial: Trial) -> str:
    stops = "<br>".join(say_stop(stop) for stop in trial.stops) or "none"
    failed = trial.verdict == "failed"  # nothing was counted
    counts = "".join(
        f'<td class="count{"" if count else " zero"}">{"" if failed and not count else number(count)}</td>'
        for count in (trial.lost, trial.repeated, trial.reordered, trial.altered)
    )
    return (
        f'<tbody id="trial-{trial.number}" class="{trial.verdict}"><tr><td class="count">{trial.number}</td>'
        f'<td class="badge">{GLYPHS[trial.verdict]} {trial.verdict}</td><td class="stops">{stops}</td>'
        f'<td class="mono">{_topologies(trial.topologies)}</td>{counts}</tr></tbody>'
    )


def _topologies(topologies: Sequence[Mapping[str, Any]]) -> str:
    """The arguments of each stretch, a line each, or one line where they never change."""
    lines = [shown(", ".join(f"{name}={value!r}" for name, value in given.items()), 300) for given in topologies]
    if len(set(lines)) <= 1:
        return lines[0] if lines and lines[0] else "none"
    return "<br>".join(f"{'→ ' if at else ''}{line or 'none'}" for at, line in enumerate(lines))


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return "<h2>Notes</h2>\n<ul>" + "".join(f"<li>{shown(note)}</li>" for note in notes) + "</ul>"
