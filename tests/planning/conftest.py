from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.planning.site import Site, make_site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    yield from make_site(tmp_path)
