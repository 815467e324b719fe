"""The one error of the demo."""

from __future__ import annotations

from typing import final

from unbroken.errors import UnbrokenError

__all__ = ["DemoError"]


@final
class DemoError(UnbrokenError, RuntimeError):
    """The demo could not be run to its end, so nothing was proved or disproved. The message names the way out."""
