"""`forge plan` and the start report of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from tests.stream.plans import QWEN, RATES, described

from trainforge.cli import main
from trainforge.errors import ConfigError
from trainforge.toolbox.host_limits import resident_set
from trainforge.toolbox.streams import Streams
from trainforge.units import parse_bytes
from trainforge_megatrain.stream import StreamSection, building, estimate

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("stream.py").write_text("from trainforge_megatrain.stream import forge_memory\n")
    Path("cpu_adam.py").write_text("from trainforge_megatrain.cpu_adam import forge_optimizer\n")


def recipe(**sections: Any) -> dict[str, Any]:
    return {
        "plugins": ["./stream.py"],
        "run": {"name": "r", "device": "cpu", "threads": 1},
        "model": {"config": QWEN},
        "train": {"steps": 1, "micro_batch": 2},
        "text": {"path": "package:trainforge_plugins.text/demo/moby_dick.txt", "max_len": 32},
        **sections,
    }


def plan(content: dict[str, Any], *arguments: str) -> Result:
    Path("recipe.yaml").write_text(yaml.safe_dump(content))
    return CliRunner().invoke(main, ["plan", "recipe.yaml", *arguments], prog_name="forge")


def test_it_prints_tiers_placement_and_the_step(monkeypatch):
    monkeypatch.setattr(estimate, "rates_of_this_machine", lambda *_: RATES)
    done = plan(recipe(), "--json")
    assert done.exit_code == 0, done.output
    sizes = json.loads(done.output)["sizes"]
    memory = sizes["estimates"]["memory"]
    padded = sizes["parameters"]
    assert memory["host"]["optimizer state"] == pytest.approx(8 * padded, rel=0.01)
    assert memory["seconds_per_step"] > 0
    text = " ".join(memory["notes"])
    for part in (
        "0 of 6 blocks live on the device",
        "a step should take",
        "forward: compute",
        "measured here",
    ):
        assert part in text
    shown = " ".join(plan(recipe()).output.split())
    assert "0 of 6 blocks live on the device" in shown


def test_a_plan_that_cannot_be_shows_its_table_and_ends_with_2():
    content = recipe(run={"name": "r", "device": "cpu", "host_memory": "1MiB"})
    done = plan(content)
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "together" in said
    assert "run.host_memory leaves 1.0 MiB" in said
    assert "are missing" in said
    assert json.loads(plan(content, "--json").output.partition("\nerror")[0])["sizes"]
    assert plan({**content, "stream": {"oversubscribe": True}}).exit_code == 0


def test_the_example_of_120_billion_parameters_is_planned_in_seconds_and_refused_in_less_ram(monkeypatch):
    monkeypatch.setattr(estimate, "rates_of_this_machine", lambda *_: RATES)
    content = yaml.safe_load((ROOT / "examples/plan_120b.yaml").read_text())
    assert content["plugins"] == ["stream", "cpu_adam"]
    content["plugins"] = ["./stream.py", "./cpu_adam.py"]
    content["run"]["device"] = "cpu"
    before, began = resident_set(), time.monotonic()
    done = plan(content, "--json")
    assert time.monotonic() - began < 60
    assert resident_set() - before < 2**30
    assert done.exit_code == 0, done.output
    sizes = json.loads(done.output)["sizes"]
    assert 116e9 < sizes["parameters"] < 118e9
    host, device = (sizes["estimates"]["memory"][tier] for tier in ("host", "device"))
    there = sizes["parameters"] - host["weights"] / 2
    assert host["optimizer state"] == pytest.approx(
        4 * (sizes["parameters"] - there), rel=1e-3
    )  # bf16 moments
    assert sum(device.values()) <= 130 * 2**30
    less = plan({**content, "run": {**content["run"], "host_memory": "512GiB"}})
    assert less.exit_code == 2
    assert "run.host_memory leaves 512.0 GiB" in " ".join(less.output.split())


def built(folder: Path, **section: Any) -> tuple[list[str], list[str]]:
    """Where each unit lives, and the lines that a person was told."""
    ctx = described(folder, train={"dtype": "bf16"}, micro_batch=2)
    ctx.row_tokens = 32
    memory = building.build(ctx, StreamSection.model_validate(section))
    memory.close()
    return [unit.place.value for unit in memory.units], ctx.console.lines


def test_a_budget_moves_blocks_and_the_start_report_says_where_and_how_fast(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "rates_of_this_machine", lambda *_: RATES)
    places, lines = built(tmp_path, gpu_budget="8GiB")
    assert places == ["device"] * 8
    assert any("6 of 6 blocks live on the device" in line for line in lines)
    assert any("a step should take" in line for line in lines)
    with pytest.raises(ConfigError) as refused:
        built(tmp_path, gpu_budget=1)
    missing = parse_bytes(str(refused.value).partition("The device needs ")[2].partition(" (")[0])
    places, lines = built(tmp_path, gpu_budget=missing + 2**18)  # a block of 41,000 parameters takes 0.6 MB
    assert "streamed" in places
    assert any("0 of 6 blocks live on the device" in line for line in lines)


def test_without_room_to_measure_the_device_is_filled(tmp_path, monkeypatch):
    def no_room(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(building, "rates_of_this_machine", no_room)
    places, lines = built(tmp_path, gpu_budget="8GiB")
    assert places == ["device"] * 8
    assert any("no room on the device to measure" in line for line in lines)


def test_a_plan_without_room_to_measure_is_still_a_plan(monkeypatch):
    def no_room(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(estimate, "rates_of_this_machine", no_room)
    done = plan(recipe(), "--set", "stream.gpu_budget=8GiB")
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert "no room on the device to measure its speed" in shown
    assert "6 of 6 blocks live on the device" in shown
    assert "a step should take" not in shown


def test_page_locking_can_be_switched_off(tmp_path, monkeypatch):
    asked: list[bool] = []
    real = Streams.host

    def host(self, elements, dtype, *, pinned=True):
        asked.append(pinned)
        return real(self, elements, dtype, pinned=pinned)

    monkeypatch.setattr(Streams, "host", host)
    built(tmp_path)
    assert any(asked)
    asked.clear()
    built(tmp_path, pin=False)
    assert not any(asked)


@pytest.mark.parametrize("inputs", ["device", "host"])
def test_where_inputs_wait_can_be_said(tmp_path, inputs):
    memory = building.build(described(tmp_path), StreamSection.model_validate({"inputs": inputs}))
    assert (memory.offload is not None) == (inputs == "host")
    memory.close()
