"""The values that travel between stages, and the state that survives in a checkpoint.

Words used throughout: a *step* is one optimizer step; it takes `accumulate` *micro-batches* on every rank. An
*extent* is a contiguous span of a parameter. The *working copy* is the tensor the model computes with (`dtype`);
the *master* is the fp32 truth behind it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

IGNORED = -100
"""The label of a token that is not supervised (PyTorch's `cross_entropy` default)."""


@dataclass(frozen=True)
class Extent:
    """A contiguous span of a parameter, in elements of its row-major flattening.

    A whole parameter is one extent; so is one expert of a stacked expert tensor, or a shard. Norms, updates,
    checkpoints and the digest all speak of extents, so any layout can be read by any other.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: int
    length: int
    group: str = "dense"

    @property
    def whole(self) -> bool:
        """Whether this span is the whole parameter."""
        return self.offset == 0 and self.length == math.prod(self.global_shape)

    @property
    def number(self) -> Extent:
        """The extent of a single number that belongs to this parameter (its count of steps): 0-dim, never split."""
        return Extent(self.name, (), 0, 1, self.group)


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as planning sees it: no storage, only facts.

    Attributes:
        name: its global name, without wrapper prefixes. Tied parameters appear once, under their first name.
        shape: its global shape.
        kind: what it is, for decay groups: `"matrix"`, `"embedding"`, `"norm"`, `"bias"`.
        trainable: False for frozen parameters: no gradient, no moments, no decay, not in the norm.
        block: index of the repeated block that owns it; None for the stem and the head.
        experts: number of experts stacked along dimension 0; 0 when it is not an expert tensor.
        aliases: the other names of the same storage (tied weights).
        lr_scale: what the learning rate of every step is multiplied with for this parameter; core sets it from
            `train.lr_groups`, and every optimizer honours it.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["matrix", "embedding", "norm", "bias"] = "matrix"
    trainable: bool = True
    block: int | None = None
    experts: int = 0
    aliases: tuple[str, ...] = ()
    lr_scale: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its aliases."""
        return (self.name, *self.aliases)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def extent(self) -> Extent:
        """The extent that covers the whole parameter."""
        return Extent(self.name, self.shape, 0, self.elements, "experts" if self.experts else "dense")


@dataclass
class Batch:
    """One micro-batch, collated and padded. Valid until the next `Data.take`.

    Attributes:
        input_ids: int64 `[rows, tokens]`.
        labels: int64 `[rows, tokens]`, already shifted: `labels[r, t]` is the token that should follow
            `input_ids[r, t]`, or `IGNORED`.
        position_ids: int64 `[rows, tokens]`; restarts at 0 with every document of a packed row.
        document_ids: int64 `[rows, tokens]` when rows hold several documents (packing) or padding: tokens
            attend only within their own document, and padding (at the end of a row) has -1; None when every row
            is one document without padding, so that attention may take its plain causal path.
        supervised: number of labels that are not `IGNORED` (a host number, so nobody has to ask a device).
        real: number of tokens that are not padding.
        index: this micro-batch's place in the step over all ranks: `i * world + rank` for the i-th of a rank.
        sample_ids: ids of the samples it holds (for logs and for tests of resume).
        seed: what random generators are seeded from before this micro-batch; filled by the loop from
            (run seed, step, index), so dropout does not depend on walking order, ranks or resume.
        inputs: further model inputs by name (pixel values, ...).
        documents: number of runs of equal `document_ids` over all rows (a host number: kernels for packed rows
            need it, and asking the device would stop it); None when nobody counted.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor | None
    supervised: int
    real: int
    index: int = 0
    sample_ids: tuple[int, ...] = ()
    seed: int = 0
    inputs: dict[str, Tensor] = field(default_factory=dict)
    documents: int | None = None

    def to(self, device: torch.device, *, non_blocking: bool = True) -> Batch:
        """This batch on `device`; tensors that already lie there are not copied."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return replace(
            self,
            input_ids=move(self.input_ids),
            labels=move(self.labels),
            position_ids=move(self.position_ids),
            document_ids=None if self.document_ids is None else move(self.document_ids),
            inputs={name: move(value) for name, value in self.inputs.items()},
        )


@dataclass(frozen=True)
class FlatBuffer:
    """Gradients of one dtype in one contiguous 1-D tensor, in reverse execution order (last block first).

    Memory allocates it; comm reduces spans of it in place and never moves them.

    Attributes:
        tensor: 1-D, on the device or in host RAM (trait `gradients_on`).
        extents: whole parameters in the order in which backward finishes them.
        starts: where each extent begins in `tensor`, in elements.
    """

    tensor: Tensor
    extents: tuple[Extent, ...]
    starts: tuple[int, ...]

    def span(self, index: int) -> Tensor:
        """The gradient of the extent at `index`, as a 1-D view."""
        start = self.starts[index]
        return self.tensor[start : start + self.extents[index].length]


class Ready(Protocol):
    """An event: `wait()` makes the current stream (or the host, for host work) wait until the work is done."""

    def wait(self) -> None:
        """Wait for it."""


Sink = Callable[[Extent, "Ready | None"], None]
"""`sink(extent, ready)`: that extent's gradient is final on this rank. `ready` tells when its bytes have landed; None
means that they are ordered on the stream that is current at the call."""


@dataclass(frozen=True)
class StateSpec:
    """One tensor of optimizer state for a parameter.

    `per_element` False means a single number, the same for every extent of the parameter.
    """

    per_element: bool = True
    dtype: str = "float32"


@dataclass(frozen=True)
class Slot:
    """An extent together with everything the optimizer needs to update it. All tensors lie on one device.

    Attributes:
        spec: the parameter it belongs to.
        extent: which part of it.
        master: fp32 `[extent.length]`, updated in place; or, where `low` is given, the bf16 upper halves of it.
        grad: fp32 `[extent.length]`, or bf16 for an optimizer with `takes_bf16_gradients`; may be overwritten.
        state: tensors by the names that `Optimizer.state` gave: `[extent.length]`, or 0-dim for single numbers.
        low: int16 `[extent.length]`, the lower halves of split masters (`trainforge.toolbox.halves`), updated in place
            together with `master`. Only for an optimizer with `takes_split_masters`.
    """

    spec: ParameterSpec
    extent: Extent
    master: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    low: Tensor | None = None


@dataclass(frozen=True)
class Update:
    """What one optimizer step is to do.

    Attributes:
        step: 1-based step of the loop.
        lr: learning rate of this step; that of a parameter is `lr * spec.lr_scale`.
        scale: 0-dim fp32, what gradients are multiplied with (clipping); on the device of the norm.
        found_inf: 0-dim fp32, 1.0 when a gradient somewhere is not finite: then nothing may change.
    """

    step: int
    lr: float
    scale: Tensor
    found_inf: Tensor


UpdateFunction = Callable[[Sequence[Slot]], None]
"""What core hands to `Memory.apply`: updates the slots that it is given. Memory owns the schedule."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a part's state. `key` says what it is (`"master"`, `"exp_avg"`); (key, extent.name) is global.

    `tensor` has `extent.length` elements. A single number of optimizer state has the extent `extent.number`: every
    rank that holds a shard gives the same one, so that another layout can read it.

    Attributes:
        low: the lower halves of split masters, whose upper ones are then `tensor` (bf16). Savers and readers see the
            fp32 values: `dtype`, `read` and `write`.
    """

    key: str
    extent: Extent
    tensor: Tensor
    low: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values: fp32 for split masters."""
        import torch

        return self.tensor.dtype if self.low is None else torch.float32

    def read(self, start: int, out: Tensor) -> None:
        """Copy `len(out)` elements from `start` into `out` (1-D, of `dtype`); on a device in stream order."""
        stop = start + len(out)
        source = self.tensor.detach().reshape(-1)[start:stop]
        if self.low is None:
            out.copy_(source, non_blocking=True)
        else:
            from trainforge.toolbox.halves import join

            join(source, self.low[start:stop], out)

    def write(self, start: int, values: Tensor) -> None:
        """Replace `len(values)` elements from `start`."""
        stop = start + len(values)
        target = self.tensor.detach().view(-1)[start:stop]
        if self.low is None:
            target.copy_(values)
        else:
            import torch

            from trainforge.toolbox.halves import split

            split(values.to(target.device, torch.float32), target, self.low[start:stop])


@dataclass(frozen=True, kw_only=True)
class LazyTensor(NamedTensor):
    """A tensor that is not in memory: whoever reads elements has them loaded. It cannot be written to.

    `tensor` has its dtype and its number of elements, and lies on the meta device.

    Attributes:
        load: `load(start, out)` fills `out`, as `read` does.
    """

    load: Callable[[int, Tensor], None]

    def read(self, start: int, out: Tensor) -> None:
        """Load `len(out)` elements from `start` into `out` (1-D, of `dtype`, on the CPU)."""
        self.load(start, out)

    def write(self, start: int, values: Tensor) -> None:
        """Refused."""
        raise TypeError(f"{self.key} of {self.extent.name} can only be read")


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        writer: the plugin that wrote it.
        bytes: its size on disk.
        saved_at: Unix seconds.
        metrics: what was measured at its step (`retention.measured`).
        finite: whether all masters are; one whose masters are not is neither resumed from nor counted.
        shares: whether its data lies elsewhere, perhaps together with that of others (`bytes` in checkpoint.json).
    """

    step: int
    path: Path
    writer: str
    bytes: int
    saved_at: float
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    finite: bool = True
    shares: bool = False


class Tokenizer(Protocol):
    """Text as token ids and back, as the data stage does it, without its data (`Provider.tokenizer`)."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, no special tokens added."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""

    def save(self, out: Path) -> None:
        """Write the files from which others read this tokenizer into the folder `out`."""


@dataclass(frozen=True)
class PartState:
    """The state of one part of a run: plain data (JSON types only) and tensors.

    Attributes:
        version: of the layout of `data`; a part refuses versions it does not know.
        data: JSON-able; the same on every rank.
        tensors: the live tensors, not copies. Restoring fills them in place.
    """

    version: int = 1
    data: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[NamedTensor, ...] = ()


class Part(Protocol):
    """Anything whose state belongs in a checkpoint."""

    def state(self) -> PartState:
        """Give the state as it is now. Tensors are live: a saver copies what it needs before it returns."""

    def load(self, version: int, data: dict[str, Any]) -> None:
        """Take plain data back, after the tensors that `state()` gave were filled in place."""


_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_name(step: int) -> str:
    """The folder name of a committed checkpoint."""
    return f"step-{step:08d}"


REPLACED = ".old-"
"""What stands before the name of a checkpoint while another of the same step takes its place."""


def is_checkpoint_name(name: str) -> int | None:
    """The step of a committed checkpoint's folder name, or None."""
    match = _CHECKPOINT_NAME.fullmatch(name)
    return int(match[1]) if match else None
