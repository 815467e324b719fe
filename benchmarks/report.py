"""The table that is printed, and the JSON file with every repeat."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import unbroken
from benchmarks.measure import Goal, Line, number

PACKAGES = ("torch", "torchdata", "numpy", "tokenizers", "xxhash", "orjson")


@dataclass(frozen=True)
class Row:
    """What one file measured, and how long that took in seconds."""

    name: str
    lines: list[Line]
    seconds: float


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="Speed, side by side: medians", show_lines=True, title_justify="left")
    table.add_column("what", ratio=5)
    table.add_column("unbroken", justify="right", ratio=2)
    table.add_column("beside it (times ours)", ratio=5)
    table.add_column("target", ratio=4)
    table.add_column("measured", justify="right", ratio=2)
    table.add_column("", ratio=3)
    for line in (line for row in rows for line in row.lines):
        (_, mine), *others = line.medians.items()
        beside = "\n".join(f"{name} {number(value)} ({number(value / mine)}x)" for name, value in others)
        table.add_row(
            line.what,
            f"{number(mine)} {line.unit}",
            beside,
            "\n".join(goal.text for goal in line.goals),
            "\n".join(f"{number(goal.measured)} {goal.unit}" for goal in line.goals),
            "\n".join(_coloured(goal) for goal in line.goals),
        )
    console.print(table)
    goals = [goal for row in rows for line in row.lines for goal in line.goals]
    console.print(f"{sum(goal.met for goal in goals)} of {len(goals)} targets met.")


def _coloured(goal: Goal) -> str:
    return f"[{'green' if goal.met else 'red'}]{goal.verdict}[/]"


def write(rows: list[Row], folder: Path, *, quick: bool, load: tuple[float, ...]) -> Path:
    """``load`` is the load average before the run: what else the machine was doing."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "speed.json"
    content = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine() | {"load_before": load},
        "versions": {"python": platform.python_version(), "unbroken": unbroken.__version__}
        | {name: version(name) for name in PACKAGES},
        "rows": [
            {"name": row.name, "seconds": round(row.seconds, 1), "lines": [_as_json(line) for line in row.lines]}
            for row in rows
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def machine() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _cpu_model(), "cores": usable, "system": platform.platform(terse=True)}


def _as_json(line: Line) -> dict[str, Any]:
    goals = [asdict(goal) | {"met": goal.met, "verdict": goal.verdict} for goal in line.goals]
    return {"what": line.what, "unit": line.unit, "medians": line.medians, "goals": goals, "repeats": line.repeats}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
