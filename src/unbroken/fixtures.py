"""Fixtures of pytest for users' own tests. A project that wants them says so in its conftest.py::

    pytest_plugins = ["unbroken.fixtures"]

and then::

    def make_loader(num_workers=0):
        return StatefulDataLoader(MyDataset(), batch_size=4, num_workers=num_workers)

    def test_my_dataset(resumes_exactly):
        resumes_exactly(make_loader, topologies=[{"num_workers": 2}, {"num_workers": 0}])

It is no entry point, for then every project's pytest would import torch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from unbroken.testing import assert_resumes_exactly

__all__ = ["resumes_exactly"]


@pytest.fixture
def resumes_exactly(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``unbroken.testing.assert_resumes_exactly``; without a function it takes the module's ``make_loader``."""

    def check(make_loader: Callable[..., object] | str | None = None, /, **arguments: object) -> None:
        __tracebackhide__ = True
        if make_loader is None:
            make_loader = getattr(request.module, "make_loader", None)
        if make_loader is None:
            raise pytest.UsageError(
                f"{request.module.__name__} has no make_loader: define it, or pass a function that makes a loader."
            )
        assert_resumes_exactly(make_loader, **arguments)  # type: ignore[arg-type]

    return check
