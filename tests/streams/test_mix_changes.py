"""Mix at a resume: other weights, and sources that come and go. Every source goes on from its place."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streams.mixing import (
    BEHIND,
    NAMES,
    STOPS,
    built,
    ids_of,
    names_in,
    other_ids_of,
    rows_of,
    streams,
    taken,
    tokens_of,
)
from tests.streams.runs import run
from tests.streams.test_law_of_streams import small
from unbroken import StatefulDataLoader
from unbroken.errors import InvalidState, StateMismatch
from unbroken.lanes import Lane
from unbroken.streams.mix import mix
from unbroken.streams.stage import Stage


@st.composite
def changes(draw: st.DrawFn) -> tuple[Any, ...]:
    """Sizes of sources, what stands around the mix, and which sources it has with which weights after how many rows."""
    names = NAMES[: draw(st.integers(2, 4))]
    sizes = {name: draw(st.sampled_from([0, 1, 4, 12, 20])) for name in names}
    tokens = draw(st.booleans())
    before = draw(st.sampled_from([[], ["shuffle 2"], ["shuffle 30"]])) + ["tokenize"] * tokens
    behind = draw(st.lists(st.sampled_from(BEHIND[: 4 + (not tokens)]), max_size=3, unique=True))
    if tokens or "tokenize" in behind:
        behind += draw(st.sampled_from([[], ["pack 1"], ["pack 8"], ["best_fit 8"], ["pack 3", "shuffle 5"]]))
    always = draw(st.sets(st.sampled_from(names), min_size=1))
    some = st.sets(st.sampled_from(names)).map(lambda found: sorted(found | always)).flatmap(st.permutations)
    weighed = some.flatmap(lambda found: st.fixed_dictionaries({name: st.sampled_from([0.2, 1, 4]) for name in found}))
    steps = draw(st.lists(st.tuples(weighed, st.sampled_from([0, 1, 2, 5, 9, 20])), min_size=2, max_size=4))
    return rows_of(sizes, draw(st.sampled_from(["3", "0291"]))), before, behind, steps, always


@given(
    plan=changes(),
    stop=st.sampled_from(STOPS),
    by=st.sampled_from(["rows", "rows", "tokens"]),
    batch=st.sampled_from([1, 3]),
    epoch=st.integers(0, 1),
)
def test_every_source_goes_on_from_its_place(plan: tuple[Any, ...], stop: str, by: str, batch: int, epoch: int) -> None:
    """Case 30: after any changes in a row no row of any source comes twice, and none of one that stays is lost."""
    rows, before, behind, steps, always = plan
    by = by if "tokenize" in before else "rows"
    lane, state, found = Lane(0, 1, epoch), None, []
    with tempfile.TemporaryDirectory() as folder, small(batch, 10):
        parts = streams(Path(folder), rows, *before)
        try:
            for number, (weights, count) in enumerate(steps):
                stream = built(mix({name: parts[name] for name in weights}, weights, by=by, stop=stop), behind)
                part, state = taken(stream, lane, 2000 if number + 1 == len(steps) else count, state)
                found += part
        except InvalidState as error:
            assert "with weight 0" in str(error)
            assert by == "tokens" or any("pack" in stage or "fit" in stage for stage in behind)
            assert set().union(*(weights for weights, _ in steps)) > always
            return
    times = tokens_of(found)
    if stop != "repeat":
        assert max(times.values(), default=1) == 1
    for name in always:
        texts = [row["text"].split() for row in rows[name]]
        as_tokens = "tokenize" in [*before, *behind]
        counts = [times[int(n), place] for n, length in texts for place in range(int(length) if as_tokens else 1)]
        if stop == "all":
            assert set(counts) <= {1}
        elif len(part) < 2000 and "best_fit 8" not in behind:
            assert not counts or max(counts) - min(counts) <= 1


CHAINS = [
    ["shuffle 12", "tokenize", "shuffle 5", "pack 4"],
    ["map", "shuffle 7"],
    ["tokenize", "pack 5"],
    [],
]


@pytest.mark.parametrize("behind", CHAINS)
@pytest.mark.parametrize(
    "weights", [{"a": 9, "b": 1}, {"b": 1, "a": 0.1, "c": 1}, {0: {"a": 1, "b": 1}, 9: {"a": 0, "b": 1}}]
)
def test_other_weights_and_an_added_source_lose_and_repeat_nothing(
    tmp_path: Path, behind: list[str], weights: Any
) -> None:
    """Case 30, at every k."""
    parts = streams(tmp_path, rows_of({"a": 12, "b": 12, "c": 5}, "12"))
    first = built(mix({name: parts[name] for name in "ab"}, stop="all"), behind)
    names = weights.get(0, weights)
    then = built(mix({name: parts[name] for name in names}, weights, stop="all"), behind)
    for k in range(len(run(first)) - 8):
        head, state = taken(first, Lane(0, 1), k)
        times = tokens_of(head + taken(then, Lane(0, 1), 1000, state)[0])
        assert set(times.values()) == {1}
        assert {number // 1000 for number, _ in times} == {NAMES.index(name) + 1 for name in names}


def test_rows_that_were_left_out_stay_left_out_when_their_source_is_added_again(tmp_path: Path) -> None:
    """Else a window would be packed again from other rows than the ones that were delivered of it."""
    parts = streams(tmp_path, rows_of({"a": 30, "b": 30}))
    both, alone = (mix({name: parts[name] for name in names}, stop="all").shuffle(20, seed=1) for names in ("ab", "a"))
    head, state = taken(both, Lane(0, 1), 3)
    middle, state = taken(alone, Lane(0, 1), 2, state)
    found = head + middle + taken(both, Lane(0, 1), 100, state)[0]
    waited = [row["text"] for row in run(both)[3:20] if names_in([row]) == "b"]
    assert len(waited) > 4
    expected = {row["text"] for part in rows_of({"a": 30, "b": 30}).values() for row in part} - {*waited}
    assert sorted(row["text"] for row in found) == sorted(expected)


@pytest.mark.parametrize("behind", CHAINS[:3])
def test_a_source_that_is_added_again_goes_on_and_repeats_nothing(tmp_path: Path, behind: list[str]) -> None:
    """At every k: what of it was read and not delivered is left out, and nothing else."""
    parts = streams(tmp_path, rows_of({"a": 20, "b": 20}, "12"))
    both, alone = built(mix(parts, stop="all"), behind), built(mix({"a": parts["a"]}, stop="all"), behind)
    waited = 0
    for k in range(12):
        head, state = taken(both, Lane(0, 1), k)
        try:
            middle, state = taken(alone, Lane(0, 1), 3, state)
        except InvalidState as error:  # a row was begun with tokens of it
            assert "pack" in behind[-1] and "with weight 0" in str(error)
            continue
        times = tokens_of(head + middle + taken(both, Lane(0, 1), 1000, state)[0])
        assert set(times.values()) == {1}
        whole = sum(int(row["text"][-1]) if "tokenize" in behind else 1 for row in rows_of({"a": 20}, "12")["a"])
        assert sum(number < 2000 for number, _ in times) == whole
        waited += len([number for number in range(2000, 2020) if (number, 0) not in times])
    assert waited, "no row waited in a window, so this tests nothing"


def history_of(state: str, name: str = "mix") -> Any:
    return json.loads(state)["journal"][name]["history"]


def test_the_position_has_the_history_of_the_weights(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 50, "b": 50, "c": 50}))
    lane, behind = Lane(1, 2, 1), ["shuffle 4"]
    even, more, three = {"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}
    steps: list[tuple[Any, int, list[Any]]] = [
        (even, 0, [[1, 0, [[0, even]]]]),
        (more, 3, [[1, 0, [[0, more]]]]),  # no row was made before
        (more, 2, [[1, 0, [[0, more]]]]),
        (even, 0, [[1, 0, [[0, more]]]]),  # nor now
        (three, 4, [[1, 0, [[0, more]]], [1, 6, [[0, three]]]]),
        (
            {0: three, 40: even | {"c": 0.0}},
            1,
            [[1, 0, [[0, more]]], [1, 6, [[0, three]]], [1, 10, [[0, three], [40, even | {"c": 0.0}]]]],
        ),
    ]
    state = None
    for weights, count, history in steps:
        stream = built(mix({name: parts[name] for name in weights.get(0, weights)}, weights), behind)
        state = taken(stream, lane, count, state)[1]
        assert history_of(state) == history


def test_the_order_in_which_sources_are_named_does_not_count(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 20, "b": 20, "c": 20}))
    stream, other = (
        mix(dict(order), stop="all").shuffle(9, seed=1) for order in (parts.items(), reversed(parts.items()))
    )
    assert run(stream) == run(other)
    for k in (0, 1, 9, 30):
        head, state = taken(stream, Lane(0, 1), k)
        assert head + taken(other, Lane(0, 1), 100, state)[0] == run(stream)
        assert history_of(taken(other, Lane(0, 1), 100, state)[1]) == history_of(state)


def test_what_holds_now_holds_for_rows_that_were_not_read_yet(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 50, "b": 50}))
    state = taken(mix(parts, {"a": 1, "b": 0}).shuffle(10, seed=1), Lane(0, 1), 3)[1]
    rows = taken(mix(parts, {"a": 0, "b": 1}).shuffle(10, seed=1), Lane(0, 1), 17, state)[0]
    assert names_in(rows) == "a" * 7 + "b" * 10


def test_a_lane_that_was_read_to_its_end_stays_there_until_the_next_epoch(tmp_path: Path) -> None:
    """Its last window would get other rows than those that were delivered of it."""
    parts = streams(tmp_path, rows_of({"a": 9, "b": 9}))
    alone, both = mix({"a": parts["a"]}, stop="all").shuffle(20, seed=1), mix(parts, stop="all").shuffle(20, seed=1)
    head, state = taken(alone, Lane(0, 1), 4)
    assert head + taken(both, Lane(0, 1), 100, state)[0] == run(alone)
    assert names_in(run(both, Lane(0, 1, epoch=1))).count("b") == 9
    at_end = taken(mix({"a": parts["a"]}), Lane(0, 1), 9)[1]  # the end was not met yet
    assert names_in(taken(mix(parts, stop="all"), Lane(0, 1), 100, at_end)[0]) == "b" * 9


@pytest.mark.parametrize(
    ("before", "behind", "by", "waits"),
    [
        ([], ["filter", "shuffle 9"], "rows", 8),
        ([], ["flat_map", "shuffle 9"], "rows", 8),
        (["tokenize"], ["shuffle 9"], "tokens", 8),
        (["tokenize"], ["best_fit 8"], "rows", 1),
    ],
)
def test_where_a_source_cannot_be_taken_out_weight_0_is_named_and_is_a_way_out(
    tmp_path: Path, before: list[str], behind: list[str], by: str, waits: int
) -> None:
    rows = rows_of({"a": 20, "b": 40}, "2")
    parts = streams(tmp_path, rows, *before)
    both = built(mix(parts, by=by, stop="all"), behind)
    alone = built(mix({"a": parts["a"]}, by=by, stop="all"), behind)
    head, state = taken(both, Lane(0, 1), 1)
    for _ in range(2):  # it is refused again when it is tried again
        with pytest.raises(InvalidState, match=r"taken out(.|\n)*with weight 0"):
            taken(alone, Lane(0, 1), 100, state)
    waiting, state = taken(built(mix(parts, {"a": 1, "b": 0}, by=by, stop="all"), behind), Lane(0, 1), waits, state)
    rest = taken(alone, Lane(0, 1), 100, state)[0]
    times = tokens_of(head + waiting + rest)
    assert set(times.values()) == {1} and rest
    assert {number for number, _ in times if number < 2000} == {int(row["text"][:4]) for row in rows["a"]}


def test_a_source_of_a_mix_within_a_mix_can_be_taken_out(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 9, "b": 9, "c": 9}))

    def nested(*names: str) -> Stage:
        inner = mix({name: parts[name] for name in names}, stop="all")
        return mix({"a": parts["a"], "in": inner}, stop="all").shuffle(8, seed=1)

    head, state = taken(nested("b", "c"), Lane(0, 1), 5)
    middle, state = taken(nested("b"), Lane(0, 1), 6, state)
    assert len(history_of(state, "in/mix")) == 2 and len(history_of(state)) == 1
    times = tokens_of(head + middle + taken(nested("c", "b"), Lane(0, 1), 100, state)[0])
    assert set(times.values()) == {1}
    counts = Counter(number // 1000 for number, _ in times)
    assert counts[1] == counts[2] == 9 and 5 < counts[3] < 9


def test_by_tokens_a_mix_cannot_go_on_without_a_source_of_a_mix_in_it(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 9, "b": 9, "c": 9}), "tokenize")
    whole, part = (
        mix({"a": parts["a"], "in": mix({name: parts[name] for name in names})}, by="tokens").shuffle(9, seed=1)
        for names in ("bc", "b")
    )
    state = taken(whole, Lane(0, 1), 1)[1]
    with pytest.raises(InvalidState, match=r"a source of 'in' was taken out(.|\n)*with weight 0"):
        taken(part, Lane(0, 1), 9, state)


def test_a_mix_within_a_mix_that_ended_without_a_row_stays_so(tmp_path: Path) -> None:
    """The window that is made again would get rows of it."""
    parts = streams(tmp_path, rows_of({"a": 30, "b": 0, "c": 9}))
    first, then = (
        mix({"a": parts["a"], "in": mix({name: parts[name] for name in names})}, stop="all").shuffle(20, seed=1)
        for names in ("b", "bc")
    )
    for k in range(20):
        head, state = taken(first, Lane(0, 1), k)
        assert head + taken(then, Lane(0, 1), 100, state)[0] == run(first)


@pytest.mark.parametrize("k", [1, 20, 40])
def test_a_source_is_taken_out_of_passes_that_are_made_again(tmp_path: Path, k: int) -> None:
    """Here a has come to its end many times, and b had not yet: so the lane did not end then."""
    parts = streams(tmp_path, rows_of({"a": 3, "b": 40}))
    both, alone = (
        mix({name: parts[name] for name in names}, stop="repeat").shuffle(60, seed=1) for names in ("ab", "a")
    )
    head, state = taken(both, Lane(0, 1), k)
    found = head + taken(alone, Lane(0, 1), 1000, state)[0]
    assert names_in(found).count("a") >= names_in(run(both)[:60]).count("a")
    counts = [tokens_of(found)[1000 + n, 0] for n in range(3)]
    assert max(counts) - min(counts) <= 1


def test_a_whole_mix_within_a_mix_can_be_taken_out_and_added_again(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 20, "b": 9, "c": 9}))
    whole = mix(
        {"a": parts["a"], "in": mix({"b": parts["b"], "c": parts["c"]}, {"b": 3, "c": 1}, stop="all")}, stop="all"
    )
    head, state = taken(whole, Lane(0, 1), 9)
    middle, state = taken(mix({"a": parts["a"]}), Lane(0, 1), 2, state)
    assert tokens_of(head + middle + taken(whole, Lane(0, 1), 100, state)[0]) == tokens_of(run(whole))


def test_a_source_that_was_never_begun_may_come_and_go(tmp_path: Path) -> None:
    """Its rows are in a window whose anchor knows nothing of it."""
    parts = streams(tmp_path, rows_of({"a": 150, "b": 30}))
    alone, both = (
        mix({name: parts[name] for name in names}, stop="all").shuffle(20).shuffle(40) for names in ("a", "ab")
    )
    found, state = taken(alone, Lane(0, 1), 0)
    for stream, count in ((alone, 1), (both, 45), (alone, 3), (both, 5), (alone, 3), (both, 200)):
        part, state = taken(stream, Lane(0, 1), count, state)
        found += part
    counts = Counter(number // 1000 for number, _ in tokens_of(found))
    assert set(tokens_of(found).values()) == {1} and counts[1] == 150 and 5 < counts[2] < 30


def test_a_name_with_other_files_is_refused_where_its_source_had_begun(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 20, "b": 20, "c": 20}))
    other = {"a": parts["a"], "b": parts["c"]}
    state = taken(mix(parts), Lane(0, 1), 9)[1]
    state = taken(mix({"a": parts["a"]}), Lane(0, 1), 2, state)[1]  # here nothing tells of the files of b but its place
    with pytest.raises(StateMismatch, match=r"the source 'b' stands in the middle of other files(.|\n)*another name"):
        taken(mix(other), Lane(0, 1), 9, state)
    fresh = taken(mix(parts, {"a": 1, "b": 0, "c": 0}), Lane(0, 1), 5)[1]
    assert names_in(taken(mix(other, {"a": 0, "b": 1}), Lane(0, 1), 9, fresh)[0]) == "c" * 9


@pytest.mark.parametrize("epochs", [2, 6])
def test_windows_over_several_epochs_are_made_again_without_a_source(tmp_path: Path, epochs: int) -> None:
    """Of epochs longer ago than is remembered it is refused: where a lane ended without the source is not known."""
    parts = streams(tmp_path, rows_of({"a": 5, "b": 2}))
    both, alone = (
        mix({name: parts[name] for name in names}, stop="all").repeat(epochs).shuffle(99, seed=1)
        for names in ("ab", "a")
    )
    head, state = taken(both, Lane(0, 1), 4)
    if epochs > 3:
        with pytest.raises(InvalidState, match="with weight 0"):
            taken(alone, Lane(0, 1), 99, state)
        return
    times = tokens_of(head + taken(alone, Lane(0, 1), 99, state)[0])
    assert [times[1000 + n, 0] for n in range(5)] == [epochs] * 5
    assert sum(times.values()) < 7 * epochs


# ---- through the loader


def loader_of(stream: Stage, workers: int = 0) -> StatefulDataLoader:
    return StatefulDataLoader(stream, 4, num_workers=workers, lanes=4, seed=3, collate_fn=list)


def texts(batches: Iterable[Any]) -> list[str]:
    return [row["text"] for batch in batches for row in batch]


def test_a_mix_is_the_same_on_any_number_of_workers_and_goes_on_with_other_sources(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 40, "b": 40, "c": 10}))
    stream = mix({"a": parts["a"], "b": parts["b"]}, {"a": 2, "b": 1}, stop="all").shuffle(12)
    changed = mix({"c": parts["c"], "a": parts["a"]}, {"a": 1, "c": 1}, stop="all").shuffle(12)
    orders, rests = [], []
    for workers in (0, 1, 2):
        with closing(loader_of(stream, workers)) as loader, closing(loader_of(changed, 2 - workers)) as after:
            batches = iter(loader)
            head = texts(batch for _, batch in zip(range(5), batches, strict=False))
            after.load_state_dict(loader.state_dict())
            orders.append(head + texts(batches))
            rests.append(texts(after))
    assert orders[0] == orders[1] == orders[2] and rests[0] == rests[1] == rests[2]
    assert sorted(orders[0]) == sorted(row["text"] for name in "ab" for row in rows_of({"a": 40, "b": 40})[name])
    found = Counter(orders[0][:20] + rests[0])
    assert set(found.values()) == {1}
    assert Counter(text[0] for text in found)["1"] == 40 and Counter(text[0] for text in found)["3"] == 10


def test_the_loader_accepts_weights_and_sources_and_nothing_else_of_a_mix(tmp_path: Path, caplog: Any) -> None:
    parts = streams(tmp_path, rows_of({"a": 40, "b": 40, "c": 40}), "tokenize")
    raw = streams(tmp_path, rows_of({"a": 40}))["a"]
    loader = loader_of(mix({"a": parts["a"], "b": parts["b"]}))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    for safe in (mix(parts, {"a": 1, "b": 5, "c": 1}), mix({"a": parts["a"]}), mix({"c": parts["c"], "b": parts["b"]})):
        after = loader_of(safe)
        after.load_state_dict(state)
        assert len(list(after)) > 5
    for other, field in ((raw.tokenize(other_ids_of), "a: tokenizer"), (raw.shuffle(3).tokenize(ids_of), "a: stages")):
        with pytest.raises(StateMismatch, match=field):
            loader_of(mix(parts | {"a": other})).load_state_dict(state)
    loader_of(mix(parts | {"a": raw.tokenize(other_ids_of)})).load_state_dict(state, strict=False)
    assert "a: tokenizer" in caplog.text
    for strict in (True, False):
        with pytest.raises(StateMismatch, match=r"a: files(.|\n)*cannot change without losing"):
            loader_of(mix(parts | {"a": parts["c"]})).load_state_dict(state, strict=strict)
    for order, field in (
        (mix(parts, by="tokens"), "mix_by"),
        (mix(parts, stop="all"), "mix_stop"),
        (mix(parts, seed=9), "mix_seed"),
    ):
        with pytest.raises(StateMismatch, match=rf"{field} (.|\n)*order-changing"):
            loader_of(order).load_state_dict(state)
