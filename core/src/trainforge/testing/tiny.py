"""`tiny_run`: a whole run of core's own loop, small enough for a test, with any plugins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainforge.discovery import Catalog, Plugin
from trainforge.options import RunOptions
from trainforge.planning import Plan, make_plan
from trainforge.provider import STAGES
from trainforge.testing.bench import REFERENCE, PluginReference, load_plugin, providers_of
from trainforge.testing.ranks import run_ranks
from trainforge.testing.recorder import METRICS, SAMPLES

_TRAIN = {
    "steps": 8,
    "global_batch": 6,
    "micro_batch": 1,
    "lr": 0.01,
    "dtype": "fp32",
    "log_every": 1,
    "warmup": 2,
}


@dataclass(frozen=True)
class TinyRun:
    """What a tiny run left behind.

    Attributes:
        code: what `forge run` would exit with.
        path: the run folder.
        summary: summary.json.
        metrics: what was logged, step by step (of all starts in this folder).
        sample_ids: the samples of each step over all ranks, in the order of their micro-batches.
    """

    code: int
    path: Path
    summary: dict[str, Any]
    metrics: list[dict[str, float]]
    sample_ids: list[list[int]]

    @property
    def losses(self) -> list[float]:
        """The loss of each step that trained."""
        return [entry["loss"] for entry in self.metrics if "loss" in entry]

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each step."""
        return [entry["lr"] for entry in self.metrics]

    @property
    def digest(self) -> str:
        """The digest of the trained weights."""
        return str(self.summary["weights_digest"])


def tiny_run(
    folder: Path,
    plugins: Sequence[PluginReference] = (),
    *,
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
    device: str = "cpu",
    ranks: int = 1,
    max_steps: int | None = None,
) -> TinyRun:
    """Run `folder` from where it stands: plan, build, resume, train, save, evaluate, summarise.

    Args:
        folder: the run folder; a second call with the same one resumes.
        plugins: the stages that they own are theirs, the others are the reference ones; observers listen.
        model: keys of the recipe's `model` section (without a model plugin: those of the tiny model).
        train: keys of the `train` section, over small defaults (8 steps of 6 samples).
        sections: recipe sections by plugin name.
        seed: `run.seed`.
        device: `run.device`.
        ranks: more than one are processes of their own; then a comm plugin is needed.
        max_steps: stop early, as `forge run --max-steps`.

    Raises:
        TrainForgeError: what `forge run` would tell the user.
        AssertionError: with several ranks, when one of them failed.
    """
    recipe = {
        "run": {"name": "tiny", "seed": seed, "device": device, "threads": 1},
        "model": dict(model or {}),
        "train": {**_TRAIN, **(train or {})},
        **{name: dict(section) for name, section in (sections or {}).items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.parent / f"{folder.name}.recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    references = [str(reference) for reference in plugins]
    if ranks > 1:
        codes = run_ranks(_run_rank, ranks, file, folder, references, max_steps)
    else:
        codes = [_run_rank(0, 1, file, folder, references, max_steps)]
    return TinyRun(
        max(codes),
        folder,
        json.loads((folder / "summary.json").read_text("utf-8")),
        _lines(folder / METRICS),
        _samples(folder, ranks),
    )


def plan_tiny(recipe: Path, plugins: Sequence[PluginReference], world: int = 1) -> Plan:
    """The plan of a tiny run: every stage settled, no observer but those of `plugins` and the recorder."""
    loaded = [load_plugin(reference) for reference in (*plugins, REFERENCE, "trainforge.testing.recorder")]
    catalog = Catalog([plugin.source for plugin in loaded], [])
    owners: dict[str, Plugin] = {}
    for plugin in loaded[:-1]:
        for stage in providers_of(plugin):
            owners.setdefault(stage, plugin)
    names = list(dict.fromkeys(plugin.source.reference for plugin in loaded))
    stages: dict[str, str] = {stage: owners[stage].source.reference for stage in STAGES}
    return make_plan(recipe, plugins=names, stages=stages, world=world, catalog=catalog)


def _run_rank(
    rank: int, world: int, recipe: Path, folder: Path, plugins: Sequence[str], max_steps: int | None
) -> int:
    from trainforge.runner import run_plan

    return run_plan(plan_tiny(recipe, plugins, world), RunOptions(run_dir=folder, max_steps=max_steps))


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _samples(folder: Path, ranks: int) -> list[list[int]]:
    per_rank = [_lines(folder / SAMPLES.format(rank=rank)) for rank in range(ranks)]
    steps = []
    for batches in zip(*per_rank, strict=True):
        ordered = sorted(pair for rank in batches for pair in rank)
        steps.append([sample for _, samples in ordered for sample in samples])
    return steps
