"""``unbroken state show | diff | check | import``."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unbroken.cli.shared import cannot

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["state"]

state = typer.Typer(
    name="state",
    help=(
        "Look into a position that was saved: a DCP folder, a file of torch.save, or JSON.\n\n"
        "Exit code: 0 if it was done (diff: they are equal; check: it would load), 1 if they differ or it would not "
        "load, 2 if it could not be carried out."
    ),
    no_args_is_help=True,
)

Checkpoint = Annotated[Path, typer.Argument(metavar="CKPT", help="A DCP folder, a file of torch.save, or JSON.")]
Checkpoints = Annotated[
    list[Path],
    typer.Argument(metavar="CKPT", help="A DCP folder, a file of torch.save, or JSON; or those of all ranks."),
]
_KEY = "The name of the position in the checkpoint, where there are several: loader, or train.loader."
Key = Annotated[str | None, typer.Option("--key", metavar="NAME", help=_KEY)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Factory = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help=(
            "Makes the loader: module:function, or file.py:function. It is called with num_workers=0, dp_rank=0 and "
            "dp_world_size=1 where it has no default for them, else without arguments."
        ),
    ),
]


@contextmanager
def _ending(what: str) -> Iterator[None]:
    """Errors of unbroken end the command with 2, Ctrl-C with 130."""
    from unbroken.errors import UnbrokenError

    try:
        yield
    except (UnbrokenError, OSError) as error:
        cannot(what, error)
    except KeyboardInterrupt:
        typer.echo("Interrupted. Nothing was changed.", err=True)
        raise typer.Exit(130) from None


@state.command()
def show(
    ckpt: Checkpoints,
    key: Key = None,
    lanes: Annotated[bool, typer.Option("--lanes", help="A line for each lane, also where there are many.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what is in a position: header, fingerprint, place of each lane and source, weights, what was left out.

    Exit code: 0 if it was printed, 2 if it could not be read.
    """
    with _ending("The position cannot be shown."):
        from unbroken.checkpoints.files import read_merged
        from unbroken.checkpoints.summary import summarize

        summary = summarize(read_merged(ckpt, key))
        if as_json:
            typer.echo(summary.to_json())
            return
        from rich.console import Console

        from unbroken.checkpoints.tables import tables_of

        where = ", ".join(map(str, ckpt)) + (f", {key}" if key else "")
        Console().print(tables_of(summary, where, every_lane=lanes))


@state.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A DCP folder, a file of torch.save, or JSON.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Hold two positions against each other: header, fingerprint, how far apart their lanes are, ledgers.

    Exit code: 0 if they are equal, 1 if they differ, 2 if they could not be compared.
    """
    with _ending("The positions cannot be compared."):
        from unbroken.checkpoints.differ import compare
        from unbroken.checkpoints.files import read_position

        found = compare(read_position(a, key), read_position(b, key), str(a), str(b))
        if as_json:
            typer.echo(found.to_json())
        else:
            from rich.console import Console

            Console().print(found.tables())
    raise typer.Exit(0 if found.equal else 1)


@state.command()
def check(ckpt: Checkpoints, factory: Factory, key: Key = None, as_json: AsJson = False) -> None:
    """Say whether a loader would load a position, and if not, why, and what would do.

    The loader is made and loads it; no batch is made and no worker is started.

    Exit code: 0 if it would load, 1 if not, 2 if that could not be found out.
    """
    _check_order(ckpt, factory)
    with _ending("It cannot be checked."):
        from unbroken.checkpoints.check import check
        from unbroken.checkpoints.files import read_merged
        from unbroken.factories import load_factory

        answer = check(read_merged(ckpt, key), load_factory(factory), factory)
        typer.echo(answer.to_json() if as_json else str(answer))
    raise typer.Exit(0 if answer.would_load else 1)


def _check_order(ckpt: list[Path], factory: str) -> None:
    """Ends with 2 where the function stands before the checkpoint."""
    before = [str(path) for path in ckpt if ":" in path.name and not path.exists()]
    if before and Path(factory).exists():
        raise typer.BadParameter(
            f"{before[0]} names a function and {factory} is a checkpoint, which comes first:\n"
            f"unbroken state check {factory} {before[0]}"
        )


@state.command("import")
def import_(
    old: Annotated[
        list[Path],
        typer.Argument(metavar="OLD", help="The checkpoint of the other loader; or those of all ranks, in order."),
    ],
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="Where to write the position: FILE.json, FILE.pt, or a DCP folder.")
    ],
    factory: Factory,
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="KIND", help="torchdata or torchtitan. Default: told by the state itself."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="NAME", help="The name of the other loader's state, where there are several."),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="NAME",
            help="The name that the position gets in NEW. Default: none; in a DCP folder, loader.",
        ),
    ] = "",
) -> None:
    """Take over the state of torchdata's StatefulDataLoader, or of torchtitan's loader, as a position.

    The loader that the function makes goes on with the batches that the
    other one would have delivered next. What cannot be taken over exactly is
    refused, with the reason.

    Exit code: 0 if it was written, 2 if not.
    """
    if origin not in (None, "torchdata", "torchtitan"):
        raise typer.BadParameter(f"--from is torchdata or torchtitan, and not {origin!r}.")
    with _ending("Nothing was taken over."):
        from unbroken.checkpoints.check import make_loader
        from unbroken.checkpoints.files import open_checkpoint, write_position
        from unbroken.checkpoints.foreign import find_foreign
        from unbroken.checkpoints.takeover import take_over
        from unbroken.factories import load_factory

        found = [find_foreign(open_checkpoint(path), origin, key) for path in old]
        taken = take_over(found, make_loader(load_factory(factory), factory))
        typer.echo(f"Written: {write_position(new, taken.position, name)}")
        for note in taken.notes:
            typer.echo(note)
