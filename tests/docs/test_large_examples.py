"""The recipes for one card: too large to run here, but their plans fit what their comments say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from trainforge.cli import main
from trainforge.units import parse_bytes
from trainforge_megatrain.stream import estimate
from trainforge_megatrain.stream.forecast import Rates

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
# a card of 400 TFLOP/s on a link of 40 GB/s: what is tested does not depend on the machine of the test
RATES = Rates(compute=4e14, upload=4e10, download=4e10, host_update=4e9, device_update=1e11)


def parameters(model: dict[str, Any]) -> int:
    """Counted by hand for a Qwen2 shape: biases at the queries, keys and values; two norms in a block, one after it."""
    width, inner, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    keys = width * model["num_key_value_heads"] // model["num_attention_heads"]
    attention = width * width + width + 2 * (width * keys + keys) + width * width
    block = attention + 3 * width * inner + 2 * width
    heads = 1 if model["tie_word_embeddings"] else 2
    return int(heads * vocab * width + model["num_hidden_layers"] * block + width)


@pytest.mark.parametrize(("name", "billions"), [("single_card_7b", 7.6), ("card_24gb", 3.1)])
def test_the_plan_fits_the_card_and_the_ram_of_the_comments(
    name: str, billions: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(estimate, "rates_of_this_machine", lambda *_: RATES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    text = (ROOT / f"examples/{name}.yaml").read_text()
    recipe, words = yaml.safe_load(text), " ".join(text.replace("#", " ").split())
    assert f"a model of {billions} billion" in words
    (numbers,) = re.findall(r"RAM: (\d+) to (\d+) GiB.*? (\d+) more", words)
    least, most, copied = map(int, numbers)

    sizes = planned(name)
    assert sizes["parameters"] == parameters(recipe["model"]["config"])
    assert round(sizes["parameters"] / 1e9, 1) == billions
    assert sum(tier(sizes, "memory", "device").values()) <= parse_bytes(recipe["stream"]["gpu_budget"])
    training, copy = (
        sum(tier(sizes, "memory", "host").values()),
        sum(tier(sizes, "checkpoint", "host").values()),
    )
    assert least * GIB <= training <= most * GIB
    assert copy == pytest.approx(12 * sizes["parameters"], rel=1e-3)
    assert copy == pytest.approx(copied * GIB, abs=GIB)
    assert training + copy <= parse_bytes(recipe["run"]["host_memory"])

    for rounded in re.findall(r"together less than (\d+) with `cpu_adam.moments: bf16`", words):
        less = planned(name, "--set", "cpu_adam.moments=bf16")
        there = {**tier(less, "memory", "host"), **tier(less, "checkpoint", "host")}
        assert sum(there.values()) < int(rounded) * GIB


def tier(sizes: dict[str, Any], stage: str, where: str) -> dict[str, int]:
    """Bytes by what holds them."""
    found: dict[str, int] = sizes["estimates"][stage][where]
    return found


def planned(name: str, *arguments: str) -> dict[str, Any]:
    """The sizes that `forge plan` gives."""
    done = CliRunner().invoke(
        main,
        ["plan", f"examples/{name}.yaml", "--json", "--set", "run.device=cpu", *arguments],
        prog_name="forge",
    )
    assert done.exit_code == 0, done.output
    sizes: dict[str, Any] = json.loads(done.output)["sizes"]
    return sizes
