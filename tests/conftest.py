"""Settings of every test: one thread each, so that several runs share a machine and bits repeat; no example is late."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# how long an example takes says more about what else the machine does than about the example
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
