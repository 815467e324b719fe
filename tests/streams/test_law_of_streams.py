"""The law for streams: ``run[:k] + resume(position_k) == run`` for every nesting, lane, file and restore point."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
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
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage

NAMES = st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def augmented(row: dict[str, Any]) -> dict[str, Any]:
    """Another text of another length, drawn at random."""
    drawn = int(random.random() * 3) + int(np.random.rand() * 3)
    return {"text": row["text"][drawn:] + "z" * int(torch.randint(3, ()))}


def rolled(row: dict[str, Any]) -> dict[str, Any]:
    """Token ids moved by a random number of places."""
    return {"input_ids": np.roll(row["input_ids"], int(np.random.rand() * 5))}


def often(row: dict[str, Any]) -> bool:
    return random.random() < 0.7


@st.composite
def corpora(draw: st.DrawFn) -> list[tuple[str, list[dict[str, str]], str, bool]]:
    seq_len = draw(st.integers(1, 12))
    lengths = st.sampled_from([0, 1, seq_len - 1, seq_len, seq_len + 1, 3, 10 * seq_len])
    rows = st.lists(
        st.builds(lambda length, letter: {"text": letter * length}, lengths, st.sampled_from("abc")), max_size=12
    )
    return draw(
        st.lists(
            st.tuples(NAMES, rows, st.sampled_from(["\n", "\r\n", "\n \n"]), st.booleans()), min_size=1, max_size=3
        )
    )


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Stages that fit on one another: on texts, then perhaps on documents, then perhaps on packed rows."""
    windows = st.sampled_from([1, 2, 5, 50, 10_000])
    shuffles = st.tuples(st.just("shuffle"), windows)
    functions = st.tuples(st.sampled_from(["augmented", "often"]), st.just(0))
    chain = draw(st.lists(st.one_of(shuffles, functions), max_size=3))
    if draw(st.booleans()):
        chain.append(("tokenize", draw(st.sampled_from([1, 2, 5]))))
        chain += draw(
            st.lists(st.one_of(shuffles, st.tuples(st.sampled_from(["rolled", "often"]), st.just(0))), max_size=2)
        )
        if draw(st.booleans()):
            chain.append(("pack", draw(st.sampled_from([1, 3, 7, 40]))))
            chain += draw(st.lists(st.one_of(shuffles, st.just(("often", 0))), max_size=2))
    return chain


def built(folder: Path, corpus: list[Any], chain: list[tuple[str, int]]) -> Stage:
    paths = [
        write_jsonl(folder / f"{n}{name}", rows, newline, end) for n, (name, rows, newline, end) in enumerate(corpus)
    ]
    stream: Stage = read_jsonl(paths)
    for number, (name, argument) in enumerate(chain):
        if name == "shuffle":
            stream = stream.shuffle(argument, seed=number)
        elif name == "tokenize":
            stream = stream.tokenize(ids_of, append=None if argument == 1 else 0)
        elif name == "pack":
            stream = stream.pack(argument, document_ids=True)
        elif name == "often":
            stream = stream.filter(often)
        else:
            stream = stream.map(augmented if name == "augmented" else rolled)
    return stream


@contextmanager
def small(batch: int, block: int) -> Iterator[None]:
    """Batches and blocks so small that a handful of rows has several."""
    with MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "_BATCH_DOCUMENTS", batch)
        patch.setattr(pack, "_BLOCK_TOKENS", block)
        patch.setattr(pack, "_DOCUMENTS_PER_ANCHOR", batch)
        yield


@given(
    corpus=corpora(),
    chain=chains(),
    place=st.tuples(st.sampled_from([1, 2, 5]), st.integers(0, 4), st.integers(0, 2), st.integers(0, 3)),
    stops=st.lists(st.integers(0, 9), max_size=5),
    sizes=st.tuples(st.sampled_from([1, 2, 8]), st.sampled_from([1, 10, 4096])),
)
def test_every_restore_point_of_every_nesting_is_exact(
    corpus: list[Any], chain: list[tuple[str, int]], place: Any, stops: list[int], sizes: tuple[int, int]
) -> None:
    """Cases 3, 28, 29 and 32: all k, positions through JSON, and chains of several stops."""
    count, index, epoch, seed = place
    with tempfile.TemporaryDirectory() as folder, small(*sizes):
        assert_law(built(Path(folder), corpus, chain), Lane(index % count, count, epoch, seed), stops)


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
        rows = built(Path(folder), corpus, [("shuffle", window)] if window else [])
        tokens = rows.tokenize(ids_of).pack(seq_len, pad_id=-1)
        texts = sorted(row["text"] for _, listed, _, _ in corpus for row in listed)
        for epoch in range(2):
            assert sorted(row["text"] for lane in run_lanes(rows, count, epoch=epoch) for row in lane) == texts
            packed = [row["input_ids"][1] for lane in run_lanes(tokens, count, epoch=epoch) for row in lane]
            assert sorted(t for row in packed for t in row if t >= 0) == sorted("".join(texts).encode())
