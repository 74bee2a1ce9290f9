"""What cannot be updated is an error that says so, never a crash: kernels look at nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.cpu_adam.slots import SPECS, bits, do, make, make_slot, split

from trainforge.errors import ConfigError

BACKENDS = ["native", "torch"]


def with_state(slot, **tensors):
    return replace(slot, state={**slot.state, **tensors})


WRONG = {
    "master is float64": lambda s: replace(s, master=s.master.double()),
    "master is bfloat16": lambda s: replace(s, master=s.master.bfloat16()),
    "gradient is float16": lambda s: replace(s, grad=s.grad.half()),
    "gradient is float64": lambda s: replace(s, grad=s.grad.double()),
    "gradient must be a contiguous": lambda s: replace(s, grad=torch.zeros(2000)[::2]),
    "master must be a contiguous": lambda s: replace(s, master=torch.zeros(2000)[::2]),
    "gradient must be a contiguous 1-D": lambda s: replace(s, grad=s.grad.view(40, 25)),
    "gradient has 999 elements": lambda s: replace(s, grad=s.grad[:-1]),
    "gradient is on the meta device": lambda s: replace(s, grad=s.grad.to("meta")),
    "master is on the meta device": lambda s: replace(s, master=s.master.to("meta")),
    "gradient must be": lambda s: replace(s, grad=s.grad.to_sparse()),
    "exp_avg is bfloat16": lambda s: with_state(s, exp_avg=s.state["exp_avg"].bfloat16()),
    "exp_avg_sq has 1 elements": lambda s: with_state(s, exp_avg_sq=torch.zeros(1)),
    "exp_avg is missing": lambda s: replace(s, state={"step": s.state["step"]}),
    "step must be a 0-dim": lambda s: with_state(s, step=torch.zeros(1000)),
    "its step must be": lambda s: with_state(s, step=torch.zeros((), dtype=torch.int64)),
    "master is float32; it must be bfloat16": lambda s: replace(s, low=torch.zeros(1000, dtype=torch.int16)),
    "lower half of the master is int32": lambda s: replace(
        split(s), low=torch.zeros(1000, dtype=torch.int32)
    ),
    "lower half of the master has 3": lambda s: replace(split(s), low=torch.zeros(3, dtype=torch.int16)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("says", WRONG)
def test_a_wrong_tensor_is_refused_and_nothing_has_changed(backend, says):
    optimizer = make({"backend": backend})
    good, bad = make_slot(optimizer, SPECS[0]), WRONG[says](make_slot(optimizer, SPECS[1]))
    before = bits([good])
    with pytest.raises(ValueError, match=f"blocks.0.weight: .*{says}"):
        optimizer.update([good, bad], do())
    assert bits([good]) == before


def test_moments_must_have_the_dtype_that_the_recipe_says():
    optimizer = make({"backend": "native", "moments": "bf16"})
    slot = with_state(make_slot(optimizer, SPECS[1]), exp_avg=torch.zeros(1000))
    with pytest.raises(ValueError, match="exp_avg is float32; it must be bfloat16"):
        optimizer.update([slot], do())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"backend": "deepspeed"}, r"pip install 'trainforge-megatrain\[deepspeed\]'"),
        ({"backend": "deepspeed", "moments": "bf16"}, "bf16 is not for cpu_adam.backend: deepspeed"),
    ],
)
def test_a_backend_that_cannot_be_had_says_what_to_do(monkeypatch, config, says):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=says):
        make(config)


class Operator:
    """Stands for DeepSpeed's compiled operator: AdamW on what it is given, in its own words."""

    def __init__(self):
        self.alive = set()

    def create_adam(self, number, lr, beta1, beta2, eps, weight_decay, adamw_mode, should_log):
        assert adamw_mode
        self.alive.add(number)

    def adam_update(self, number, step, lr, b1, b2, eps, decay, bias_correction, p, g, m, v):
        assert number in self.alive
        assert bias_correction
        assert {t.dtype for t in (p, g, m, v)} == {torch.float32}
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        p.mul_(1 - lr * decay).sub_(lr / (1 - b1**step) * m / ((v / (1 - b2**step)).sqrt() + eps))

    def destroy_adam(self, number):
        self.alive.remove(number)


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Operator:
    operator = Operator()
    builder = ModuleType("deepspeed.ops.op_builder")
    builder.CPUAdamBuilder = lambda: SimpleNamespace(load=lambda: operator)
    modules = {name: ModuleType(name) for name in ("deepspeed", "deepspeed.ops")}
    for name, module in {**modules, builder.__name__: builder}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return operator


def test_deepspeed_gets_fp32_slots_one_by_one(deepspeed):
    """The operator is a stand-in: this tests what we hand over, not DeepSpeed."""
    optimizer, ours = make({"backend": "deepspeed"}, weight_decay=0.1), make(weight_decay=0.1)
    slots, wanted = ([make_slot(o, spec) for spec in SPECS] for o in (optimizer, ours))
    for step in (1, 2, 3):
        update = do(step, scale=0.5, found_inf=float(step == 2))
        for slot in (*slots, *wanted):
            slot.grad.fill_(0.1 * step)
        optimizer.update(slots, update)
        ours.update(wanted, update)
    for slot, other in zip(slots, wanted, strict=True):
        torch.testing.assert_close(slot.master, other.master, rtol=1e-6, atol=1e-6)
        assert slot.state["step"] == 2
    optimizer.close()
    assert not deepspeed.alive


def test_deepspeed_is_given_nothing_but_fp32(deepspeed):
    """Its operator reads bf16 bits as fp32, or crashes."""
    optimizer = make({"backend": "deepspeed"})
    assert not optimizer.takes_split_masters
    assert not optimizer.takes_bf16_gradients
    slot = make_slot(optimizer, SPECS[1])
    for wrong in (replace(slot, grad=slot.grad.bfloat16()), split(slot)):
        with pytest.raises(ValueError, match="it must be float32"):
            optimizer.update([wrong], do())
