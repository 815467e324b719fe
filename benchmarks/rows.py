"""The rows there are, each in a file of its name with ``run(settings)``."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor

from benchmarks.measure import Line, Settings

NAMES = (
    "handover",
    "inline",
    "lanes",
    "capture",
    "positions",
    "digest",
    "resume",
    "text",
    "packing",
    "tokens",
    "bigfiles",
    "memory",
)


def measure(name: str, settings: Settings) -> list[Line]:
    """Run one file of rows in a process of its own, so that no row finds what another left behind."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_run, name, settings).result()


def _run(name: str, settings: Settings) -> list[Line]:
    # A spawned process would spawn the workers of loaders too; they are to start as they do by default.
    multiprocessing.set_start_method(None, force=True)
    # torchdata calls what torch has since deprecated, and says at each resume that it replays.
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    logging.getLogger("torchdata").setLevel(logging.ERROR)
    lines: list[Line] = importlib.import_module(f"benchmarks.{name}").run(settings)
    return lines
