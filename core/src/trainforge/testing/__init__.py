"""The kit for plugin authors: subclass the class of your stage, name your plugin, run pytest.

    from trainforge.testing import OptimizerConformance

    class TestMine(OptimizerConformance):
        plugin = "./mine.py"

`tiny_run` takes a whole small run with any plugins. The reference stages in `trainforge.testing.reference` are an
ordinary plugin: the numbers that conformance compares with, and a plain example of every contract.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainforge.testing.bench import Stages, Walker, build_stages, load_plugin, tiny_context
    from trainforge.testing.conformance.base import PluginConformance
    from trainforge.testing.conformance.checkpoint import CheckpointConformance
    from trainforge.testing.conformance.comm import CommConformance
    from trainforge.testing.conformance.data import DataConformance
    from trainforge.testing.conformance.memory import MemoryConformance
    from trainforge.testing.conformance.model import ModelConformance
    from trainforge.testing.conformance.observer import ObserverConformance
    from trainforge.testing.conformance.optimizer import OptimizerConformance
    from trainforge.testing.ranks import run_ranks
    from trainforge.testing.tiny import TinyRun, tiny_run

__all__ = [
    "CheckpointConformance",
    "CommConformance",
    "DataConformance",
    "MemoryConformance",
    "ModelConformance",
    "ObserverConformance",
    "OptimizerConformance",
    "PluginConformance",
    "Stages",
    "TinyRun",
    "Walker",
    "build_stages",
    "load_plugin",
    "run_ranks",
    "tiny_context",
    "tiny_run",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the reference plugin lives in this package and must stay light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.endswith("Conformance"):
        stage = name.removesuffix("Conformance").lower()
        module = f"conformance.{'base' if stage == 'plugin' else stage}"
    else:
        module = {"run_ranks": "ranks", "tiny_run": "tiny", "TinyRun": "tiny"}.get(name, "bench")
    return getattr(import_module(f"{__name__}.{module}"), name)
