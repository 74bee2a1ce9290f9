"""How long something takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

ROUNDS = 3


def fastest_s(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few rounds, after one to warm up."""
    taken = []
    for _ in range(ROUNDS + 1):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
