"""The standard plugins of TrainForge."""

__version__ = "0.1.0"
