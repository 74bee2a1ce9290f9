"""C37: with keep=1 there is a verified checkpoint at every moment. C42: a missing part of one is named and fatal.

Both with `dcp` and with `vault`.
"""

import json
import threading
import time

import pytest
import torch
import xxhash
from click.testing import CliRunner
from tests.run.runs import run, write_recipe
from tests.vault.toys import stage_in

from trainforge.cli import main
from trainforge_plugins.dcp import manifest

TRAIN = {"steps": 5, "save_every": 1, "keep": 1}
WITH = {"dcp": {}, "vault": {"plugins": ["vault"]}}
BESIDE = {"dcp": set(), "vault": {"packs", "vault.lock"}}


def verifier(plugin, run_dir):
    """What gives the problems of a checkpoint."""
    return manifest.verify if plugin == "dcp" else stage_in(run_dir, reads=True).verify


class Watcher(threading.Thread):
    """Verifies, again and again, that some checkpoint is whole. One may be pruned while it is looked at."""

    def __init__(self, plugin, run_dir):
        super().__init__(daemon=True)
        self.folder, self.verify = run_dir / "checkpoints", verifier(plugin, run_dir)
        self.stop, self.seen, self.gaps = threading.Event(), [], 0

    def run(self):
        while not self.stop.is_set():
            began = {path.name for path in self.folder.glob("step-*")}
            sound = [name for name in sorted(began) if not self.verify(self.folder / name)]
            if sound:
                self.seen.append(sound[-1])
            elif self.seen and began <= {path.name for path in self.folder.glob("step-*")}:
                self.gaps += 1  # nothing was pruned meanwhile, and still none is whole
            elif self.seen and not list(self.folder.glob("step-*")):
                self.gaps += 1
            time.sleep(0.001)


@pytest.mark.parametrize("plugin", WITH)
@pytest.mark.parametrize("background", [True, False])
def test_one_verified_checkpoint_at_every_moment(tmp_path, background, plugin):
    recipe = write_recipe(tmp_path, train=TRAIN, **{plugin: {"background": background}})
    watcher = Watcher(plugin, tmp_path / "run")
    watcher.start()
    outcome = run(recipe, tmp_path / "run", **WITH[plugin])
    watcher.stop.set()
    watcher.join()
    assert outcome.code == 0
    assert watcher.gaps == 0
    assert watcher.seen == sorted(watcher.seen)
    assert len(set(watcher.seen)) > 1, "the watcher was too slow to see anything"
    left = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert left == {"step-00000005"} | BESIDE[plugin]
    assert not verifier(plugin, tmp_path / "run")(tmp_path / "run/checkpoints/step-00000005")


def without(path, *keys):
    """Take a key out of checkpoint.json, with the checksum that its format asks for."""
    document = json.loads(path.read_text())
    del document["checksum"]
    where = document
    for key in keys[:-1]:
        where = where[key]
    del where[keys[-1]]
    document["checksum"] = xxhash.xxh3_128_hexdigest((json.dumps(document, indent=1) + "\n").encode())
    path.write_text(json.dumps(document, indent=1) + "\n")


@pytest.mark.parametrize("plugin", WITH)
@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (("parts", "loop", "data", "rng"), "lacks rng"),
        (("parts", "loop", "data", "rng", "torch"), "lacks the state of torch's random generator"),
        (("parts", "loop", "data", "rng", "python"), "lacks the state of python's random generator"),
        (("parts", "loop", "data", "counters"), "lacks counters"),
        (("parts", "data"), "has no part data"),
    ],
)
def test_a_missing_part_is_named_and_fatal(tmp_path, keys, names, plugin):
    recipe = write_recipe(tmp_path, train={"steps": 6})
    run(recipe, tmp_path / "run", max_steps=3, **WITH[plugin])
    path = tmp_path / "run/checkpoints/step-00000003/checkpoint.json"
    without(path, *keys)
    chosen = [word for name in WITH[plugin].get("plugins", ()) for word in ("--plugins", name)]
    result = CliRunner().invoke(main, ["run", str(recipe), "--run-dir", str(tmp_path / "run"), *chosen])
    assert result.exit_code in (1, 2)
    assert names in result.stderr
    assert "Traceback" not in result.stderr
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3  # no step was taken without it


def test_an_edit_without_the_checksum_is_damage(tmp_path):
    recipe = write_recipe(tmp_path, train={"steps": 6})
    run(recipe, tmp_path / "run", max_steps=3)
    path = tmp_path / "run/checkpoints/step-00000003/checkpoint.json"
    document = json.loads(path.read_text())
    del document["parts"]["loop"]["data"]["rng"]
    path.write_text(json.dumps(document, indent=1))
    result = CliRunner().invoke(main, ["run", str(recipe), "--run-dir", str(tmp_path / "run")])
    assert result.exit_code in (1, 2)
    assert "checkpoint.json is damaged" in result.stderr


@pytest.mark.parametrize("plugin", WITH)
def test_random_generators_are_restored_from_plain_data(tmp_path, plugin):
    """Python's, NumPy's and torch's, all three readable JSON: nothing is unpickled."""
    recipe = write_recipe(tmp_path, train={"steps": 2})
    outcome = run(recipe, tmp_path / "run", **WITH[plugin])
    newest = outcome.folder / "checkpoints/step-00000002/checkpoint.json"
    states = json.loads(newest.read_text())["parts"]["loop"]["data"]["rng"]
    assert set(states) == {"python", "numpy", "torch"}
    assert (
        len(states["python"][1]) == len(states["numpy"][1]) + 1 == 625
    )  # two Mersenne twisters, one with its place
    assert len(bytes.fromhex(states["torch"])) == torch.get_rng_state().numel()
