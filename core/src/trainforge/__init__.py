"""TrainForge: one recipe, and a choice per run of how each stage of training is done."""

__version__ = "0.1.0"
