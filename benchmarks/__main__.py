"""`python -m benchmarks [NAME ...]`: all benchmarks that this machine can run, or those named."""

from __future__ import annotations

import importlib
import sys

CPU = ("startup", "core_overhead", "tokenise", "host_update", "stream_cpu", "checkpoint")
GPU = ("resident_gpu", "stream_gpu")
BY_NAME = ("crash", "peer_deepspeed")  # only when asked for: no figures; needs DeepSpeed


def main(names: list[str]) -> None:
    """Run them one after another."""
    import torch

    for name in names or (*CPU, *(GPU if torch.cuda.is_available() else ())):
        if name not in (*CPU, *GPU, *BY_NAME):
            sys.exit(f"no benchmark named {name}: there are {', '.join((*CPU, *GPU, *BY_NAME))}")
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
