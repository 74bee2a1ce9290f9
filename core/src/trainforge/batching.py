"""How the global batch is cut into micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainforge.blame import blaming
from trainforge.context import Batching
from trainforge.errors import ConfigError
from trainforge.sections import TrainSection

if TYPE_CHECKING:
    from trainforge.context import Context
    from trainforge.planning import Plan

DEFAULT_GLOBAL_BATCH = 8
LARGEST_AUTO_MICRO_BATCH = 8


def resolve_batching(
    train: TrainSection, world: int, saved_global_batch: int | None = None, *, cut_as_saved: bool = True
) -> Batching:
    """Find micro-batch and accumulation for this number of ranks; the global batch is what is kept.

    Args:
        train: the recipe's section; nothing, some or all of global_batch, micro_batch and accumulate are given.
        world: number of ranks.
        saved_global_batch: of the run being resumed. It stands in for a global batch that the recipe only implies,
            and `accumulate` then follows the number of ranks.
        cut_as_saved: micro_batch and accumulate are those of the run being resumed. Changed ones must add up.

    Raises:
        ConfigError: the numbers do not divide; the message holds the nearest that do.
    """
    micro = None if train.micro_batch == "auto" else train.micro_batch
    accumulate = train.accumulate
    total = train.global_batch or saved_global_batch or _implied(micro, accumulate, world)
    if total % world:
        raise ConfigError(
            f"train.global_batch {total} cannot be shared out to {world} ranks: the nearest that can are "
            f"{_multiples(total, world)}"
        )
    share = total // world
    if saved_global_batch is not None and micro is not None and cut_as_saved:
        accumulate = None
    if micro is None:
        micro = _micro(share, accumulate, total, world)
    elif share % micro:
        raise ConfigError(
            f"train.micro_batch {micro} does not divide the {share} samples that each rank takes of train.global_batch "
            f"{total}: the nearest that do are {_divisors(share, micro)}"
        )
    if accumulate is not None and micro * accumulate != share:
        raise ConfigError(
            f"train.global_batch {total} is not micro_batch {micro} x accumulate {accumulate} x {world} rank"
            f"{'s' * (world > 1)} = {micro * accumulate * world}: leave accumulate out (it is {share // micro} then), "
            f"or set global_batch to {micro * accumulate * world}"
        )
    return Batching(total, micro, share // micro)


def choose_micro_batch(plan: Plan, ctx: Context) -> None:
    """Where the recipe leaves the micro-batch open, ask the memory plugin; `ctx.train` and `ctx.batching` then hold it.

    A plugin that does not answer, on any rank, leaves it to the rule of `resolve_batching`; of different answers the
    smallest counts. Comm, model and optimizer are built. The length of rows is what data estimates, if it does.

    Raises:
        ProviderError: the answer does not divide this rank's share of the global batch.
    """
    memory, data = plan.chosen["memory"], plan.chosen["data"]
    if memory.provider.micro_batch is None or not leaves_micro_batch_open(ctx.train):
        return
    if data.provider.estimate is not None:
        with blaming(ctx, data.plugin, "data", "estimating what it needs"):
            ctx.row_tokens = data.provider.estimate(ctx, ctx.model, data.config).row_tokens
    with blaming(ctx, memory.plugin, "memory", "choosing the micro-batch"):
        chosen = memory.provider.micro_batch(ctx, ctx.model, ctx.optimizer, memory.config)
        share = ctx.batching.global_batch // ctx.world
        if chosen is not None and (chosen < 1 or share % chosen):
            raise ValueError(f"{chosen} does not divide the {share} samples of a rank")
    answers = ctx.comm.gather(chosen)
    if None in answers:
        return
    smallest = min(answers)
    ctx.train = ctx.train.model_copy(update={"micro_batch": smallest})
    ctx.batching = Batching(ctx.batching.global_batch, smallest, share // smallest)


def cut_as_before(train: TrainSection, world: int, saved: Mapping[str, Any]) -> TrainSection:
    """The section with the micro-batch of the run being resumed, where the recipe leaves it open and it still divides.

    Args:
        saved: the effective `train` section of that run; empty when there is none.
    """
    micro, total = saved.get("micro_batch"), train.global_batch or saved.get("global_batch")
    if not leaves_micro_batch_open(train) or not isinstance(micro, int) or not isinstance(total, int):
        return train
    fits = micro >= 1 and total % (micro * world) == 0
    return train.model_copy(update={"micro_batch": micro}) if fits else train


def leaves_micro_batch_open(train: TrainSection) -> bool:
    """Neither a number nor `accumulate` fixes it."""
    return train.micro_batch == "auto" and train.accumulate is None


def _implied(micro: int | None, accumulate: int | None, world: int) -> int:
    """The global batch when the recipe does not name it: what the others give, else about the default."""
    if micro is not None:
        return micro * (accumulate or 1) * world
    unit = (accumulate or 1) * world
    return unit * -(-DEFAULT_GLOBAL_BATCH // unit)


def _micro(share: int, accumulate: int | None, total: int, world: int) -> int:
    if accumulate is None:
        return max(n for n in range(1, LARGEST_AUTO_MICRO_BATCH + 1) if share % n == 0)
    if share % accumulate:
        raise ConfigError(
            f"train.accumulate {accumulate} does not divide the {share} samples that each rank takes of "
            f"train.global_batch {total}: the nearest that do are {_divisors(share, accumulate)}; or set "
            f"global_batch to {_multiples(total, accumulate * world)}"
        )
    return share // accumulate


def _multiples(number: int, of: int) -> str:
    below = number // of * of
    return " and ".join(str(n) for n in (below, below + of) if n)


def _divisors(of: int, near: int) -> str:
    divisors = [n for n in range(1, of + 1) if of % n == 0]
    below = [n for n in divisors if n < near][-1:]
    above = [n for n in divisors if n > near][:1]
    return " and ".join(str(n) for n in below + above)
