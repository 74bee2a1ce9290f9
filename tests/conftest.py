"""Settings of every test: one thread each, so that several runs share a machine and bits repeat; no example is late."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# how long an example takes says more about what else the machine does than about the example
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

LONG = (
    "cases/test_c17_nothing_is_left.py",
    "cases/test_c17_stuck_or_killed.py",
    "run/test_signals.py",
    "run/test_mistakes.py",
    "run/test_ranks.py",
    "run/test_evaluation.py",
    "families/test_images.py",
    "ddp/test_ddp.py",
    "ranks/test_launcher.py",
    "resident/test_resident.py",
    "docs/test_examples.py",
    "cases/test_c05_c11_rows.py",
)
"""The files that take longest. They come first, so that no worker of `--dist loadfile` is left with one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of the collection: pytest-xdist would begin with the files of most tests, which are quick ones."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the others stay as they are."""
    ranks = {name: rank for rank, name in enumerate(LONG)}

    def rank(item: pytest.Item) -> int:
        return ranks.get("/".join(item.path.parts[-2:]), len(LONG))

    items.sort(key=rank)
