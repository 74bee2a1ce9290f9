"""The rules of the kit, in fp32."""

from trainforge.testing import MemoryConformance


class TestRules(MemoryConformance):
    plugin = "trainforge_megatrain.stream"
