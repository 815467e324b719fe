"""Mix: shares that hold, choices that are made again, and how it ends."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.streams.mixing import BEHIND, NAMES, STOPS, built, names_in, rows_of, streams, taken, tokens_of
from tests.streams.runs import TORN, assert_law, plain, run, run_lanes, saved, write_jsonl
from tests.streams.test_law_of_streams import small
from unbroken.errors import BadRow, InvalidState
from unbroken.lanes import Lane
from unbroken.streams.mix import mix
from unbroken.streams.reading.jsonl import read_jsonl
from unbroken.streams.stage import Stage

LANES = st.builds(
    lambda count, index, epoch, seed: Lane(index % count, count, epoch, seed),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 3),
)


# ---- the law


@st.composite
def mixes(draw: st.DrawFn) -> Callable[[Path], Stage]:
    """A mix, perhaps with another one in it, over and under other stages."""
    tokens = draw(st.booleans())
    inside = ["tokenize"] if tokens else []
    windows = st.sampled_from(["shuffle 1", "shuffle 4", "shuffle 100"])
    by = draw(st.sampled_from(["rows", "tokens"])) if tokens else "rows"
    names = NAMES[: draw(st.integers(1, 4))]
    rows = rows_of({name: draw(st.sampled_from([0, 1, 3, 9])) for name in names}, draw(st.sampled_from(["3", "0291"])))
    before = {name: [*draw(st.lists(windows, max_size=1)), *inside] for name in names}
    nested = names[: draw(st.integers(0, 2))]
    outer = [name for name in names if name not in nested] + ["inner"] * bool(nested)
    weight = st.sampled_from([0, 0.3, 1, 1, 5])
    weights = st.fixed_dictionaries(dict.fromkeys(outer, weight)).filter(lambda found: any(found.values()))
    given_weights = draw(st.one_of(st.none(), weights, st.fixed_dictionaries({0: weights, 5: weights, 11: weights})))
    stops = draw(st.sampled_from(STOPS)), draw(st.sampled_from(STOPS))
    behind = draw(st.lists(st.sampled_from([*BEHIND[:4], "filter", "flat_map"]), max_size=2))
    if draw(st.booleans()):
        behind += [] if tokens else ["tokenize"]
        behind += draw(st.lists(st.sampled_from(["shuffle 3", "pack 4", "best_fit 8"]), max_size=2 - (not tokens)))
        behind = behind[:-1] if behind[-2:].count("pack 4") + behind[-2:].count("best_fit 8") > 1 else behind
    epochs = draw(st.sampled_from([0, 0, 2]))

    def make(folder: Path) -> Stage:
        made = {name: built(stream, before[name]) for name, stream in streams(folder, rows).items()}
        parts = {name: made[name] for name in outer if name in made}
        if nested:
            parts["inner"] = mix({name: made[name] for name in nested}, by=by, stop=stops[1])
        stream = mix(parts, given_weights, by=by, stop=stops[0])
        return built(stream.repeat(epochs) if epochs else stream, behind)

    return make


@given(make=mixes(), lane=LANES, chain=st.lists(st.integers(0, 9), max_size=4), batch=st.sampled_from([1, 2, 8]))
def test_every_restore_point_of_every_mix_is_exact(
    make: Callable[[Path], Stage], lane: Lane, chain: list[int], batch: int
) -> None:
    """Cases 3, 28 and 30."""
    with tempfile.TemporaryDirectory() as folder, small(batch, 10):
        assert_law(make(Path(folder)), lane, chain)


# ---- which rows come, and from where


@pytest.mark.parametrize("by", ["rows", "tokens"])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_lanes_share_out_every_row_once_in_every_epoch(tmp_path: Path, by: str, lanes: int) -> None:
    rows = rows_of({"a": 40, "b": 7, "c": 0}, "0291")
    parts = streams(tmp_path, rows, "shuffle 5", "tokenize")
    expected = {
        (int(row["text"][:4]), place) for part in rows.values() for row in part for place in range(int(row["text"][5]))
    }
    for epoch in range(2):
        found = run_lanes(mix(parts, {"a": 1, "b": 4, "c": 2}, by=by, stop="all"), lanes, epoch=epoch, seed=1)
        assert tokens_of([row for rows in found for row in rows]) == dict.fromkeys(expected, 1)


def test_choices_are_a_function_of_seed_epoch_lane_and_row(tmp_path: Path) -> None:
    stream = mix(streams(tmp_path, rows_of({"a": 60, "b": 60})), stop="repeat")
    places = [(lane, epoch, seed) for lane in range(2) for epoch in range(2) for seed in range(2)]
    orders = {place: names_in(taken(stream, Lane(place[0], 2, *place[1:]), 30)[0]) for place in places}
    assert len(set(orders.values())) == len(places)
    assert orders == {place: names_in(taken(stream, Lane(place[0], 2, *place[1:]), 30)[0]) for place in places}
    for own in (
        mix(stream.named, stop="repeat", seed=1),
        mix(dict(reversed([*stream.named.items()])), stop="repeat", seed=1),
    ):
        assert names_in(taken(own, Lane(1, 2, 1, 0), 30)[0]) == orders[1, 1, 1]


def test_shares_by_rows_are_the_weights(tmp_path: Path) -> None:
    weights = {"a": 6, "b": 3, "c": 1}
    parts = {name: part.repeat() for name, part in streams(tmp_path, rows_of(dict.fromkeys(weights, 50))).items()}
    found = Counter("".join(names_in(taken(mix(parts, weights), Lane(lane, 4), 1000)[0]) for lane in range(4)))
    for name, weight in weights.items():
        assert abs(found[name] - 400 * weight) < 4 * math.sqrt(400 * weight * (1 - weight / 10))


def test_shares_by_tokens_are_kept_to_the_longest_document_at_any_time(tmp_path: Path) -> None:
    weights = {"a": 0.6, "b": 0.3, "c": 0.1}
    parts = streams(tmp_path, rows_of(dict.fromkeys(weights, 50), "1937"), "tokenize")
    stream = mix({name: part.repeat() for name, part in parts.items()}, weights, by="tokens")
    counts: Counter[str] = Counter()
    for row in taken(stream, Lane(1, 2), 500)[0]:
        counts[NAMES[row["input_ids"][1][0] // 1000 - 1]] += len(row["input_ids"][1])
        assert all(abs(counts[name] - weight * counts.total()) <= 9 for name, weight in weights.items())
    assert counts.total() > 2000
    assert json.loads(taken(stream, Lane(1, 2), 500)[1])["rows"]["longest"] == 9


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_a_schedule_changes_the_weights_at_its_row_of_the_global_order(tmp_path: Path, lanes: int) -> None:
    schedule = {0: {"a": 1, "b": 0}, 7: {"a": 0, "b": 1}, 20: {"a": 1, "b": 0}}
    found = run_lanes(mix(streams(tmp_path, rows_of({"a": 90, "b": 90})), schedule).take(30), lanes)
    assert "".join(names_in([found[row % lanes][row // lanes]]) for row in range(30)) == "a" * 7 + "b" * 13 + "a" * 10


def test_a_source_of_weight_0_waits_where_it_is(tmp_path: Path) -> None:
    schedule = {0: {"a": 1, "b": 1}, 10: {"a": 1, "b": 0}, 30: {"a": 0, "b": 1}}
    rows = run(mix(streams(tmp_path, rows_of({"a": 50, "b": 50})), schedule))
    assert set(names_in(rows[10:30])) == {"a"} and set(names_in(rows[30:])) == {"b"}
    assert tokens_of([row for row in rows if names_in([row]) == "b"]) == {(2000 + n, 0): 1 for n in range(50)}


# ---- how it ends


def test_stop_first_ends_where_a_source_has_no_more(tmp_path: Path) -> None:
    rows = run(mix(streams(tmp_path, rows_of({"a": 20, "b": 5})), stop="first"))
    assert names_in(rows).count("b") == 5 and 0 < names_in(rows).count("a") < 20


def test_stop_all_goes_on_with_the_others(tmp_path: Path) -> None:
    order = names_in(
        run(mix(streams(tmp_path, rows_of({"a": 20, "b": 5, "c": 0})), {"a": 1, "b": 2, "c": 9}, stop="all"))
    )
    assert Counter(order) == {"a": 20, "b": 5} and order.endswith("aaaa")


def test_stop_repeat_begins_a_source_again_in_another_order_until_each_has_ended(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 40, "b": 6, "c": 0}), "shuffle 10")
    stream = mix(parts, {"a": 1, "b": 1, "c": 3}, stop="repeat")
    rows = run(stream)
    passes = [row["text"] for row in rows if names_in([row]) == "b"]
    assert names_in(rows).count("a") == 40 and len(passes) > 12
    assert sorted(passes[:6]) == sorted(passes[6:12]) and passes[:6] != passes[6:12]
    later = [row["text"] for row in run(stream, Lane(0, 1, epoch=1)) if names_in([row]) == "b"]
    assert sorted(passes[:6]) == sorted(later[:6]) and later[:6] not in (passes[:6], passes[6:12])


def test_stop_repeat_waits_for_a_source_whose_rows_are_on_other_lanes_in_this_pass(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 2, "b": 400}))
    shared_out = run_lanes(parts["a"].shuffle(1, seed=3), 8)
    assert [] in shared_out, "every lane has rows of it in the first pass, so this tests nothing"
    for rows in run_lanes(mix(parts, stop="repeat").shuffle(1, seed=3), 8):
        assert names_in(rows).count("a") > 10


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("names", ["a", "abc"])
def test_sources_without_rows_are_an_epoch_without_rows(tmp_path: Path, stop: str, names: str) -> None:
    stream = mix(streams(tmp_path, rows_of(dict.fromkeys(names, 0))), stop=stop)
    assert assert_law(stream, Lane(0, 2)) == assert_law(stream.shuffle(5), Lane(1, 2, 1)) == []


def test_empty_documents_do_not_take_all_turns(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 50}, "0") | rows_of({"b": 50}, "3"), "tokenize")
    rows = taken(mix(parts, by="tokens"), Lane(0, 1), 40)[0]
    assert sum(not row["input_ids"][1] for row in rows) == 30


# ---- what it says, and what it refuses


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda a: mix(cast("Any", [a])), TypeError, "sources must be a dict of names to streams"),
        (lambda a: mix({}), TypeError, "with one at least"),
        (lambda a: mix({"": a}), ValueError, "a name must be text without ': ' and '/', but got ''"),
        (lambda a: mix({"a/b": a}), ValueError, "but got 'a/b'"),
        (lambda a: mix({"a: b": a}), ValueError, "but got 'a: b'"),
        (lambda a: mix(cast("Any", {1: a})), ValueError, "but got 1"),
        (lambda a: mix(cast("Any", {"a": [1]})), TypeError, "the source 'a' must be a stream, but is a list"),
        (lambda a: mix({"a": a}, {"b": 1}), ValueError, "weights must name each source"),
        (lambda a: mix({"a": a}, by="token"), ValueError, "by must be 'rows' or 'tokens', but got 'token'"),
        (lambda a: mix({"a": a}, stop="last"), ValueError, "stop must be 'first' or 'all' or 'repeat', but got 'last'"),
        (lambda a: mix({"a": a}, seed=cast("Any", 1.0)), TypeError, "seed must be a whole number"),
        (lambda a: mix({"a": a}, seed=1 << 64), ValueError, "seed must be at most"),
        (lambda a: mix({"a": a}, seed=-1), ValueError, "seed must be at least 0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_read(
    tmp_path: Path, make: Callable[[Any], Stage], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        make(read_jsonl(write_jsonl(tmp_path / "a.jsonl", [1])))
    assert str(caught.value).startswith("mix: ") and text in str(caught.value)


def test_later_changes_of_the_arguments_change_nothing(tmp_path: Path) -> None:
    parts, weights = streams(tmp_path, rows_of({"a": 9, "b": 9})), {0: {"a": 1, "b": 1}}
    stream = mix(parts, weights)
    before = run(stream), repr(stream), stream.describe()
    del parts["a"]
    weights[0]["b"] = 0
    assert (run(stream), repr(stream), stream.describe()) == before


def test_print_shows_what_is_mixed(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 1, "b": 1}), "tokenize")
    stream = mix(parts, {0: {"a": 1, "b": 2}, 9: {"a": 1, "b": 0}}, by="tokens", stop="all", seed=3).pack(4)
    assert repr(stream) == (
        "mix(weights={0: {'a': 1.0, 'b': 2.0}, 9: {'a': 1.0, 'b': 0.0}}, by='tokens', stop='all', seed=3).pack(4)"
    )
    tree = str(mix(parts)).splitlines()
    assert [line.split("(")[0] for line in tree] == [
        "mix",
        "├─ a: tokenize",
        "│  └─ read_jsonl",
        "└─ b: tokenize",
        "   └─ read_jsonl",
    ]


def test_lineage_names_the_source(tmp_path: Path) -> None:
    parts = streams(tmp_path, rows_of({"a": 9, "b": 9, "c": 9}))
    inner = mix({"b": parts["b"], "c": parts["c"]}, stop="all")
    rows = mix({"a": parts["a"].shuffle(4), "in": inner}, stop="all").shuffle(5).open(Lane(0, 1), lineage=True)
    names = {"a": "a", "b": "in/b", "c": "in/c"}
    for row in rows:
        (origin,) = rows.origin()
        assert origin.source == names[names_in([row])] and origin.file.endswith(f"{names_in([row])}.jsonl")


@pytest.mark.parametrize("row", [{"text": "x"}, {"input_ids": 5}, "x", None])
def test_a_row_without_tokens_is_named_and_passed_over(tmp_path: Path, row: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1]}, row, {"input_ids": [2]}])
    rows = mix({"a": read_jsonl(path)}, by="tokens").open(Lane(0, 1))
    assert next(rows) == {"input_ids": [1]}
    with pytest.raises(
        BadRow, match=r"a row of 'a' has no 'input_ids' to count, in .*a\.jsonl, byte 19(.|\n)*tokenize"
    ):
        next(rows)
    after = mix({"a": read_jsonl(path)}, by="tokens").open(Lane(0, 1))
    after.load_state_dict(json.loads(saved(rows)))
    assert [*rows] == [*after] == [{"input_ids": [2]}]


def test_a_source_that_raises_loses_nothing_and_changes_no_choice(tmp_path: Path) -> None:
    failed: list[Any] = []

    def fail_once(row: Any) -> Any:
        if row["text"][:4] in ("1002", "1003", "2000") and row not in failed:
            failed.append(row)
            raise OSError(row["text"])
        return row

    parts = {name: part.map(fail_once) for name, part in streams(tmp_path, rows_of({"a": 9, "b": 9})).items()}
    stream = mix(parts, stop="all")
    rows = stream.open(Lane(0, 1))
    found: list[Any] = []
    while len(found) < 15:
        try:
            found.append(next(rows))
        except OSError as error:
            assert str(error) == failed[-1]["text"]
            rows, state = stream.open(Lane(0, 1)), saved(rows)
            rows.load_state_dict(json.loads(state))
    assert next(rows, TORN) is TORN and len(failed) == 3
    texts = sorted(row["text"] for row in found + failed)
    assert texts == sorted(row["text"] for part in rows_of({"a": 9, "b": 9}).values() for row in part)


def test_where_names_the_source(tmp_path: Path) -> None:
    rows = mix(streams(tmp_path, rows_of({"b": 3}))).open(Lane(0, 1))
    assert rows.where() == "the first row"
    next(rows)
    assert rows.where() == f"{tmp_path}/b.jsonl, byte 0 (source 'b')"


def broken(state: Any, path: str, value: Any) -> Any:
    *outer, last = path.split(".")
    inner = state
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return state


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rows", {}),
        ("rows.row", -1),
        ("rows.row", "1"),
        ("rows.sources", None),
        ("rows.sources.a", None),
        ("rows.sources.b", {}),
        ("rows.sources.b.rows", -1),
        ("rows.sources.b.owed", 0.5),
        ("rows.sources.b.ended", True),
        ("rows.sources.b.position", 3),
        ("rows.sources.b.position", {"anchor": {}}),
        ("rows.sources.c", {"passes": 0}),
        ("rows.behind", []),
        ("rows.behind.a", "x"),
        ("rows.behind.a", float("inf")),
        ("rows.longest", None),
        ("journal.mix", None),
        ("journal.mix.history", 5),
        ("journal.mix.reached.ends", [[0]]),
    ],
)
def test_a_position_that_is_none_is_refused_and_nothing_of_it_is_used(tmp_path: Path, path: str, value: Any) -> None:
    """Case 27."""
    parts = streams(tmp_path, rows_of({"a": 9, "b": 9}), "shuffle 4", "tokenize")
    stream = mix(parts, by="tokens", stop="all")
    state = json.loads(taken(stream, Lane(0, 1), 9)[1])
    rows = stream.open(Lane(0, 1))
    with pytest.raises(InvalidState):
        rows.load_state_dict(broken(state, path, value))
    assert [plain(row) for row in rows] == run(stream)


def test_a_position_is_not_loaded_after_rows_were_read(tmp_path: Path) -> None:
    stream = mix(streams(tmp_path, rows_of({"a": 9})))
    rows = stream.open(Lane(0, 1))
    state = rows.state_dict()
    rows.load_state_dict(state)
    next(rows)
    with pytest.raises(InvalidState, match="rows were read already"):
        rows.load_state_dict(state)


def test_of_two_positions_that_are_loaded_the_last_holds(tmp_path: Path) -> None:
    stream = mix(streams(tmp_path, rows_of({"a": 9, "b": 9}), "shuffle 4"), stop="all")
    states = [json.loads(taken(stream, Lane(0, 1), k)[1]) for k in (9, 4)]
    rows = stream.open(Lane(0, 1))
    for state in states:
        rows.load_state_dict(state)
    assert [*rows] == run(stream)[4:]


def test_a_closed_mix_can_still_tell_its_position(tmp_path: Path) -> None:
    rows = mix(streams(tmp_path, rows_of({"a": 9, "b": 9}))).open(Lane(0, 1))
    next(rows)
    rows.close()
    rows.close()
    assert json.loads(saved(rows))["rows"]["row"] == 1


@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_tokens_are_counted_by_source_where_rows_have_them(tmp_path: Path, by: str) -> None:
    """For ``unbroken state show``: however the mix is made, the position tells what each source gave."""

    def with_ids(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "input_ids": list(range(row["n"] % 4 + 1))}

    sources = {
        name: read_jsonl(write_jsonl(tmp_path / f"{name}.jsonl", [{"n": n, "of": name} for n in range(9)])).map(
            with_ids
        )
        for name in ("a", "b")
    }
    rows = mix(sources, {"a": 2, "b": 1}, by=by, stop="all", seed=1).open(Lane(0, 1))
    seen: Counter[str] = Counter()
    for _ in range(11):
        row = next(rows)
        seen[row["of"]] += len(row["input_ids"])
    found = {name: place["tokens"] for name, place in rows.state_dict()["rows"]["sources"].items()}
    assert found == seen
