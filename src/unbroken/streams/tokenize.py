"""Tokenize: the token ids of a text field, a few documents at a time.

Threads. A ``tokenizers.Tokenizer`` spreads a batch over Rust threads, unless TOKENIZERS_PARALLELISM=false. That is left
as it is: no environment variable is set here. A process that was forked after threads were used works on with one
thread, for the library itself sees to it (and prints a line that says so); only TOKENIZERS_PARALLELISM=true takes
that guard away. With several worker processes, false is the better setting: they share the cores already.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, final

import fsspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.lineage import Origin
from unbroken.meters import TOKENIZE, TOKENS
from unbroken.streams.arguments import read_state
from unbroken.streams.course import Course
from unbroken.streams.identity import identity_of
from unbroken.streams.stage import GONE, Stage, StageIterator

__all__ = ["Tokenize"]

Ids: TypeAlias = npt.NDArray[np.int32]
Encode: TypeAlias = Callable[[list[str]], list[Ids]]

# One call takes documents until it has this many characters or documents: enough to keep threads busy, and little
# to make again on a resume.
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 14, 64
_MOST_ID = np.iinfo(np.int32).max
_NOTHING: Ids = np.empty(0, np.int32)


@final
@dataclass(frozen=True, repr=False, eq=False)
class Tokenize(Stage):
    """``{"input_ids": int32 array [tokens]}`` for each row: the ids of its ``text`` field, and ``append`` after them.

    ``tokenizer`` is a ``tokenizers.Tokenizer``, the path of its JSON, an object whose ``encode(text)`` gives ids (or an
    ``Encoding``), or a function from text to ids. Ids are whole numbers from 0 to 2^31 - 1. It must give the same
    ids for the same text. ``append`` is an id, a list of ids, or the name of a token. ``add_special_tokens`` goes to
    the tokenizer where it knows it: what its own template adds, such as a token at the start.

    Raises ``TypeError`` and ``ValueError`` on what is no tokenizer, pads, drops at random, or does not know the token
    named in ``append``; ``FileNotFoundError`` where the path leads nowhere. The iterator raises ``BadRow`` where a row
    has no such field, or the field is no text.
    """

    NAME: ClassVar[str] = "tokenize"
    COUNTS_TOKENS: ClassVar[bool] = True
    DIFFERENCES: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("tokenizer", "text", "append", "add_special_tokens"), "data"
    )

    source: Stage
    tokenizer: Any
    text: str = "text"
    append: int | str | Iterable[int] | None = None
    add_special_tokens: bool = True
    tail: tuple[int, ...] = field(init=False, default=())  # the ids that append stands for
    digest: str = field(init=False, default="")  # of the file, where the tokenizer is one

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"tokenize: text must be the name of a field, but got {self.text!r}.")
        if isinstance(self.tokenizer, os.PathLike):
            object.__setattr__(self, "tokenizer", os.fspath(self.tokenizer))
        if isinstance(self.tokenizer, str):
            digest = hashlib.sha256(_read(self.tokenizer)).hexdigest()
            object.__setattr__(self, "digest", digest)
        tokenizer = _at_hand(self)
        if not hasattr(tokenizer, "encode") and not callable(tokenizer):
            raise TypeError(
                f"tokenize: a {type(tokenizer).__name__} is no tokenizer. Pass a tokenizers.Tokenizer, the path of its "
                "JSON, an object with encode(text), or a function from text to ids."
            )
        if isinstance(tokenizer, Tokenizer):
            _check_repeatable(tokenizer)
        object.__setattr__(self, "tail", _ids_to_append(tokenizer, self.append))

    @property
    def sources(self) -> tuple[Stage, ...]:
        return (self.source,)

    @property
    def counts_rows(self) -> bool:
        return True

    def begin(self, lane: Lane, course: Course) -> StageIterator:
        return _TokenizeIterator(self.source.begin(lane, course), self, course)

    def fields(self) -> dict[str, Any]:
        return {
            "tokenizer": _digest_of(_at_hand(self)),
            "text": self.text,
            "append": list(self.tail),
            "add_special_tokens": self.add_special_tokens,
        }

    def arguments(self) -> str:
        name = repr(self.tokenizer) if isinstance(self.tokenizer, str) else ""
        name = name or getattr(self.tokenizer, "__qualname__", None) or type(self.tokenizer).__name__
        text = f", text={self.text!r}" if self.text != "text" else ""
        return f"{name}{text}" + ("" if self.append is None else f", append={self.append!r}")


@final
class _TokenizeIterator(StageIterator):
    """Position: the anchor at the batch's start, and the count taken from it.

    On a load the rows of the batch are read again; those that were taken are not tokenised again.
    """

    def __init__(self, source: StageIterator, stage: Tokenize, course: Course) -> None:
        self._source = source
        self._stage = stage
        self._meter = course.meter
        self._counts = course.meter.source(course.source_of(stage.source._all()))
        self._origins: list[tuple[Origin, ...]] | None = [] if course.lineage else None  # one a text; the next one last
        self._encode: Encode | None = None
        self._anchor = source.state_dict()
        self._taken = 0
        self._origin: tuple[Origin, ...] = ()
        self._texts: list[str | None] = []  # kept when the source raises, so that a second try loses nothing
        self._documents: list[Ids | None] = []  # the next one last

    def __next__(self) -> Any:
        while not self._documents:
            self._fill()
        ids = self._documents.pop()
        if self._origins is not None:
            self._origin = self._origins.pop()
        if self._documents:
            self._taken += 1
        else:
            self._anchor, self._taken = self._source.state_dict(), 0
        return GONE if ids is None else {"input_ids": ids}

    def _fill(self) -> None:
        texts, origins = self._texts, self._origins
        room = _BATCH_CHARACTERS - sum(len(text or "") for text in texts)
        try:
            while room > 0 and len(texts) < _BATCH_DOCUMENTS:
                row = next(self._source)
                text = None if row is GONE else self._text_of(row)
                room -= len(text or "")
                texts.append(text)
                if origins is not None:
                    origins.append(self._source.origin())
        except StopIteration:
            if not texts and not self._taken:
                raise
            if self._taken >= len(texts):
                raise InvalidState(
                    f"tokenize: {self._taken} documents of a batch were delivered, but now there are {len(texts)}: "
                    "what it reads from has changed.\nRebuild the stream as it was when the position was saved."
                ) from None
        if self._taken < len(texts):
            left = texts[self._taken :]
            encoded = iter(self._ids_of([text for text in left if text is not None]))
            self._documents = [None if text is None else next(encoded) for text in left]
            self._documents.reverse()
            if origins is not None:
                self._origins = origins[self._taken :][::-1]
        else:  # saved by a version whose batches were larger
            self._anchor, self._taken = self._source.state_dict(), self._taken - len(texts)
        self._texts = []

    def _ids_of(self, texts: list[str]) -> list[Ids]:
        if self._encode is None:
            self._encode = _encoder(_at_hand(self._stage), self._stage)
        began = self._meter.clock()
        try:
            found = self._encode(texts)
        except StopIteration as error:
            raise RuntimeError(
                f"tokenize: the tokenizer raised StopIteration, for {self.where()}. The stream would end there."
            ) from error
        self._meter.add_seconds(TOKENIZE, began)
        self._counts[TOKENS] += sum(map(len, found))
        return found

    def _text_of(self, row: Any) -> str:
        name = self._stage.text
        text = row.get(name) if type(row) is dict or isinstance(row, Mapping) else None
        if isinstance(text, str):
            return text
        if not isinstance(row, Mapping):
            found = f"the row is a {type(row).__name__}, not a dict"
        elif name in row:
            found = f"its field {name!r} is a {type(text).__name__}, not text"
        else:
            found = f"it has no field {name!r} (fields: {', '.join(map(repr, row)) or 'none'})"
        raise BadRow(
            f"tokenize: {found}, in {self._source.where()}.\n"
            "Name the field of the text with tokenize(..., text=...), or take such rows out with filter() before it."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"anchor": self._anchor, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        anchor, taken = read_state(state, "tokenize", anchor=dict, taken=int)
        self._source.load_state_dict(anchor)
        self._anchor, self._taken = self._source.state_dict(), taken

    def close(self) -> None:
        self._source.close()

    def where(self) -> str:
        return f"a document of the batch that ends in {self._source.where()}"

    def origin(self) -> tuple[Origin, ...]:
        return self._origin


def _read(path: str) -> bytes:
    try:
        with fsspec.open(path, "rb") as file:
            content: bytes = file.read()
            return content
    except FileNotFoundError:
        raise FileNotFoundError(f"tokenize: there is no tokenizer file {path!r}. Correct the path.") from None


@functools.lru_cache(maxsize=4)  # shared by the lanes of a process
def _loaded(path: str, digest: str) -> Any:
    content = _read(path)
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"tokenize: {path!r} has changed since the stream was made. Make the stream again.")
    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenize: {path!r} is not the JSON of a tokenizers.Tokenizer: {error}") from error


def _at_hand(stage: Tokenize) -> Any:
    return _loaded(stage.tokenizer, stage.digest) if stage.digest else stage.tokenizer


def load_tokenizer(name: str) -> Any:
    """The tokenizer in a file that tokenizers wrote, or what transformers knows by a name. Raises as they do."""
    if name.endswith(".json"):
        return Tokenizer.from_file(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def tokenizer_of(stream: Stage) -> Any:
    """The tokenizer of the stage nearest to the end of a stream that tokenizes; None where none does."""
    if isinstance(stream, Tokenize):
        return _at_hand(stream)
    found = (tokenizer_of(source) for source in (*stream.sources, *stream.named.values()))
    return next((tokenizer for tokenizer in found if tokenizer is not None), None)


def _check_repeatable(tokenizer: Any) -> None:
    if tokenizer.padding is not None:
        raise ValueError(
            "tokenize: this tokenizer pads, which would put pad tokens into documents. Call tokenizer.no_padding()."
        )
    if tokenizer.truncation is not None:
        raise ValueError(
            f"tokenize: this tokenizer cuts texts off after {tokenizer.truncation['max_length']} tokens. Call "
            "tokenizer.no_truncation(); pack(..., overflow=) says what becomes of long documents."
        )
    if getattr(tokenizer.model, "dropout", None):
        raise ValueError(
            f"tokenize: this tokenizer drops merges at random (dropout={tokenizer.model.dropout}), so its ids could "
            "not be made again after a resume. Set tokenizer.model.dropout = None."
        )


def _ids_to_append(tokenizer: Any, append: Any) -> tuple[int, ...]:
    if append is None:
        return ()
    if isinstance(append, str):
        vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
        if vocabulary is None or append not in vocabulary:
            known = "its vocabulary cannot be looked into" if vocabulary is None else "it is not in its vocabulary"
            raise ValueError(f"tokenize: append={append!r} names no token of this tokenizer: {known}. Pass its id.")
        append = vocabulary[append]
    ids = tuple(append) if isinstance(append, list | tuple) else (append,)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _MOST_ID:
            raise ValueError(
                f"tokenize: append must be a token id, a list of ids or the name of a token, but got {append!r}."
            )
    return ids


def _digest_of(tokenizer: Any) -> str:
    """What makes the ids: the tokenizer's JSON, or else its vocabulary and class, or the function's code."""
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if isinstance(tokenizer, Tokenizer):
        return f"sha256:{hashlib.sha256(tokenizer.to_str().encode()).hexdigest()}"
    identity = identity_of(tokenizer)
    if hasattr(tokenizer, "get_vocab"):
        vocabulary = repr(sorted(tokenizer.get_vocab().items())).encode(errors="surrogatepass")
        identity += f":{hashlib.sha256(vocabulary).hexdigest()[:16]}"
    return identity


def _encoder(tokenizer: Any, stage: Tokenize) -> Encode:
    special = stage.add_special_tokens
    if isinstance(tokenizer, Tokenizer):
        tail = list(stage.tail)

        def encode_batch(texts: list[str]) -> list[Ids]:
            found = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=special)]
            for ids in found:
                ids += tail
            # array("I") takes a list twice as fast as numpy does, and its ids fit int32.
            return [np.frombuffer(array("I", ids), np.int32) if ids else _NOTHING for ids in found]

        return encode_batch
    call = getattr(tokenizer, "encode", tokenizer)
    if _takes(call, "add_special_tokens"):
        call = functools.partial(call, add_special_tokens=special)

    def encode_each(texts: list[str]) -> list[Ids]:
        return [_as_ids(call(text), stage.tail) for text in texts]

    return encode_each


def _takes(call: Any, parameter: str) -> bool:
    try:
        return parameter in inspect.signature(call).parameters
    except (TypeError, ValueError):  # made in C, without a signature
        return False


def _as_ids(found: Any, tail: tuple[int, ...]) -> Ids:
    ids = np.asarray(getattr(found, "ids", found))
    if not ids.size:
        ids = np.empty(0, np.int64)
    elif ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > _MOST_ID:
        raise ValueError(
            f"tokenize: a tokenizer must give a flat list of ids from 0 to {_MOST_ID}, but it gave {str(ids)[:200]}."
        )
    return np.concatenate([ids, tail], dtype=np.int32, casting="unsafe") if tail else ids.astype(np.int32)
