"""Settings of every test: one thread each, so that several runs share a machine and bits repeat."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
