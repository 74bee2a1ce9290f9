"""In which dtype a run computes."""

from __future__ import annotations

import torch

from trainforge.sections import TrainSection


def working_dtype(train: TrainSection, device: torch.device) -> torch.dtype:
    """What the model computes in: `train.dtype`, where `auto` is bf16 on an accelerator and fp32 on a CPU."""
    if train.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.bfloat16 if train.dtype == "bf16" else torch.float32
