"""States in files: whole or not at all, in each format, and merged where they go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from unbroken.audit import saves
from unbroken.audit.saves import Format, merged, read_states, saved_steps, write_state
from unbroken.errors import AuditError

STATE = {"epoch": 2, "done": [1, 2], "inner": {"text": "a"}, "none": None}


@pytest.mark.parametrize("format", ["torch", "json", "dcp"])
def test_a_state_comes_back_as_it_was(format: Format, tmp_path: Path) -> None:
    write_state(STATE, tmp_path, 12, 0, format)
    write_state({**STATE, "epoch": 3}, tmp_path, 12, 1, format)
    assert saved_steps(tmp_path, 2) == [12]
    assert read_states(tmp_path, 12, 2, format) == [STATE, {**STATE, "epoch": 3}]


def test_only_steps_that_every_rank_has_saved_count(tmp_path: Path) -> None:
    for step, rank in [(4, 0), (4, 1), (8, 0), (6, 1), (6, 0)]:
        write_state(STATE, tmp_path, step, rank, "json")
    assert saved_steps(tmp_path, 2) == [4, 6]


def test_a_save_that_was_cut_short_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(saves.os, "replace", killed)
    with pytest.raises(SystemExit):
        write_state(STATE, tmp_path, 4, 0, "torch")
    assert saved_steps(tmp_path, 1) == []


def test_a_state_that_a_format_cannot_carry_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="bytes is not JSON serializable"):
        write_state(b"opaque", tmp_path, 4, 0, "json")
    with pytest.raises(AuditError, match="saves dicts, and this state is of type bytes"):
        write_state(b"opaque", tmp_path, 4, 0, "dcp")


def test_states_that_go_together_are_one_for_any_number_of_ranks() -> None:
    states = [{"lane-0": "a", "header": "h"}, {"lane-1": "b", "header": "h"}]
    assert [merged(states, rank, 3) for rank in range(3)] == [{"lane-0": "a", "lane-1": "b", "header": "h"}] * 3


def test_states_that_clash_go_back_each_to_its_rank() -> None:
    states = [{"done": torch.tensor([1, 2])}, {"done": torch.tensor([3, 4])}]
    assert merged(states, 1, 2) is states[1]
    assert merged([b"one", b"two"], 0, 2) == b"one"
    with pytest.raises(AuditError, match="cannot be merged into one for 3") as caught:
        merged(states, 0, 3)
    assert "--ranks 2" in str(caught.value)


def test_the_state_of_one_rank_is_that_of_all() -> None:
    assert merged([b"one"], 1, 2) == b"one"
