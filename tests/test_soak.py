"""Random kills, signals, saves, loads and changes of topology for a long time, and what was delivered in the end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.soak import Topology, compare, log_of, position_of, soak, train, write_corpus

# torch's advice on a machine with few cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.mark.timeout(240)
def test_a_minute_of_ends_changes_nothing(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")  # shown where it fails
    steps, ends = soak(tmp_path, 60, seed)
    assert steps > 0
    assert len(ends) >= 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_minutes_of_ends_change_nothing(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    steps, ends = soak(tmp_path, 1200, seed)
    assert steps > 0
    assert len(ends) >= 200


def test_what_a_run_lost_or_repeated_is_found(tmp_path: Path) -> None:
    """The comparison can fail: a step that is missing, one that is another's, a ledger that tells of more."""
    write_corpus(tmp_path)
    train(tmp_path, Topology(2, 0, False, 2, None, 4, 0), steps=6)
    given, position = log_of(tmp_path), position_of(tmp_path)
    compare(tmp_path, given, position, [])
    for wrong in ({**given, 3: given[2]}, {step: given[step] for step in range(5)}):
        with pytest.raises(AssertionError, match="differs"):
            compare(tmp_path, wrong, position, [])
    train(tmp_path, Topology(2, 0, False, 2, None, 4, 0), steps=2)
    with pytest.raises(AssertionError, match="lane-"):
        compare(tmp_path, given, {**position_of(tmp_path), "step": 6}, [])
