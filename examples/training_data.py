"""The trainer's data: the options about it, and the stream of rows that they describe.

``--data`` names files of any format that ``unbroken.read`` knows, or a function that returns a stream. What is to be
done with the rows is seen in the first one: text is tokenised and packed, documents of token ids are packed, and rows
with ``labels`` and ``position_ids`` are taken as they are.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import unbroken

FILES = "JSONL (plain, .gz, .zst), Parquet, Arrow, folders of datasets.save_to_disk, tar shards, tokens (.bin, .npy)"
FORMATS = ("jsonl", "parquet", "arrow", "tar", "tokens")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what is trained on, and how it is made into rows."""
    add = parser.add_argument_group("data").add_argument
    text = "files, URLs or quoted patterns: " + FILES
    function = "or FILE.py:FUNCTION, which is called and returns a stream, such as unbroken.from_hf(...) or mix(...)"
    add("--data", nargs="+", required=True, metavar="PATH", help=f"{text}; {function}")
    add("--format", choices=FORMATS, help="where the names of the files do not tell it")
    add("--text", metavar="FIELD", help="the field of the text (default: text, or txt where rows have only that)")
    add("--tokenizer", metavar="JSON", help="a tokenizer saved by `tokenizers`; none is needed for token ids")
    add("--eos", default="<|endoftext|>", help="token between documents of text (default: %(default)s)")
    add("--vocab-size", type=int, metavar="N", help="how many token ids there are (default: what the tokenizer has)")
    add("--dtype", help="of raw .bin files of tokens, such as uint16")
    add("--batch-size", type=int, default=8, help="rows in a global step, over all ranks (%(default)s)")
    add("--seq-len", type=int, default=128, help="tokens in a row (%(default)s)")
    add("--lanes", type=int, default=16, help="logical workers; fixed for a run (%(default)s)")
    add("--window", type=int, default=256, help="documents in the shuffle window (%(default)s)")
    end = "where data ends: all ranks begin the next epoch together, or each lane repeats its own data (%(default)s)"
    add("--at-end", choices=("stop", "repeat"), default="stop", help=end)
    add("--workers", type=int, default=0, help="loader processes a rank; free to change (%(default)s)")


def load_data(args: argparse.Namespace) -> tuple[unbroken.Stage, int]:
    """The stream of rows, and how many token ids there are."""
    tokenizer = load_tokenizer(args.tokenizer)
    return make_stream(args, tokenizer), vocabulary(args, tokenizer)


def make_stream(args: argparse.Namespace, tokenizer: Tokenizer | None) -> unbroken.Stage:
    """Rows of ``input_ids``, ``labels`` and ``position_ids``: shuffled, tokenised and packed as they are needed."""
    rows = open_data(args)
    first = first_row(rows)
    if {"labels", "position_ids"} <= first.keys():
        return rows
    rows = rows.shuffle(window=args.window, seed=args.seed)
    text = args.text or ("txt" if "txt" in first and "text" not in first else "text")
    if text in first and tokenizer is not None:
        if tokenizer.token_to_id(args.eos) is None:
            raise SystemExit(f"{args.tokenizer} has no token {args.eos!r}: name the one it has with --eos.")
        return rows.tokenize(args.tokenizer, text=text, append=args.eos).pack(args.seq_len)
    if "input_ids" in first and not args.text:
        return rows.pack(args.seq_len)
    if text in first:
        raise SystemExit("The rows of --data are text: name a tokenizer with --tokenizer JSON.")
    raise SystemExit(
        f"The rows of --data have no field {text!r} (fields: {', '.join(map(repr, first)) or 'none'}).\n"
        "Name the field of the text with --text. Rows of token ids have them in a field 'input_ids'."
    )


def open_data(args: argparse.Namespace) -> unbroken.Stage:
    """The rows as they are stored. Of token files: their documents, or rows of one length where those are not known."""
    if re.search(r"\.py(:|$)", args.data[0]):
        return call_function(args.data)
    is_tokens = args.format == "tokens" or (not args.format and all(p.endswith((".bin", ".npy")) for p in args.data))
    if args.dtype and not is_tokens:
        raise SystemExit("--dtype is about files of tokens (.bin): leave it out, or say --format tokens.")
    try:
        if not is_tokens:
            return unbroken.read(args.data, format=args.format)
        try:
            return unbroken.read_tokens(args.data, dtype=args.dtype)
        except ValueError:  # where documents begin is not known, or something else that is said again
            rows = unbroken.read_tokens(args.data, args.seq_len, dtype=args.dtype)
            return rows.shuffle(window=args.window, seed=args.seed).map(count_positions)
    except (OSError, TypeError, ValueError) as error:
        told = re.sub(r"\b(format|dtype)=,? ?", r"--\1 ", str(error))  # its arguments are options here
        raise SystemExit(f"--data: {told}") from None


def count_positions(row: dict[str, Any]) -> dict[str, Any]:
    """The row, and the place of each token in it."""
    return row | {"position_ids": np.arange(len(row["input_ids"]))}


def call_function(names: list[str]) -> unbroken.Stage:
    """What the function returns that is named as FILE.py:FUNCTION."""
    name = " ".join(names)
    path, _, called = name.partition(":")
    if len(names) > 1 or not called:
        raise SystemExit(
            f"--data {name}: name one function, as FILE.py:FUNCTION; it may mix or concat several sources."
        )
    file = Path(path).resolve()
    if not file.is_file():
        raise SystemExit(f"--data {name}: there is no file {path}.")
    # Imported by its name, so that functions in it can be sent to worker processes that are not forked.
    sys.path.append(str(file.parent))
    module = importlib.import_module(file.stem)
    found = getattr(module, "__file__", None)
    if not found or Path(found).resolve() != file:
        raise SystemExit(f"--data {name}: another module has the name {file.stem!r} already: give the file another.")
    function = getattr(module, called, None)
    if not callable(function):
        raise SystemExit(f"--data {name}: there is no function {called!r} in {path}.")
    stream = function()
    if not isinstance(stream, unbroken.Stage):
        raise SystemExit(
            f"--data {name}: returned a {type(stream).__name__}, not a stream.\n"
            "Return what unbroken's read_*, from_* or mix returns, such as unbroken.from_map(dataset)."
        )
    return stream


def first_row(rows: unbroken.Stage) -> Mapping[str, Any]:
    """The first row that is stored; a stream can be opened any number of times."""
    try:
        with iter(rows) as opened:
            row = next(opened, None)
    except (OSError, unbroken.BadRow) as error:
        raise SystemExit(f"--data: {error}") from None
    if not isinstance(row, Mapping):
        found = "there are no rows" if row is None else f"a row is a {type(row).__name__}"
        raise SystemExit(f"--data: {found}. Rows must be dicts with a field of text, or with 'input_ids'.")
    return row


def load_tokenizer(path: str | None) -> Tokenizer | None:
    """The tokenizer that is saved there; None where none is named."""
    if path is None:
        return None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise SystemExit(f"--tokenizer {path}: cannot be read: {error}. Name a JSON that `tokenizers` saved.") from None


def vocabulary(args: argparse.Namespace, tokenizer: Tokenizer | None) -> int:
    """How many token ids there are: ``--vocab-size``, or those of the tokenizer."""
    known = 0 if tokenizer is None else tokenizer.get_vocab_size()
    if args.vocab_size is None and tokenizer is None:
        raise SystemExit(
            "The rows of --data are token ids, and how many there are is not known.\n"
            "Say it with --vocab-size: at least one more than the largest id. Or name their tokenizer with --tokenizer."
        )
    if args.vocab_size is not None and args.vocab_size < known:
        raise SystemExit(f"--vocab-size {args.vocab_size} is too small: {args.tokenizer} has {known} token ids.")
    return args.vocab_size or known


def check_ids(batch: Mapping[str, Any], size: int) -> None:
    """Ids have a row in the model's embedding each; beyond it, errors would be hard to read."""
    largest = max(int(batch["input_ids"].max()), int(batch["labels"].max()))
    if largest >= size:
        raise SystemExit(f"A batch has the token id {largest}: say --vocab-size {largest + 1}, or more.")
