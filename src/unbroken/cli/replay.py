"""``unbroken replay``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from unbroken.cli.shared import cannot, end_on_sigterm

if TYPE_CHECKING:
    from unbroken.replay import Replayed, Report

__all__ = ["replay"]

_FACTORY = (
    "The function that makes the loader: module:function, or file.py:function. It gets dp_rank and dp_world_size."
)
_CHECKPOINT = (
    "A checkpoint of the run (a DCP folder, a file of torch.save, JSON), or a folder of several: the nearest one "
    "before the step is taken. Files of several ranks: given one by one, or in a folder. Default: the start of the run."
)
_STEP = "The step to make again, counted over all epochs from 0: that of the first batch of a run is 0."
_LONGEST = 200


def replay(
    factory: Annotated[str, typer.Argument(metavar="FACTORY", help=_FACTORY)],
    step: Annotated[int, typer.Option(min=0, help=_STEP)],
    checkpoint: Annotated[list[Path] | None, typer.Option(help=_CHECKPOINT)] = None,
    key: Annotated[str | None, typer.Option(help="Which position, where a checkpoint has several.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="dp ranks at that step. Default: as many as saved the checkpoint.")
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(min=0, help="Only this rank; may be given several times.")] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Show the text of token ids.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Decode with this: a tokenizer.json, or a name for transformers.")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Do not shorten texts.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the batches there, by torch.save: a list, by rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Make the batch of any step again, and print the rows, files, token spans and text behind it.

    It starts from the nearest position before the step and runs in this process, whatever the size of the run.

    Exit code: 0 if the batch was made, 2 if it could not be.
    """
    from unbroken.errors import UnbrokenError
    from unbroken.factories import load_factory
    from unbroken.replay import replay as make_again

    end_on_sigterm()
    try:
        found = _nearest(checkpoint, key, step) if checkpoint else None
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            made = make_again(
                load_factory(factory), None if found is None else found[1], step,
                ranks=ranks, only=rank or None, report=_shown_on(bar),
            )  # fmt: skip
        lines = [_lines(part, decode or tokenizer is not None, _tokenizer(tokenizer)) for part in made]
        if save is not None:
            _save([part.batch for part in made], save)
    except (UnbrokenError, OSError) as error:
        cannot("The batch could not be made.", error)
    except KeyboardInterrupt:
        typer.echo("Interrupted; nothing was written.", err=True)
        raise typer.Exit(130) from None
    since = "the start of the run" if found is None else found[0]
    if as_json:
        typer.echo(json.dumps([_told(part, rows) for part, rows in zip(made, lines, strict=True)]))
        return
    console = Console()
    for part, rows in zip(made, lines, strict=True):
        _print(console, part, rows, since, whole=whole, decoded=decode or tokenizer is not None)


def _nearest(paths: list[Path], key: str | None, step: int) -> tuple[str, dict[str, str]]:
    """The position in a checkpoint, or the nearest before a step of those in a folder; and what it is called."""
    from unbroken.checkpoints.files import read_merged, read_position
    from unbroken.errors import InvalidState
    from unbroken.replay import nearest, step_of

    folder = paths[0]
    several = len(paths) == 1 and folder.is_dir() and not (folder / ".metadata").exists()
    inside = sorted(folder.iterdir()) if several else []
    if not inside:
        return ", ".join(map(str, paths)), read_merged(paths, key)
    positions: dict[str, dict[str, str]] = {}
    failures: list[InvalidState] = []
    for path in inside:
        try:
            position = read_position(path, key)
            _add(positions, str(path), position, step_of(position))
        except InvalidState as error:
            failures.append(error)
    if not positions and failures:
        raise failures[0]
    name = nearest(positions, step)
    return name, positions[name]


def _add(positions: dict[str, dict[str, str]], name: str, position: dict[str, str], step: int) -> None:
    """Add a position; to those of other ranks, where they were saved at the same step."""
    from unbroken.replay import step_of
    from unbroken.state import HEADER

    for other, found in list(positions.items()):
        if step_of(found) == step and found.keys() & position.keys() == {HEADER}:
            del positions[other]
            positions[f"{other}, {name}"] = found | position
            return
    positions[name] = position


def _shown_on(bar: Progress) -> Report:
    tasks: dict[int, Any] = {}

    def report(rank: int, done: int, total: int) -> None:
        if rank not in tasks:
            tasks[rank] = bar.add_task(f"rank {rank}, steps before it", total=total)
        bar.update(tasks[rank], completed=done)

    return report


def _tokenizer(name: str | None) -> Any:
    from unbroken.errors import ReplayError
    from unbroken.streams.tokenize import load_tokenizer

    if name is None:
        return None
    try:
        return load_tokenizer(name)
    except Exception as error:
        raise ReplayError(
            f"There is no tokenizer {name!r}: {error}\nName a file that tokenizers wrote (tokenizer.json); for a name "
            "at the Hub, install transformers."
        ) from error


def _lines(part: Replayed, decode: bool, tokenizer: Any) -> list[list[dict[str, Any]]]:
    """For each row of a batch what is behind it: source, file, row, tokens, text."""
    from unbroken.audit.records import rows_of
    from unbroken.replay import decoded

    texts = decoded(part, tokenizer) if decode else None
    if not part.rows:
        values = rows_of(part.batch)
        return [[{"text": _short(value) if texts is None else "".join(texts[n])}] for n, value in enumerate(values)]
    values = rows_of(part.batch) if texts is None else []
    lines = []
    for number, behind in enumerate(part.rows):
        row = [origin._asdict() for origin in behind]
        if texts is not None:
            for origin, text in zip(row, texts[number], strict=False):
                origin["text"] = text
        elif row and len(values) == len(part.rows):
            row[0]["text"] = _short(values[number])
        lines.append(row)
    return lines


def _short(value: Any) -> str:
    from unbroken.audit.records import brief

    return value if isinstance(value, str) else brief(value)


def _told(part: Replayed, rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
    return {"rank": part.rank, "ranks": part.ranks, "step": part.step, "epoch": part.epoch, "rows": rows}


def _has_ids(part: Replayed) -> bool:
    return isinstance(part.batch, dict) and "input_ids" in part.batch


def _print(
    console: Console, part: Replayed, rows: list[list[dict[str, Any]]], since: str, *, whole: bool, decoded: bool
) -> None:
    of = f", rank {part.rank} of {part.ranks}" if part.ranks > 1 else ""
    table = Table(title=f"step {part.step}, epoch {part.epoch}{of}", title_justify="left", show_lines=whole)
    hint = "" if decoded or not _has_ids(part) else " Add --decode to see the text of token ids."
    named = any("source" in origin for row in rows for origin in row)
    for column in ("", *(("source", "file", "row", "tokens") if named else ()), "text"):
        table.add_column(column, overflow="fold", justify="right" if column in ("", "row", "tokens") else "left")
    for cells in _cells(rows, named, whole):
        table.add_row(*cells)
    console.print(table)
    console.print(f"Made again from {since}." + hint + "\n", highlight=False)


def _cells(rows: list[list[dict[str, Any]]], named: bool, whole: bool) -> Iterator[list[str | Text]]:
    for number, row in enumerate(rows):
        for place, origin in enumerate(row or [{}]):
            text = " ".join(str(origin.get("text", "")).split()) if not whole else str(origin.get("text", ""))
            if not whole and len(text) > _LONGEST:
                text = f"{text[: _LONGEST - 1]}…"
            cells: list[str | Text] = ["" if place else str(number)]
            if named:
                span = f"{origin['start']}-{origin['stop']}" if origin.get("start", -1) >= 0 else ""
                cells += [Text(str(origin.get(name, ""))) for name in ("source", "file", "row")] + [span]
            yield [*cells, Text(text)]


def _save(batches: list[Any], path: Path) -> None:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(batches, path)
