"""Text that every machine has: the sources of Python's standard library as JSONL, and a tokenizer trained on them.

Sources are cut at line ends into documents of up to 4000 characters, about what a web page holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
from tokenizers import Tokenizer

from benchmarks.measure import Settings
from unbroken.demo.corpus import END_OF_TEXT, train_tokenizer, write_corpus

__all__ = ["END_OF_TEXT", "prepare"]

CORPUS_BYTES, VOCABULARY, DOCUMENT_CHARACTERS = 12_000_000, 8192, 4000


def prepare(settings: Settings) -> tuple[Path, Tokenizer]:
    """The corpus and the tokenizer; made once, for all rows that need them."""
    sources, corpus = settings.scratch / "sources.jsonl", settings.scratch / "corpus.jsonl"
    saved = settings.scratch / "tokenizer.json"
    if not saved.exists():
        write_corpus(sources, CORPUS_BYTES)
        with sources.open("rb") as rows, corpus.open("wb") as documents:
            for row in rows:
                for text in _documents(orjson.loads(row)["text"]):
                    documents.write(orjson.dumps({"text": text}) + b"\n")
        train_tokenizer(corpus, saved, VOCABULARY)
    return corpus, Tokenizer.from_file(str(saved))


def _documents(source: str) -> Iterator[str]:
    document = ""
    for line in source.splitlines(keepends=True):
        if document and len(document) + len(line) > DOCUMENT_CHARACTERS:
            yield document
            document = ""
        document += line
    yield document
