"""The kit for plugin authors: subclass the class of your stage, name your plugin, run pytest.

    from trainforge.testing import OptimizerConformance

    class TestMine(OptimizerConformance):
        plugin = "./mine.py"

`tiny_run` takes a whole small run with any plugins. The reference stages in `trainforge.testing.reference` are an
ordinary plugin: the numbers that conformance compares with, and a plain example of every contract.
"""

from trainforge.testing.bench import Stages, Walker, build_stages, load_plugin, tiny_context
from trainforge.testing.conformance.base import PluginConformance
from trainforge.testing.conformance.memory import MemoryConformance
from trainforge.testing.conformance.optimizer import OptimizerConformance

__all__ = [
    "MemoryConformance",
    "OptimizerConformance",
    "PluginConformance",
    "Stages",
    "Walker",
    "build_stages",
    "load_plugin",
    "tiny_context",
]
