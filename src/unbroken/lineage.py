"""Lineage: which rows a row of a batch was made of."""

from __future__ import annotations

from typing import Any, NamedTuple, final

__all__ = ["Lineage", "Origin", "with_lineage"]


@final
class Origin(NamedTuple):
    """One stored row that something was made of.

    ``source`` is the name of the source in a ``mix`` (``"web"``), or the reader's (``"read_jsonl"``) where it has none;
    ``file`` its path or URL; ``row`` its place there, as the format counts: the offset of its first byte in JSON lines
    (in the text of a compressed file), the number of the row from 0 in Parquet and Arrow files, the number of the first
    token in token files, the key of a group of tar members, the index of a map-style dataset.

    ``start`` and ``stop`` are the tokens ``[start, stop)`` of the row's ids that were used; -1 where it was not cut.
    """

    source: str
    file: str
    row: int | str
    start: int = -1
    stop: int = -1


@final
class Lineage(list[tuple[Origin, ...]]):
    """For each row of a batch, in its order, the stored rows behind it."""


def with_lineage(batch: Any, origins: Lineage) -> Any:
    """The batch with its lineage: a dict gets the field ``"lineage"``; of anything else ``(batch, lineage)`` is made.

    Raises ``ValueError`` where a dict has such a field already.
    """
    if not isinstance(batch, dict):
        return batch, origins
    if "lineage" in batch:
        raise ValueError(
            "lineage=True adds a field 'lineage' to each batch, and the rows have one of that name.\n"
            "Rename theirs with map(), or in collate_fn."
        )
    return {**batch, "lineage": origins}
