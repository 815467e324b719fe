"""The frame and the looks of the report page: one file that fetches nothing and runs nothing."""

from __future__ import annotations

from html import escape

__all__ = ["number", "page", "plural", "shown"]

# Colours that stay apart under the common kinds of colour blindness (M. Okabe and K. Ito, "Color Universal Design"):
# vermillion, blue, bluish green, orange and reddish purple, each darkened or lightened to read on its ground.
_LIGHT = """
  --ground: #ffffff; --raised: #f6f7f9; --line: #d9dde3; --ink: #1b2027; --soft: #5a6472;
  --once: #a9bacb; --double: #0063a6; --hole: #c94f00; --unknown: #9c3d78;
  --good: #00735a; --bad: #b84300; --stuck: #8a5a00;
"""
_DARK = """
  --ground: #14171c; --raised: #1d2229; --line: #363d47; --ink: #e8ebef; --soft: #a3adba;
  --once: #566779; --double: #63bdf5; --hole: #ff9257; --unknown: #eaa0cf;
  --good: #3fcba4; --bad: #ff9257; --stuck: #f2b632;
"""

_STYLE = """
:root { color-scheme: light dark; %LIGHT% }
@media (prefers-color-scheme: dark) { :root { %DARK% } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 2rem 1.5rem 4rem; background: var(--ground); color: var(--ink);
  font: .94rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 2.4rem; line-height: 1.1; margin: 0 0 .5rem; letter-spacing: -.02em; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .4rem; }
p { margin: .3rem 0; max-width: 52rem; }
a { color: inherit; }
pre, code, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .87em; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
code { overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.eyebrow { color: var(--soft); margin: 0 0 1rem; }
.hero { border-left: .5rem solid var(--tone); padding: .4rem 0 .4rem 1.25rem; margin: 0 0 1.5rem; }
.hero h1 { color: var(--tone); }
.hero p { font-size: 1.1rem; }
.exact { --tone: var(--good); } .inexact { --tone: var(--bad); } .failed { --tone: var(--stuck); }
.none { --tone: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 0 0 1.25rem; padding: 0; list-style: none; }
.tiles li { background: var(--raised); border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem;
  min-width: 6.5rem; color: var(--soft); font-size: .87rem; }
.tiles b { display: block; color: var(--ink); font-size: 1.35rem; line-height: 1.3; font-weight: 600;
  font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.25rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem; margin: .75rem 0;
  break-inside: avoid; }
.card > dl { margin-top: .2rem; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: .75rem; }
.sides > div { background: var(--raised); border-radius: .35rem; padding: .5rem .75rem; min-width: 0; }
.sides h4 { margin: 0 0 .2rem; font-size: .8rem; font-weight: 600; color: var(--soft); }
mark { background: none; color: var(--bad); font-weight: 700; text-decoration: underline; text-underline-offset: .2em; }
summary { cursor: pointer; margin: .75rem 0; color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; font-weight: 600; white-space: nowrap; color: var(--soft);
  border-bottom: 2px solid var(--line); }
th, td { padding: .4rem .8rem .4rem 0; vertical-align: top; }
tbody { border-bottom: 1px solid var(--line); break-inside: avoid; }
tbody:target { background: var(--raised); }
td.stops { min-width: 18rem; }
.count { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.zero { color: var(--soft); }
.badge { color: var(--tone); font-weight: 600; white-space: nowrap; }
.error { background: var(--raised); border-left: .25rem solid var(--tone); padding: .5rem .75rem; margin: 0 0 .6rem;
  max-height: 16rem; overflow: auto; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: .6rem 0 .4rem; padding: 0; list-style: none;
  font-size: .87rem; color: var(--soft); }
.legend svg { width: 34px; height: 33px; min-width: 0; display: inline-block; vertical-align: middle;
  margin-right: .4rem; }
figure { margin: 0 0 1rem; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 56rem; height: auto; }
svg text { fill: var(--ink); font-size: 12px; }
svg .small { fill: var(--soft); font-size: 10.5px; font-variant-numeric: tabular-nums; }
svg .tone { fill: var(--tone); font-weight: 600; }
.ground { fill: transparent; } .trial:hover .ground { fill: var(--raised); }
.once { fill: var(--once); }
.double { fill: var(--double); }
.hole { fill: url(#hatch); stroke: var(--hole); stroke-width: 1; }
.paper { fill: var(--ground); } .scratch { stroke: var(--hole); stroke-width: 1.8; }
.unknown { fill: var(--unknown); stroke: var(--ground); stroke-width: 1; }
.unjudged { fill: none; stroke: var(--soft); stroke-dasharray: 3 3; }
.cut { stroke: var(--ground); stroke-width: 1; }
.stop { fill: none; stroke: var(--ink); stroke-width: 1.3; } .stop .dashed { stroke-dasharray: 2 2; }
.stop circle { fill: var(--ground); } .stop .again { stroke: var(--soft); stroke-width: 2.5; }
.first { fill: var(--ink); stroke: var(--ground); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1; } .epoch { stroke: var(--soft); stroke-dasharray: 1 3; }
@media (max-width: 45rem) { .sides { grid-template-columns: 1fr; } body { padding: 1rem; } }
@media print {
  :root { %LIGHT% }
  html { font-size: 11px; }
  body { max-width: none; padding: 0; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  h2 { break-after: avoid; }
  svg { min-width: 0; } figure, .wide, .error { overflow: visible; max-height: none; }
  details::details-content { content-visibility: visible; height: auto; } summary { display: none; }
}
""".replace("%LIGHT%", _LIGHT.strip()).replace("%DARK%", _DARK.strip())

# The policy forbids every fetch, so that a page that was mailed or served asks for nothing, not even an icon.
_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def page(title: str, body: str) -> str:
    """The whole file; ``title`` is plain text, ``body`` is HTML."""
    return _FRAME.format(title=shown(title), style=_STYLE, body=body)


def shown(value: object, most: int = 2000) -> str:
    """What a user gave, as HTML that shows it and does nothing else.

    Characters that have no look of their own (controls, directions of writing, halves of surrogate pairs) are written
    as Python escapes; the ends of lines stay. Text beyond ``most`` characters is left out, with the number of them.
    """
    text = str(value)
    left = len(text) - most
    seen = "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode("ascii")
        for char in text[:most]
    )
    return escape(seen) + (f" … ({number(left)} more characters)" if left > 0 else "")


def number(value: int) -> str:
    """With commas between the thousands."""
    return f"{value:,}"


def plural(count: int, one: str, many: str = "") -> str:
    """``3 rows``, ``1 row``, ``2 batches``."""
    return f"{number(count)} {one if count == 1 else many or one + 's'}"
