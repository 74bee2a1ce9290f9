"""TrainForge plugins for models far larger than the card."""

__version__ = "0.1.0"
