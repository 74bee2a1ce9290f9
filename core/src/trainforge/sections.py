"""The recipe sections that core owns, `run` and `train`. Every provider of a stage honours all of `train`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainforge.provider import Section
from trainforge.units import ByteCount, Seconds, parse_seconds


def _cadence(value: Any) -> Any:
    """A cadence is a number of steps, or a duration with its unit, kept as text (`10min`), or `auto`."""
    if isinstance(value, str) and not value.strip().isdigit():
        if value.strip() == "auto":
            return "auto"
        try:
            seconds = parse_seconds(value)
        except ValueError:
            raise ValueError("must be a number of steps, a duration such as 10min, or auto") from None
        if seconds == 0:
            raise ValueError("must be longer than nothing")
        return value.strip()
    return int(value) if isinstance(value, str) else value


Cadence = Annotated[Annotated[int, Field(ge=1)] | str, BeforeValidator(_cadence)]
Factor = Annotated[float, Field(ge=0, lt=1)]


class RunSection(Section):
    """What the run is called and what it runs on."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
        description="name of the run; its folder is runs/NAME",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seeds weights, data order and dropout")
    device: str = Field(
        "auto", description="`auto` (an accelerator when there is one), `cpu`, `cuda`, `cuda:1`, ..."
    )
    devices: tuple[int, ...] | None = Field(None, description="cards to use, one rank each: `[0, 1]`")
    threads: int | None = Field(
        None, ge=1, description="CPU threads per rank; by default the cores are shared out"
    )
    host_memory: Literal["auto"] | ByteCount = Field(
        "auto",
        description="host RAM that a memory plugin which keeps weights there may take, such as 96GiB; auto: what is "
        "free now and what control groups leave. For memory that grows on use, and to plan another machine",
    )
    sample: str | None = Field(
        None, description="text that the trained model continues at the end of the run"
    )


class RateGroup(Section):
    """Parameters that learn at another rate than the rest."""

    match: str = Field(min_length=1, description="pattern of parameter names: `*.embed*`")
    lr: float | None = Field(None, gt=0, description="their peak learning rate")
    scale: float | None = Field(None, gt=0, description="their learning rate as a multiple of `train.lr`")

    @model_validator(mode="after")
    def _one_rate(self) -> RateGroup:
        if (self.lr is None) == (self.scale is None):
            raise ValueError("give either lr or scale")
        return self


class EarlyStop(Section):
    """When a run that no longer gets better ends."""

    metric: Literal["eval_loss"] = Field("eval_loss", description="what must fall")
    patience: int = Field(3, ge=1, description="evaluations in a row without a fall after which the run ends")
    min_delta: float = Field(0.0, ge=0, description="a fall must be larger than this")


class TrainSection(Section):
    """How long, how much per step, and the numbers of the optimizer."""

    steps: int | None = Field(None, ge=1, description="optimizer steps of the whole run")
    epochs: float | None = Field(None, gt=0, description="passes over the data, instead of `steps`")
    global_batch: int | None = Field(
        None, ge=1, description="samples per step over all ranks; kept when ranks change"
    )
    micro_batch: int | Literal["auto"] = Field(
        "auto",
        description="samples per forward on one rank; auto: what the memory plugin finds best, else the largest up to "
        "8 that divides",
    )
    accumulate: int | None = Field(
        None, ge=1, description="micro-batches per step and rank; follows from the others"
    )
    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    lr_groups: tuple[RateGroup, ...] = Field(
        (),
        description="other learning rates by name: `[{match: '*.embed*', lr: 1e-5}, {match: '*norm*', scale: 2}]`. "
        "They follow the same schedule; of several that match, the last counts",
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine",
        description="after the warm-up: constant, linear or cosine to `lr_end`, or warmup-stable-decay",
    )
    warmup: float = Field(0.0, ge=0, description="steps of warm-up, or a share of the run when below 1")
    decay: float = Field(
        0.2, gt=0, description="wsd: steps of the final decay, or a share of the run when at most 1"
    )
    lr_end: float = Field(0.0, ge=0, description="learning rate at the end of the schedule")
    betas: tuple[Factor, Factor] = Field((0.9, 0.95), description="Adam's averaging factors")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay")
    decay_exclude: tuple[str, ...] = Field(
        ("norm", "bias", "embedding"),
        description="parameters without weight decay: kinds (`matrix`, `embedding`, `norm`, `bias`) and patterns of "
        "names (`*.A_log`). A tied output layer is an embedding; all else with one dimension counts as norm",
    )
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null switches clipping off")
    dtype: Literal["auto", "bf16", "fp32"] = Field(
        "auto",
        description="of the working copies; masters are fp32. `auto`: bf16 on an accelerator, fp32 on a CPU",
    )
    recompute: bool | Literal["auto"] = Field(
        "auto",
        description="recompute each block in backward instead of keeping its activations; `auto` leaves it to the "
        "memory plugin, which keeps what it has room for",
    )
    compile: bool = Field(False, description="compile each block with torch.compile")
    loss_chunk: int = Field(
        2048, ge=1, description="tokens per chunk of output head and loss, so logits stay small"
    )
    save_every: Cadence | None = Field(
        None,
        description="steps, or a duration such as 10min; null: only at the end; auto: the time that loses least, "
        "sqrt(2 x what a save costs x `mtbf`), measured while training and said when it changes",
    )
    mtbf: Seconds = Field(
        86400.0,
        gt=0,
        description="with `save_every: auto`, the mean time between failures of this run: crashes, power cuts, a queue "
        "that ends it, such as 4h",
    )
    keep: int = Field(2, ge=1, description="checkpoints to keep; older ones go once a newer one is verified")
    keep_every: int | None = Field(
        None, ge=1, description="checkpoints of every so many steps are kept for ever, besides `keep`"
    )
    best: Literal["eval_loss"] | None = Field(
        None, description="also save at, and keep, the evaluation with the lowest validation loss"
    )
    early_stop: EarlyStop | None = Field(
        None,
        description="end the run when the validation loss no longer falls: `{patience: 3, min_delta: 0.001}`",
    )
    eval_every: int | None = Field(None, ge=1, description="steps between evaluations; null: only at the end")
    log_every: int = Field(
        10, ge=1, description="steps between log lines; losses are read from the device only then"
    )
    max_bad_steps: int = Field(10, ge=1, description="non-finite steps in a row after which the run stops")

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give either steps or epochs, not both")
        if self.steps is None and self.epochs is None:
            raise ValueError("say how long to train: steps or epochs")
        if isinstance(self.micro_batch, int) and self.micro_batch < 1:
            raise ValueError("micro_batch must be at least 1, or auto")
        return self

    @model_validator(mode="after")
    def _no_wish_in_vain(self) -> TrainSection:
        """A schedule's number that the chosen schedule does not know would change nothing."""
        if self.schedule != "wsd" and self.decay != type(self).model_fields["decay"].default:
            raise ValueError(
                f"decay has no effect with schedule {self.schedule}: leave it out, or set schedule to wsd"
            )
        if self.schedule == "constant" and self.lr_end != 0:
            raise ValueError(
                "lr_end has no effect with schedule constant: leave it out, or choose linear, cosine or wsd"
            )
        if self.keep_every is not None and self.save_every is None:
            raise ValueError("keep_every has no effect without save_every: say how often to save")
        if self.save_every != "auto" and self.mtbf != type(self).model_fields["mtbf"].default:
            raise ValueError("mtbf has no effect without save_every: auto")
        for key in ("best", "early_stop"):
            if getattr(self, key) is not None and self.eval_every is None:
                raise ValueError(f"{key} has no effect without eval_every: say how often to evaluate")
        return self
