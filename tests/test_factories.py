"""Functions that are named on a command line: found, or an error that says why not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from unbroken.errors import FactoryError
from unbroken.factories import accepted, call_factory, load_factory


@pytest.fixture(autouse=True)
def path_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before, known = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = before
    for name in set(sys.modules) - known:
        del sys.modules[name]


def test_a_function_is_found_in_a_file_and_in_a_module_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "one_program.py").write_text("def make():\n    return 3\n\nclass Of:\n    make = staticmethod(make)\n")
    for name in ("one_program:make", f"{tmp_path / 'one_program.py'}:make", "one_program.py:Of.make"):
        assert load_factory(name)() == 3


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("", "two_program", "names no function"),
        ("", "two_program.py:", "names no function"),
        ("", "nowhere.py:make", "no file nowhere.py"),
        ("", "nowhere:make", "cannot be imported: ModuleNotFoundError"),
        ("make = 3", "two_program.py:make", "is of type int"),
        ("", "two_program.py:make", "has no 'make'"),
        ("1 / 0", "two_program.py:make", "cannot be imported: ZeroDivisionError"),
        ("import sys; sys.exit(4)", "two_program.py:make", r"(?s)ends the program .* 4.*__main__"),
    ],
)
def test_what_cannot_be_found_is_named(text: str, name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "two_program.py").write_text(text)
    with pytest.raises(FactoryError, match=told):
        load_factory(name)


def test_a_file_is_not_taken_for_another_module_of_its_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "three_program.py").write_text(f"def make():\n    return {folder!r}\n")
    assert load_factory("a/three_program.py:make")() == "a"
    with pytest.raises(FactoryError, match=r"(?s)another module 'three_program', in .*a/three_program.*another name"):
        load_factory("b/three_program.py:make")
    (tmp_path / "queue.py").write_text("def make(): ...")
    with pytest.raises(FactoryError, match="another module 'queue'"):
        load_factory("queue.py:make")


def test_a_function_is_given_what_it_takes() -> None:
    def make(a: int, *, b: int = 0) -> None: ...

    wanted = {"a": 1, "b": 2, "c": 3}
    assert accepted(make, wanted) == {"a": 1, "b": 2}
    assert accepted(lambda **options: None, wanted) == wanted
    assert accepted(partial(make, b=4), wanted) == {"a": 1, "b": 2}
    assert accepted(dict, wanted) in ({}, wanted)


def test_what_a_function_raises_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "four_program.py").write_text("def make():\n    return 1 // 0\n")
    with pytest.raises(FactoryError, match=r"(?s)four raised ZeroDivisionError.*four_program.py, line 2 \(make\)"):
        call_factory(load_factory("four_program.py:make"), {}, "four")
