"""The law for streams: ``run[:k] + resume(position_k) == run`` for every nesting, lane, file and restore point."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

from tests.streams.runs import assert_law, run_lanes, write_jsonl
from unbroken.lanes import Lane
from unbroken.streams import pack, tokenize
from unbroken.streams.concat import concat
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage

NAMES = st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def augmented(row: dict[str, Any]) -> dict[str, Any]:
    """Another text of another length, drawn at random."""
    drawn = int(random.random() * 3) + int(np.random.rand() * 3)
    return {"text": row["text"][drawn:] + "z" * int(torch.randint(3, ()))}


def drawn(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"text": row["text"][int(rng.integers(3)) :] + "yx"[: int(rng.integers(3))]}


def linked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each text with the beginning of the one after it in the batch, and how many they are."""
    after = [*rows[1:], {"text": str(len(rows))}]
    return [{"text": row["text"] + other["text"][:2]} for row, other in zip(rows, after, strict=True)]


def reordered(rows: list[Any], rng: np.random.Generator) -> list[Any]:
    return [rows[i] for i in rng.permutation(len(rows))]


def parts(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """None of an empty text, two of a long one."""
    for text in (row["text"][:5], row["text"][5:9]):
        if text:
            yield {"text": text}


def copies(row: Any, rng: np.random.Generator) -> list[Any]:
    return [row] * int(rng.integers(3))


def regrouped(rows: list[Any]) -> list[Any]:
    """Without every third row, and the first one again at the end."""
    return [row for n, row in enumerate(rows) if n % 3 != 2] + rows[:1]


def rolled(row: dict[str, Any]) -> dict[str, Any]:
    """Token ids moved by a random number of places."""
    return {"input_ids": np.roll(row["input_ids"], int(np.random.rand() * 5))}


def often(row: dict[str, Any]) -> bool:
    return random.random() < 0.7


def kept(row: Any, rng: np.random.Generator) -> bool:
    return rng.random() < 0.7


def sampled(rows: list[Any], rng: np.random.Generator) -> Any:
    return rng.random(len(rows)) < 0.7


# The number is the size of a batch or window, or a number of rows or passes; where none is said it is not used.
ON_TEXTS: dict[str, Callable[[Stage, int], Stage]] = {
    "augmented": lambda rows, n: rows.map(augmented),
    "drawn": lambda rows, n: rows.map(drawn, rng=True),
    "linked": lambda rows, n: rows.map(linked, batched=n),
    "parts": lambda rows, n: rows.flat_map(parts),
}
ON_DOCUMENTS: dict[str, Callable[[Stage, int], Stage]] = {"rolled": lambda rows, n: rows.map(rolled)}
ON_ROWS: dict[str, Callable[[Stage, int], Stage]] = {
    "shuffle": lambda rows, n: rows.shuffle({3: 50, 4: 10_000}.get(n, n), seed=n),
    "often": lambda rows, n: rows.filter(often),
    "kept": lambda rows, n: rows.filter(kept, rng=True),
    "sampled": lambda rows, n: rows.filter(sampled, rng=True, batched=n),
    "reordered": lambda rows, n: rows.map(reordered, rng=True, batched=n),
    "copies": lambda rows, n: rows.flat_map(copies, rng=True),
    "regrouped": lambda rows, n: rows.flat_map(regrouped, batched=n),
    "take": lambda rows, n: rows.take(n * n),
    "skip": lambda rows, n: rows.skip(n),
}
PASSES: dict[str, Callable[[Stage, int], Stage]] = {
    "repeat": lambda rows, n: rows.repeat(1 + n % 3),
    "first of endless": lambda rows, n: rows.repeat().take(5 * n),
}
SIZED: dict[str, Callable[[Stage, int], Stage]] = {
    "tokenize": lambda rows, n: rows.tokenize(ids_of, append=None if n == 1 else 0),
    "pack": lambda rows, n: rows.pack({2: 3, 4: 7, 5: 40}.get(n, n), document_ids=True),
}
STEPS = ON_TEXTS | ON_DOCUMENTS | ON_ROWS | PASSES | SIZED


@st.composite
def corpora(draw: st.DrawFn, most: int = 12) -> list[tuple[str, list[dict[str, str]], str, bool]]:
    seq_len = draw(st.integers(1, most))
    lengths = st.sampled_from([0, 1, seq_len - 1, seq_len, seq_len + 1, 3, 10 * seq_len])
    rows = st.lists(
        st.builds(lambda length, letter: {"text": letter * length}, lengths, st.sampled_from("abc")), max_size=most
    )
    return draw(
        st.lists(
            st.tuples(NAMES, rows, st.sampled_from(["\n", "\r\n", "\n \n"]), st.booleans()), min_size=1, max_size=3
        )
    )


@st.composite
def steps(draw: st.DrawFn, most: int, *tables: dict[str, Any]) -> list[tuple[str, int]]:
    names = sorted(name for table in (*tables, ON_ROWS) for name in table)
    return draw(st.lists(st.tuples(st.sampled_from(names), st.integers(1, 5)), max_size=most))


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Stages that fit on one another: on texts, then perhaps on documents, then perhaps on packed rows."""
    chain = draw(steps(3, ON_TEXTS))
    if draw(st.booleans()):
        chain += [(draw(st.sampled_from(sorted(PASSES))), draw(st.integers(1, 5)))]
    if draw(st.booleans()):
        chain.append(("tokenize", draw(st.integers(1, 5))))
        chain += draw(steps(2, ON_DOCUMENTS))
        if draw(st.booleans()):
            chain.append(("pack", draw(st.integers(1, 5))))
            chain += draw(steps(2))
    return chain


def read(folder: Path, corpus: list[Any]) -> Stage:
    folder.mkdir(exist_ok=True)
    return read_jsonl(
        [write_jsonl(folder / f"{n}{name}", rows, newline, end) for n, (name, rows, newline, end) in enumerate(corpus)]
    )


def chained(rows: Stage, chain: list[tuple[str, int]]) -> Stage:
    for name, number in chain:
        rows = STEPS[name](rows, number)
    return rows


@contextmanager
def small(batch: int, block: int) -> Iterator[None]:
    """Batches and blocks so small that a handful of rows has several."""
    with MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "_BATCH_DOCUMENTS", batch)
        patch.setattr(pack, "_BLOCK_TOKENS", block)
        patch.setattr(pack, "_DOCUMENTS_PER_ANCHOR", batch)
        yield


PLACES = st.tuples(st.sampled_from([1, 2, 5]), st.integers(0, 4), st.integers(0, 2), st.integers(0, 3))
STOPS = st.lists(st.integers(0, 9), max_size=5)
SIZES = st.tuples(st.sampled_from([1, 2, 8]), st.sampled_from([1, 10, 4096]))


def lane_at(place: tuple[int, int, int, int]) -> Lane:
    count, index, epoch, seed = place
    return Lane(index % count, count, epoch, seed)


@given(corpus=corpora(), chain=chains(), place=PLACES, stops=STOPS, sizes=SIZES)
def test_every_restore_point_of_every_nesting_is_exact(
    corpus: list[Any], chain: list[tuple[str, int]], place: Any, stops: list[int], sizes: tuple[int, int]
) -> None:
    """Cases 3, 28, 29 and 32: all k, positions through JSON, and chains of several stops."""
    with tempfile.TemporaryDirectory() as folder, small(*sizes):
        assert_law(chained(read(Path(folder), corpus), chain), lane_at(place), stops)


@given(
    branches=st.lists(st.tuples(corpora(4), steps(2, ON_TEXTS, PASSES)), min_size=1, max_size=3),
    chain=chains(),
    place=PLACES,
    stops=STOPS,
    sizes=SIZES,
)
def test_every_restore_point_of_streams_one_after_another_is_exact(
    branches: list[Any], chain: list[tuple[str, int]], place: Any, stops: list[int], sizes: tuple[int, int]
) -> None:
    """Cases 3 and 28."""
    with tempfile.TemporaryDirectory() as folder, small(*sizes):
        streams = [chained(read(Path(folder) / str(n), corpus), own) for n, (corpus, own) in enumerate(branches)]
        assert_law(chained(concat(streams), chain), lane_at(place), stops)


@given(
    corpus=corpora(),
    window=st.sampled_from([0, 1, 3, 100]),
    count=st.sampled_from([1, 2, 7, 64]),
    seq_len=st.integers(1, 9),
)
def test_lanes_together_deliver_every_row_and_token_once(
    corpus: list[Any], window: int, count: int, seq_len: int
) -> None:
    """Case 22, in epochs 0 and 1."""
    with tempfile.TemporaryDirectory() as folder:
        rows = read(Path(folder), corpus)
        rows = rows.shuffle(window, seed=0) if window else rows
        tokens = rows.tokenize(ids_of).pack(seq_len, pad_id=-1)
        texts = sorted(row["text"] for _, listed, _, _ in corpus for row in listed)
        for epoch in range(2):
            assert sorted(row["text"] for lane in run_lanes(rows, count, epoch=epoch) for row in lane) == texts
            packed = [row["input_ids"][1] for lane in run_lanes(tokens, count, epoch=epoch) for row in lane]
            assert sorted(t for row in packed for t in row if t >= 0) == sorted("".join(texts).encode())


@given(
    branches=st.lists(corpora(4), min_size=1, max_size=3),
    windows=st.tuples(st.sampled_from([0, 1, 3]), st.sampled_from([0, 5, 100])),
    passes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    count=st.sampled_from([1, 2, 7, 64]),
    epoch=st.integers(0, 2),
)
def test_lanes_together_deliver_every_row_once_in_every_pass(
    branches: list[Any], windows: tuple[int, int], passes: tuple[int, int], count: int, epoch: int
) -> None:
    """Cases 14 and 22: passes within passes, over several streams, with windows inside and outside of them."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [read(Path(folder) / str(n), corpus) for n, corpus in enumerate(branches)]
        inner, outer = windows
        rows = concat([rows.shuffle(inner) if inner else rows for rows in streams]).repeat(passes[0])
        rows = (rows.shuffle(outer) if outer else rows).repeat(passes[1])
        found = Counter(row["text"] for lane in run_lanes(rows, count, epoch=epoch) for row in lane)
        once = Counter(row["text"] for corpus in branches for _, listed, _, _ in corpus for row in listed)
        assert found == {text: times * passes[0] * passes[1] for text, times in once.items()}
