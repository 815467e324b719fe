"""Stretches of an audit run in this process: nothing is killed, but everything else is as it is."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import numpy as np
import torch

from unbroken.audit.findings import Findings
from unbroken.audit.judging import run_audit
from unbroken.audit.plan import Audit
from unbroken.audit.processes import Ended
from unbroken.audit.records import Row
from unbroken.audit.run import Runner, carry_out
from unbroken.audit.stretch import Kill, Orders


class Here:
    """In the place of processes. A stretch that halts is let go of there, as a process that is killed is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[bytes, Row] = {}

    def run(self, ranks: list[Orders], kill: Kill) -> Ended:
        for orders in ranks:
            control, events = os.pipe()  # nobody writes to the one or reads from the other
            os.close(events)
            events = os.open(os.devnull, os.O_WRONLY)
            runner = Runner(orders, events, control)
            output = io.StringIO()
            try:
                with redirect_stderr(output):
                    code = carry_out(runner)
            except SystemExit:  # it halted
                code = 0
            finally:
                if runner.subject is not None:
                    runner.subject.close()
                for each in (control, events, runner.log):
                    os.close(each)
            if code:
                return Ended(output.getvalue())
        return Ended()

    def stop(self) -> None:
        pass


@contextmanager
def globals_put_back() -> Iterator[None]:
    aside = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(aside[0])
        np.random.set_state(aside[1])
        random.setstate(aside[2])


def audit_here(folder: Path, factory: str, **options: object) -> Findings:
    """An audit of a factory, in ``tests.audit.victims`` if no other module is named, all within this process."""
    given = {"batches": 24, "trials": 6, "jobs": 1, **options}
    with globals_put_back():
        name = factory if ":" in factory else f"tests.audit.victims:{factory}"
        return run_audit(Audit(name, **given), runs=Here(folder))  # type: ignore[arg-type]
