from pathlib import Path

from trainforge.testing import OptimizerConformance, tiny_run

PLUGIN = Path(__file__).with_name("my_plugin.py")


class TestLion(OptimizerConformance):
    plugin = PLUGIN


def test_it_learns(tmp_path):
    run = tiny_run(tmp_path / "run", [PLUGIN], train={"steps": 30, "lr": 0.003})
    assert run.losses[-1] < 0.8 * run.losses[0]
