import pytest
import torch
from tests.support.context import make_context

from trainforge.blame import STARTING, blaming
from trainforge.errors import ConfigError, OutOfMemory, ProviderError

CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB of which ..."
)


def failing(error, doing="running step 3", **train):
    with pytest.raises(ProviderError) as caught, blaming(make_context(**train), "mine", "memory", doing):
        raise error
    return caught.value


def test_an_unexpected_exception_names_plugin_stage_and_work():
    error = failing(KeyError("width"))
    assert str(error) == "mine (memory) failed while running step 3: KeyError: 'width'"
    assert isinstance(error.__cause__, KeyError)
    assert not isinstance(error, OutOfMemory)


def test_what_is_worded_already_passes():
    with pytest.raises(ConfigError, match=r"^say so$"), blaming(make_context(), "mine", "memory", STARTING):
        raise ConfigError("say so")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA_SAYS),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        MemoryError(),
    ],
)
def test_no_memory_left_says_what_to_lower_and_not_what_is_at_its_limit(error):
    text = str(failing(error, micro_batch=2, loss_chunk=512))
    assert "ran out of memory while running step 3" in text
    assert "train.micro_batch (now 2" in text
    assert "train.loss_chunk (now 512)" in text
    assert "train.recompute" in text
    assert "GPU 0 has" not in text
    assert "train.recompute" not in str(failing(error, recompute=True))


def test_no_memory_at_the_start_is_about_what_always_lies_there():
    text = str(failing(torch.OutOfMemoryError(CUDA_SAYS), STARTING))
    assert "forge plan" in text
    assert "micro_batch" not in text
