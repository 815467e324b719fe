"""The public names: one import path, complete, sorted and documented."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import unbroken

NAMES = list(unbroken.__all__)
# Plain values (a version) have neither a module nor a docstring of their own.
DOCUMENTED = [name for name in NAMES if callable(getattr(unbroken, name, None))]


def test_the_names_are_sorted_and_none_is_given_twice() -> None:
    assert sorted(set(unbroken.__all__)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name: str) -> None:
    assert hasattr(unbroken, name)


def test_everything_public_in_the_package_is_named() -> None:
    # Submodules become attributes when they are imported, and `annotations` when annotations are deferred.
    public = {
        name
        for name, value in vars(unbroken).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert public - set(NAMES) == set()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_function_and_class_comes_from_this_package(name: str) -> None:
    module = getattr(unbroken, name).__module__
    assert module == "unbroken" or module.startswith("unbroken.")


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_function_and_class_has_a_docstring_of_its_own(name: str) -> None:
    value = getattr(unbroken, name)
    # A dataclass without a docstring is given its signature for one.
    generated = inspect.isclass(value) and (value.__doc__ or "").startswith(f"{value.__name__}(")
    assert (value.__doc__ or "").strip()
    assert not generated


def test_a_star_import_gives_the_same_names() -> None:
    scope: dict[str, object] = {}
    exec("from unbroken import *", scope)
    assert {name for name in scope if name != "__builtins__"} == set(NAMES)
