"""`stream,cpu_adam` on one GPU, against the resident compute limit: forward and backward alone of the same model.

    python -m benchmarks stream_gpu                    # every case
    CASES=1.5B-8GiB,1.5B-24GiB python -m benchmarks stream_gpu

The limit holds bf16 weights and gradients on the card, recomputes each block, takes the same chunked loss and does
nothing else: no masters, no norm, no update. Ours is whole steps: data, forward, backward, norm, clipping, AdamW on
fp32 masters, logging. Each side is a process of its own; weights are random (drawn fast: values do not matter here).
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import median, show

TOKENS = 2048
STEPS, WARMUP = int(os.environ.get("STEPS", "10")), int(os.environ.get("WARMUP", "4"))


def _qwen2(
    width: int, blocks: int, heads: int, kv: int, inner: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
    }


MODELS = {
    "1.5B": _qwen2(1536, 28, 12, 2, 8960, 151936, True),
    "3B": _qwen2(2048, 36, 16, 2, 11008, 151936, True),
    "7B": _qwen2(3584, 28, 28, 4, 18944, 152064, False),
    "14B": _qwen2(5120, 48, 40, 8, 13824, 152064, False),
}
# case: model, rows per micro-batch, micro-batches per step, budget, tokens per chunk of the loss
CASES: dict[str, tuple[str, int, int, str, int]] = {
    "1.5B-8GiB": ("1.5B", 8, 1, "8GiB", 512),
    "1.5B-24GiB": ("1.5B", 8, 1, "24GiB", 2048),
    "1.5B-8x4-16GiB": ("1.5B", 8, 4, "16GiB", 512),
    "1.5B-32x1-16GiB": ("1.5B", 32, 1, "16GiB", 512),
    "3B-15GiB": ("3B", 8, 2, "15GiB", 512),
    "3B-auto": ("3B", 8, 2, "auto", 2048),
    "7B-auto": ("7B", 8, 1, "auto", 2048),
    "7B-40GiB": ("7B", 8, 1, "40GiB", 2048),
    "14B-auto": ("14B", 8, 1, "auto", 1024),
}


def main() -> None:
    """Run the cases, and the limit of each model and batch once."""
    wanted = os.environ.get("CASES")
    names = wanted.split(",") if wanted else list(CASES)
    limits: dict[tuple[str, int], dict[str, Any]] = {}
    rows, runs = [], {}
    for name in names:
        model, micro_batch, _, budget, chunk = CASES[name]
        key = (model, micro_batch)
        if key not in limits:
            limits[key] = _side("limit", model, str(micro_batch), str(chunk))
            print("limit", key, limits[key], flush=True)
        ours = runs[name] = _side("ours", name)
        print(name, ours, flush=True)
        limit = limits[key].get("tokens_per_s")
        speed = ours.get("tokens_per_s")
        share = speed / limit if limit and speed else None
        rows.append(
            (
                name,
                budget,
                speed or "failed",
                limit or "does not fit",
                share or "",
                speed / ours["planned_tokens_per_s"] if speed else "",
                ours.get("waited_ms", ""),
                ours.get("reserved_gib", ""),
                ours.get("host_gib", ""),
            )
        )
    show(
        "stream_gpu",
        f"Median of {STEPS - WARMUP} steps after {WARMUP}; real tokens per second. limit: forward and backward alone, "
        "resident, each block recomputed. Of plan: share of the speed that the plan's bound allows. GiB: peak "
        "reserved by PyTorch; peak resident set of the process.",
        (
            "case",
            "budget",
            "tokens/s",
            "limit",
            "of limit",
            "of plan",
            "waited for update ms",
            "reserved GiB",
            "host GiB",
        ),
        rows,
        runs=runs,
        limits={" x ".join(map(str, key)): value for key, value in limits.items()},
    )


def _side(*arguments: str) -> dict[str, Any]:
    out = subprocess.run([sys.executable, "-m", __spec__.name, *arguments], capture_output=True, text=True)
    if out.returncode:
        print(f"{arguments} failed:\n{out.stdout[-1500:]}\n{out.stderr[-1500:]}", flush=True)
        return {}
    figures: dict[str, Any] = json.loads(out.stdout.strip().splitlines()[-1])
    return figures


def limit(model: str, rows: int, chunk: int) -> dict[str, float]:
    """Forward and backward alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainforge.toolbox.chunked_loss import chunked_cross_entropy
    from trainforge.toolbox.recompute import recompute_blocks

    config = AutoConfig.for_model(**MODELS[model])
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    recompute_blocks(module, [f"model.layers.{index}" for index in range(config.num_hidden_layers)])
    ids = torch.randint(0, 256, (rows, TOKENS), device="cuda")
    head = list(module.lm_head.parameters())

    def step() -> None:
        hidden = module.model(input_ids=ids, use_cache=False).last_hidden_state
        chunked_cross_entropy(hidden, ids, module.lm_head, head, chunk, 1 / ids.numel()).backward()
        for parameter in module.parameters():
            parameter.grad = None

    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    step_s = median(seconds[WARMUP:])
    return {"step_ms": step_s * 1000, "tokens_per_s": rows * TOKENS / step_s}


def ours(name: str) -> dict[str, Any]:
    """The same through a recipe."""
    import torch
    import yaml

    import trainforge

    _draw_fast()
    model, rows, accumulate, budget, chunk = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        recipe = {
            "run": {"name": "bench"},
            "model": {"config": MODELS[model], "attn": "sdpa"},
            "train": {
                "steps": STEPS,
                "micro_batch": rows,
                "accumulate": accumulate,
                "lr": 1e-5,
                "schedule": "constant",
                "dtype": "bf16",
                "log_every": 1,
                "loss_chunk": chunk,
            },
            "text": {
                "path": "package:trainforge_plugins.text/demo/moby_dick.txt",
                "max_len": TOKENS,
                "validation": 0,
            },
            "stream": {"gpu_budget": budget},
        }
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        run_dir = Path(folder) / "run"
        began = time.perf_counter()
        plan = trainforge.plan(path, plugins=["stream", "cpu_adam", "benchmarks/no_checkpoint.py"])
        trainforge.run(plan, run_dir=run_dir)
        whole_s = time.perf_counter() - began
        log = (run_dir / "log.txt").read_text()
        print(log[-3000:], file=sys.stderr)
        logged = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steady = [entry for entry in logged if entry["step"] > WARMUP]
    step_ms = median(entry["step_ms"] for entry in steady)
    planned = re.search(r"\(([\d,]+) tokens/s\)", log)
    assert planned is not None
    return {
        "step_ms": step_ms,
        "tokens_per_s": rows * accumulate * TOKENS / step_ms * 1000,
        "planned_tokens_per_s": int(planned[1].replace(",", "")),
        "waited_ms": median(entry["memory/waited_for_update_ms"] for entry in steady),
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "loss": [entry["loss"] for entry in logged],
        "whole_s": whole_s,
    }


def _draw_fast() -> None:
    """Initial weights from one block of random numbers, repeated, and no digest: minutes less for large models."""
    import torch

    import trainforge.summary
    from trainforge_plugins.hf.initial import RandomWeights

    noise = torch.randn(2**22) * 0.02

    def fill(self: Any, spec: Any, out: Any, extent: Any) -> None:
        if spec.kind == "norm":
            out.fill_(1.0)
            return
        for start in range(0, len(out), len(noise)):
            piece = out[start : start + len(noise)]
            piece.copy_(noise[: len(piece)])

    RandomWeights.fill = fill  # type: ignore[method-assign]
    trainforge.summary.weights_digest = lambda parameters, weights: ""  # nor does anybody read it


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "limit":
        print(json.dumps(limit(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
    else:
        print(json.dumps(ours(sys.argv[2])))
