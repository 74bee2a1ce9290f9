"""The kernel is compiled once per session: compiling takes a second, and the kit builds an optimizer per rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainforge_megatrain.cpu_adam import building, optimizer


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernel")


@pytest.fixture(autouse=True)
def _one_kernel(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "load_kernel", lambda cache: building.load_kernel(kernel_cache))
