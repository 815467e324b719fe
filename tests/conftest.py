"""How hypothesis searches: freely at a desk, the same cases every time in CI, where a failure must be found again; and
Ctrl-C, which a shell has jobs in the background ignore.
"""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# No deadline: an example may start processes, and a slow machine is not a bug.
settings.register_profile("default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
