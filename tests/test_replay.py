"""The batch of any step, made again from a position before it, and what is behind it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import IterableDataset, get_worker_info
from typer.testing import CliRunner

from unbroken import StatefulDataLoader, mix, read_jsonl
from unbroken.cli import app
from unbroken.errors import FactoryError, InvalidState, ReplayError, StateMismatch
from unbroken.replay import decoded, nearest, replay, step_of

Make = Callable[..., StatefulDataLoader[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of documents, ``w<number>x<place>`` each word, and a tokenizer that knows the words."""
    folder = tmp_path_factory.mktemp("replay")
    words = []
    for name, count in (("web", 300), ("code", 150)):
        texts = [[f"{name}{number}x{place}" for place in range(number % 9 + 1)] for number in range(count)]
        words += [word for text in texts for word in text]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": " ".join(text)}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def packed(folder: Path) -> Make:
    def make(dp_rank: int | None = None, dp_world_size: int | None = None) -> StatefulDataLoader[Any]:
        sources = {name: read_jsonl(str(folder / f"{name}.jsonl")).shuffle(9, seed=2) for name in ("web", "code")}
        stream = mix(sources, {"web": 2, "code": 1}, seed=1).tokenize(str(folder / "tokenizer.json")).pack(16)
        return StatefulDataLoader(stream, batch_size=2, lanes=4, seed=5, dp_rank=dp_rank, dp_world_size=dp_world_size)

    return make


def shuffled(**options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(range(42), batch_size=4, shuffle=True, seed=3, num_workers=2, **options)  # type: ignore[arg-type]


class Dealt(IterableDataset[int]):
    """The numbers below 90, dealt to the lanes."""

    size = 90

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(info.id, self.size, info.num_workers) if info else range(self.size)


def dealt(**options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Dealt(), batch_size=3, lanes=2, seed=3, **options)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return torch.equal(one, other)


def run(make: Make, steps: int, ranks: int = 1) -> tuple[list[list[Any]], list[dict[str, str]]]:
    """The batches of each rank, and the position before each step."""
    batches: list[list[Any]] = []
    positions: list[dict[str, str]] = [{} for _ in range(steps)]
    for rank in range(ranks):
        loader = make(dp_rank=rank, dp_world_size=ranks) if ranks > 1 else make()
        taken, iterator = [], iter(loader)
        while len(taken) < steps:
            positions[len(taken)] |= loader.state_dict()
            try:
                taken.append(next(iterator))
            except StopIteration:
                iterator = iter(loader)
        loader.close()
        batches.append(taken)
    return batches, positions


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["packed", "shuffled", "dealt"])
def test_every_step_is_made_again_from_every_position_before_it(kind: str, ranks: int, folder: Path) -> None:
    make: Make = {"packed": packed(folder), "shuffled": shuffled, "dealt": dealt}[kind]
    steps = 14
    batches, positions = run(make, steps, ranks)
    for step in (0, 1, 8, 13):
        for position in (None, positions[0], positions[step // 2], positions[step]):
            found = replay(make, position, step, ranks=ranks if position is None else None)
            assert [(part.rank, part.ranks, part.step) for part in found] == [(r, ranks, step) for r in range(ranks)]
            assert all(equal(part.batch, batches[part.rank][step]) for part in found)


def test_the_epoch_of_a_step_is_told(folder: Path) -> None:
    assert [replay(shuffled, None, step)[0].epoch for step in (0, 10, 11, 21, 22)] == [0, 0, 1, 1, 2]


def test_a_step_that_was_left_out_is_made_all_the_same() -> None:
    (batches,), _ = run(shuffled, 9)
    loader = shuffled()
    loader.skip(range(3, 7))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    position = loader.state_dict()
    assert step_of(position) == 3
    for step in range(3, 9):
        assert equal(replay(shuffled, position, step)[0].batch, batches[step])


class Epochs(Dealt):
    """Other numbers in each epoch."""

    size, epoch = 30, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (number + 1000 * self.epoch for number in super().__iter__())


def test_where_the_loop_sets_epochs_only_steps_of_that_of_the_position_are_made() -> None:
    def make() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(Epochs(), batch_size=3, seed=3)

    loader, positions, batches = make(), [], []
    for epoch in range(2):
        loader.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in loader:
            batches.append(batch)
            positions.append(loader.state_dict())
    assert equal(replay(make, positions[11], 15)[0].batch, batches[15])
    with pytest.raises(ReplayError, match=r"(?s)set_epoch.*later epoch"):
        replay(make, positions[4], 12)
    with pytest.raises(ReplayError, match=r"(?s)set_epoch.*between two epochs"):
        replay(make, loader.state_dict(), 25)


@pytest.mark.parametrize("kind", ["packed", "dealt"])
def test_ranks_are_not_taken_over_the_end_of_an_epoch_that_they_may_have_ended_together(
    kind: str, folder: Path
) -> None:
    make: Make = packed(folder) if kind == "packed" else dealt
    with pytest.raises(ReplayError, match=r"Rank \d of 2 comes to the end of its data after step \d+"):
        replay(make, None, 60, ranks=2, only=[0])


def test_what_a_factory_leaves_out_is_left_out_but_the_step_itself() -> None:
    def leaving_out() -> StatefulDataLoader[Any]:
        loader = shuffled()
        loader.skip(range(4, 6))
        return loader

    (batches,), _ = run(shuffled, 9)
    assert [equal(replay(leaving_out, None, step)[0].batch, batches[step]) for step in range(9)] == [True] * 9


def test_bad_batches_in_what_was_left_out_took_their_steps() -> None:
    def make() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(Faulty(range(40)), batch_size=4, seed=1, on_error="skip")  # type: ignore[arg-type]

    loader = make()
    batches = iter(loader)
    first = next(batches)
    loader.skip(range(1, 4))
    position = loader.state_dict()
    delivered = [first, *batches]
    assert [batch.tolist() for batch in delivered[:2]] == [[0, 1, 2, 3], [16, 18, 19]]
    assert equal(replay(make, position, 4)[0].batch, delivered[1])
    assert equal(replay(make, position, 6)[0].batch, delivered[3])


def test_without_a_position_and_a_seed_no_step_can_be_made() -> None:
    with pytest.raises(ReplayError, match=r"(?s)no seed.*Name a checkpoint"):
        replay(lambda: StatefulDataLoader(range(40), shuffle=True), None, 3)  # type: ignore[arg-type]


def test_a_loader_that_gives_lineage_gives_it_here_too(folder: Path) -> None:
    def make() -> StatefulDataLoader[Any]:
        loader = packed(folder)()
        return StatefulDataLoader(loader.dataset, batch_size=2, lanes=4, seed=5, lineage=True)

    (part,) = replay(make, None, 3)
    assert part.batch["lineage"] == list(part.rows)


def test_the_rows_of_a_map_style_dataset_are_its_indices() -> None:
    (part,) = replay(shuffled, None, 12)
    assert [origin.row for (origin,) in part.rows] == part.batch.tolist()
    assert part.rows[0][0].source == "range"


def test_the_rows_and_texts_of_a_stream_are_those_of_its_files(folder: Path) -> None:
    (part,) = replay(packed(folder), None, 7)
    assert len(part.rows) == 2
    for behind, texts in zip(part.rows, decoded(part), strict=True):
        assert len(behind) == len(texts) > 0
        for origin, text in zip(behind, texts, strict=True):
            with open(origin.file, "rb") as file:
                file.seek(int(origin.row))
                stored = json.loads(file.readline())["text"].split()
            assert origin.file == str(folder / f"{origin.source}.jsonl")
            assert text.split() == stored[origin.start : origin.stop]


def test_steps_of_many_epochs_after_the_position_are_made(folder: Path) -> None:
    (batches,), positions = run(shuffled, 60)
    for step in (12, 23, 44, 59):
        for position in (None, positions[3]):
            (part,) = replay(shuffled, position, step)
            assert equal(part.batch, batches[step])
            assert part.epoch == step // 11


class Faulty(list[int]):
    """Its items 8 to 11 and 17 fail."""

    def __getitem__(self, index: Any) -> Any:
        if 8 <= index < 12 or index == 17:
            raise OSError("bad")
        return super().__getitem__(index)


def test_samples_that_were_left_out_are_no_rows_and_batches_of_them_no_steps() -> None:
    def skipping() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(Faulty(range(24)), batch_size=4, on_error="skip")  # type: ignore[arg-type]

    batches = list(skipping())
    for step in range(5):
        (part,) = replay(skipping, None, step)
        assert equal(part.batch, batches[step])
        assert [origin.row for (origin,) in part.rows] == part.batch.tolist()


def test_loaders_that_know_no_ranks_are_made_again_rank_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of torch.distributed has a leaf of its own then."""

    def drawn(rank: int = 0) -> StatefulDataLoader[Any]:
        torch.manual_seed(rank)
        return StatefulDataLoader(range(40), batch_size=4, shuffle=True)  # type: ignore[arg-type]

    state: dict[str, str] = {}
    expected = []
    for rank in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("unbroken.loader.distributed_rank", lambda rank=rank: (rank, 2))
            loader = drawn(rank)
            iterator = iter(loader)
            for _ in range(2):
                next(iterator)
            state |= loader.state_dict()
            expected.append([next(iterator).tolist() for _ in range(3)][-1])
    assert [part.batch.tolist() for part in replay(drawn, state, 4)] == expected
    del state["rank-0001"]
    assert replay(drawn, state, 4, only=[0])[0].batch.tolist() == expected[0]
    with pytest.raises(ReplayError, match="rank-0001"):
        replay(drawn, state, 4)


def test_what_cannot_be_made_again_is_named(folder: Path) -> None:
    make = packed(folder)
    _, positions = run(make, 5, ranks=2)
    with pytest.raises(ReplayError, match="at step 4, and step 2 lies before it"):
        replay(make, positions[4], 2)
    with pytest.raises(ReplayError, match="no rank 2 among 2"):
        replay(make, positions[4], 4, only=[2])
    with pytest.raises(ReplayError, match="takes no dp_rank and dp_world_size"):
        replay(lambda: make(), positions[4], 4)
    with pytest.raises(ReplayError, match=r"of type builtins\.list"):
        replay(list, None, 4)  # type: ignore[arg-type]
    with pytest.raises(StateMismatch, match="another kind"):
        replay(shuffled, positions[4], 4)
    with pytest.raises(InvalidState):
        replay(make, {"loader": "{}"}, 4)
    header = json.loads(positions[4]["unbroken"])
    for at in (None, [1, 2], [0, "x", 2]):
        with pytest.raises(InvalidState, match="at which step"):
            replay(make, {**positions[4], "unbroken": json.dumps({**header, "at": at})}, 4)
    with pytest.raises(FactoryError, match="raised ZeroDivisionError"):
        replay(lambda: 1 // 0, None, 4)  # type: ignore[arg-type, return-value]
    with pytest.raises(FactoryError, match="ended the program"):
        replay(lambda: sys.exit(3), None, 4)  # type: ignore[arg-type, return-value]


def test_a_loader_without_batches_has_no_steps() -> None:
    with pytest.raises(ReplayError, match="There is no step 0"):
        replay(lambda: StatefulDataLoader(range(3), batch_size=4, drop_last=True), None, 0)  # type: ignore[arg-type]


def test_the_nearest_position_is_the_latest_that_is_not_beyond_the_step() -> None:
    _, positions = run(shuffled, 9)
    named = {f"step-{step}": positions[step] for step in (2, 5, 8)}
    assert [nearest(named, step) for step in (2, 4, 5, 7, 8, 99)] == ["step-2"] * 2 + ["step-5"] * 2 + ["step-8"] * 2
    with pytest.raises(ReplayError, match=r"Step 1 lies before every position there is \(step-2 at step 2"):
        nearest(named, 1)


def test_ids_without_a_tokenizer_and_batches_without_ids_are_not_decoded(folder: Path) -> None:
    with pytest.raises(ReplayError, match="--tokenizer"):
        decoded(replay(shuffled, None, 1)[0])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with pytest.raises(ReplayError, match="no input_ids"):
        decoded(replay(shuffled, None, 1)[0], tokenizer)


# ---- the command

runner = CliRunner()


@pytest.fixture(scope="module")
def program(folder: Path) -> str:
    """A file with a function that makes the loader of the stream above, for two ranks or one."""
    path = folder / "replayed_program.py"
    path.write_text(
        f"""
from unbroken import StatefulDataLoader, read_jsonl

def make(dp_rank=0, dp_world_size=1):
    stream = read_jsonl({str(folder / "web.jsonl")!r}).shuffle(9, seed=2)
    stream = stream.tokenize({str(folder / "tokenizer.json")!r}).pack(16)
    return StatefulDataLoader(stream, batch_size=2, lanes=4, seed=5, dp_rank=dp_rank, dp_world_size=dp_world_size)

def plain():
    return StatefulDataLoader(range(40), batch_size=4, shuffle=True, seed=3)
"""
    )
    return f"{path}:make"


def test_the_command_prints_what_is_behind_a_batch(program: str, folder: Path, tmp_path: Path) -> None:
    from unbroken.factories import load_factory

    batches, positions = run(load_factory(program), 9, ranks=2)
    for step in (0, 4):
        torch.save({"loader": positions[step]}, tmp_path / f"step-{step}.pt")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    made = tmp_path / "out" / "made.pt"
    command = ["replay", program, "--checkpoint", str(tmp_path), "--step", "6", "--decode"]
    result = runner.invoke(app, [*command, "--json", "--save", str(made)])
    assert result.exit_code == 0, result.output
    parts = json.loads(result.stdout)
    assert [(part["rank"], part["ranks"], part["step"]) for part in parts] == [(0, 2, 6), (1, 2, 6)]
    origin = parts[0]["rows"][0][0]
    assert origin["source"] == "read_jsonl"
    assert origin["text"].startswith("web")
    saved = torch.load(made, weights_only=True)
    assert [equal(batch, batches[rank][6]) for rank, batch in enumerate(saved)] == [True, True]
    shown = runner.invoke(app, [*command, "--rank", "1"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    assert "step 6, epoch 0, rank 1 of 2" in shown.stdout
    assert "step-4.pt" in shown.stdout
    assert str(parts[1]["rows"][0][0]["row"]) in shown.stdout


def test_the_command_puts_the_files_of_ranks_together(program: str, tmp_path: Path) -> None:
    from unbroken.factories import load_factory

    make = load_factory(program)
    (_, batches), positions = run(make, 7, ranks=2)
    for step in (2, 4):
        for rank in range(2):
            own = {f"lane-{lane:06d}" for lane in range(rank, 4, 2)} | {"unbroken"}
            state = {name: text for name, text in positions[step].items() if name in own}
            (tmp_path / f"step-{step}-rank-{rank}.json").write_text(json.dumps(state))
    (tmp_path / "found.json").write_text(json.dumps({"versions": {"unbroken": "0.1.0"}}))
    files = [f"--checkpoint={tmp_path / f'step-4-rank-{rank}.json'}" for rank in range(2)]
    for given in (files, [f"--checkpoint={tmp_path}"]):
        made = tmp_path / "made.pt"
        result = runner.invoke(app, ["replay", program, "--step", "6", *given, "--rank", "1", "--save", str(made)])
        assert result.exit_code == 0, result.output
        assert "step-4-rank-1.json" in result.output.replace("\n", "")
        assert "--decode" in result.output
        assert equal(torch.load(made, weights_only=True)[0], batches[6])
        made.unlink()


def test_the_command_shows_batches_of_other_datasets_too(program: str) -> None:
    result = runner.invoke(app, ["replay", program.replace(":make", ":plain"), "--step", "3"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "step 3, epoch 0" in result.stdout
    assert "range" in result.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["nowhere:make", "--step", "3"], "cannot be imported"),
        (["PROGRAM", "--step", "3", "--checkpoint", "nowhere.pt"], "nowhere.pt"),
        (["PROGRAM", "--step", "3", "--tokenizer", "nowhere.json"], "no tokenizer"),
        (["PROGRAM", "--step", "3", "--rank", "4"], "no rank 4 among 1"),
    ],
)
def test_the_command_says_why_it_could_not(options: list[str], text: str, program: str) -> None:
    result = runner.invoke(app, ["replay", *(program if option == "PROGRAM" else option for option in options)])
    assert result.exit_code == 2, result.output
    assert "The batch could not be made." in result.output
    assert text in result.output
