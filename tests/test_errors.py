"""The exception tree is the one that its docstring draws, and every error survives the way between processes."""

from __future__ import annotations

import builtins
import pickle
import re

import pytest

from unbroken import errors

LINE = re.compile(r"^(?P<indent>[| ]*)(?:\+-- )?(?P<name>[A-Z]\w+)(?: \((?P<builtin>\w+)\))?(?: {2,}|$)")


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """For each class in the drawing: the class above it, and the built-in that is named with it."""
    drawing = (errors.__doc__ or "").split("::", 1)[1].split("\n\n", 2)[1]
    found: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for line in drawing.splitlines():
        text = line.removeprefix("    ")
        match = LINE.match(text)
        assert match, f"the drawing has a line of another form: {line!r}"
        depth = text.index("+--") // 4 + 1 if "+--" in text else 0
        del above[depth:]
        found[match["name"]] = (above[-1] if above else None, match["builtin"])
        above.append(match["name"])
    return found


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_stands_where_the_drawing_has_it(name: str) -> None:
    above, builtin = drawn_tree()[name]
    bases = getattr(errors, name).__bases__
    expected = [Exception] if above is None else [getattr(errors, above)]
    expected += [getattr(builtins, builtin)] if builtin else []
    assert list(bases) == expected


def test_the_drawing_and_the_public_names_are_the_same_classes() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(drawn_tree()) == set(errors.__all__) == defined


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_is_made_from_its_text_and_survives_pickling(name: str) -> None:
    error = pickle.loads(pickle.dumps(getattr(errors, name)("lane 3 has no data")))
    assert type(error) is getattr(errors, name)
    assert str(error) == "lane 3 has no data"


@pytest.mark.parametrize("name", errors.__all__)
def test_one_except_clause_catches_every_error_of_the_library(name: str) -> None:
    with pytest.raises(errors.UnbrokenError):
        raise getattr(errors, name)("text")


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_says_in_a_sentence_what_it_means(name: str) -> None:
    assert (getattr(errors, name).__doc__ or "").strip().endswith(".")
