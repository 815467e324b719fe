"""Data of the user's in the demo: what the trainer has to be told about it, found in its first megabytes."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

import unbroken
from unbroken.demo.corpus import END_OF_TEXT, train_tokenizer_on
from unbroken.errors import DemoError

__all__ = ["Data", "study"]

_RANKS, _LANES = 2, 16
# With more token ids than this the logits of long rows would take most of the time.
_MANY_IDS, _SHORT = 1 << 14, 64


@final
@dataclass(frozen=True)
class Data:
    """What ``--data`` names, and the options beside it, as the trainer has them: at least one path."""

    paths: tuple[str, ...]
    format: str | None = None
    text: str | None = None
    dtype: str | None = None
    vocab_size: int | None = None

    @property
    def name(self) -> str:
        """In a word or two."""
        first = Path(self.paths[0]).name
        return first if len(self.paths) == 1 else f"{first} and {len(self.paths) - 1} more"

    def options(self) -> tuple[str, ...]:
        """As options of the trainer.

        Lanes repeat their data: there may be little of it, and on other ranks steps hold the same rows only as long as
        no lane has ended.
        """
        given = {"format": self.format, "text": self.text, "dtype": self.dtype, "at-end": "repeat"}
        return "--data", *self.paths, *(f"--{name}={value}" for name, value in given.items() if value is not None)


def study(data: Data, tokenizer: Path, size: int, vocab_size: int, note: Callable[[str], None]) -> tuple[str, ...]:
    """The trainer's options about the data.

    For text a tokenizer of ``vocab_size`` tokens is trained on the first ``size`` characters, and saved as
    ``tokenizer``. For token ids their number is a power of two above the largest id in the first ``size`` bytes.
    ``data.vocab_size`` goes before both. ``note`` is called with what has been read, in words.

    Raises:
        DemoError: the data cannot be read, has neither text nor token ids, or all of it is in one lane.
    """
    try:
        stream = _open(data)
        text = _text_of(data, next(_rows(stream), None))
        _check_ranks(data, stream)
        if text is not None:
            texts = list(_texts(stream, text, size, note))
            trained = train_tokenizer_on(texts, tokenizer, data.vocab_size or vocab_size)
            note(f"{trained} tokens")
            return *data.options(), f"--tokenizer={tokenizer}", f"--eos={END_OF_TEXT}"
        ids = data.vocab_size or 1 << max(6, _largest_id(stream, size, note).bit_length())
    except DemoError:
        raise
    except Exception as error:  # of a function of the user's, any
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        told = re.sub(r"\b(format|dtype)=,? ?", r"--\1 ", str(error))  # its arguments are options here
        raise DemoError(f"--data {data.name}: {kind}{told}") from error
    note(f"{ids} token ids")
    return *data.options(), f"--vocab-size={ids}", *([f"--seq-len={_SHORT}"] if ids > _MANY_IDS else [])


def _open(data: Data) -> unbroken.Stage:
    """The rows, as the trainer opens them; of token files rows of one length, for only their ids are looked at."""
    if re.search(r"\.py(:|$)", data.paths[0]):
        return _call(data)
    if data.format == "tokens" or (data.format is None and all(path.endswith((".bin", ".npy")) for path in data.paths)):
        return unbroken.read_tokens(list(data.paths), 1024, dtype=data.dtype)
    return unbroken.read(list(data.paths), format=data.format)


def _call(data: Data) -> unbroken.Stage:
    path, _, called = data.paths[0].partition(":")
    if len(data.paths) > 1 or not called:
        raise DemoError(f"--data {data.name}: name one function, as FILE.py:FUNCTION.")
    sys.path.append(str(Path(path).resolve().parent))
    stream = getattr(importlib.import_module(Path(path).stem), called)()
    if not isinstance(stream, unbroken.Stage):
        raise DemoError(f"--data {data.name}: returned a {type(stream).__name__}, not a stream of unbroken.")
    return stream


def _rows(stream: unbroken.Stage, lane: int = 0, lanes: int = 1) -> Iterator[Any]:
    with stream.open(unbroken.Lane(lane, lanes)) as rows:
        yield from rows


def _check_ranks(data: Data, stream: unbroken.Stage) -> None:
    for rank in range(_RANKS):
        lanes = range(rank, _LANES, _RANKS)
        if all(next(_rows(stream, lane, _LANES), None) is None for lane in lanes):
            raise DemoError(
                f"--data {data.name}: the demo goes on with {_RANKS} ranks, and one of them would have no rows.\n"
                "A compressed file, or a shard of a streamed dataset, is read by one rank: name several."
            )


def _text_of(data: Data, first: Any) -> str | None:
    """The field of the text, by the first row; ``None`` where rows are token ids."""
    if not isinstance(first, Mapping):
        found = "there are no rows" if first is None else f"a row is a {type(first).__name__}, not a dict"
        raise DemoError(f"--data {data.name}: {found}.")
    if {"labels", "position_ids"} <= first.keys():
        return None
    text = data.text or ("txt" if "txt" in first and "text" not in first else "text")
    if text in first:
        return text
    if "input_ids" in first and data.text is None:
        return None
    raise DemoError(
        f"--data {data.name}: rows have no field {text!r} (fields: {', '.join(map(repr, first)) or 'none'}).\n"
        "Name the field of the text with --text. Rows of token ids have them in a field 'input_ids'."
    )


def _texts(stream: unbroken.Stage, text: str, size: int, note: Callable[[str], None]) -> Iterator[str]:
    taken = 0
    for row in _rows(stream):
        if not isinstance(row.get(text), str):
            raise DemoError(f"--data: a row has no text in its field {text!r}, but {str(row.get(text))[:80]!r}.")
        taken += len(row[text])
        note(f"{taken / 1e6:.1f} MB of text")
        yield row[text]
        if taken >= size:
            break


def _largest_id(stream: unbroken.Stage, size: int, note: Callable[[str], None]) -> int:
    taken = largest = 0
    for row in _rows(stream):
        ids = np.asarray(row["input_ids"])
        taken, largest = taken + ids.nbytes, max(largest, int(ids.max(initial=0)))
        note(f"{taken / 1e6:.1f} MB of token ids")
        if taken >= size:
            break
    return largest
