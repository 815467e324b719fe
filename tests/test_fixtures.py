"""The fixture, as a project of a user's has it."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

CONFTEST = 'pytest_plugins = ["unbroken.fixtures"]'
LOADER = """
class Loader:
    done = 0

    def __iter__(self):
        self.done %= 6
        while self.done < 6:
            self.done += 1
            yield [self.done]

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"] - LATE
"""
TEST = """
def make_loader(num_workers=0):
    return Loader()


def other_loader():
    return Loader()


def test_by_name_of_the_module(resumes_exactly):
    resumes_exactly(topologies=[{"num_workers": 2}, {"num_workers": 0}])


def test_a_function(resumes_exactly):
    resumes_exactly(other_loader, epochs=1)
"""


def outcomes(pytester: pytest.Pytester, test: str) -> tuple[dict[str, int], str]:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test)
    # Another test may have imported the fixtures, which pytest warns of where it would like to rewrite them.
    rewritten = "-Wignore::pytest.PytestAssertRewriteWarning"
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", rewritten)
    return result.parseoutcomes(), result.stdout.str()


def test_an_exact_loader_passes(pytester: pytest.Pytester) -> None:
    assert outcomes(pytester, "LATE = 0\n" + LOADER + TEST)[0] == {"passed": 2}


def test_an_inexact_loader_fails_with_the_difference(pytester: pytest.Pytester) -> None:
    counted, told = outcomes(pytester, "LATE = 1\n" + LOADER + TEST)
    assert counted == {"failed": 2}
    assert "NotExact: A resumed run differs from the run that never stopped." in told


def test_without_a_function_there_is_a_word_about_it(pytester: pytest.Pytester) -> None:
    counted, told = outcomes(pytester, "def test_it(resumes_exactly):\n    resumes_exactly()\n")
    assert counted == {"failed": 1}
    assert "has no make_loader: define it, or pass a function that makes a loader." in told
