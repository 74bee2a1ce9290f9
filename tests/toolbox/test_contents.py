"""Ranges of stored tensors: every element is the right one, and a chunk is loaded once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainforge.stages import Extent, LazyTensor
from trainforge.toolbox.checkpointing.contents import Chunkwise


class Disk:
    """Tensors that can be loaded, and which of their ranges were."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors, self.loads = tensors, list[tuple[str, int, int]]()

    def load(self, name: str, start: int, out: Tensor) -> None:
        self.loads.append((name, start, len(out)))
        out.copy_(self.tensors[name][start : start + len(out)])


def read(chunkwise: Chunkwise, disk: Disk, name: str, start: int, length: int) -> Tensor:
    tensor = disk.tensors[name]
    out = torch.full((length,), -1, dtype=tensor.dtype)
    chunkwise.read(name, len(tensor), lambda at, into: disk.load(name, at, into), start, out)
    return out


@given(st.data())
def test_any_ranges_in_any_order_are_what_is_stored_and_loads_are_whole_chunks(data: st.DataObject):
    sizes = {"a": data.draw(st.integers(0, 50)), "b": data.draw(st.integers(0, 50))}
    disk = Disk(a=torch.arange(sizes["a"]), b=-torch.arange(sizes["b"]))
    chunkwise = Chunkwise(8 * 10)  # ten elements
    for _ in range(data.draw(st.integers(1, 8))):
        name = data.draw(st.sampled_from("ab"))
        start = data.draw(st.integers(0, sizes[name]))
        length = data.draw(st.integers(0, sizes[name] - start))
        expected = disk.tensors[name][start : start + length]
        assert torch.equal(read(chunkwise, disk, name, start, length), expected)
    for name, start, length in disk.loads:
        assert length > 0
        assert start % 10 == 0
        assert (start + length) % 10 == 0 or start + length == sizes[name]


def test_smaller_pieces_in_order_load_each_chunk_once():
    disk = Disk(a=torch.arange(95))
    chunkwise = Chunkwise(8 * 20)
    got = [read(chunkwise, disk, "a", at, min(5, 95 - at)) for at in range(0, 95, 5)]
    assert torch.equal(torch.cat(got), disk.tensors["a"])
    assert disk.loads == [("a", 0, 20), ("a", 20, 20), ("a", 40, 20), ("a", 60, 20), ("a", 80, 15)]


def test_what_crosses_into_the_next_chunk_and_comes_back_loads_nothing_again():
    disk = Disk(a=torch.arange(40))
    chunkwise = Chunkwise(8 * 20)
    for at in (0, 20, 5, 25, 10, 30):
        read(chunkwise, disk, "a", at, 5)
    assert disk.loads == [("a", 0, 20), ("a", 20, 20)]


def test_whole_chunks_are_loaded_at_once():
    disk = Disk(a=torch.arange(45))
    chunkwise = Chunkwise(8 * 10)
    assert torch.equal(read(chunkwise, disk, "a", 10, 35), torch.arange(10, 45))
    assert disk.loads == [("a", 10, 35)]


def test_elements_that_there_are_not_are_refused():
    disk = Disk(a=torch.arange(5))
    for start, length in ((-1, 2), (4, 2), (6, 0)):
        with pytest.raises(IndexError, match="a has no elements"):
            read(Chunkwise(80), disk, "a", start, length)
    assert disk.loads == []


def test_a_lazy_tensor_is_read_through_its_loader_and_never_written_to():
    disk = Disk(w=torch.arange(6.0))
    meta = torch.empty(6, device="meta")
    lazy = LazyTensor("master", Extent("w", (2, 3), 0, 6), meta, load=lambda at, out: disk.load("w", at, out))
    assert disk.loads == []
    out = torch.zeros(2)
    lazy.read(3, out)
    assert out.tolist() == [3.0, 4.0]
    assert lazy.dtype == torch.float32
    with pytest.raises(TypeError, match="master of w can only be read"):
        lazy.write(0, out)
