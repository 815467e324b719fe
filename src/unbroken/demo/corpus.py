"""Real text that every machine has, the sources of Python's standard library; and a tokenizer trained on text."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from unbroken.errors import DemoError

__all__ = ["END_OF_TEXT", "train_tokenizer", "train_tokenizer_on", "write_corpus"]

END_OF_TEXT = "<|endoftext|>"
# Third-party packages are not the standard library, and a test folder may be as large as all the rest.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def _sources(root: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each source file under ``root``, in an order that depends on the names alone.

    The order is by a digest of the name: a corpus cut short is then a mixture, not the letters a to c.
    """
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    for name in sorted(names, key=lambda name: blake2b(name.encode()).digest()):
        if _LEFT_OUT.isdisjoint(name.split("/")):
            try:
                text = (root / name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # a file in another encoding, or one that may not be read: text enough without it
            if text.strip():
                yield name, text


def write_corpus(path: Path, size: int, root: Path | None = None) -> int:
    """Write JSONL rows ``{"text": source, "path": name}`` until ``size`` bytes are reached; returns their number.

    Raises:
        DemoError: fewer than 100 kB of source under ``root`` (default: the standard library of this Python).
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    rows = written = 0
    with path.open("w", encoding="utf-8") as file:
        for name, text in _sources(root):
            written += file.write(json.dumps({"text": text, "path": name}) + "\n")
            rows += 1
            if written >= size:
                break
    if written < min(size, 100_000):
        raise DemoError(
            f"The demo trains on the sources of Python's standard library, but found only {written} bytes of them "
            f"under {root}.\nRun it with a Python that comes with its sources."
        )
    return rows


def train_tokenizer(corpus: Path, path: Path, vocab_size: int) -> int:
    """Train a tokenizer on the field "text" of a corpus of JSON lines; see ``train_tokenizer_on``."""
    with corpus.open(encoding="utf-8") as rows:
        return train_tokenizer_on((json.loads(row)["text"] for row in rows), path, vocab_size)


def train_tokenizer_on(texts: Iterable[str], path: Path, vocab_size: int) -> int:
    """Train a byte-level BPE tokenizer and save it as JSON; returns the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.save(str(path))
    return int(tokenizer.get_vocab_size())
