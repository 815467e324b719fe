"""Whether a loader would load a position, and if not, why. No batch is made and no worker is started."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

from unbroken.checkpoints.differ import FieldChange
from unbroken.errors import FactoryError, StateError
from unbroken.factories import accepted, call_factory
from unbroken.lanes import Lane, LaneStream
from unbroken.loader import StatefulDataLoader
from unbroken.state import HEADER, parse_header, parse_leaf

__all__ = ["Answer", "check", "make_loader"]

# What a factory is given of these where it has no default for them: the only rank, and no worker.
_ALONE = {"num_workers": 0, "dp_rank": 0, "dp_world_size": 1}


@final
@dataclass(frozen=True)
class Answer:
    """What a load would do.

    ``refused`` is the error's text, None where the position would be loaded. ``accepted`` are fields of the fingerprint
    that differ and are accepted in silence. ``without_strict``: where it is refused, whether ``strict=False`` would
    load it; ``warnings`` is what that would tell.
    """

    error: str | None
    refused: str | None
    accepted: list[FieldChange] = field(default_factory=list)
    without_strict: bool | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def would_load(self) -> bool:
        """Whether ``load_state_dict(position)`` would do."""
        return self.refused is None

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps({"would_load": self.would_load, **asdict(self)})

    def __str__(self) -> str:
        if self.would_load:
            lines = ["It would load."]
            lines += [
                f"  {change.field}: saved {json.dumps(change.a)}, now {json.dumps(change.b)} (accepted: safe)"
                for change in self.accepted
            ]
        else:
            lines = [f"It would not load. {self.error}: {self.refused}"]
            if self.without_strict:
                lines.append("With load_state_dict(state, strict=False) it would load.")
            else:
                lines.append("Nor would it with strict=False.")
        return "\n".join([*lines, *(f"  {text}" for text in self.warnings)])


def make_loader(factory: Callable[..., Any], name: str) -> StatefulDataLoader[Any]:
    """The loader that a factory makes. A generator or a context manager is not entered.

    ``num_workers``, ``dp_rank`` and ``dp_world_size`` are passed, as 0, 0 and 1, where it has no default for them.

    Raises ``FactoryError`` where the factory raises, wants another argument, or makes something else.
    """
    wanted = _wanted(factory)
    given = accepted(factory, {name: value for name, value in _ALONE.items() if name in wanted})
    if missing := [each for each in wanted if each not in given]:
        told = f"with {', '.join(given)} alone" if given else "without arguments"
        raise FactoryError(f"{name} makes no loader here: it is called {told}, and wants {', '.join(missing)}.")
    made = call_factory(factory, given, name)
    if not isinstance(made, StatefulDataLoader):
        raise FactoryError(
            f"{name} made an object of type {type(made).__module__}.{type(made).__qualname__}, and not "
            "unbroken's StatefulDataLoader."
        )
    return made


def _wanted(factory: Callable[..., Any]) -> list[str]:
    """The arguments that a function has no default for."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature
        return []
    return [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def check(position: Mapping[str, str], factory: Callable[..., Any], name: str) -> Answer:
    """Load a position into the loader that a factory makes, as a run would; where it is refused, without ``strict``.

    The lanes of a stream are opened where they stand, and nothing is read: a state that does not fit its stage would
    otherwise raise with the first batch only.

    Raises ``FactoryError`` where there is no loader to load it into.
    """
    loader = make_loader(factory, name)
    try:
        loader.load_state_dict(position)
        _open_lanes(loader)
    except StateError as error:
        told = _Told()
        try:
            with told:
                loader.load_state_dict(position, strict=False)
                _open_lanes(loader)
            accepted = True
        except StateError:
            accepted = False
        warnings = told.texts if accepted else []
        return Answer(type(error).__name__, str(error), without_strict=accepted, warnings=warnings)
    now = parse_header(loader.state_dict())["fingerprint"]
    saved = parse_header(position)["fingerprint"]
    changes = [
        FieldChange(field, saved.get(field), now.get(field))
        for field in {**saved, **now}
        if saved.get(field) != now.get(field)
    ]
    return Answer(None, None, accepted=changes)


def _open_lanes(loader: StatefulDataLoader[Any]) -> None:
    """Open each lane of a stream at its anchor. Raises ``StateError``."""
    if not isinstance(loader.dataset, LaneStream):
        return
    position = loader.state_dict()
    lanes = parse_header(position)["lanes"]
    for name in position.keys() - {HEADER}:
        leaf = parse_leaf(position, name)
        lane, number = leaf["lane"], int(name.removeprefix("lane-"))
        if lane["anchor"] is not None and not lane["ended"]:
            rows = loader.dataset.open(Lane(number, lanes, lane["epoch"], leaf["run"] or 0))
            try:
                rows.load_state_dict(lane["anchor"]["after"])
            finally:
                if callable(close := getattr(rows, "close", None)):
                    close()


@final
class _Told(logging.Handler):
    """What the logger tells inside of ``with``."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> _Told:
        logging.getLogger("unbroken").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("unbroken").removeHandler(self)
