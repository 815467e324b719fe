"""Whether a loader would load a position, and if not, why, found without a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.checkpoints.runs import Table, lanes_loader, mixed_loader, position_after, text_files
from unbroken import StatefulDataLoader, mix, read_jsonl
from unbroken.checkpoints.check import check
from unbroken.errors import FactoryError


def test_a_position_of_the_same_loader_would_load() -> None:
    answer = check(position_after(lanes_loader(), 4), lanes_loader, "make")
    assert answer.would_load
    assert str(answer) == "It would load."


def test_safe_differences_are_named(tmp_path: Path) -> None:
    folder = text_files(tmp_path)
    answer = check(position_after(mixed_loader(folder), 4), lambda: mixed_loader(folder, batch_size=8), "make")
    assert answer.would_load
    assert [(change.field, change.a, change.b) for change in answer.accepted] == [("batch_size", 4, 8)]
    assert "batch_size: saved 4, now 8 (accepted: safe)" in str(answer)


def test_what_is_refused_is_told_and_whether_strict_is_the_reason() -> None:
    position = position_after(lanes_loader(), 4)
    answer = check(position, lambda: lanes_loader(seed=2), "make")
    assert (answer.would_load, answer.error, answer.without_strict) == (False, "StateMismatch", True)
    assert "saved 1   now 2" in str(answer)
    assert "strict=False) it would load" in str(answer)
    answer = check(position, lambda: lanes_loader(lanes=5), "make")
    assert (answer.would_load, answer.without_strict) == (False, False)
    assert "Nor would it with strict=False." in str(answer)
    answer = check({"unbroken": "{"}, lanes_loader, "make")
    assert answer.error == "InvalidState"
    answer = check({name: position[name] for name in ("unbroken", "lane-000001")}, lanes_loader, "make")
    assert answer.error == "IncompleteState"


def test_no_row_is_read_and_no_worker_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = text_files(tmp_path)
    position = position_after(mixed_loader(folder), 4)
    monkeypatch.setattr(StatefulDataLoader, "__iter__", lambda _: pytest.fail("it was iterated"))
    assert check(position, lambda: mixed_loader(folder, num_workers=2), "make").would_load


def test_a_state_that_does_not_fit_its_stage_is_found(tmp_path: Path) -> None:
    """A load reads such states only when the first batch is made."""
    folder = text_files(tmp_path)

    def make(name: str) -> StatefulDataLoader[Any]:
        (folder / name).write_text('{"a": 1}\n' * (30 + len(name)))
        return StatefulDataLoader(mix({"only": read_jsonl(folder / name)}), lanes=2, batch_size=2, seed=1)

    position = position_after(make("a.jsonl"), 3)
    leaf = json.loads(position["lane-000000"])
    leaf["lane"]["anchor"]["after"]["rows"]["row"] = "three"
    answer = check({**position, "lane-000000": json.dumps(leaf)}, lambda: make("a.jsonl"), "make")
    assert (answer.would_load, answer.error) == (False, "InvalidState")
    assert check(position, lambda: make("a.jsonl"), "make").would_load


def raising() -> NoReturn:
    raise OSError("no data today")


def test_a_factory_that_makes_no_loader_is_an_error() -> None:
    position = lanes_loader().state_dict()
    with pytest.raises(FactoryError, match="make raised OSError: no data today") as error:
        check(position, raising, "make")
    line = raising.__code__.co_firstlineno + 1
    assert f"It was raised in {__file__}, line {line} (raising)." in str(error.value)
    with pytest.raises(
        FactoryError, match=r"make made an object of type builtins\.list, and not unbroken's StatefulDataLoader"
    ):
        check(position, list, "make")
    with pytest.raises(FactoryError, match="called without arguments, and wants folder"):
        check(position, lambda folder: folder, "make")
    with pytest.raises(FactoryError, match="make made no loader: LaneError"):
        check(position, lambda: lanes_loader(lanes=2, dp_rank=0, dp_world_size=3), "make")


def test_the_line_of_the_user_that_led_to_an_error_is_told() -> None:
    """Not that of torch or of unbroken which raised it."""

    def wrong() -> Any:
        return StatefulDataLoader(Table(), batch_size=-1)

    with pytest.raises(FactoryError, match=rf"line {wrong.__code__.co_firstlineno + 1} \(wrong\)"):
        check({}, wrong, "make")


def test_a_factory_is_given_the_numbers_that_it_has_no_default_for() -> None:
    given: dict[str, Any] = {}

    def make(num_workers: int, dp_rank: int, *, dp_world_size: int, seed: int = 1, lanes: int = 6) -> Any:
        given.update(num_workers=num_workers, dp_rank=dp_rank, dp_world_size=dp_world_size)
        return lanes_loader(num_workers=num_workers, dp_rank=dp_rank, dp_world_size=dp_world_size)

    assert check(position_after(lanes_loader(), 4), make, "make").would_load
    assert given == {"num_workers": 0, "dp_rank": 0, "dp_world_size": 1}

    def with_default(num_workers: int = 2) -> Any:
        given["num_workers"] = num_workers
        return lanes_loader()

    assert check(position_after(lanes_loader(), 4), with_default, "make").would_load
    assert given["num_workers"] == 2
    with pytest.raises(FactoryError, match="called with num_workers alone, and wants folder"):
        check({}, lambda folder, num_workers: None, "make")


def test_the_answer_is_json() -> None:
    answer = check(position_after(lanes_loader(), 4), lambda: lanes_loader(seed=2), "make")
    read = json.loads(answer.to_json())
    assert (read["would_load"], read["error"], read["without_strict"]) == (False, "StateMismatch", True)
    assert len(read["warnings"]) <= 1
