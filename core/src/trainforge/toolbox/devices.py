"""What a device can do at best, for the utilisation that the log shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Dense bf16 matrix rates from the vendors' data sheets (no sparsity), in TFLOP/s. The first name found wins.
_BF16_TFLOPS = {
    "B300": 2250,
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 PCIE": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "RTX PRO 6000": 503,
    "RTX 6000 ADA": 364,
    "RTX 5090": 210,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "MI325X": 1307,
    "MI300X": 1307,
    "MI250X": 383,
}


def peak_bf16_flops(device: torch.device) -> float | None:
    """The device's dense bf16 rate in FLOP/s by its data sheet, or None when it is not known here."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device).upper()
    return next((tflops * 1e12 for known, tflops in _BF16_TFLOPS.items() if known in name), None)
