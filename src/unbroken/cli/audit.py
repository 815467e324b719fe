"""``unbroken audit``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from unbroken.cli.shared import cannot, end_on_sigterm

if TYPE_CHECKING:
    from unbroken.audit.judging import Progress as Told

__all__ = ["COLUMNS", "audit", "bar_of"]

_FACTORY = (
    "The function that makes the loader, as module:function or path/to/file.py:function. It is called with "
    "num_workers, dp_rank and dp_world_size, where it takes them."
)
_LEDGER = "Compare two checkpoints instead: whether they saw the same data, whatever ranks and workers they ran on."
COLUMNS = (
    BarColumn(20),
    TextColumn("{task.completed}/{task.total}"),
    TimeElapsedColumn(),
    TextColumn("{task.description}"),
)
_KILLS, _SAVES = ("sigkill", "sigterm", "none"), ("torch", "json", "dcp")


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise typer.BadParameter(
            f"{option} takes numbers with commas between them, such as 0,2,4; found {text!r}"
        ) from None


def _one_of(value: str, choices: tuple[str, ...], option: str) -> str:
    if value not in choices:
        raise typer.BadParameter(f"{option} is one of {', '.join(choices)}; found {value!r}")
    return value


def audit(
    factory: Annotated[str | None, typer.Argument(help=_FACTORY, metavar="MODULE:FUNCTION")] = None,
    batches: Annotated[int, typer.Option(min=4, help="Batches of a run that are compared.")] = 100,
    trials: Annotated[int, typer.Option(min=1, help="Runs that are ended and resumed; each third one twice.")] = 10,
    kill: Annotated[
        str,
        typer.Option(
            metavar="sigkill|sigterm|none",
            help="How a run is ended: sigkill, sigterm, or none (it ends by itself, between batches).",
        ),
    ] = "sigkill",
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="0,2,4", help="Numbers of workers, such as 0,2,4. Half of the trials change it at a stop."
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="1,2", help="Numbers of ranks, such as 1,2; each rank is a process. Half change it."),
    ] = None,
    save: Annotated[str, typer.Option(metavar="torch|json|dcp", help="How the state is saved.")] = "torch",
    report: Annotated[Path | None, typer.Option(help="Write a page (HTML) of what was found.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write what was found as JSON.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of places and global generators: the same audit again.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without a batch after which a run has failed.")] = 120,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time. Default: one a core.")] = None,
    ledger: Annotated[tuple[Path, Path] | None, typer.Option("--ledger", metavar="A B", help=_LEDGER)] = None,
    key: Annotated[str | None, typer.Option(help="With --ledger: which position, where there are several.")] = None,
) -> None:
    """Kill a loader at random places, resume it, and hold it against the run that never stopped.

    Works with any object that has state_dict and load_state_dict, or get_state and set_state, on itself, on its
    iterator or on its dataset. Each run is a process of its own. It is ended between batches, in the middle of a fetch
    and during a save, and goes on from its last whole save in a new process with other global seeds.

    Exit code: 0 if every trial delivers the same batches, 1 if any does not, 2 if the audit could not be carried out.
    """
    _ledgers_alone(factory, ledger, key)
    if factory is None:
        raise typer.BadParameter("Name the function that makes the loader, as module:function.")
    asked: dict[str, Any] = {
        "batches": batches,
        "trials": trials,
        "kill": _one_of(kill, _KILLS, "--kill"),
        "workers": _numbers(workers, "--workers"),
        "ranks": _numbers(ranks, "--ranks"),
        "save": _one_of(save, _SAVES, "--save"),
        "seed": seed,
        "timeout": timeout,
        "jobs": jobs,
    }
    raise typer.Exit(_carry_out(factory, asked, report, json))


def _carry_out(factory: str, asked: dict[str, Any], report: Path | None, json: Path | None) -> int:
    # Imported here: --help needs none of it.
    from unbroken.audit.judging import run_audit
    from unbroken.audit.plan import Audit
    from unbroken.audit.telling import show, to_json
    from unbroken.errors import AuditError

    end_on_sigterm()
    try:
        with _progress() as progress:
            findings = run_audit(Audit(factory, **asked), progress)
        show(findings, Console(highlight=False))
        if report is not None:
            from unbroken.audit.report import write_report

            write_report(findings, report)
        if json is not None:
            json.parent.mkdir(parents=True, exist_ok=True)
            json.write_text(to_json(findings), "utf-8")
    except (AuditError, OSError) as error:
        cannot("The audit could not be carried out.", error)
    except KeyboardInterrupt:
        typer.echo("Interrupted; the runs were ended.", err=True)
        return 130
    return 0 if findings.verdict == "exact" else 1


@contextmanager
def _progress() -> Iterator[Told]:
    """A bar on stderr where that is a terminal; else nothing."""
    from unbroken.audit.judging import Progress as Told

    if not sys.stderr.isatty():
        yield Told()
        return
    with Progress(*COLUMNS, console=Console(stderr=True), transient=True) as bar:
        yield bar_of(bar)


def bar_of(bar: Progress) -> Told:
    """An audit's progress in a bar of rich."""
    from unbroken.audit.judging import Progress as Told

    class Bar(Told):
        task: TaskID

        def begin(self, parts: int) -> None:
            self.task = bar.add_task("", total=parts)

        def tell(self, text: str) -> None:
            bar.update(self.task, description=text)

        def done(self) -> None:
            bar.advance(self.task)

    return Bar()


def _ledgers_alone(factory: str | None, ledger: tuple[Path, Path] | None, key: str | None) -> None:
    """Compare two checkpoints and end, where that is what is asked for; nothing that is asked besides is left aside."""
    if ledger is None and key is None:
        return
    if ledger is None:
        raise typer.BadParameter("--key says which position of two checkpoints is compared: it goes with --ledger A B.")
    if factory is not None:
        raise typer.BadParameter(
            f"--ledger compares two checkpoints and runs nothing, so that {factory!r} has no part in it. Leave one of "
            "them out."
        )
    _compare_ledgers(*ledger, key)


def _compare_ledgers(a: Path, b: Path, key: str | None) -> None:
    from unbroken.checkpoints.ledgers import compare_ledgers
    from unbroken.errors import UnbrokenError

    try:
        found = compare_ledgers(a, b, key)
    except (UnbrokenError, OSError) as error:
        cannot("The checkpoints could not be compared.", error)
    typer.echo(str(found))
    raise typer.Exit(0 if found.same else 1 if found.verdict == "different" else 2)
