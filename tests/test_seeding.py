"""Randomness as a function of place, and global generators that are left as they were."""

from __future__ import annotations

import itertools
import math
import random
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from unbroken import seeding
from unbroken.seeding import (
    Permutation,
    isolated,
    key,
    put_back_globals,
    read_globals,
    seed_globals,
    take_globals,
    write_globals,
)

KNOWN = [
    ((), 0x2D06800538D394C2),
    ((0,), 0xC77B3ABB6F87ACD9),
    ((-1,), 0x5111C7E47D784413),
    ((2**64 + 5,), 0x8E03E9AA39AAA78C),
    (("a",), 0xD78BAAC08237DDB),
    ((3, "shuffle", 1), 0x8D5630C188FA9D3E),
    (("é", 0), 0x567D916F0BF36A67),
    ((12, "batch", "lane", 0, 3, 40), 0xDBE6F722D0F9766C),
]
PLACES = st.lists(st.integers(0, 2**64 - 1) | st.text("ab1", min_size=1, max_size=3), max_size=4).map(tuple)


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    before = read_globals()
    yield
    write_globals(before)


def draws() -> list[float]:
    return [float(torch.rand(())), float(torch.randn(())), np.random.rand(), np.random.randn(), random.random()]


def states() -> dict[str, int]:
    """What tells the states of the three generators from others, numpy's with the number it has left over."""
    torch_state, random_state, numpy_state = read_globals()
    return {
        "torch": xxhash.xxh3_64_intdigest(torch_state.numpy()),
        "random": hash(random_state),
        "numpy": hash((numpy_state[1].tobytes(), *numpy_state[2:])),
    }


@pytest.mark.parametrize(("place", "expected"), KNOWN)
def test_a_key_never_changes_because_positions_hold_it(place: Any, expected: int) -> None:
    assert key(*place) == expected


@given(PLACES)
def test_a_key_is_what_its_definition_says(place: tuple[Any, ...]) -> None:
    parts = [struct.pack("<Q", part) if isinstance(part, int) else part.encode() + b"\0" for part in place]
    assert key(*place) == xxhash.xxh3_64_intdigest(b"".join(parts))


@given(PLACES, PLACES)
def test_different_places_have_different_keys(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    assert (key(*a) == key(*b)) == (a == b)


def test_neighbouring_places_have_keys_that_share_nothing() -> None:
    keys = [key(7, "batch", epoch, lane, first) for epoch in range(10) for lane in range(10) for first in range(10)]
    differing = [bin(a ^ b).count("1") for a, b in itertools.pairwise(keys)]
    assert len(set(keys)) == 1000
    assert 31 < sum(differing) / len(differing) < 33


def test_seeding_sets_all_three_generators_to_known_numbers() -> None:
    seed_globals(0x123456789ABCDEF0)
    assert [float(torch.rand(())), np.random.rand(), random.random()] == pytest.approx(
        [0.5790657997131348, 0.5881994747331873, 0.849063363578306], abs=0
    )


def test_draws_depend_on_the_key_and_on_nothing_before_it() -> None:
    seen = []
    for place in (1, 2, 1, 2**64 - 1):
        seed_globals(place)
        seen.append(draws())
    assert seen[0] == seen[2]
    assert all(len(set(numbers)) == 3 for numbers in zip(*seen[1:], strict=True))


def test_draws_inside_do_not_depend_on_the_user_s_generators() -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        draws()
        with isolated(5):
            found.append(draws())
    assert found[0] == found[1]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=4), st.integers(0, 5))
def test_isolation_puts_the_generators_back_at_every_depth(places: list[int], drawn: int) -> None:
    """Case 18."""

    def enter(depth: int) -> None:
        before = states()
        if depth < len(places):
            with isolated(places[depth]):
                for _ in range(drawn % (depth + 2)):
                    draws()
                enter(depth + 1)
        assert states() == before

    enter(0)


def test_isolation_puts_the_generators_back_after_an_error() -> None:
    """Case 18."""
    before = states()
    with pytest.raises(KeyError), isolated(1):
        draws()
        raise KeyError
    assert states() == before


@pytest.mark.parametrize("seed", range(4))
def test_the_second_number_of_a_pair_of_normal_draws_is_not_lost(seed: int) -> None:
    """Case 18: numpy and random make normal numbers two at a time and keep the second."""
    np.random.seed(seed)
    random.seed(seed)
    expected = [np.random.randn(), random.gauss(0, 1), np.random.randn(), random.gauss(0, 1)]
    np.random.seed(seed)
    random.seed(seed)
    found = [np.random.randn(), random.gauss(0, 1)]
    with isolated(3):
        np.random.randn(2)
        random.gauss(0, 1)
    assert [*found, np.random.randn(), random.gauss(0, 1)] == expected


def test_normal_draws_inside_do_not_use_a_number_left_over_outside() -> None:
    found = []
    for left_over in (False, True):
        if left_over:
            np.random.randn()
            random.gauss(0, 1)
        with isolated(3):
            found.append((np.random.randn(), random.gauss(0, 1)))
            np.random.randn()
    assert found[0] == found[1]


def test_a_bit_generator_of_the_user_s_own_is_put_back() -> None:
    """Case 18: numpy's global generator need not be a Mersenne twister."""
    ours = np.random.get_bit_generator()
    try:
        theirs = np.random.PCG64(5)
        np.random.set_bit_generator(theirs)
        before = theirs.state
        with isolated(1):
            assert np.random.get_bit_generator() is not theirs
            draws()
        assert np.random.get_bit_generator() is theirs
        assert theirs.state == before
    finally:
        np.random.set_bit_generator(ours)


def test_a_seed_call_of_the_user_s_inside_stays_inside() -> None:
    """Case 18: a dataset that seeds for itself."""
    before = states()
    with isolated(1):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
    assert states() == before


def test_taking_and_putting_back_nest_in_the_order_of_a_stack() -> None:
    before = states()
    outer = take_globals()
    seed_globals(1)
    expected = draws()
    seed_globals(1)
    inner = take_globals()
    seed_globals(2)
    draws()
    put_back_globals(inner)
    assert draws() == expected
    put_back_globals(outer)
    assert states() == before


def test_states_that_were_read_can_be_written_again() -> None:
    np.random.randn()  # leaves a second number behind
    before = read_globals()
    expected = draws()
    draws()
    write_globals(before)
    assert draws() == expected


# The permutation


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097, 100_003])
def test_a_permutation_has_every_number_once(n: int) -> None:
    assert sorted(Permutation(n, key(n)).block(0, n).tolist()) == list(range(n))


def test_a_permutation_of_nothing_is_empty() -> None:
    assert Permutation(0, 1).block(0, 0).tolist() == []
    assert len(Permutation(0, 1)) == 0


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.data())
def test_a_block_is_the_slice_of_the_whole(n: int, place: int, data: st.DataObject) -> None:
    start, stop = data.draw(st.integers(0, n)), data.draw(st.integers(0, n))
    step = data.draw(st.integers(1, 7))
    permutation = Permutation(n, place)
    assert permutation.block(start, stop, step).tolist() == permutation.block(0, n).tolist()[start:stop:step]


def test_one_value_is_that_of_the_block() -> None:
    permutation = Permutation(37, 3)
    assert [permutation[i] for i in range(37)] == permutation.block(0, 37).tolist()


def test_a_permutation_never_changes_because_positions_count_in_it() -> None:
    assert Permutation(10, key(7)).block(0, 10).tolist() == [6, 2, 9, 3, 4, 5, 7, 8, 1, 0]
    large = Permutation(10**12, 5)
    assert [large[i] for i in (0, 1, 10**12 - 1)] == [364549023182, 873270911554, 903517020753]


def test_a_permutation_of_a_million_million_starts_anywhere_without_a_list() -> None:
    """Case 16: what it holds does not grow with its length, and one value asks for one value."""
    large = Permutation(10**12, 5)
    values = [large[i] for i in range(10**12 - 1, 0, -(10**11) // 7)]
    assert all(0 <= value < 10**12 for value in values)
    assert len(set(values)) == len(values)
    assert max(np.size(part) for part in vars(large).values()) <= 6


@pytest.mark.parametrize("n", [2**62 - 1, 2**62, 2**40 + 1])
def test_a_block_of_a_very_long_permutation_repeats_nothing(n: int) -> None:
    block = Permutation(n, 1).block(n - 5000, n).tolist()
    assert len(set(block)) == 5000
    assert all(0 <= value < n for value in block)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_tiny_permutation_comes_in_every_order_equally_often(n: int) -> None:
    """Chi-squared over all n! orders for a fixed list of keys; the bound is far beyond the 99.99 % point."""
    rounds = 4000
    found = Counter(tuple(Permutation(n, key(n, i)).block(0, n).tolist()) for i in range(rounds))
    expected = rounds / math.factorial(n)
    assert len(found) == math.factorial(n)
    assert sum((count - expected) ** 2 / expected for count in found.values()) < 30 + 2 * math.factorial(n)


def test_every_value_comes_at_every_place_equally_often() -> None:
    n, rounds = 7, 3000
    found = np.zeros((n, n))
    for i in range(rounds):
        found[np.arange(n), Permutation(n, key("places", i)).block(0, n)] += 1
    assert ((found - rounds / n) ** 2 / (rounds / n)).sum() < 100  # 36 degrees of freedom


def test_neighbours_do_not_stay_neighbours() -> None:
    order = Permutation(100_000, key(1)).block(0, 100_000)
    assert (np.abs(np.diff(order)) == 1).sum() < 20  # 2 are expected
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


def test_different_keys_give_different_orders() -> None:
    orders = {tuple(Permutation(20, place).block(0, 20).tolist()) for place in range(500)}
    assert len(orders) == 500


@pytest.mark.parametrize("where", ["_normal_left_over", "seed_globals", "_set_bit_generator"])
def test_an_interrupt_lets_go_of_the_generators_for_other_threads(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that came after it would wait for ever."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(seeding, where, interrupted)
        with seeding.isolated(1):
            pass
    free: list[bool] = []
    asks = threading.Thread(target=lambda: free.append(_is_free()))
    asks.start()
    asks.join()
    assert free == [True]


def _is_free() -> bool:
    if not seeding._guard.acquire(timeout=1):
        return False
    seeding._guard.release()
    return True
