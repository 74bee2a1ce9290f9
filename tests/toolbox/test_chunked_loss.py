"""The chunked loss against plain cross-entropy over whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainforge.stages import IGNORED
from trainforge.toolbox.chunked_loss import chunked_cross_entropy


def problem(rows: int, tokens: int, ignored: float, seed: int = 0, dtype: torch.dtype = torch.float64):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, tokens, 8, generator=draw, dtype=dtype).requires_grad_()
    weight = torch.randn(11, 8, generator=draw, dtype=dtype).requires_grad_()
    bias = torch.randn(11, generator=draw, dtype=dtype).requires_grad_()
    labels = torch.randint(11, (rows, tokens), generator=draw)
    labels[torch.rand(rows, tokens, generator=draw) < ignored] = IGNORED
    return hidden, weight, bias, labels


def plain(logits: Tensor, labels: Tensor, scale: float) -> Tensor:
    return (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") * scale
    )


def check(ours: Tensor, expected: Tensor, leaves: list[Tensor], tolerance: float = 2e-6):
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)
    got = torch.autograd.grad(ours, leaves)
    wanted = torch.autograd.grad(expected, leaves)
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() <= tolerance * (other.norm() + 1e-12)
        assert one.shape == other.shape
        assert one.dtype == other.dtype


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 9),
    chunk=st.integers(1, 30),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    cap=st.sampled_from([None, 2.0]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_plain_cross_entropy(rows, tokens, chunk, ignored, cap, bias, seed):
    hidden, weight, offset, labels = problem(rows, tokens, ignored, seed)
    parameters = [weight, offset] if bias else [weight]

    def head(states: Tensor) -> Tensor:
        logits = F.linear(states, *parameters)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    ours = chunked_cross_entropy(hidden, labels, head, parameters, chunk, 0.3)
    check(ours, plain(head(hidden), labels, 0.3), [hidden, *parameters])


def test_tied_weights_get_both_gradients_in_one_accumulation():
    torch.manual_seed(0)
    weight = torch.randn(11, 8).requires_grad_()
    ids, labels = torch.randint(11, (2, 7)), torch.randint(11, (2, 7))
    calls = []
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    chunked_cross_entropy(
        F.embedding(ids, weight).tanh(), labels, lambda h: h @ weight.t(), [weight], 3, 1.0
    ).backward()
    other = weight.detach().clone().requires_grad_()
    plain(F.embedding(ids, other).tanh() @ other.t(), labels, 1.0).backward()
    assert len(calls) == 1
    assert torch.allclose(calls[0], other.grad, atol=1e-5)


def test_logits_never_exist_whole():
    hidden, weight, _, labels = problem(3, 10, 0.2)
    seen = []

    def head(states: Tensor) -> Tensor:
        seen.append(len(states))
        return states @ weight.t()

    chunked_cross_entropy(hidden, labels, head, [weight], 4, 1.0).backward()
    assert seen == [4] * 7 + [2]  # once per chunk: forward does not run again in backward
    with torch.no_grad():
        chunked_cross_entropy(hidden, labels, head, [weight], 7, 1.0)
    assert max(seen) == 7


def test_all_ignored_is_zero_with_zero_gradients():
    hidden, weight, _, labels = problem(2, 5, 1.0)
    loss = chunked_cross_entropy(hidden, labels, lambda h: h @ weight.t(), [weight], 4, 1.0)
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_without_gradients_only_the_loss():
    hidden, weight, _, labels = problem(2, 5, 0.3)
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, labels, lambda h: h @ weight.t(), [weight], 3, 2.0)
        assert loss.item() == pytest.approx(plain(hidden @ weight.t(), labels, 2.0).item(), rel=1e-6)
    assert not loss.requires_grad
    assert loss.dtype == torch.float32


def test_frozen_head_and_frozen_body():
    hidden, weight, bias, labels = problem(2, 6, 0.3)
    frozen = weight.detach()
    loss = chunked_cross_entropy(hidden, labels, lambda h: F.linear(h, frozen, bias), [frozen, bias], 5, 1.0)
    check(loss, plain(F.linear(hidden, frozen, bias), labels, 1.0), [hidden, bias])
    still = hidden.detach()
    loss = chunked_cross_entropy(still, labels, lambda h: F.linear(h, weight, bias), [weight, bias], 5, 1.0)
    check(loss, plain(F.linear(still, weight, bias), labels, 1.0), [weight, bias])
    assert not still.requires_grad  # asking for chunk gradients leaves the caller's tensor alone


def test_gradient_is_multiplied_by_what_comes_from_above():
    hidden, weight, _, labels = problem(2, 6, 0.0)
    loss = 3 * chunked_cross_entropy(hidden, labels, lambda h: h @ weight.t(), [weight], 5, 1.0)
    check(loss, 3 * plain(hidden @ weight.t(), labels, 1.0), [hidden, weight])


def test_second_backward_is_refused():
    hidden, weight, _, labels = problem(1, 4, 0.0)
    loss = chunked_cross_entropy(hidden, labels, lambda h: h @ weight.t(), [weight], 3, 1.0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already"):
        loss.backward()


def test_many_bf16_chunks_add_up_in_fp32():
    """256 chunks that each add a little: a bf16 sum would stop growing."""
    hidden = torch.ones(1, 256, 4, dtype=torch.bfloat16).requires_grad_()
    weight = torch.zeros(2, 4, dtype=torch.bfloat16).requires_grad_()
    labels = torch.zeros(1, 256, dtype=torch.long)
    chunked_cross_entropy(hidden, labels, lambda h: h @ weight.t(), [weight], 1, 1.03).backward()
    assert weight.grad[0, 0].item() == pytest.approx(-128 * 1.03, rel=4e-3)


def test_bf16_gradients_of_chunks_are_rounded_once():
    torch.manual_seed(0)
    hidden = torch.randn(1, 8, 4).bfloat16()
    weight = torch.randn(16, 4).bfloat16().requires_grad_()
    labels = torch.randint(16, (1, 8))

    def gradient(rows: slice, scale: float) -> Tensor:
        head = lambda h: h @ weight.t()  # noqa: E731
        chunked_cross_entropy(hidden[:, rows], labels[:, rows], head, [weight], 4, scale).backward()
        taken, weight.grad = weight.grad, None
        return taken

    apart = gradient(slice(0, 4), 1.0).float() + gradient(slice(4, 8), 1.0).float()
    assert torch.equal(gradient(slice(0, 8), 1.03), (apart * 1.03).bfloat16())
