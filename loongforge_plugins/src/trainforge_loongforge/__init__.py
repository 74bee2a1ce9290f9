"""TrainForge plugins for several GPUs and Mixture-of-Experts models."""

__version__ = "0.1.0"
