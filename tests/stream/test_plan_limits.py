"""Case C28: what the machine cannot hold is refused before anything is loaded, with numbers; and the way through."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from tests.stream.plans import QWEN, described, sizes_of

from trainforge.errors import ConfigError, OutOfMemory
from trainforge.toolbox import host_limits
from trainforge.toolbox.host_limits import Limit, host_limit
from trainforge_megatrain.stream import StreamSection, building
from trainforge_megatrain.stream.decision import decide
from trainforge_megatrain.stream.limits import locking_note, refusal
from trainforge_megatrain.stream.oom import explained_memory
from trainforge_megatrain.stream.units import divide

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"}
V2 = {
    "proc/self/cgroup": "0::/jobs/mine\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "sys/fs/cgroup/jobs/mine/memory.current": f"{2 * GIB}\n",
    "sys/fs/cgroup/jobs/memory.max": f"{5 * GIB}\n",
    "sys/fs/cgroup/jobs/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/jobs/memory.stat": f"anon 7\ninactive_file {GIB}\n",
}
V1 = {
    "proc/self/cgroup": "12:cpu,cpuacct:/x\n9:memory:/jobs/mine\n",
    "sys/fs/cgroup/memory/jobs/mine/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/jobs/mine/memory.usage_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/jobs/mine/memory.stat": f"total_inactive_file {GIB // 2}\n",
}
INSIDE = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": f"{GIB}\n",
    "sys/fs/cgroup/memory.current": f"{GIB // 4}\n",
}


@pytest.mark.parametrize(
    ("files", "name", "free"),
    [
        ({}, "free RAM", 8 * GIB),
        (V2, "the control group's limit", 3 * GIB),
        (V1, "the control group's limit", 3 * GIB // 2),
        (INSIDE, "the control group's limit", 3 * GIB // 4),
        ({**V2, "sys/fs/cgroup/jobs/memory.max": f"{50 * GIB}\n"}, "free RAM", 8 * GIB),
    ],
)
def test_the_smallest_limit_counts(tmp_path, files, name, free):
    assert host_limit(None, write(tmp_path, {**MEMINFO, **files})) == Limit(name, free)


def test_what_the_recipe_says_is_believed(tmp_path):
    assert host_limit(7, write(tmp_path, {**MEMINFO, **V1})) == Limit("run.host_memory", 7)
    assert host_limit(None, tmp_path / "no system") is None


def test_locked_memory_beyond_its_limit_is_said(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 * 1024, 64 * 1024))
    assert "ulimit -l unlimited" in (locking_note(64 * 1024 + 1) or "")
    assert locking_note(64 * 1024) is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert locking_note(10**15) is None


def test_a_refusal_has_the_number_missing_and_the_largest_first():
    said = refusal({"small": GIB, "large": 3 * GIB}, 3 * GIB, "free RAM", "Host RAM", "Buy some")
    assert said is not None
    assert (
        "needs 4.0 GiB (large 3.0 GiB, small 1.0 GiB) and free RAM leaves 3.0 GiB: 1.0 GiB are missing"
        in said
    )
    assert refusal({"small": GIB}, GIB, "", "", "") is None


def memory_of(ctx, section):
    return building.build(ctx, StreamSection.model_validate(section))


@pytest.mark.parametrize(
    ("run", "section", "says"),
    [
        ({"host_memory": "100KiB"}, {}, "run.host_memory leaves 100.0 KiB"),
        ({}, {"gpu_budget": "1MiB"}, "stream.gpu_budget leaves 1.0 MiB"),
    ],
)
def test_a_run_is_refused_before_it_loads_unless_told_to_start(tmp_path, monkeypatch, run, section, says):
    ctx = described(tmp_path, run=run)
    loaded = []
    monkeypatch.setattr(type(ctx.model), "load", lambda *call: loaded.append(call) or call[2].zero_())
    with pytest.raises(ConfigError, match=says) as error:
        memory_of(ctx, section)
    assert "are missing" in str(error.value)
    assert error.value.exit_code == 2
    assert not loaded
    memory = memory_of(ctx, {**section, "oversubscribe": True})
    memory.close()
    assert loaded
    assert any("starting although" in line and says in line for line in ctx.console.lines)


def test_a_control_group_refuses_a_7b_shape(tmp_path, monkeypatch):
    """7 billion parameters: 12 bytes of state and 4 of weights and gradients each, in a group of 64 GiB."""
    monkeypatch.setattr(
        host_limits, "_control_groups", lambda root: iter([Limit("the control group's limit", 64 * GIB)])
    )
    monkeypatch.setattr(host_limits, "_available", lambda root: iter([Limit("free RAM", 2**50)]))
    shape = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 4096,
    }
    ctx = described(tmp_path, {**QWEN, **shape}, train={"dtype": "bf16"})
    made = decide(ctx, ctx.model, ctx.optimizer, StreamSection(), divide(ctx.model), None, None)
    parameters = sum(spec.elements for spec in ctx.model.parameters)
    assert 7.6e9 < parameters < 7.7e9
    loading = 2**28 * 4 + 2 * 2**24 * 4  # of the embedding
    assert sum(made.host.values()) == pytest.approx(parameters * (2 + 2 + 8 + 2) + loading, rel=1e-4)
    assert made.refusal is not None
    for part in ("optimizer state 56.7 GiB", "weights 14.2 GiB", "the control group's limit leaves 64.0 GiB"):
        assert part in made.refusal


def test_out_of_memory_names_the_largest_tier_and_what_frees_how_much(tmp_path):
    ctx = described(tmp_path, micro_batch=4)
    ctx.row_tokens = 16
    needs = {
        "block inputs": 4 * GIB,
        "activations kept": 10 * GIB,
        "logits of one chunk, and the head's gradient": GIB,
    }
    with pytest.raises(OutOfMemory) as error, explained_memory(needs, sizes_of(ctx), "training a step"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
    text = str(error.value)
    assert "most of the 15.0 GiB planned is activations kept (10.0 GiB)" in text
    assert (
        "train.recompute: true frees about 10.0 GiB, train.micro_batch 2 (now 4) frees about 7.0 GiB" in text
    )
    with (
        pytest.raises(ValueError, match="something else"),
        explained_memory(needs, sizes_of(ctx), "training"),
    ):
        raise ValueError("something else")
