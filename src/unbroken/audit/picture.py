"""The map of the delivered rows over the trials, as SVG.

A line of the map is a trial; to the right go the rows of the reference in the order of delivery. Runs of equal columns
are one shape, so that the size of the page follows what happened and not the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from unbroken.audit.columns import Run, runs, spread
from unbroken.audit.findings import Findings, Stop, Trial, Verdict
from unbroken.audit.page import number, plural, shown

__all__ = ["COLUMNS", "GLYPHS", "delivered_map", "legend", "losses", "say_stop"]

COLUMNS: Final = 500
GLYPHS: Final[dict[Verdict, str]] = {"exact": "✓", "inexact": "✗", "failed": "!"}

_LEFT, _WIDTH, _RIGHT = 96.0, 1000.0, 184.0
# Within a row of the map, from its top: doubles rise above the band, holes hang below it, stops lie beneath both.
_RISE, _BAND, _BASE, _HANG, _STOPS, _PITCH = 5, 11, 21, 25, 30, 36
_HEAD, _FOOT = 34, 40
_TRIALS_A_FIGURE: Final = 40  # each figure has its own axis and fits a printed page
_TOOLTIPS: Final = 40  # for each trial and kind; more runs than that share them, which bounds the size of the page
_NARROWEST: Final = 3.0  # units: a single lost row among a million is still seen


@final
@dataclass(frozen=True)
class _Scale:
    """How columns, rows and batches become places on the map, in its units."""

    total: int
    columns: int
    batches: int
    rows: int

    def column(self, column: float) -> float:
        return _LEFT + column * _WIDTH / self.columns

    def row(self, row: float) -> float:
        return _LEFT + min(row, self.total) * _WIDTH / self.total

    def batch(self, batch: int) -> float:
        """Where about ``batch`` begins; the sizes of single batches are not known here."""
        return self.row(self.rows * batch / self.batches if self.batches else 0)

    def box(self, first: int, last: int, top: float, bottom: float) -> str:
        """A path over columns, never narrower than the eye needs."""
        left, right = self.column(first), self.column(last)
        if right - left < _NARROWEST:
            middle = min(max((left + right) / 2, _LEFT + _NARROWEST / 2), _LEFT + _WIDTH - _NARROWEST / 2)
            left, right = middle - _NARROWEST / 2, middle + _NARROWEST / 2
        return _box(left, right, top, bottom)


def _box(left: float, right: float, top: float, bottom: float) -> str:
    return f"M{left:.6g} {top:g}h{right - left:.6g}v{bottom - top:g}h{left - right:.6g}z"


def delivered_map(findings: Findings) -> str:
    """The figures, with as many trials in each as fit a page; empty where there is no row or no trial."""
    total = max([findings.rows, *(len(trial.counts) for trial in findings.trials)])
    if not total or not findings.trials:
        return ""
    scale = _Scale(total, min(total, COLUMNS), findings.batches, findings.rows)
    groups = [
        findings.trials[begin : begin + _TRIALS_A_FIGURE] for begin in range(0, len(findings.trials), _TRIALS_A_FIGURE)
    ]
    hatch = (
        '<svg style="position:absolute;width:0;min-width:0;height:0" aria-hidden="true"><defs>'
        '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="paper"/><path class="scratch" d="M1 0V6M4 0V6"/></pattern></defs></svg>'
    )
    return hatch + "\n".join(_figure(group, findings.epochs, scale) for group in groups)


def _figure(trials: Sequence[Trial], epochs: Sequence[int], scale: _Scale) -> str:
    bottom = _HEAD + _PITCH * len(trials)
    drawn = "\n".join(_trial(trial, _HEAD + _PITCH * at, scale) for at, trial in enumerate(trials))
    label = f"Delivered rows, trials {trials[0].number} to {trials[-1].number}"
    size = f"0 0 {_LEFT + _WIDTH + _RIGHT:g} {bottom + _FOOT:g}"
    return (
        f'<figure><svg viewBox="{size}" role="group" aria-label="{label}">\n'
        f"{_epochs(epochs, scale, bottom)}\n{drawn}\n{_axis(scale, bottom + 4)}\n</svg></figure>"
    )


def _epochs(epochs: Sequence[int], scale: _Scale, bottom: float) -> str:
    """A line where each epoch begins; where they are too many to be told apart, some of them."""
    parts = []
    lined = labelled = -_WIDTH
    for epoch, begin in enumerate(epochs):
        x = scale.row(begin)
        if x - lined < 6:
            continue
        lined = x
        parts.append(
            f"<g><title>epoch {epoch} begins at row {number(begin)}</title>"
            f'<path class="epoch" d="M{x:.6g} {_HEAD - 10}V{bottom + 4}"/>'
        )
        if x - labelled >= 64 and x <= _LEFT + _WIDTH - 20:
            labelled = x
            parts.append(f'<text class="small" x="{x:.6g}" y="{_HEAD - 15}">epoch {epoch}</text>')
        parts.append("</g>")
    return "".join(parts)


def _axis(scale: _Scale, top: float) -> str:
    step = 1
    for factor in _steps():
        step = factor
        if scale.total / step <= 10:
            break
    ticks = "".join(
        f'<path class="axis" d="M{scale.row(row):.6g} {top:g}v5"/>'
        f'<text class="small" x="{scale.row(row):.6g}" y="{top + 17:g}" text-anchor="middle">{number(row)}</text>'
        for row in range(0, scale.total + 1, step)
    )
    each = -(-scale.total // scale.columns)
    caption = "rows of the run without a stop, in the order of delivery"
    caption += f"; a column is up to {each} rows, and a hole or a double if any of them is" if each > 1 else ""
    return (
        f'<path class="axis" d="M{_LEFT:g} {top:g}h{_WIDTH:g}"/>{ticks}'
        f'<text class="small" x="{_LEFT + _WIDTH / 2:g}" y="{top + 33:g}" text-anchor="middle">{caption}</text>'
    )


def _steps() -> Iterable[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _trial(trial: Trial, top: float, scale: _Scale) -> str:
    drawn = runs(trial.counts, scale.total, scale.columns)
    holes = [run for run in drawn if run.missing]
    doubles = [run for run in drawn if run.more]
    once = "".join(
        _box(scale.column(run.first), scale.column(run.last), top + _BAND, top + _BASE)
        for run in drawn
        if not run.missing and not run.more
    )

    def tall(run: Run) -> str:
        return scale.box(run.first, run.last, top + _RISE, top + (_BAND if run.missing else _BASE))

    def gap(run: Run) -> str:
        return scale.box(run.first, run.last, top + _BAND, top + _HANG)

    stops = "".join(_stop(at, stop, top, scale) for at, stop in enumerate(trial.stops, 1))
    cuts = _cuts(top, scale)
    # The signs of the stops lie under the holes and doubles where these are so narrow that they would be hidden.
    below, above = ("", cuts + stops) if cuts else (stops, "")
    return "".join(
        (
            f'<g class="trial {trial.verdict}"><title>{_summary(trial)}</title>',
            f'<rect class="ground" x="0" y="{top:g}" width="{_LEFT + _WIDTH + _RIGHT:g}" height="{_PITCH}"/>',
            _unjudged(trial, top, scale),
            f'<path class="once" d="{once}"/>' if once else "",
            below,
            _grouped("double", doubles, tall, _say_doubles),
            _grouped("hole", holes, gap, _say_holes),
            above,
            _unknown(trial, top, scale),
            _first(trial, top, scale),
            _labels(trial, top),
            "</g>",
        )
    )


def _grouped(kind: str, drawn: list[Run], shape: Callable[[Run], str], say: Callable[[list[Run]], str]) -> str:
    """One path for each run with its own tooltip, or for some neighbouring runs where there are many."""
    size = max(1, -(-len(drawn) // _TOOLTIPS))
    parts = [drawn[begin : begin + size] for begin in range(0, len(drawn), size)]
    return "".join(
        f'<path class="{kind}" d="{"".join(map(shape, part))}"><title>{say(part)}</title></path>' for part in parts
    )


def _say_holes(part: list[Run]) -> str:
    missing, covered = sum(run.missing for run in part), sum(run.end - run.begin for run in part)
    among = f" of {number(covered)}" if covered != missing else ""
    return f"{_rows(part)}: {number(missing)}{among} never delivered"


def _say_doubles(part: list[Run]) -> str:
    more, covered = sum(run.more for run in part), sum(run.end - run.begin for run in part)
    most = max(run.most for run in part)
    among = f" of {number(covered)}" if covered != more else ""
    times = "255 times or more" if most == 255 else f"{most} times"
    return f"{_rows(part)}: {number(more)}{among} delivered more than once, up to {times}"


def _rows(part: list[Run]) -> str:
    begin, last = part[0].begin, part[-1].end - 1
    where = f"rows {number(begin)} to {number(last)}" if last > begin else f"row {number(begin)}"
    return where if len(part) == 1 else f"{len(part)} places among {where}"


def _unjudged(trial: Trial, top: float, scale: _Scale) -> str:
    """An empty frame where nothing was counted."""
    if len(trial.counts) >= scale.total:
        return ""
    frame = _box(scale.row(len(trial.counts)), _LEFT + _WIDTH, top + _BAND, top + _BASE)
    return f'<path class="unjudged" d="{frame}"><title>nothing was counted here</title></path>'


def _cuts(top: float, scale: _Scale) -> str:
    """Lines between the rows, where a column is wide enough to bear them."""
    if _WIDTH / scale.columns < 7:
        return ""
    lines = "".join(
        f"M{scale.column(column):.6g} {top + _RISE:g}V{top + _BASE:g}" for column in range(1, scale.columns)
    )
    return f'<path class="cut" pointer-events="none" d="{lines}"/>'


def _unknown(trial: Trial, top: float, scale: _Scale) -> str:
    """Diamonds, drawn out over neighbouring columns."""
    middle, half = top + (_BAND + _BASE) / 2, 5
    shapes = []
    for first, last in spread(trial.unknown, scale.total, scale.columns):
        centre = scale.column((first + last) / 2)
        flat = max(0.0, scale.column(last) - scale.column(first) - 2 * half)
        shapes.append(
            f"M{centre - flat / 2 - half:.6g} {middle:g}l{half} -{half}h{flat:.6g}l{half} {half}"
            f"l-{half} {half}h{-flat:.6g}z"
        )
    if not shapes:
        return ""
    told = f"{plural(len(trial.unknown), 'row')} that the run without a stop does not have; the first came in place "
    told += f"{number(min(trial.unknown))} of the trial"
    return f'<path class="unknown" d="{"".join(shapes)}"><title>{told}</title></path>'


def _stop(at: int, stop: Stop, top: float, scale: _Scale) -> str:
    saved, ended, y = scale.batch(stop.saved), scale.batch(stop.ended), top + _STOPS
    return (
        f'<g class="stop"><title>stop {at}: {say_stop(stop)}</title>'
        f'<path class="again" d="M{saved:.6g} {y}H{ended:.6g}"/>'
        f'<path d="M{saved:.6g} {top + _BAND - 2:g}V{y}"/>'
        f'<path class="dashed" d="M{ended:.6g} {top + _BAND - 2:g}V{y}"/>'
        f'<circle cx="{saved:.6g}" cy="{y}" r="3.6"/>'
        f'<path d="M{ended - 3.2:.6g} {y - 3.2:g}l6.4 6.4m0 -6.4l-6.4 6.4"/></g>'
    )


def say_stop(stop: Stop) -> str:
    """As HTML."""
    saved, ended = plural(stop.saved, "batch", "batches"), number(stop.ended)
    return f"saved after {saved}, ended after {ended}, {shown(stop.how, 200)}"


def _first(trial: Trial, top: float, scale: _Scale) -> str:
    if trial.first is None:
        return ""
    x = scale.batch(trial.first.batch)
    where = f"batch {number(trial.first.batch)} (epoch {trial.first.epoch}, step {number(trial.first.step)})"
    return (
        f'<path class="first" d="M{x:.6g} {top + _RISE + 1:g}l-4.5 -6h9z">'
        f"<title>the first difference: {where}</title></path>"
    )


def _labels(trial: Trial, top: float) -> str:
    x, middle = _LEFT + _WIDTH + 10, top + (_BAND + _BASE) / 2 + 4
    left = (
        f'<text class="tone" x="6" y="{middle:g}">{GLYPHS[trial.verdict]}</text>'
        f'<text x="{_LEFT - 10:g}" y="{middle:g}" text-anchor="end">trial {trial.number}</text>'
    )
    lost = losses(trial)
    if trial.verdict == "failed":
        lost.insert(0, "failed" if trial.counts else "failed: no batch to draw")
    if len(lost) <= 2:
        return f'{left}<text class="small" x="{x:g}" y="{middle:g}">{", ".join(lost) or trial.verdict}</text>'
    halves = (lost[:2], lost[2:])
    return left + "".join(
        f'<text class="small" x="{x:g}" y="{middle + shift:g}">{", ".join(half)}</text>'
        for half, shift in zip(halves, (-6, 7), strict=True)
    )


def losses(trial: Trial) -> list[str]:
    """``["3 lost", "1 altered"]``: the counts that are not zero, and the word for each."""
    counted = {
        "lost": trial.lost,
        "repeated": trial.repeated,
        "reordered": trial.reordered,
        "altered": trial.altered,
    }
    return [f"{number(count)} {word}" for word, count in counted.items() if count]


def _summary(trial: Trial) -> str:
    lost = f": {', '.join(losses(trial))}" if losses(trial) else ""
    return f"trial {trial.number}: {trial.verdict}{lost}; {plural(len(trial.stops), 'stop')}"


def legend() -> str:
    """The signs of the map, each with its meaning, as a list in HTML."""
    y = _STOPS
    before, after = f"M0 {_BAND}h10V{_BASE}h-10z", f"M24 {_BAND}h10V{_BASE}h-10z"
    band = f'<path class="once" d="M0 {_BAND}h34V{_BASE}h-34z"/>'
    sides = f'<path class="once" d="{before}{after}"/>'
    entries = {
        "delivered once": band,
        "a hole: never delivered": f'{sides}<path class="hole" d="M10 {_BAND}h14V{_HANG}h-14z"/>',
        "a double: delivered more than once": f'{sides}<path class="double" d="M10 {_RISE}h14V{_BASE}h-14z"/>',
        "both within one column": f'{sides}<path class="double" d="M10 {_RISE}h14V{_BAND}h-14z"/>'
        f'<path class="hole" d="M10 {_BAND}h14V{_HANG}h-14z"/>',
        "a row that is unknown or altered": f'{band}<path class="unknown" d="M12 16l5 -5l5 5l-5 5z"/>',
        "the first difference": f'{band}<path class="first" d="M17 {_RISE + 3}l-4.5 -6h9z"/>',
        "not counted": f'<path class="unjudged" d="M1 {_BAND}h32V{_BASE}h-32z"/>',
        "saved (ring), ended (cross) some batches later": f'{band}<g class="stop"><path class="again" d="M8 {y}H26"/>'
        f'<path d="M8 {_BAND - 2}V{y}"/><path class="dashed" d="M26 {_BAND - 2}V{y}"/>'
        f'<circle cx="8" cy="{y}" r="3.6"/><path d="M22.8 {y - 3.2}l6.4 6.4m0 -6.4l-6.4 6.4"/></g>',
        "an epoch begins": f'{band}<path class="epoch" d="M17 0V36"/>',
    }
    items = "".join(
        f'<li><svg viewBox="0 0 34 36" aria-hidden="true">{sign}</svg>{meaning}</li>'
        for meaning, sign in entries.items()
    )
    return f'<ul class="legend">{items}</ul>'
