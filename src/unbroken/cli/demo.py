"""``unbroken demo``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from unbroken.cli.shared import end_on_sigterm

__all__ = ["demo"]

_DATA = (
    "Train on these instead of Python's sources: JSONL (plain, gz, zst), Parquet, Arrow, tar or token files, quoted "
    "patterns, or FILE.py:FUNCTION, which returns a stream. More paths may follow."
)
_VOCAB = "Token ids of the data, or of the tokenizer that is trained. Default: by the first megabytes; 2048."


def demo(
    out: Annotated[Path, typer.Option(help="Folder for logs and the picture.")] = Path("demo-out"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints after a success too.")] = False,
    kill_at: Annotated[int | None, typer.Option(help="Kill after this step. Default: by chance, 16 to 28.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="12 steps, resumed at 4, on a smaller corpus.")] = False,
    trainer: Annotated[Path | None, typer.Option(help="The example trainer, examples/train.py.")] = None,
    skip_loader_state: Annotated[
        bool,
        typer.Option(
            "--skip-loader-state",
            help="Resume model and optimizer, but not the data's place: shows that the comparison can fail.",
        ),
    ] = False,
    data: Annotated[list[str] | None, typer.Option("--data", metavar="PATH...", help=_DATA)] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="PATH", help="More paths of --data.")] = None,
    format: Annotated[
        str | None, typer.Option(help="jsonl, parquet, arrow, tar or tokens, where names do not tell it.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The field of the text. Default: text, or txt.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of raw token files, such as uint16.")] = None,
    vocab_size: Annotated[int | None, typer.Option(min=1, help=_VOCAB)] = None,
) -> None:
    """Train a small model, kill it, resume it, and hold it against the run that never stopped.

    (a) 30 steps without a stop. (b) The same run killed with SIGKILL, the checkpoints after step 15 deleted, resumed
    with another number of workers: the losses must be equal to the last bit. (c) The checkpoint of step 15 resumed on
    2 ranks: each global batch must hold the same rows.

    Exit code: 0 if all is equal, 1 if anything differs, 2 if the demo could not be run.
    """
    # Imported here: --help and --version need none of it.
    from unbroken.demo import Data, DemoError, Plan, find_trainer, run_demo

    console = Console()
    end_on_sigterm()
    paths = (*(data or ()), *(more or ()))
    if not data and (paths or format or text or dtype):
        raise typer.BadParameter("Name the data with --data PATH...")
    try:
        plan = Plan(out, find_trainer(trainer), skip_loader_state=skip_loader_state, keep=keep)
        if paths:
            plan = replace(plan, data=Data(paths, format, text, dtype, vocab_size))
        elif vocab_size is not None:
            plan = replace(plan, vocab_size=vocab_size)
        if quick:
            plan = replace(plan, steps=12, save_every=4, restore=4, corpus_bytes=1_000_000)
        passed = run_demo(replace(plan, kill_at=kill_at), console)
    except DemoError as error:
        typer.echo(f"The demo could not be run.\n{error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("Interrupted; the runs were ended.", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(0 if passed else 1)
