"""What the demo shows at its end: a table, a verdict and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from unbroken.demo.verdict import Check, Log

__all__ = ["draw_losses", "show_checks"]


def show_checks(console: Console, checks: Sequence[Check]) -> bool:
    """Print the table and the verdict; returns whether every check passed."""
    table = Table(title="What was compared with the run that never stopped", title_justify="left")
    table.add_column("what")
    table.add_column("steps", no_wrap=True)
    table.add_column("found")
    table.add_column("verdict", no_wrap=True)
    for check in checks:
        verdict = "[green]equal[/]" if check.passed else "[bold red]DIFFERS[/]"
        table.add_row(check.what, check.steps, check.found, verdict)
    console.print(table)
    passed = bool(checks) and all(check.passed for check in checks)
    if passed:
        console.print("[bold green]Exact.[/] The stopped runs and the run that never stopped are the same run.")
    else:
        failed = sum(not check.passed for check in checks)
        console.print(f"[bold red]Not exact.[/] {failed} of {len(checks)} comparisons differ.")
    return passed


def draw_losses(path: Path, reference: Log, killed: Log, resumed: Log, restored: int) -> None:
    """Draw both loss curves into a PNG.

    ``killed`` and ``resumed`` are the two parts of the run that was stopped, ``restored`` the step of its checkpoint.
    """
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the machine's default is
    axes = figure.add_subplot()
    for log, style, label in (
        (reference, {"color": "0.6", "linewidth": 6, "alpha": 0.6}, "never stopped"),
        (killed, {"color": "tab:red", "linewidth": 1.5, "linestyle": "--"}, "killed"),
        (resumed, {"color": "tab:blue", "linewidth": 1.5, "marker": "o", "markersize": 4}, "resumed"),
    ):
        steps = sorted(log)
        axes.plot(steps, [log[step].loss for step in steps], label=label, **style)  # type: ignore[arg-type]
    axes.axvline(restored, color="tab:blue", linestyle=":", linewidth=1)
    axes.annotate(f" checkpoint {restored}", (restored, 0.02), xycoords=("data", "axes fraction"), color="tab:blue")
    if killed:
        axes.axvline(max(killed), color="tab:red", linestyle=":", linewidth=1)
        axes.annotate(
            f" SIGKILL {max(killed)}", (max(killed), 0.94), xycoords=("data", "axes fraction"), color="tab:red"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title("One run that never stopped, one that was killed and resumed")
    axes.legend()
    figure.savefig(path)
