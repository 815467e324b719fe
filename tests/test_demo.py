"""The demo: its verdict on recorded logs, its processes, and the whole with an imitated and with the real trainer.

The imitated trainer follows the same options and writes the same logs without a model, so what the demo makes of good
and of bad runs is seen in seconds. Data of the user's is in test_demo_data.py.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from unbroken.demo import DemoError, Plan, find_trainer, run_demo
from unbroken.demo.corpus import END_OF_TEXT, train_tokenizer, write_corpus
from unbroken.demo.processes import TrainingRun
from unbroken.demo.verdict import Check, Line, Log, compare_digests, compare_losses, compare_rows, read_log

STEPS = range(16, 31)

# Rows are named by their place. `--workers=2` is the run that is to be killed: after step 6 it does nothing but wait
# for it, so no test depends on who is faster.
IMITATION = """
import json, os, pathlib, signal, sys
options = dict(option.lstrip("-").split("=") for option in sys.argv[1:] if "=" in option)
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
(out / "options.json").write_text(json.dumps(sys.argv[1:]))
start = max(int(p.parent.name[5:]) for p in out.glob("step-*/.metadata")) if "--resume" in sys.argv else 0
behind = start if "--skip-loader-state" in sys.argv else 0
with open(out / f"log-rank{rank}.jsonl", "a") as log:
    for step in range(start + 1, int(options["steps"]) + 1):
        rows = [f"row-{4 * (step - behind) + i}" for i in range(rank, 4, world)]
        line = {"step": step, "start": start, "loss_hex": (8 - (step - behind) / 64).hex()}
        print(json.dumps(line | {"digest": "+".join(rows), "rows": rows}), file=log, flush=True)
        if step % int(options["save-every"]) == 0 and world == 1:
            (out / f"step-{step:06d}").mkdir(exist_ok=True)
            (out / f"step-{step:06d}" / ".metadata").touch()
        if step == 6 and options["workers"] == "2":
            signal.pause()
"""


def a_log(steps: range = range(1, 31)) -> Log:
    return {step: Line(step, (8 - step / 64).hex(), f"digest-{step}", (f"{step}-a", f"{step}-b")) for step in steps}


def a_plan(tmp_path: Path, trainer: Path) -> Plan:
    return Plan(tmp_path / "out", trainer, steps=8, save_every=2, restore=4, kill_at=6, corpus_bytes=120_000)


@pytest.fixture
def imitation(tmp_path: Path) -> Path:
    path = tmp_path / "imitation.py"
    path.write_text(IMITATION)
    return path


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200, record=True)


# --- The verdict -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compare", [compare_losses, compare_digests])
def test_equal_logs_pass(compare: Callable[..., Check]) -> None:
    check = compare("what", a_log(), a_log(), STEPS)
    assert check.passed
    assert check.steps == "16 to 30"
    assert check.found.startswith("15 of 15")


def test_one_loss_that_differs_in_its_last_bit_fails_and_is_named() -> None:
    other = a_log()
    other[20] = replace(other[20], loss_hex="0x1.ec00000000001p+2")
    check = compare_losses("what", a_log(), other, STEPS)
    assert not check.passed
    assert "1 of 15 differ; first, step 20: 7.687500 (0x1.ec00000000001p+2)" in check.found


def test_one_digest_that_differs_fails_and_is_named() -> None:
    other = a_log()
    other[30] = replace(other[30], digest="another")
    check = compare_digests("what", a_log(), other, STEPS)
    assert not check.passed
    assert check.found == "1 of 15 differ; first, step 30: digest another, not digest-30"


def test_what_lies_outside_the_compared_steps_does_not_count() -> None:
    other = a_log()
    other[15] = replace(other[15], digest="another", loss_hex="0x0p+0")
    assert compare_losses("what", a_log(), other, STEPS).passed
    assert compare_digests("what", a_log(), other, STEPS).passed


@pytest.mark.parametrize("compare", [compare_losses, compare_digests])
def test_a_step_that_either_log_lacks_fails(compare: Callable[..., Check]) -> None:
    assert "step 30: not in the log of other" in compare("what", a_log(), a_log(range(30)), STEPS).found
    assert "step 16: not in the log of reference" in compare("what", {}, a_log(), STEPS).found


def test_no_steps_at_all_prove_nothing() -> None:
    for check in (compare_losses("what", {}, {}, []), compare_rows("what", {}, [{}], [])):
        assert not check.passed
        assert check.found == "nothing was compared"


def on_ranks(first: Callable[[int], tuple[str, ...]], second: Callable[[int], tuple[str, ...]]) -> list[Log]:
    """The logs of two ranks, given their rows of each step."""
    return [{step: replace(line, rows=rows(step)) for step, line in a_log().items()} for rows in (first, second)]


def test_the_rows_of_all_ranks_together_count_in_any_order() -> None:
    ranks = on_ranks(lambda step: (f"{step}-b",), lambda step: (f"{step}-a",))
    assert compare_rows("what", a_log(), ranks, STEPS).passed


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda step: (f"{step}-a",), lambda step: (f"{step}-a",)),  # one twice, one not at all
        (lambda step: (f"{step}-a", f"{step}-b"), lambda step: (f"{step}-b",)),  # one twice
        (lambda step: (f"{step}-a",), lambda step: ()),  # one not at all
        (lambda step: (f"{step}-a",), lambda step: (f"{step - 1}-b",)),  # one a step too late
    ],
)
def test_a_row_lost_repeated_or_in_another_step_fails(
    first: Callable[[int], tuple[str, ...]], second: Callable[[int], tuple[str, ...]]
) -> None:
    assert not compare_rows("what", a_log(), on_ranks(first, second), STEPS).passed


def test_a_rank_without_a_log_fails() -> None:
    check = compare_rows("what", a_log(), [a_log(), {}], STEPS)
    assert "15 of 15 differ; first, step 16: not in the log of rank 1" in check.found


def test_a_log_is_read_up_to_the_line_that_a_kill_left_unfinished(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [{"step": step, "start": 0, "loss_hex": "0x1p+0", "digest": "d", "rows": ["r"]} for step in (1, 2, 3)]
    path.write_text("\n".join(map(json.dumps, lines))[:-20])
    assert list(read_log(path)) == [1, 2]
    assert read_log(tmp_path / "none.jsonl") == {}


def test_of_a_log_with_several_starts_each_can_be_had(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [
        {"step": step, "start": start, "loss_hex": "0x1p+0", "digest": f"from {start}", "rows": []}
        for step, start in [(15, 0), (16, 0), (16, 15), (17, 15)]
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_log(path, 0)[16].digest == "from 0"
    assert {step: line.digest for step, line in read_log(path, 15).items()} == {16: "from 15", 17: "from 15"}


# --- Corpus and tokenizer ----------------------------------------------------------------------------------------


def test_the_corpus_is_source_text_in_an_order_of_its_own_and_of_the_size_asked_for(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    count = write_corpus(first, 200_000)
    assert write_corpus(second, 200_000) == count
    assert first.read_bytes() == second.read_bytes()
    rows = [json.loads(line) for line in first.read_text("utf-8").splitlines()]
    assert len(rows) == count
    assert first.stat().st_size >= 200_000
    assert all(row["path"].endswith(".py") and row["text"].strip() for row in rows)


def test_a_python_without_its_sources_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("x = 1\n")
    with pytest.raises(DemoError, match="comes with its sources"):
        write_corpus(tmp_path / "corpus.jsonl", 200_000, root=tmp_path)


def test_the_tokenizer_gives_every_text_back_and_knows_the_end_of_a_document(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"def f{i}(): return {i}"}) + "\n" for i in range(50)))
    assert train_tokenizer(corpus, tmp_path / "tokenizer.json", 300) <= 300
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Grüße, 世界: def f7(): return \x00"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(END_OF_TEXT) == 0


# --- Processes ---------------------------------------------------------------------------------------------------


def test_a_trainer_that_is_not_there_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"nowhere\.py\n.*--trainer PATH"):
        find_trainer(tmp_path / "nowhere.py")


def test_the_trainer_of_the_checkout_is_found() -> None:
    assert find_trainer() == Path(__file__).parent.parent / "examples" / "train.py"


def test_a_run_that_fails_shows_the_end_of_its_output(tmp_path: Path) -> None:
    trainer = tmp_path / "fails.py"
    trainer.write_text("print('first words')\nraise SystemExit('the reason')\n")
    with (
        TrainingRun(trainer, tmp_path / "out", ()).start() as running,
        pytest.raises(DemoError, match=r"exit code 1\.\n(.*\n)*first words\nthe reason"),
    ):
        running.watch(lambda step, loss: None)


def test_the_report_that_torchrun_ends_with_does_not_hide_the_reason(tmp_path: Path) -> None:
    trainer = tmp_path / "fails.py"
    noise = "E1201 torch/distributed/elastic/multiprocessing/api.py:1002] failed"
    trainer.write_text(f"print('the reason')\nprint({noise!r})\nprint(50 * 'a line\\n')\nraise SystemExit(1)\n")
    with (
        TrainingRun(trainer, tmp_path / "out", ()).start() as running,
        pytest.raises(DemoError, match=r"ends with\n\nthe reason$"),
    ):
        running.watch(lambda step, loss: None)


def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    trainer = tmp_path / "waits.py"
    os.mkfifo(tmp_path / "started")
    trainer.write_text(
        "import os, pathlib, signal\n"
        f"pathlib.Path({str(tmp_path / 'started')!r}).write_text(str(os.getpid()))\n"
        "signal.pause()\n"
    )
    training = TrainingRun(trainer, tmp_path / "out", ())
    with pytest.raises(KeyboardInterrupt), training.start():
        process = int((tmp_path / "started").read_text())
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_run_that_ended_before_the_kill_says_so(tmp_path: Path) -> None:
    trainer = tmp_path / "ends.py"
    trainer.write_text("")
    with TrainingRun(trainer, tmp_path / "out", ()).start() as running:
        assert running.watch(lambda step, loss: None, until=3) is False
        assert running.kill() is False


# --- The whole ---------------------------------------------------------------------------------------------------


def test_a_kill_that_would_prove_nothing_is_refused(tmp_path: Path, imitation: Path) -> None:
    plan = a_plan(tmp_path, imitation)
    for wrong in (4, 8):
        with pytest.raises(DemoError, match=f"between 5 and 7, but kill_at is {wrong}"):
            replace(plan, kill_at=wrong)
    with pytest.raises(DemoError, match="restore=3 with save_every=2"):
        replace(plan, restore=3)


def test_the_kill_is_drawn_from_the_steps_after_the_checkpoint(tmp_path: Path, imitation: Path) -> None:
    plan = replace(a_plan(tmp_path, imitation), steps=30, restore=14, kill_at=None)
    assert {plan.draw_kill() for _ in range(1000)} == set(range(15, 29))


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path, imitation: Path, console: Console) -> None:
    plan = a_plan(tmp_path, imitation)
    plan.out.mkdir()
    (plan.out / "thesis.txt").write_text("years of work")
    with pytest.raises(DemoError, match="--out"):
        run_demo(plan, console)
    assert (plan.out / "thesis.txt").read_text() == "years of work"


def test_runs_that_go_on_exactly_pass(tmp_path: Path, imitation: Path, console: Console) -> None:
    plan = a_plan(tmp_path, imitation)
    assert run_demo(plan, console)
    shown = console.export_text()
    assert "SIGKILL after step 6; checkpoints after step 4 deleted: 6" in shown
    assert "Exact." in shown
    assert "DIFFERS" not in shown
    assert (plan.out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert str(plan.out / "losses.png") in shown
    assert list(plan.out.glob("?/step-*")) == []


def test_runs_that_lose_their_place_fail_and_their_checkpoints_stay(
    tmp_path: Path, imitation: Path, console: Console
) -> None:
    plan = replace(a_plan(tmp_path, imitation), skip_loader_state=True)
    assert not run_demo(plan, console)
    shown = console.export_text()
    assert "Not exact. 3 of 5 comparisons differ." in shown
    assert list(plan.out.glob("b/step-000004"))


SMALL = ("--batch-size=4", "--seq-len=64", "--lanes=4", "--window=16", "--width=32", "--layers=1", "--heads=2")


def the_real_thing(tmp_path: Path) -> Plan:
    # Many steps and an early kill: the run is far from its end when the kill comes.
    return Plan(
        tmp_path / "out",
        find_trainer(),
        steps=60,
        save_every=2,
        restore=2,
        kill_at=3,
        corpus_bytes=800_000,
        vocab_size=512,
        options=SMALL,
    )


def test_the_real_trainer_goes_on_exactly(tmp_path: Path, console: Console) -> None:
    assert run_demo(the_real_thing(tmp_path), console), console.export_text()


@pytest.mark.slow
def test_the_real_trainer_without_the_place_of_its_data_fails(tmp_path: Path, console: Console) -> None:
    assert not run_demo(replace(the_real_thing(tmp_path), skip_loader_state=True), console)
    assert "Not exact. 3 of 5 comparisons differ." in console.export_text()
