"""Block inputs in host RAM between forward and backward.

A streamed block keeps nothing but its inputs. With long contexts those are the largest thing on the device, and the
link to the host is idle in that direction during forward. (That inputs of recomputed blocks are worth keeping in host
RAM is the idea of vDNN, Rhu et al. 2016, and of SuperNeurons; here the copies take turns with the weights'.)
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainforge.toolbox.streams import Event, StreamsLike
from trainforge_megatrain.stream.rooms import Wait

_LEAVING = 2  # inputs that may be on their way down before computing waits for the first of them


@dataclass(eq=False)
class Parcel:
    """One tensor that went down.

    Attributes:
        turn: when backward needs it: the last block first, in it the micro-batches in order.
        room: host memory, at least as long.
        shape: of the tensor that went down last.
        stored, landed: the events of its journeys down and up.
        came_back: its copy on the device, ahead of its use.
    """

    turn: tuple[int, int, int]
    room: Tensor
    shape: torch.Size
    stored: Event
    landed: Event
    came_back: Tensor | None = field(default=None, init=False)

    @property
    def host(self) -> Tensor:
        """Where it lies, 1-D."""
        return self.room[: self.shape.numel()]


class Offload:
    """Sends block inputs down in forward and brings them back, one ahead, in backward.

    Host memory is taken at the first step and used again in every later one.
    """

    def __init__(self, streams: StreamsLike, device: torch.device, wait: Wait, *, pin: bool) -> None:
        self._streams, self._device, self._wait, self._pin = streams, device, wait, pin
        self._upload, self._download = streams.stream("upload"), streams.stream("download")
        self._parcels: dict[tuple[int, int, int], Parcel] = {}
        self._leaving: deque[tuple[Tensor, Parcel]] = deque()
        self._waiting: dict[tuple[int, int, int], Parcel] = {}  # for backward, by turn

    def end(self) -> None:
        """Forget what is still on its way; its memory is only used again after computing has waited for it."""
        while self._leaving:
            self._arrive_down()
        for parcel in self._waiting.values():  # of blocks that did not run again
            if parcel.came_back is not None:
                self._wait("inputs that came back before they are read or forgotten", parcel.landed.wait)
                parcel.came_back = None
        self._waiting = {}

    def around(self, block: int, micro_batch: int, inputs: list[Tensor]) -> AbstractContextManager[Any]:
        """Within it, autograd keeps the tensors in `inputs` in host RAM instead of on the device."""
        places = {_lies(tensor): place for place, tensor in enumerate(inputs)}

        def pack(tensor: Tensor) -> Any:
            place = places.get(_lies(tensor))
            if place is None or not tensor.is_floating_point():
                return tensor
            return self._send((block, micro_batch, place), tensor.detach())

        def unpack(kept: Any) -> Tensor:
            return self._take_back(kept) if isinstance(kept, Parcel) else kept

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _send(self, key: tuple[int, int, int], tensor: Tensor) -> Parcel:
        parcel = self._parcels.get(key)
        if parcel is None or parcel.room.numel() < tensor.numel() or parcel.room.dtype != tensor.dtype:
            # by half as much again: page-locked memory is kept to the end, and lengths may differ from step to step
            elements = max(tensor.numel(), 0 if parcel is None else parcel.room.numel() * 3 // 2)
            room = self._streams.host(elements, tensor.dtype, pinned=self._pin)
            parcel = Parcel(
                (-key[0], *key[1:]), room, tensor.shape, self._streams.event(), self._streams.event()
            )
            self._parcels[key] = parcel
        parcel.shape = tensor.shape
        flat = tensor.reshape(-1)  # a copy where it is not contiguous, so before the event
        computed = self._streams.event()
        computed.record()
        self._wait("a block's inputs before they go down", lambda: self._download.wait(computed))
        self._streams.copy(parcel.host, flat, self._download)
        parcel.stored.record(self._download)
        self._leaving.append((flat, parcel))
        while len(self._leaving) > _LEAVING:
            self._arrive_down()
        self._waiting[parcel.turn] = parcel
        return parcel

    def _arrive_down(self) -> None:
        """Let the device's memory of the inputs that left first be used for something else."""
        _, parcel = self._leaving.popleft()
        self._wait("inputs on their way down before their memory is used again", parcel.stored.wait)

    def _take_back(self, parcel: Parcel) -> Tensor:
        if parcel.came_back is None:
            self._bring_back(parcel)
        tensor, parcel.came_back = parcel.came_back, None
        assert tensor is not None
        self._wait("inputs that came back before they are read or forgotten", parcel.landed.wait)
        self._waiting.pop(parcel.turn, None)  # None: the block got the same tensor twice
        later = [turn for turn in self._waiting if turn > parcel.turn]
        if later and self._waiting[min(later)].came_back is None:
            self._bring_back(self._waiting[min(later)])
        return tensor.view(parcel.shape)

    def _bring_back(self, parcel: Parcel) -> None:
        parcel.came_back = torch.empty(parcel.host.numel(), dtype=parcel.host.dtype, device=self._device)
        free = self._streams.event()
        free.record()
        self._wait("the last use of memory before inputs come back into it", lambda: self._upload.wait(free))
        self._wait("inputs on their way down before they come back", lambda: self._upload.wait(parcel.stored))
        self._streams.copy(parcel.came_back, parcel.host, self._upload)
        parcel.landed.record(self._upload)


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies and how: two views that begin at the same element are two."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
