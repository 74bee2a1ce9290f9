"""Hidden states, logits and the router's loss, against transformers' own forward."""

from __future__ import annotations

import pytest
import torch
from tests.hf import tiny

from trainforge.errors import IncompatibleError

HEADS = [
    "llama", "qwen3_moe", "gemma2", "gemma3_text", "cohere", "granite", "gpt2", "phi", "opt", "gpt_neox",
    "falcon_h1", "deepseek_v3", "llama4_text",
]  # fmt: skip
PACKED = ["llama", "qwen2", "gemma3_text", "qwen3_moe", "mistral", "gemma2", "gpt2", "llama4_text", "gpt_oss"]


def _ids(rows=2, tokens=12, seed=1):
    return torch.randint(1, tiny.VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", HEADS)
def test_head_of_hidden_is_the_models_logits(tmp_path, family):
    spec = tiny.filled(tiny.model(tmp_path, family))
    reference = tiny.transformers_model(family)
    reference.load_state_dict(tiny.initial(spec), strict=False)
    ids = _ids()
    hidden, auxiliary = spec.hidden(tiny.batch(ids))
    assert auxiliary is None
    assert hidden.shape == (2, 12, 32)
    logits = spec.head(hidden.flatten(0, 1))
    assert torch.allclose(logits, reference(ids).logits.flatten(0, 1), atol=1e-5)


def test_head_takes_bound_weights(tmp_path):
    """The head reads parameters from the module, so that whatever memory binds there is used."""
    spec = tiny.filled(tiny.model(tmp_path, "llama"))
    hidden = torch.randn(3, 32)
    spec.module.lm_head.weight = torch.nn.Parameter(torch.ones(tiny.VOCAB, 32))
    assert torch.allclose(spec.head(hidden), hidden.sum(1, keepdim=True).expand(3, tiny.VOCAB), atol=1e-5)


@pytest.mark.parametrize("attn", ["auto", "eager"])
@pytest.mark.parametrize("family", PACKED)
def test_packed_documents_are_as_if_alone(tmp_path, family, attn):
    spec = tiny.filled(tiny.model(tmp_path, family, attn=attn))
    ids = _ids()
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 6 + [1] * 4 + [-1] * 2])
    positions = torch.tensor([[*range(5), *range(7)], [*range(6), *range(4), 0, 1]])
    packed, _ = spec.hidden(tiny.batch(ids, positions, documents, count=5))
    for row, first, last in ((0, 0, 5), (0, 5, 12), (1, 0, 6), (1, 6, 10)):
        alone, _ = spec.hidden(tiny.batch(ids[row : row + 1, first:last]))
        assert torch.allclose(packed[row, first:last], alone[0], atol=1e-5), (row, first)
    assert packed.isfinite().all()


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3_text", "llama4_text"])
def test_windows_hold_in_plain_rows(tmp_path, family):
    spec = tiny.filled(tiny.model(tmp_path, family))
    reference = tiny.transformers_model(family)
    reference.load_state_dict(tiny.initial(spec), strict=False)
    ids = _ids(1, 20)
    hidden, _ = spec.hidden(tiny.batch(ids))
    theirs = reference.get_submodule(spec.base_name)(ids).last_hidden_state
    assert torch.allclose(hidden, theirs, atol=1e-5)


@pytest.mark.slow
def test_flex_on_a_cpu(tmp_path):
    plain = tiny.filled(tiny.model(tmp_path, "llama", head_dim=16))
    flex = tiny.filled(tiny.model(tmp_path, "llama", attn="flex", head_dim=16))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    batch = tiny.batch(_ids(1), positions, documents)
    with torch.no_grad():
        try:
            ours, _ = flex.hidden(batch)
        except Exception as error:
            if "compiler" in str(error).lower() or "inductor" in str(error).lower():
                pytest.skip("no C++ compiler here")
            raise
        assert torch.allclose(ours, plain.hidden(batch)[0], atol=1e-5)


def test_no_mask_and_no_look_at_the_device_for_plain_rows(tmp_path):
    """Without documents attention takes its plain causal path; nothing is read back from a tensor."""
    spec = tiny.filled(tiny.model(tmp_path, "llama"))
    seen = []

    def note(module, args, kwargs):
        seen.append(kwargs["attention_mask"])

    spec.module.model.layers[0].self_attn.register_forward_pre_hook(note, with_kwargs=True)
    documents = torch.tensor([[0] * 5 + [1] * 7] * 2)
    positions = torch.tensor([[*range(5), *range(7)]] * 2)
    plain, packed = tiny.batch(_ids()), tiny.batch(_ids(), positions, documents)
    with _NoReadBack():
        spec.hidden(plain)
        spec.hidden(packed)
    assert seen[0] is None
    assert seen[1].dtype == torch.bool
    assert seen[1].shape == (2, 1, 12, 12)


class _NoReadBack(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails when an operator gives a number to the host, which on a GPU would wait for it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), (
            function
        )
        return function(*args, **(kwargs or {}))


def test_a_read_back_would_be_noticed():
    with _NoReadBack(), pytest.raises(AssertionError):
        bool(torch.ones(2).all())


def test_router_loss_is_transformers_loss_over_real_tokens(tmp_path):
    spec = tiny.filled(tiny.model(tmp_path, "qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5))
    reference = tiny.transformers_model("qwen3_moe")
    reference.load_state_dict(tiny.initial(spec), strict=False)
    ids = _ids()
    _, auxiliary = spec.hidden(tiny.batch(ids))
    theirs = reference(ids, output_router_logits=True).aux_loss
    assert torch.allclose(auxiliary, 0.5 * theirs, atol=1e-6)
    documents = torch.tensor([[0] * 12, [0] * 8 + [-1] * 4])
    _, padded = spec.hidden(tiny.batch(ids, None, documents))
    mask = (documents >= 0).long()
    assert torch.allclose(
        padded, 0.5 * reference(ids, attention_mask=mask, output_router_logits=True).aux_loss
    )
    padded.backward()
    assert spec.module.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0


def test_router_loss_without_a_gradient_is_refused(tmp_path):
    """A memory that recomputes blocks without a graph would lose the router's gradient without a word."""
    spec = tiny.filled(tiny.model(tmp_path, "qwen3_moe", output_router_logits=True))
    for layer in spec.module.model.layers:
        inner = layer.forward

        def cut(hidden, *args, inner=inner, **kwargs):
            with torch.no_grad():
                out = inner(hidden, *args, **kwargs)
            return out + 0 * hidden

        layer.forward = cut
    with pytest.raises(IncompatibleError, match="auxiliary loss"):
        spec.hidden(tiny.batch(_ids()))


def test_models_with_state_take_one_document_per_row(tmp_path):
    spec = tiny.filled(tiny.model(tmp_path, "falcon_h1"))
    padded = torch.tensor([[0] * 12, [0] * 8 + [-1] * 4])
    spec.hidden(tiny.batch(_ids(), None, padded))
    packed = torch.tensor([[0] * 12, [0] * 8 + [1] * 4])
    with pytest.raises(IncompatibleError, match="switch packing off"):
        spec.hidden(tiny.batch(_ids(), None, packed))
    assert any("one document each" in line for line in spec.start_report())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
def test_experts_train_on_a_cpu(tmp_path, experts, dtype):
    from trainforge_plugins.hf import ModelSection, build

    section = ModelSection(config=tiny.values("qwen3_moe", moe_intermediate_size=32), experts=experts)
    spec = tiny.filled(build(tiny.context(tmp_path), section))
    spec.module.to(dtype)
    hidden, _ = spec.hidden(tiny.batch(_ids()))
    loss = torch.nn.functional.cross_entropy(spec.head(hidden.flatten(0, 1)).float(), _ids().flatten())
    loss.backward()
    for name, parameter in spec.module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
