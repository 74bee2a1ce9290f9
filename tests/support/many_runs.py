"""Several whole runs, one after the other, on the same processes: starting ranks takes longer than a small run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainforge.testing import run_ranks

Change = Callable[[pytest.MonkeyPatch, int], None]


@dataclass(frozen=True)
class Start:
    """One start of a recipe. `change` (a function of a module) is called on every rank before, with its number."""

    recipe: Path
    run_dir: Path
    max_steps: int | None = None
    change: Change | None = None


@dataclass(frozen=True)
class End:
    """How a start ended on one rank: with an exit code, or with an error."""

    code: int
    error: str = ""
    text: str = ""


def on_ranks(world: int, starts: Sequence[Start], timeout: float = 240) -> list[list[End]]:
    """Carry out the starts on `world` processes; for each start its ends, by rank."""
    by_rank = run_ranks(_carry_out, world, list(starts), timeout=timeout)
    return [list(ends) for ends in zip(*by_rank, strict=True)]


def _carry_out(rank: int, world: int, starts: list[Start]) -> list[End]:
    return [_one(rank, world, start) for start in starts]


def _one(rank: int, world: int, start: Start) -> End:
    import torch.distributed as dist

    from trainforge.options import RunOptions
    from trainforge.planning import make_plan
    from trainforge.runner import run_plan

    with pytest.MonkeyPatch.context() as patch:
        if start.change is not None:
            start.change(patch, rank)
        try:
            plan = make_plan(start.recipe, world=world, without=("progress",))
            return End(run_plan(plan, RunOptions(run_dir=start.run_dir, max_steps=start.max_steps)))
        except Exception as error:
            return End(getattr(error, "exit_code", 1), type(error).__name__, str(error))
        finally:
            if dist.is_initialized():  # after a failure it is left as it is
                dist.destroy_process_group()
