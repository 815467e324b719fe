"""``python -m benchmarks [--only NAME ...] [--quick] [--out DIR]``"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from time import perf_counter

from rich.console import Console

from benchmarks import report
from benchmarks.measure import Settings
from benchmarks.rows import NAMES, measure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="The speed table, peers side by side.")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="fewer repeats and batches: to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"), help="folder of speed.json (%(default)s)")
    arguments = parser.parse_args()
    load, console, rows = os.getloadavg(), Console(), []
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(Path(scratch), arguments.quick)
        for name in arguments.only:
            began = perf_counter()
            console.print(f"{name} ...", end=" ")
            lines = measure(name, settings)
            rows.append(report.Row(name, lines, perf_counter() - began))
            console.print(f"{rows[-1].seconds:.0f} s")
    report.show(rows, console)
    console.print(f"Every repeat: {report.write(rows, arguments.out, quick=arguments.quick, load=load)}")


if __name__ == "__main__":
    main()
