"""The command line: ``unbroken demo``, ``audit``, ``state`` and ``replay``."""

from unbroken.cli.app import app, main

__all__ = ["app", "main"]
