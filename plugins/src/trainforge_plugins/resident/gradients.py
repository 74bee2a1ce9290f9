"""How micro-batch gradients reach the flat fp32 buffer, and when each is final."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from trainforge.stages import Extent, FlatBuffer, Ready, Sink


class Gradients:
    """Adds the gradients of a step's micro-batches up in a flat buffer, and tells the sink which are final.

    Autograd accumulates fp32 gradients straight into the buffer (`in_place`); bf16 ones are added by a hook as soon
    as they are complete, and dropped. A tied weight has one hook, which autograd calls after its last use.
    """

    def __init__(self, flat: FlatBuffer, parameters: Mapping[str, nn.Parameter], *, in_place: bool) -> None:
        self.flat, self.in_place = flat, in_place
        self._touched: set[str] = set()  # parameters with a gradient in this step
        self._final: set[str] = set()  # those that the sink was told of
        self._last = False
        self._sink: Sink = _nowhere
        self._spans = {extent.name: flat.span(index) for index, extent in enumerate(flat.extents)}
        self._handles = []
        for extent in flat.extents:
            parameter = parameters[extent.name]
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(extent)))
            if in_place:
                parameter.grad = self._spans[extent.name].view(extent.global_shape)

    def _hook(self, extent: Extent) -> Callable[[Tensor], None]:
        name, span = extent.name, self._spans[extent.name]

        def accumulated(parameter: Tensor) -> None:
            if not self.in_place:
                grad = parameter.grad
                assert grad is not None
                target = span.view(extent.global_shape)
                target.add_(grad) if name in self._touched else target.copy_(grad)
                parameter.grad = None
            self._touched.add(name)
            if self._last:
                self._final.add(name)
                self._sink(extent, None)

        return accumulated

    @contextmanager
    def step(self, sink: Sink, micro_batches: int) -> Iterator[Callable[[], None]]:
        """Collect one step. Call what is given before each of the micro-batches; after the last, all is final.

        Spans without a gradient in this step are zero afterwards.
        """
        self._begin(sink)
        remaining = micro_batches

        def next_micro_batch() -> None:
            nonlocal remaining
            remaining -= 1
            self._last = remaining == 0

        yield next_micro_batch
        if not self.in_place:  # else the whole buffer was zeroed before
            for name in self._spans.keys() - self._touched:
                self._spans[name].zero_()  # of the last step: of this rank, or summed there from other ranks
        for extent in self.flat.extents:  # those that the last micro-batch did not reach
            if extent.name in self._touched and extent.name not in self._final:
                sink(extent, None)
        self._sink, self._last = _nowhere, False

    def _begin(self, sink: Sink) -> None:
        self._sink, self._last = sink, False
        if self.in_place:
            self.flat.tensor.zero_()
        self._touched, self._final = set(), set()

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _nowhere(extent: Extent, ready: Ready | None) -> None:
    """The sink between steps."""
