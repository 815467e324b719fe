"""Text that every machine has: the sources of Python's standard library as JSONL, and a tokenizer trained on them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.measure import Settings
from unbroken.demo.corpus import END_OF_TEXT, train_tokenizer, write_corpus

CORPUS_BYTES, VOCABULARY = 6_000_000, 8192


def prepare(settings: Settings) -> tuple[Path, Tokenizer]:
    """The corpus and the tokenizer; made once, for all rows that need them."""
    corpus, saved = settings.scratch / "corpus.jsonl", settings.scratch / "tokenizer.json"
    if not saved.exists():
        write_corpus(corpus, CORPUS_BYTES)
        train_tokenizer(corpus, saved, VOCABULARY)
    return corpus, Tokenizer.from_file(str(saved))


__all__ = ["END_OF_TEXT", "prepare"]
