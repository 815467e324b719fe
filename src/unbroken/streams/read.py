"""``read``: files of any format, told by their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unbroken.streams.reading.arrow import read_arrow
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.reading.parquet import read_parquet
from unbroken.streams.reading.tar import read_tar
from unbroken.streams.reading.tokens import read_tokens
from unbroken.streams.stage import Stage

__all__ = ["read"]

_READERS: dict[str, Callable[..., Stage]] = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "tokens": read_tokens,
    "tar": read_tar,
}
_BY_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".bin": "tokens",
    ".npy": "tokens",
    ".tar": "tar",
    ".tgz": "tar",
    ".tzst": "tar",
}
_PACKED = (".gz", ".zst", ".zstd")


def read(paths: Any, *, format: str | None = None, **options: Any) -> Stage:
    """A stream of the rows of files, read by ``read_jsonl``, ``read_parquet``, ``read_arrow``, ``read_tokens`` or
    ``read_tar``: whichever the names say.

    ``paths`` is a path or a list of paths, as those functions take it; a local folder is one that
    ``datasets.save_to_disk`` wrote. ``format`` (``"jsonl"``, ``"parquet"``, ``"arrow"``, ``"tokens"``, ``"tar"``) says
    it where names do not; ``options`` go to the function.

    Raises ``ValueError`` where the names say nothing or different things, and what the function raises.
    """
    if not isinstance(paths, str | os.PathLike):
        paths = list(paths)  # a generator can be looked at once
    if format is None:
        listed = [paths] if isinstance(paths, str | os.PathLike) else paths
        found = {_format_of(os.fspath(path)) for path in listed}
        if len(found) > 1:
            raise ValueError(f"read: paths are of several formats ({', '.join(sorted(found))}). Read each by itself.")
        format = found.pop() if found else "jsonl"  # which says that there are none
    if format not in _READERS:
        raise ValueError(f"read: format must be one of {', '.join(_READERS)}, but got {format!r}.")
    return _READERS[format](paths, **options)


def _format_of(path: str) -> str:
    name = path.partition("::")[0].rstrip("/")
    for packed in _PACKED:
        name = name.removesuffix(packed)
    suffix = Path(name).suffix.lower()
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix]
    if Path(path).is_dir():
        return "arrow"
    raise ValueError(
        f"read: the name {path!r} does not tell a format (known: {', '.join(_BY_SUFFIX)}).\n"
        f"Pass format=, one of {', '.join(_READERS)}."
    )
