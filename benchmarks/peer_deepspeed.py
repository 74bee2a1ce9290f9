"""DeepSpeed on the models and batches of `stream_gpu`: ZeRO-3 with all in host RAM, ZeRO-2 with the optimizer there.

    pip install deepspeed                                                  # not part of any extra of the benchmarks
    python -m benchmarks peer_deepspeed                                    # 1.5B-8x1 and 3B-8x2
    CASES=1.5B-24GiB,3B-15GiB python -m benchmarks stream_gpu peer_deepspeed
    CASES=tiny python -m benchmarks peer_deepspeed                         # shows without a GPU that it works

A case is a model, rows per micro-batch and micro-batches per step; a case of `stream_gpu` means its model and batch.
bf16 with fp32 masters, clipping to norm 1.0, AdamW in host RAM (DeepSpeedCPUAdam), every block recomputed (the model's
own checkpointing, non-reentrant), and the chunked loss of the limit: the head is a module of its own that takes the
loss, so ZeRO-3 gathers its weight around it as around any other. What `configuration` does not name is DeepSpeed's
default. ZeRO has no budget of the card: the table says what it took. No launcher is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import stream_gpu
from benchmarks.common import median, show
from benchmarks.stream_gpu import STEPS, TOKENS, WARMUP

TINY = {  # matrices of more than 100,000 elements, below which ZeRO-3 does not take a parameter apart
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
MODELS = {**stream_gpu.MODELS, "tiny": TINY}
# case: model, rows per micro-batch, micro-batches per step, the largest chunk of the loss that stream_gpu takes there
CASES: dict[str, tuple[str, int, int, int]] = {"tiny": ("tiny", 1, 2, 512)}
SAME = {"tiny": "tiny"}  # a name that may be asked for -> its case here
for _name, (_model, _rows, _accumulate, _, _chunk) in stream_gpu.CASES.items():
    _case = f"{_model}-{_rows}x{_accumulate}"
    SAME[_name] = SAME[_case] = _case
    CASES[_case] = (_model, _rows, _accumulate, max(_chunk, CASES.get(_case, (0,))[-1]))

STAGES = {3: "ZeRO-3, parameters and optimizer in RAM", 2: "ZeRO-2, optimizer in RAM"}


def main() -> None:
    """Run the cases with both stages, and the limit of each model and batch once where there is a GPU."""
    if importlib.util.find_spec("deepspeed") is None:
        sys.exit("peer_deepspeed trains with DeepSpeed, which is not installed here: pip install deepspeed")
    gpu = torch.cuda.is_available()
    cases = _wanted(os.environ.get("CASES") or ("1.5B-8x1,3B-8x2" if gpu else "tiny"))
    print("DeepSpeed compiles its CPUAdam once, which takes a minute or two; later runs find it.", flush=True)
    built = _side(__spec__.name, "build")
    if not built:
        sys.exit(
            "DeepSpeed could not compile CPUAdam (see above): it needs ninja and a C++ compiler on PATH, and versions "
            "before 0.19 may need nvcc beside a GPU"
        )
    print("built", built, flush=True)
    limits: dict[str, dict[str, Any]] = {}
    rows, runs = [], {}
    for case in cases:
        model, micro_batch, _, chunk = CASES[case]
        key = f"{model} x {micro_batch}"
        if gpu and key not in limits and model in stream_gpu.MODELS:
            limits[key] = _side(stream_gpu.__name__, "limit", model, str(micro_batch), str(chunk))
            print("limit", key, limits[key], flush=True)
        limit = limits.get(key, {}).get("tokens_per_s")
        for stage, what in STAGES.items():
            run = runs[f"{case} ZeRO-{stage}"] = _side(__spec__.name, str(stage), case)
            print(case, what, run, flush=True)
            speed = run.get("tokens_per_s")
            rows.append(
                (
                    case,
                    what,
                    speed or "failed",
                    limit or "",
                    speed / limit if limit and speed else "",
                    run.get("step_ms", ""),
                    run.get("reserved_gib", ""),
                    run.get("host_gib", ""),
                )
            )
    show(
        "peer_deepspeed",
        f"Median of {STEPS - WARMUP} whole steps after {WARMUP}; real tokens per second. DeepSpeed "
        f"{built['deepspeed']}, bf16 with fp32 masters, each block recomputed, the chunked loss of the limit. limit: "
        "forward and backward alone, resident. GiB: peak reserved by PyTorch from the first step on; peak resident set "
        "of the process.",
        ("case", "DeepSpeed", "tokens/s", "limit", "of limit", "step ms", "reserved GiB", "host GiB"),
        rows,
        runs=runs,
        limits=limits,
    )


def _wanted(names: str) -> list[str]:
    """Our cases for what was asked for, each once."""
    unknown = [name for name in names.split(",") if name not in SAME]
    if unknown:
        sys.exit(f"no case named {', '.join(unknown)}: there are {', '.join(SAME)}")
    return list(dict.fromkeys(SAME[name] for name in names.split(",")))


def _side(module: str, *arguments: str) -> dict[str, Any]:
    """The last JSON that the process printed; empty if it failed."""
    out = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if out.returncode:
        print(f"{arguments} failed:\n{out.stdout[-1500:]}\n{out.stderr[-1500:]}", flush=True)
        return {}
    objects = [
        line for line in out.stdout.splitlines() if line.startswith("{")
    ]  # DeepSpeed logs there as well
    figures: dict[str, Any] = json.loads(objects[-1])
    return figures


class ChunkedHead(nn.Module):
    """The output head and its loss; the weight is an own parameter, so that ZeRO-3 gathers it for this module.

    Args:
        weight: `[vocab, width]`; may be the embedding's.
        chunk: tokens per chunk.
    """

    def __init__(self, weight: nn.Parameter, chunk: int) -> None:
        super().__init__()
        self.weight, self.chunk = weight, chunk

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of `hidden`, `[rows, tokens, width]`, against `labels`, `[rows, tokens]`."""
        from trainforge.toolbox.chunked_loss import chunked_cross_entropy

        def logits(states: Tensor) -> Tensor:
            return nn.functional.linear(states, self.weight)

        return chunked_cross_entropy(hidden, labels, logits, [self.weight], self.chunk, 1 / labels.numel())


class WithLoss(nn.Module):
    """A causal language model of transformers whose forward is its loss."""

    def __init__(self, model: Any, chunk: int) -> None:
        super().__init__()
        self.body = model.model
        self.head = ChunkedHead(model.lm_head.weight, chunk)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss of `ids`, `[rows, tokens]`, as its own labels (unshifted, as in the limit)."""
        return self.head(self.body(input_ids=ids, use_cache=False).last_hidden_state, ids)


def build_module(model: str, chunk: int) -> WithLoss:
    """The model in bf16 with recomputation and the chunked loss; weights as they come."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**MODELS[model])
    module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return WithLoss(module, chunk).train()


@torch.no_grad()
def draw(name: str, parameter: Tensor) -> None:
    """Fill a whole parameter: the same values whatever the stage."""
    if parameter.dim() > 1:
        parameter.normal_(std=0.02)
    else:
        parameter.fill_(1.0 if "norm" in name else 0.0)


def batches(rows: int, accumulate: int) -> list[list[Tensor]]:
    """Token ids of each micro-batch of each step, `[rows, TOKENS]` in host RAM."""
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randint(0, 256, (rows, TOKENS), generator=generator) for _ in range(accumulate)]
        for _ in range(STEPS)
    ]


def configuration(stage: int, rows: int, accumulate: int) -> dict[str, Any]:
    """What DeepSpeed is told."""
    in_ram = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": in_ram, "overlap_comm": True}
    if stage == 3:
        zero["offload_param"] = in_ram
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "steps_per_print": 10**9,
    }


def peer(stage: int, case: str) -> dict[str, Any]:
    """Whole steps of DeepSpeed."""
    import deepspeed
    import torch._dynamo  # transformers would import it while zero.Init stands in for torch.Tensor: that fails
    from deepspeed.accelerator import get_accelerator

    model, rows, accumulate, chunk = CASES[case]
    config = configuration(stage, rows, accumulate)
    device = get_accelerator()
    _alone()
    deepspeed.init_distributed()
    # Stage 3 takes each parameter apart as soon as its module is built, so the whole model is nowhere at any time.
    whole = torch.device(device.current_device_name())
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16) if stage == 3 else whole:
        module = build_module(model, chunk)
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            draw(name, parameter)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    device.empty_cache()
    device.reset_peak_memory_stats()
    seconds, losses, norms = [], [], []
    for micro_batches in batches(rows, accumulate):
        device.synchronize()
        began = time.perf_counter()
        total = torch.zeros((), device=engine.device)
        for ids in micro_batches:
            loss = engine(ids.to(engine.device))
            engine.backward(loss)
            engine.step()  # does nothing but count until the last micro-batch
            total += loss.detach()
        losses.append(float(total) / accumulate)
        norms.append(float(engine.get_global_grad_norm()))
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    step_s = median(seconds[WARMUP:])
    torch.distributed.destroy_process_group()
    return {
        "step_ms": step_s * 1000,
        "tokens_per_s": rows * accumulate * TOKENS / step_s,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else "",
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "loss": losses,
        "grad_norm": norms,
        "steps_ms": [1000 * taken for taken in seconds],
        "optimizer": type(engine.optimizer.optimizer).__name__,
    }


def _alone() -> None:
    """Say what a launcher would: one process, the first of one, at a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in alone.items()})


def build() -> dict[str, Any]:
    """Compile the update, unless that was done before."""
    import deepspeed
    from deepspeed.ops.op_builder import CPUAdamBuilder

    began = time.perf_counter()
    CPUAdamBuilder().load()
    return {"deepspeed": deepspeed.__version__, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "build":
        print(json.dumps(build()))
    else:
        print(json.dumps(peer(int(sys.argv[1]), sys.argv[2])))
