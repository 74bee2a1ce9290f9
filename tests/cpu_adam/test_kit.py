"""`cpu_adam` passes the kit, with each backend that this machine has."""

from __future__ import annotations

from typing import Any, ClassVar

from trainforge.testing import OptimizerConformance

PLUGIN = "trainforge_megatrain.cpu_adam"


class TestNative(OptimizerConformance):
    plugin = PLUGIN
    config: ClassVar[dict[str, Any]] = {"backend": "native", "threads": 2}


class TestTorch(OptimizerConformance):
    plugin = PLUGIN
    config: ClassVar[dict[str, Any]] = {"backend": "torch"}


class TestBf16Moments(OptimizerConformance):
    plugin = PLUGIN
    config: ClassVar[dict[str, Any]] = {"backend": "native", "moments": "bf16"}
