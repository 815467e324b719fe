"""examples/train.py as a user runs it: a process of its own, stopped, resumed, refused.

What it makes of ``--data`` is in test_examples_data.py.
"""

from __future__ import annotations

import ast
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import unbroken
from unbroken.demo.corpus import train_tokenizer, write_corpus
from unbroken.demo.verdict import compare_digests, compare_losses, read_log

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ("--batch-size=4", "--seq-len=64", "--lanes=4", "--window=16", "--width=32", "--layers=1", "--heads=2")
STEPS = range(4, 7)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options that name a corpus and its tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    write_corpus(folder / "corpus.jsonl", 400_000)
    train_tokenizer(folder / "corpus.jsonl", folder / "tokenizer.json", 512)
    return f"--data={folder / 'corpus.jsonl'}", f"--tokenizer={folder / 'tokenizer.json'}"


def command(text: tuple[str, ...], out: Path, *more: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / "train.py"), *text, *SMALL, f"--out={out}", "--save-every=3", *more]


def train(text: tuple[str, ...], out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(text, out, *more), capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def reference(text: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 6 steps that never stopped, with checkpoints of steps 3 and 6."""
    out = tmp_path_factory.mktemp("reference")
    done = train(text, out, "--steps=6", "--workers=0")
    assert done.returncode == 0, done.stderr
    assert "done at step 6" in done.stdout
    return out


@pytest.fixture
def stopped_at_3(reference: Path, tmp_path: Path) -> Path:
    """The folder as a kill in the midst of writing leaves it: the newest checkpoint and the log lack their ends."""
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    (out / "step-000006" / ".metadata").unlink()
    log = out / "log-rank0.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    return out


def test_a_resumed_run_has_the_losses_and_batches_of_the_run_that_never_stopped(
    text: tuple[str, ...], reference: Path, stopped_at_3: Path
) -> None:
    done = train(text, stopped_at_3, "--steps=6", "--resume", "--workers=2", "--async-save")
    assert done.returncode == 0, done.stderr
    assert f"resumed from {stopped_at_3 / 'step-000003'}\n" in done.stdout
    was, now = read_log(reference / "log-rank0.jsonl"), read_log(stopped_at_3 / "log-rank0.jsonl", 3)
    assert sorted(now) == list(STEPS)
    for check in (compare_losses("losses", was, now, STEPS), compare_digests("batches", was, now, STEPS)):
        assert check.passed, check.found
    assert (stopped_at_3 / "step-000006" / ".metadata").exists()


def test_without_the_place_of_the_data_every_batch_and_loss_differs(
    text: tuple[str, ...], reference: Path, stopped_at_3: Path
) -> None:
    done = train(text, stopped_at_3, "--steps=6", "--resume", "--skip-loader-state")
    assert done.returncode == 0, done.stderr
    assert "WITHOUT the data's place" in done.stdout
    was, now = read_log(reference / "log-rank0.jsonl"), read_log(stopped_at_3 / "log-rank0.jsonl", 3)
    for check in (compare_losses("losses", was, now, STEPS), compare_digests("batches", was, now, STEPS)):
        assert check.found.startswith("3 of 3 differ")


def test_steps_that_are_left_out_stay_left_out_when_the_run_is_resumed(
    text: tuple[str, ...], reference: Path, stopped_at_3: Path
) -> None:
    for steps in ("--steps=4", "--steps=5"):
        done = train(text, stopped_at_3, steps, "--resume", "--skip=3:4")
        assert done.returncode == 0, done.stderr
    was, now = read_log(reference / "log-rank0.jsonl"), read_log(stopped_at_3 / "log-rank0.jsonl")
    assert [now[step].rows for step in (4, 5)] == [was[step].rows for step in (5, 6)]


MIX = """
import unbroken

def make():
    sources = {"table": unbroken.read_parquet("rows.parquet").repeat(), "lines": unbroken.read_jsonl("corpus.jsonl")}
    return unbroken.mix(sources, {"table": 0.5, "lines": 0.5})
"""


@pytest.mark.parametrize("kind", ["a mix that a function returns", "a file of tokens"])
def test_other_data_goes_on_in_another_number_of_workers(kind: str, text: tuple[str, ...], tmp_path: Path) -> None:
    if kind == "a file of tokens":
        np.random.default_rng(0).integers(0, 500, 60_000).astype(np.uint16).tofile(tmp_path / "raw.bin")
        data = [f"--data={tmp_path / 'raw.bin'}", "--dtype=uint16", "--vocab-size=500"]
    else:
        table = pa.table({"text": [f"{number} is not {number + 1}. " * 9 for number in range(200)]})
        pq.write_table(table, tmp_path / "rows.parquet", row_group_size=20)
        corpus = text[0].removeprefix("--data=")
        (tmp_path / "the_mix.py").write_text(MIX.replace("corpus", corpus[:-6]).replace("rows.", f"{tmp_path}/rows."))
        data = [f"--data={tmp_path / 'the_mix.py'}:make", text[1]]
    options = (tmp_path / "run", "--steps=4", "--save-every=2")
    first = train(tuple(data), *options)
    assert first.returncode == 0, first.stderr
    (tmp_path / "run" / "step-000004" / ".metadata").unlink()
    second = train(tuple(data), *options, "--resume", "--workers=2")
    assert second.returncode == 0, second.stderr
    was, now = (read_log(tmp_path / "run" / "log-rank0.jsonl", start) for start in (0, 2))
    for check in (compare_losses("losses", was, now, [3, 4]), compare_digests("batches", was, now, [3, 4])):
        assert check.passed, check.found


def test_to_resume_where_there_is_no_checkpoint_is_refused(text: tuple[str, ...], tmp_path: Path) -> None:
    done = train(text, tmp_path, "--resume")
    assert done.returncode == 1
    assert f"{tmp_path} has no complete checkpoint" in done.stderr


def test_to_start_anew_over_a_run_is_refused(text: tuple[str, ...], reference: Path) -> None:
    done = train(text, reference)
    assert done.returncode == 1
    assert f"{reference} holds a run already: pass --resume to go on from {reference / 'step-000006'}" in done.stderr


def test_ctrl_c_ends_the_run_after_the_step_under_way_with_a_checkpoint(text: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--steps=1000000", "--workers=1", "--async-save")
    with subprocess.Popen(command(text, tmp_path, *options), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step      2 "))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    last = max(read_log(tmp_path / "log-rank0.jsonl"))
    assert process.returncode == 130
    newest = tmp_path / f"step-{last:06d}"
    assert f"stopped by SIGINT at step {last}; newest checkpoint: {newest}\n" in output
    assert (newest / ".metadata").exists()


def test_the_help_explains_how_to_resume() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train.py"), "--help"], capture_output=True, text=True, timeout=100, check=True
    )
    for word in (
        "torchrun",
        "--resume",
        "--async-save",
        "--skip-loader-state",
        "Ctrl-C",
        "Parquet",
        "FILE.py:FUNCTION",
    ):
        assert word in done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_use_public_names_only(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    for part in ast.walk(tree):
        if isinstance(part, ast.ImportFrom):
            assert (part.module or "").split(".")[0] != "unbroken", "import unbroken, and name what is public in it"
        elif isinstance(part, ast.Import):
            assert all(alias.name == "unbroken" or not alias.name.startswith("unbroken.") for alias in part.names)
        elif isinstance(part, ast.Attribute) and ast.unparse(part.value) == "unbroken":
            assert part.attr in unbroken.__all__
