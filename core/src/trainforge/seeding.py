"""Randomness that does not depend on walking order, ranks or resume.

Before micro-batch i of step s the generators are seeded from (run seed, s, global index of the micro-batch), so
dropout is the same whether a plain loop or a streaming memory walks the model, on any number of ranks, after resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a path of numbers and names (BLAKE2b, stable over versions and machines)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def micro_batch_seed(run_seed: int, step: int, index: int) -> int:
    """The seed of the micro-batch with global `index` in `step`."""
    return derive_seed(run_seed, "step", step, index)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's (when it is loaded) and torch's generators, on every device. No device sync."""
    import torch

    random.seed(seed)
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(
            seed
        )  # 1 µs; torch.manual_seed takes 140 where it looks for cards
    else:
        torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Give the generators back as they were: what happens inside (evaluation, sampling) leaves no trace."""
    import torch

    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    cards = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=cards, device_type=device.type if cards else "cuda"):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy and numpy_state is not None:
                numpy.random.set_state(numpy_state)


def rng_state() -> dict[str, Any]:
    """The generators' states as plain data (JSON types), never a pickle."""
    import torch

    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators into a state that `rng_state` gave.

    Raises:
        CheckpointError: a generator's state is missing or unreadable; it is named.
    """
    import torch

    from trainforge.errors import CheckpointError

    for name in ("python", "torch"):
        if name not in state:
            raise CheckpointError(f"the checkpoint lacks the state of {name}'s random generator")
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
        if "numpy" in state:
            import numpy

            kind, keys, *rest = state["numpy"]
            numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's random generator state cannot be read: {error}") from error
