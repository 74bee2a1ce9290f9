"""The kit, over every way in which `vault` takes a snapshot and writes it."""

from __future__ import annotations

from typing import ClassVar

from trainforge.testing import CheckpointConformance


class TestVault(CheckpointConformance):
    plugin = "vault"


class TestVaultWithoutCopies(CheckpointConformance):
    """Every update waits for what it overtakes."""

    plugin = "vault"
    config: ClassVar = {"copies": 0.0}


class TestVaultInTheForeground(CheckpointConformance):
    plugin = "vault"
    config: ClassVar = {"background": False}


class TestVaultCompressed(CheckpointConformance):
    plugin = "vault"
    config: ClassVar = {"compress": True}
