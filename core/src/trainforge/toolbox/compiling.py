"""Whether torch.compile can work here."""

from __future__ import annotations

import shutil

import torch

from trainforge.errors import ConfigError


def check_compiler(device: torch.device) -> None:
    """Look for the compiler that `train.compile` needs.

    Raises:
        ConfigError: none is installed; the message says which would do.
    """
    compilers = ("c++", "g++", "clang++") if device.type == "cpu" else ("cc", "gcc", "clang")
    if not any(map(shutil.which, compilers)):
        raise ConfigError(
            f"train.compile needs a compiler ({' or '.join(compilers)}) and none is installed; "
            "install one (Debian: apt install g++) or set train.compile to false"
        )
