"""`train.micro_batch: auto`: the fastest micro-batch that fits, in the plan, in the run and when it is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from tests.stream.plans import QWEN, RATES, described

from trainforge.cli import main
from trainforge.context import Batching, Context
from trainforge.units import parse_bytes
from trainforge_megatrain.stream import StreamSection, building, estimate, micro_batch, sizes
from trainforge_megatrain.stream.forecast import Rates

ROW = 32
AT_ONCE = replace(RATES, upload=1e15, download=1e15, host_update=1e15, device_update=1e15)
"""Only computing takes time."""


def speeds(by_micro_batch: dict[int, float | None], *, of_a_block: bool = True) -> Any:
    """Rates of a machine that computes so many FLOP/s with that micro-batch; None: it is out of memory."""

    def rates(ctx: Context, *_: Any) -> Rates:
        compute = by_micro_batch[ctx.batching.micro_batch]
        if compute is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replace(AT_ONCE, compute=compute, of_a_block=of_a_block)

    return rates


def chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rates: Any, samples: int = 4, **section: Any
) -> tuple[int | None, str]:
    """Of so many samples a step, and the line that a person was told."""
    ctx = described(folder)
    ctx.batching, ctx.row_tokens = Batching(samples, samples, 1), ROW
    monkeypatch.setattr(micro_batch, "rates_of_this_machine", rates)
    section = {"inputs": "device", **section}
    answer = micro_batch.micro_batch(ctx, ctx.model, ctx.optimizer, StreamSection.model_validate(section))
    return answer, " ".join(ctx.console.lines)


@pytest.mark.parametrize(
    ("by_micro_batch", "wanted"),
    [
        ({1: 1e9, 2: 2e9, 4: 3e9}, 4),
        ({1: 1e9, 2: 2e9, 4: 1.5e9}, 2),
        ({1: 1e9, 2: 2e9, 4: 2.01e9}, 2),  # half a percent faster: as fast
        ({1: 1e9, 2: 2e9, 4: 2.03e9}, 4),
        ({1: 1e9, 2: 2e9, 4: None}, 2),
    ],
)
def test_the_fastest_is_taken_and_the_smaller_of_two_as_fast(tmp_path, monkeypatch, by_micro_batch, wanted):
    answer, told = chosen(tmp_path, monkeypatch, speeds(by_micro_batch), gpu_budget="8GiB")
    assert answer == wanted
    assert f"largest that fits is 4, and train.micro_batch: auto takes {wanted}" in told


def test_a_product_is_no_rival_for_a_block(tmp_path, monkeypatch):
    block, product = speeds({1: 1e9, 2: 2e9}), speeds({4: 9e9}, of_a_block=False)
    rates = lambda ctx, *_: (product if ctx.batching.micro_batch == 4 else block)(ctx)  # noqa: E731
    assert chosen(tmp_path, monkeypatch, rates, gpu_budget="8GiB")[0] == 2


@pytest.mark.parametrize(
    ("samples", "by_micro_batch", "wanted"),
    [
        (4, dict.fromkeys((1, 2, 4), 1e9), 4),
        (4, dict.fromkeys((1, 2, 4)), 4),  # no room to measure
        (20, dict.fromkeys((1, 2, 4, 5, 10, 20), 1e9), 5),
        (4, {1: 2e9, 2: 2e9, 4: 1e9}, 2),
    ],
)
def test_where_no_block_was_measured_it_is_the_largest_up_to_8_of_the_fastest(
    tmp_path, monkeypatch, samples, by_micro_batch, wanted
):
    rates = speeds(by_micro_batch, of_a_block=False)
    assert chosen(tmp_path, monkeypatch, rates, samples, gpu_budget="8GiB")[0] == wanted


def test_the_budget_holds_while_speeds_are_measured_and_no_longer(tmp_path, monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr(micro_batch, "limit_device", lambda device, budget: told.append(budget))
    monkeypatch.setattr(micro_batch, "lift_limit", lambda device: told.append("lifted"))

    def failing(*_: Any) -> Rates:
        told.append("measured")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        chosen(tmp_path, monkeypatch, failing, gpu_budget="8GiB")
    assert told == [8 * 2**30, "measured", "lifted"]


def test_without_a_budget_a_cpu_leaves_it_to_the_rule_of_core(tmp_path, monkeypatch):
    assert chosen(tmp_path, monkeypatch, speeds({})) == (None, "")


def needed(folder: Path, micro: int) -> int:
    """Bytes that the device needs at least, as a refused run says."""
    ctx = described(folder)
    ctx.batching, ctx.row_tokens = Batching(4, micro, 4 // micro), ROW
    with pytest.raises(Exception, match="The device needs") as refused:
        building.build(ctx, StreamSection(gpu_budget=1, inputs="device"))
    return parse_bytes(str(refused.value).partition("The device needs ")[2].partition(" (")[0])


def test_only_what_fits_is_measured_and_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "_WORKSPACE", 0)  # of a thread: more than this small model's activations
    least = [needed(tmp_path / str(micro), micro) for micro in (1, 2, 4)]
    assert least == sorted(least)
    assert least[2] - least[1] > 2**18
    between = (least[1] + least[2]) // 2
    answer, told = chosen(
        tmp_path, monkeypatch, speeds({1: 1e9, 2: 2e9}), gpu_budget=between
    )  # 4: a KeyError
    assert answer == 2
    assert "largest that fits is 2," in told
    answer, told = chosen(tmp_path, monkeypatch, speeds({}), gpu_budget=2**20)
    assert answer == 1  # and it is refused when it is built
    assert "none fits" in told


@pytest.fixture
def forge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs commands on a recipe of 4 samples a step on a machine of these speeds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("stream.py").write_text("from trainforge_megatrain.stream import forge_memory\n")
    content = {
        "plugins": ["./stream.py"],
        "run": {"name": "r", "device": "cpu", "threads": 1},
        "model": {"config": QWEN},
        "train": {"steps": 3, "global_batch": 4},
        "text": {"path": "package:trainforge_plugins.text/demo/moby_dick.txt", "max_len": ROW},
        "stream": {"gpu_budget": "8GiB"},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(content))

    def invoke(command: str, by_micro_batch: dict[int, float], *arguments: str) -> Result:
        for module in (building, estimate, micro_batch):
            monkeypatch.setattr(module, "rates_of_this_machine", speeds(by_micro_batch))
        done = CliRunner().invoke(main, [command, "recipe.yaml", *arguments], prog_name="forge")
        assert done.exit_code == 0, done.output
        return done

    return invoke


def test_the_plan_shows_the_largest_and_takes_the_fastest(forge):
    sizes = json.loads(forge("plan", {1: 1e9, 2: 2e9, 4: 1e9}, "--json").output)["sizes"]
    assert sizes["batching"] == {"global_batch": 4, "micro_batch": 2, "accumulate": 2}
    notes = " ".join(sizes["estimates"]["memory"]["notes"])
    assert "largest that fits is 4, and train.micro_batch: auto takes 2" in notes
    fixed = json.loads(
        forge("plan", {1: 1e9, 2: 2e9, 4: 1e9}, "--json", "--set", "train.micro_batch=4").output
    )
    assert fixed["sizes"]["batching"]["micro_batch"] == 4


def test_the_run_writes_it_down_and_a_resumed_one_keeps_it(forge):
    def cut() -> tuple[int, int]:
        train = yaml.safe_load(Path("runs/r/recipe.yaml").read_text())["train"]
        return train["global_batch"], train["micro_batch"]

    small_ones, large_ones = {1: 1e9, 2: 2e9, 4: 1e9}, {1: 1e9, 2: 1e9, 4: 2e9}
    done = forge("run", small_ones, "--max-steps", "1")
    assert cut() == (4, 2)
    assert "4 samples per step = 2 x 2 micro-batches" in " ".join(done.output.split())
    done = forge("run", large_ones, "--max-steps", "1")
    assert cut() == (4, 2)
    assert "train.micro_batch: auto stays at 2" in " ".join(done.output.split())
    forge("run", large_ones, "--set", "train.micro_batch=1", "--max-steps", "1")
    assert cut() == (4, 1)
    forge("run", large_ones, "--fresh", "--max-steps", "1")
    assert cut() == (4, 4)
