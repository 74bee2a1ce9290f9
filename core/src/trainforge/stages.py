"""The stage contracts: what core asks of each stage, and what each stage may ask of the others.

Build order: comm, model (on meta), data, optimizer, memory, checkpoint; closed in reverse. The optimizer comes
before memory because it is pure math and memory allocates the state that it asks for. The values that the stages
hand to each other (`Extent`, `Batch`, `Slot`, ...) are described in `trainforge.values` and can be imported from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from trainforge.errors import CheckpointError, UserError
from trainforge.values import (
    IGNORED,
    Batch,
    CheckpointInfo,
    Extent,
    FlatBuffer,
    LazyTensor,
    NamedTensor,
    ParameterSpec,
    Part,
    PartState,
    Ready,
    Sink,
    Slot,
    StateSpec,
    Tokenizer,
    Update,
    UpdateFunction,
    checkpoint_name,
    is_checkpoint_name,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

__all__ = [
    "IGNORED",
    "Batch",
    "Checkpoint",
    "CheckpointInfo",
    "Comm",
    "Data",
    "Extent",
    "FlatBuffer",
    "LazyTensor",
    "Memory",
    "ModelSpec",
    "NamedTensor",
    "Optimizer",
    "ParameterSpec",
    "Part",
    "PartState",
    "Ready",
    "Sink",
    "Slot",
    "Stage",
    "StateSpec",
    "Tokenizer",
    "Update",
    "UpdateFunction",
    "checkpoint_name",
    "is_checkpoint_name",
]


class Stage:
    """What every stage object has. All of it is optional."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the log, read every `log_every` steps; core prefixes them with the stage's name."""
        return {}

    def close(self) -> None:
        """Give back files, threads and memory. Called once, in reverse build order, also after an error."""


class ModelSpec(Stage, ABC):
    """The model, described before it has any storage. `module` lies on the meta device until memory fills it.

    Attributes:
        module: the whole model; its parameters are on meta, its non-persistent buffers are real and on the CPU.
        parameters: every distinct parameter in execution order (stem, blocks, head). Tied ones appear once.
        blocks: dotted names of the repeated blocks in forward order.
        head_parameters: names of the parameters that `head` uses.
        vocab_size: rows of the embedding: token ids must be below it.
        max_positions: the longest sequence it was built for, or None when it has no limit.
    """

    module: nn.Module
    parameters: tuple[ParameterSpec, ...]
    blocks: tuple[str, ...]
    head_parameters: tuple[str, ...]
    vocab_size: int
    max_positions: int | None

    @abstractmethod
    def flops_per_token(self, tokens: int) -> float:
        """Model FLOPs of forward and backward per token at sequence length `tokens`: 6·N plus causal attention.

        N counts the parameters that a token really uses (active experts; no embedding look-up). Frozen ones count 4.
        """

    @abstractmethod
    def load(self, name: str, out: Tensor, extent: Extent) -> None:
        """Fill `out` (1-D fp32 on the CPU, `extent.length` long) with that span of the initial weights.

        From a file, or from a generator seeded by (seed, name): the same bits for every memory, rank and world.
        """

    def load_buffers(self) -> None:
        """Fill persistent buffers of `module` that are not parameters, if it has any."""

    @abstractmethod
    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Run the model up to, not including, its output head.

        Returns:
            The final hidden states `[rows, tokens, width]`, and an auxiliary loss (a mean over this micro-batch's
            tokens, already weighted by its coefficient) or None.
        """

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[n, vocab]` of hidden states `[n, width]`, with the model's scale, bias and soft cap."""

    def export(self, out: Path, weights: Callable[[str], Tensor], dtype: Literal["bf16", "fp32"]) -> None:
        """Write the model into the empty folder `out`, in the format in which others read it (`forge export`).

        `weights(name)` gives a parameter or a persistent buffer, whole and on the CPU (masters are fp32), read anew at
        each call: ask for few at a time, and let its errors through. `module` stays on meta. `dtype` is that of the
        weights in the files. Where adapters were trained, they are added to what they adapt.
        """
        raise UserError(f"this model has no format to be exported in ({type(self).__name__})")

    def export_adapters(
        self, out: Path, weights: Callable[[str], Tensor], dtype: Literal["bf16", "fp32"]
    ) -> str:
        """Write the trained adapters alone into the empty folder `out` (`forge export --lora adapter`).

        As `export` otherwise. Returns the model that they belong to, as a person names it: a folder or a hub id.
        """
        raise UserError("this run's model has no adapters to be exported alone: leave out --lora adapter")

    def start_report(self) -> list[str]:
        """Lines for the start report, such as which attention kernel was taken and why."""
        return [f"model: {sum(spec.elements for spec in self.parameters):,} parameters"]


class Data(Stage, ABC):
    """Where batches come from.

    The global order is a permutation keyed by (seed, epoch); the position is the number of *consumed* global
    samples, so a run resumes exactly, at any number of ranks.

    Attributes:
        samples: training samples per epoch, over all ranks.
        steps_per_epoch: optimizer steps in one epoch at this run's global batch; the same in every epoch.
        row_tokens: tokens of its longest rows, padding included, or None when it cannot tell; the stages built after
            it find them as `ctx.row_tokens`.
    """

    samples: int
    steps_per_epoch: int
    row_tokens: int | None = None

    @abstractmethod
    def take(self, count: int) -> list[Batch]:
        """The next `count` micro-batches of this rank: all of one step. Their tensors live until the next call.

        The last step of an epoch may be short: then some batches hold fewer rows or none (0 supervised tokens),
        but every rank gets `count` of them. Before each call Python's, NumPy's and torch's generators are seeded
        from (run seed, step, rank): what is drawn from them differs from step to step and from rank to rank, and
        comes again after a resume. Work ahead of the call, or in workers, takes `derive_seed` with the sample's place.

        Raises:
            DataExhausted: no sample is left (only providers that do not repeat). The run saves and ends, on all ranks.
        """

    def validation(self) -> Iterable[Batch]:
        """The validation micro-batches of this rank: the same count on every rank, padded with empty batches."""
        return ()

    def ledger(self) -> dict[str, Any]:
        """The row ledger (rows.json): rows seen, used, skipped by reason with row numbers, truncated."""
        return {}

    def start_report(self) -> list[str]:
        """Lines for the start report: sizes, skipped rows."""
        return []

    def decode(self, ids: Sequence[int]) -> str | None:
        """Text of token ids, for the sample at the end of a run; None when there is no tokenizer."""
        return None

    def encode(self, text: str) -> list[int] | None:
        """Token ids of a text (no special tokens added), or None when there is no tokenizer."""
        return None

    @abstractmethod
    def state(self) -> PartState:
        """Position (consumed samples) and a fingerprint of data set, sampler and tokenizer."""

    @abstractmethod
    def load(self, version: int, data: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            IncompatibleError: the fingerprint differs; both values are in the message.
        """


class Comm(Stage):
    """How gradients and weights travel between ranks. This base class is the comm of a single rank.

    Order within a step: `watch`ed sinks fire during backward, `finish`, (norm), `publish` from inside memory's
    apply. Every rank makes the same calls in the same order.
    """

    rank: int = 0
    world: int = 1

    def partition(self, parameters: Sequence[ParameterSpec]) -> list[Extent]:
        """The extents whose masters and moments this rank holds: all of them, whole, unless state is sharded."""
        return [spec.extent for spec in parameters if spec.trainable]

    def watch(self, buffers: Sequence[FlatBuffer]) -> Sink:
        """Take note of where gradients lie (once, before the first step); gives the sink that memory calls.

        The sink is called once per parameter and step, when its gradient is final on this rank. Who sends a gradient
        waits for its `Ready` first; a single rank sends nothing and does not wait.
        """
        self._used: set[str] = set()

        def sink(extent: Extent, ready: Ready | None) -> None:
            self._used.add(extent.name)  # a single rank sends nothing, so it need not wait for the bytes

        return sink

    def finish(self) -> frozenset[str]:
        """Wait until this step's gradients are summed over ranks, in stream order on a device.

        Returns:
            The names of the parameters that had a gradient on any rank. The others must stay untouched: no
            decay, no moments.
        """
        used, self._used = frozenset(self._used), set()
        return used

    def publish(self, weights: Mapping[str, Tensor]) -> Ready | None:
        """Send updated weights to the ranks that do not own them.

        Args:
            weights: the working copy of each parameter, whole and 1-D, by name. The spans this rank owns are up
                to date; afterwards (once `Ready` has been waited for) all are.
        """
        return None

    def sum_shards(self, tensor: Tensor) -> Tensor:
        """Add up what ranks hold of one replica, in place, each replica once. Whole replicas: unchanged."""
        return tensor

    def sum_ranks(self, tensor: Tensor) -> Tensor:
        """Add a tensor over all data-parallel ranks, in place, on the current stream (losses, for the log)."""
        return tensor

    def control(self, values: Sequence[float]) -> list[float]:
        """Sums of a few host numbers over all ranks: token counts, signals. Host only; never touches a device."""
        return list(values)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, by rank. Host only, slow, for start and end of a run."""
        return [value]

    def state(self) -> PartState:
        """What must survive (compression residuals, ...); nothing here."""
        return PartState()

    def load(self, version: int, data: dict[str, Any]) -> None:
        """Take the state back."""


class Memory(Stage, ABC):
    """Where weights, activations and gradients live, and therefore how a step walks through the model.

    Core never calls a module. `build` allocates and fills masters, state and gradients.

    Attributes:
        gradients: the flat gradient buffers, whole parameters in reverse execution order.
    """

    gradients: Sequence[FlatBuffer]

    @abstractmethod
    def forward_backward(self, batches: Sequence[Batch], scale: float, sink: Sink) -> Tensor:
        """Forward and backward of all micro-batches of the step, in whatever order pays.

        Args:
            batches: this rank's micro-batches. One with no supervised token contributes nothing.
            scale: what the summed loss is multiplied with: 1 / supervised tokens of the step over all ranks.
            sink: called once per parameter that got a gradient, after its last use in the last micro-batch.

        Returns:
            0-dim fp32 on the device: this rank's share of the step's mean loss (sum over ranks = the loss).
            Auxiliary losses steer the gradient and are not in it.
        """

    @abstractmethod
    def grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients after `Comm.finish`, 0-dim, without a host sync.

        One sum of squares per extent where the gradient lies, accumulated in float64, added in name order.
        """

    @abstractmethod
    def apply(self, update: UpdateFunction, used: frozenset[str]) -> None:
        """Bring `update` to every slot whose parameter is in `used`, now or just before its next use.

        The gradients stay untouched until then. Afterwards working copies are rounded from the masters and
        published (`Comm.publish`).
        """

    def drain(self) -> None:
        """Leave no update pending: before save, evaluation, export and exit."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """Summed cross-entropy of each batch under the current weights, fp32 `[number of batches]`, no gradient."""

    @abstractmethod
    def weights(self, name: str) -> Tensor:
        """The whole fp32 master of a parameter on the CPU, row-major, its global shape. Every rank must call it."""

    def generate(
        self, prompt: Sequence[int], count: int, *, temperature: float = 0.8, seed: int = 0
    ) -> list[int]:
        """Sample `count` tokens after `prompt`; an empty list when this memory cannot."""
        return []

    @abstractmethod
    def state(self) -> PartState:
        """Masters (key `master`) and optimizer state of the extents this rank holds, persistent buffers (`buffer`)."""

    @abstractmethod
    def load(self, version: int, data: dict[str, Any]) -> None:
        """Called after the tensors were filled: round the working copies again."""


class Optimizer(Stage, ABC):
    """The math of an update, on slots of extents. It holds no tensor: memory does.

    Attributes:
        takes_split_masters: `update` takes slots whose master is split in halves (`Slot.low`). Others are given fp32.
        takes_bf16_gradients: `update` takes bf16 gradients. Others are given fp32.
    """

    takes_split_masters: bool = False
    takes_bf16_gradients: bool = False

    @abstractmethod
    def state(self, spec: ParameterSpec) -> dict[str, StateSpec]:
        """Which state a parameter needs: a pure function of the configuration. All of it starts as zeros."""

    @abstractmethod
    def update(self, slots: Sequence[Slot], update: Update) -> None:
        """Update masters and state in place.

        No host sync for slots on a device: `scale` and `found_inf` are its tensors. For slots in host RAM they may be
        read, on the current stream of the calling thread, which memory orders after them.

        With `found_inf` set, every master and all state (also the count of steps) stay as they are.
        """


class Checkpoint(Stage, ABC):
    """How a run survives. A committed checkpoint is a folder `step-00000012` with a `checkpoint.json`.

    `checkpoint.json` is JSON with at least `step`, `writer` (plugin name), `format` (int), `saved_at` (Unix seconds),
    `metrics` (of `retention.measured`), `finite` (false when a tensor of key `master` is not); and `bytes`, the size of
    its data, when that is not the size of the folder. After a save, what `retention.retention` names goes. A folder has
    its final name, given by rename, only once all of it is on disk.

    Outside a run the stage is built with comm alone, without model and optimizer: to read, and to save once (`forge
    checkpoints RUN convert`). Then it cleans nothing up when it starts, deletes no other checkpoint, and reads what it
    saves piece by piece, while `save` or `wait` waits: the parts may be larger than RAM (`LazyTensor`).
    """

    @abstractmethod
    def save(self, step: int, parts: Mapping[str, Part]) -> None:
        """Snapshot the parts (before it returns) and write them; the writing may go on in the background.

        A failure in the background is raised by the next `save`, `wait` or `committed`. One save in flight.
        """

    def before_write(self, slots: Sequence[Slot]) -> None:
        """The update is about to change the masters and the state of these slots; on whatever thread updates them.

        For who saves without copying everything first: what is not written yet is copied now, or waited for. All of a
        parameter's masters and state may change, whatever part of it the slots hold.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait until the save in flight is committed; raises what went wrong."""

    def committed(self) -> list[CheckpointInfo]:
        """The checkpoints committed since the last call (for the event); does not wait."""
        return []

    @abstractmethod
    def restore(self, parts: Mapping[str, Part], path: Path) -> None:
        """Fill the parts from the checkpoint at `path`, verifying checksums.

        A part that the checkpoint lacks, or a tensor of another shape, is a `CheckpointError` that names it.
        """

    @abstractmethod
    def verify(self, path: Path) -> list[str]:
        """Problems of the checkpoint at `path`, each a sentence naming the file; an empty list when it is sound."""

    def remove(self, paths: Sequence[Path]) -> int:
        """Delete these checkpoints, all of one folder, and give the bytes freed: `forge checkpoints RUN prune`.

        Who shares data between steps overrides it: what a checkpoint that stays needs must stay, also when this is
        killed in the middle, and while a run saves there. Without paths it gives back what no checkpoint needs.
        """
        from trainforge.checkpoints import remove_folder

        return sum(remove_folder(path) for path in paths)

    def describe(self, path: Path) -> Mapping[str, Any]:
        """What it can say of a checkpoint without reading its data: for `forge checkpoints RUN list` and `diff`.

        Any of these keys: `bytes` (int: its size if it lay there alone), `new_bytes` (int: what its save added to the
        disk), `tensors` (a digest, as text, of each tensor's content by its name `part/key/name`), `tensor_bytes` (the
        size of each by the same names), `cuts` (text by the same names: digests of a tensor are compared only where
        these are the same, for who has digests of pieces only). `list` asks only where checkpoint.json has `bytes`.
        """
        return {}

    def contents(self, path: Path) -> Mapping[str, PartState]:
        """All that the checkpoint at `path` holds: each part's version and data, and every tensor, whole.

        The tensors are `LazyTensor`s: nothing of them is loaded before it is read, and what is read is verified, on
        whatever thread. For `forge checkpoints RUN convert`.

        Raises:
            CheckpointError: this plugin cannot tell, or the checkpoint is damaged.
        """
        raise CheckpointError(
            f"{type(self).__name__}, which wrote {path}, cannot say all that a checkpoint holds: resume it with "
            "another checkpoint plugin, whose next save is then written there"
        )
