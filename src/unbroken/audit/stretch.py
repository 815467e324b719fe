"""One stretch of a run: what a process is told to do, and what it writes down while it does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import orjson

from unbroken.audit.records import Row
from unbroken.audit.saves import Format

__all__ = ["Halt", "Kill", "Line", "Log", "Orders", "Where", "read_log"]

Kill: TypeAlias = Literal["sigkill", "sigterm", "none"]
Where: TypeAlias = Literal["between", "fetch", "save"]


@final
@dataclass(frozen=True)
class Halt:
    """Where a stretch stops: after ``after`` batches of the run, in the fetch that follows, or in the save there.

    ``part`` (0 to 1) says where in the fetch or save.
    """

    after: int
    where: Where
    part: float = 0.5


@final
@dataclass(frozen=True)
class Orders:
    """What the process of one rank does: a run from batch ``start`` up to ``end``, or to its halt.

    It loads the states that were saved at ``start``, where there are any (``before``: in which folder, and by how many
    ranks), and saves its own in ``folder`` after each number of batches in ``saves``, and after those in ``over`` when
    the pass is over with that batch: then it has asked for the next one, as a loop does.
    ``before`` also says whose states they are (``of``, see ``Subject.state_of``), and the epoch of each rank.
    With ``end=0`` it looks at the dataset (see ``probe``).
    """

    factory: str
    arguments: Mapping[str, Any]
    folder: str
    format: Format
    end: int
    rank: int = 0
    start: int = 0
    before: Mapping[str, Any] = field(default_factory=dict)  # "folder", "world", "of", "epochs"
    saves: tuple[int, ...] = ()
    over: tuple[int, ...] = ()
    seed: int = 0
    halt: Halt | None = None

    @property
    def log(self) -> Path:
        """Where the process writes what it delivers."""
        return Path(self.folder) / f"log-{self.rank:04d}"

    def to_json(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @staticmethod
    def from_json(text: str) -> Orders:
        values = orjson.loads(text)
        halt = None if values["halt"] is None else Halt(**values["halt"])
        lists = {name: tuple(values[name]) for name in ("saves", "over")}
        return Orders(**{**values, "halt": halt, **lists})


@final
@dataclass(frozen=True)
class Line:
    """A batch in the log of a rank."""

    epoch: int
    digest: bytes
    brief: str
    rows: tuple[Row, ...]

    def to_json(self) -> bytes:
        rows = [[row.digest.hex(), *(each.hex() for each in row.fields), row.brief] for row in self.rows]
        return orjson.dumps([self.epoch, self.digest.hex(), self.brief, rows]) + b"\n"


@final
@dataclass
class Log:
    """What one rank has written: its batches, and what it said of itself."""

    lines: list[Line] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)
    ended: bool = False  # the data came to its end


def read_log(path: Path, known: dict[bytes, Row] | None = None) -> Log:
    """The log of a rank; its last line may be cut short, for the process was killed.

    ``known``: rows that were read before, by digest; equal ones are one object.
    """
    log = Log()
    known = {} if known is None else known
    for text in path.read_bytes().split(b"\n")[:-1] if path.is_file() else ():
        value = orjson.loads(text)
        if isinstance(value, dict):
            log.ended = log.ended or value.pop("ended", False)
            log.said.update(value)
            continue
        epoch, digest, brief, rows = value
        log.lines.append(Line(epoch, bytes.fromhex(digest), brief, tuple(_row(row, known) for row in rows)))
    return log


def _row(texts: list[str], known: dict[bytes, Row]) -> Row:
    digest = bytes.fromhex(texts[0])
    found = known.get(digest)
    if found is None:
        found = known[digest] = Row(digest, tuple(map(bytes.fromhex, texts[1:-1])), texts[-1])
    return found
