"""Plain PyTorch over the micro-batches of `toys`: an ordinary module, torch.optim.AdamW, one process, one big sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tests.cases import toys
from tests.support.toy_model import plain_module
from torch import Tensor

from trainforge.testing import TinyRun, tiny_run

STANDARD = (Path(toys.__file__), "ddp", "resident", "adamw", "dcp")
TRAIN = {
    "steps": 6,
    "global_batch": 4,
    "lr": 0.01,
    "schedule": "constant",
    "warmup": 0,
    "weight_decay": 0.1,
    "decay_exclude": [],
    # so large that an element whose gradient is only rounding does not take a whole step in a random direction
    "eps": 1e-4,
    "clip": 0.5,
}


@dataclass
class Reference:
    """What a plain loop gave, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def plain_loop(
    rows: str,
    *,
    branch: bool = False,
    steps: int = 6,
    skip: frozenset[int] = frozenset(),
    change: Callable[[int, torch.nn.Module], None] = lambda step, module: None,
) -> Reference:
    """Loss divided by the tokens of the whole step; `skip`ped steps change nothing; `change` sees the gradients."""
    module = plain_module(toys.config_of(toys.ModelSection(branch=branch)))
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=0.01, betas=(0.9, 0.95), eps=TRAIN["eps"], weight_decay=0.1
    )
    reference = Reference()
    for step in range(1, steps + 1):
        batches = [toys.micro_batch(rows, step, index) for index in range(4)]
        tokens = sum(int((batch.labels != -100).sum()) for batch in batches)
        optimizer.zero_grad(set_to_none=True)
        if tokens and step not in skip:
            loss = sum(toys.supervised_loss(module, batch) for batch in batches) / tokens
            loss.backward()
            change(step, module)
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), TRAIN["clip"])
            optimizer.step()
            reference.losses.append(loss.item())
            reference.norms.append(norm.item())
        reference.weights.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return reference


def toy_run(
    folder: Path,
    *,
    ranks: int = 1,
    rows: str = "plain",
    train: dict | None = None,
    sections: dict | None = None,
    **more,
) -> TinyRun:
    """A run of the standard plugins over the micro-batches of `toys`."""
    sections = {"toys": {"rows": rows}, **(sections or {})}
    if ranks == 1:
        sections.pop("ddp", None)
    return tiny_run(
        folder,
        STANDARD if ranks > 1 else (STANDARD[0], *STANDARD[2:]),
        train=TRAIN | {"micro_batch": 1} | (train or {}),
        sections=sections,
        ranks=ranks,
        **more,
    )


def weights(run: TinyRun, step: int) -> dict[str, Tensor]:
    """The weights after a step."""
    return torch.load(run.path / f"weights-{step}.pt")


def assert_weights(run: TinyRun, reference: Reference, atol: float = 1e-6) -> None:
    """The weights of every step are the reference's."""
    for step, wanted in enumerate(reference.weights, 1):
        found = weights(run, step)
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=f"{name} in step {step}")
