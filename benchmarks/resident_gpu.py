"""`resident` on one GPU against a hand-written PyTorch loop: a Qwen2 shape of 1.5B parameters, 8 rows of 2048 tokens.

Both sides keep fp32 masters and moments, compute in bf16, clip to norm 1.0 and use torch's fused AdamW. The
hand-written loop takes transformers' own loss over whole logits. A third side is `resident` with one chunk as large as
the batch.
Each side is a process of its own; sides alternate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import median, show

REPEATS = int(os.environ.get("REPEATS", "2"))
STEPS, WARMUP, LOG_EVERY = 40, 10, 5
ROWS, TOKENS = 8, 2048
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SIDES = ("plain", "ours", "ours, one chunk")


def main() -> None:
    """Run the sides in turn and print medians."""
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(REPEATS):
        for side in SIDES:
            out = subprocess.run([sys.executable, "-m", __spec__.name, side], capture_output=True, text=True)
            if out.returncode:
                sys.exit(f"{side} failed:\n{out.stdout[-4000:]}\n{out.stderr[-4000:]}")
            results[side].append(json.loads(out.stdout.strip().splitlines()[-1]))
            print(side, results[side][-1], flush=True)
    plain_ms = median(run["step_ms"] for run in results["plain"])
    rows = []
    for side, runs in results.items():
        step_ms = median(run["step_ms"] for run in runs)
        peak = median(run["peak_bytes"] for run in runs) / 2**30
        rows.append((side, step_ms, ROWS * TOKENS / step_ms * 1000, step_ms / plain_ms, peak))
    logits = ROWS * TOKENS * MODEL["vocab_size"] * 2 / 2**30
    show(
        "resident_gpu",
        f"Median step of {STEPS - WARMUP} steps after {WARMUP} (ours: of means over {LOG_EVERY} steps), "
        f"{REPEATS} processes a side in turn, device time; tokens are all real. "
        f"Peak is allocated device memory. The bf16 logits of the batch are {logits:.1f} GiB.",
        ("side", "step ms", "tokens/s", "step / plain", "peak GiB"),
        rows,
        runs=results,
    )


def plain() -> dict[str, float]:
    """The loop an expert would write."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**MODEL)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    parameters = list(model.parameters())
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, 256, (ROWS, TOKENS), device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    for step in range(STEPS):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        events[step + 1].record()
    torch.cuda.synchronize()
    step_ms = [events[i].elapsed_time(events[i + 1]) for i in range(WARMUP, STEPS)]
    return {"step_ms": median(step_ms), "peak_bytes": float(torch.cuda.max_memory_allocated())}


def ours(chunk: int) -> dict[str, float]:
    """The same through a recipe."""
    import yaml

    import trainforge

    with tempfile.TemporaryDirectory() as folder:
        recipe = {
            "run": {"name": "bench"},
            "model": {"config": MODEL, "attn": "sdpa"},
            "train": {
                "steps": STEPS,
                "global_batch": ROWS,
                "micro_batch": ROWS,
                "lr": 1e-4,
                "schedule": "constant",
                "dtype": "bf16",
                "log_every": LOG_EVERY,
                "loss_chunk": chunk,
            },
            "text": {
                "path": "package:trainforge_plugins.text/demo/moby_dick.txt",
                "max_len": TOKENS,
                "validation": 0,
            },
        }
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        run_dir = Path(folder) / "run"
        trainforge.run(trainforge.plan(path, plugins=["benchmarks/no_checkpoint.py"]), run_dir=run_dir)
        logged = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        steady = [entry for entry in logged if entry["step"] > WARMUP]
    return {
        "step_ms": median(entry["step_ms"] for entry in steady),
        "peak_bytes": steady[-1]["device_peak_bytes"],
    }


if __name__ == "__main__":
    side = sys.argv[1]
    figures = plain() if side == "plain" else ours(2048 if side == "ours" else ROWS * TOKENS)
    print(json.dumps(figures))
