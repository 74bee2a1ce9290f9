"""C04: every key of a recipe that is accepted changes what happens, and what could change nothing is refused."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.cases.probe import Seen, probed
from tests.run.runs import MODEL, run, write_recipe

import trainforge
from trainforge.cli import main
from trainforge.discovery import scan
from trainforge.errors import CheckpointError, ConfigError
from trainforge.plan_sizes import describe_model
from trainforge.planning import make_plan
from trainforge.sections import RunSection, TrainSection
from trainforge.testing.bench import providers_of
from trainforge_loongforge.vault.locking import locked
from trainforge_loongforge.vault.packs import RAW, ZSTD

ROOT = Path(__file__).resolve().parents[2]
ANY = object()
Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Effect:
    """A changed value of a key, where to look, and what is to be seen before and after (ANY: only that they differ)."""

    value: Any
    look: Callable[[Seen], Any]
    before: Any = ANY
    after: Any = ANY
    base: Sections = field(default_factory=dict)
    plugins: tuple[str, ...] = ()


def rates(seen: Seen) -> list[float]:
    return seen.series("lr")


def digest(seen: Seen) -> str:
    return seen.summary["weights_digest"]


def rows_per_step(seen: Seen) -> list[int]:
    return [len(step) for step in seen.ids]


def train(**keys: Any) -> Sections:
    return {"train": keys}


def text(**keys: Any) -> Sections:
    return {"text": keys}


JSONL = "rows.jsonl"
DIVERGES = train(lr=1e30, clip=None, warmup=0, schedule="constant", steps=8, max_bad_steps=2)
VAULT = ("vault",)
OFTEN = train(save_every="auto", steps=24)  # the first save after 20 steps, then what was measured
# the base run: 4 steps of 2 rows of 32 tokens out of 12, two blocks, linear schedule with 3 steps of warm-up, lr 0.01
EFFECTS = {
    "run.seed": Effect(1, lambda s: (s.ids, digest(s))),
    "run.threads": Effect(2, lambda s: s.threads, 1, 2),
    "run.sample": Effect("1: the", lambda s: "sample      1: the" in s.log, False, True),
    "train.steps": Effect(2, lambda s: s.summary["steps"], 4, 2),
    "train.epochs": Effect(0.5, lambda s: s.summary["steps"], 6, 3, train(steps=None, epochs=1)),
    "train.global_batch": Effect(4, rows_per_step, [2] * 4, [4, 4, 4, 4]),
    "train.micro_batch": Effect(1, lambda s: s.cuts, [1] * 4, [2] * 4),
    "train.accumulate": Effect(2, lambda s: s.shapes, [(2, 32)] * 4, [(1, 32)] * 8),
    "train.lr": Effect(0.02, lambda s: max(rates(s)), 0.01, 0.02),
    "train.lr_groups": Effect([{"match": "*embed*", "lr": 0.001, "scale": None}], digest),
    "train.schedule": Effect("constant", lambda s: rates(s)[-1], 0.0, 0.01),
    "train.warmup": Effect(2, lambda s: rates(s)[0], round(0.01 / 3, 10), 0.005),
    "train.decay": Effect(
        2, rates, [0.01] * 3 + [0.0], [0.01, 0.01, 0.005, 0], train(schedule="wsd", decay=0.25, warmup=0)
    ),
    "train.lr_end": Effect(0.004, lambda s: rates(s)[-1], 0.0, 0.004),
    "train.betas": Effect([0.5, 0.95], digest),
    "train.eps": Effect(1e-2, digest),
    "train.weight_decay": Effect(0.5, digest),
    "train.decay_exclude": Effect(["norm", "bias"], digest),
    "train.clip": Effect(1e-3, digest),
    "train.dtype": Effect("bf16", digest),
    "train.recompute": Effect(True, lambda s: s.block_forwards, 4 * 2, 2 * 4 * 2),
    "train.compile": Effect(True, lambda s: s.compiled, 0, 2),
    "train.loss_chunk": Effect(7, lambda s: s.head_rows, 64, 7),
    "train.save_every": Effect(1, lambda s: s.saves, 1, 4),
    "train.mtbf": Effect(
        40.0, lambda s: re.findall(r"saving about every (.+?) from", s.log), ANY, ["10.0 s"], OFTEN
    ),
    "train.keep": Effect(3, lambda s: len(s.checkpoints), 2, 3, train(save_every=1)),
    "train.keep_every": Effect(
        2,
        lambda s: s.checkpoints,
        ["step-00000004"],
        ["step-00000002", "step-00000004"],
        train(save_every=1, keep=1),
    ),
    "train.best": Effect(
        "eval_loss", lambda s: s.saves > 1, False, True, train(eval_every=1) | text(validation=2)
    ),
    "train.early_stop": Effect(
        {"metric": "eval_loss", "patience": 1, "min_delta": 1e9},
        lambda s: s.summary["steps"],
        4,
        2,
        train(eval_every=1) | text(validation=2),
    ),
    "train.eval_every": Effect(
        2, lambda s: next(m for m in s.metrics if "eval_loss" in m)["step"], 4, 2, text(validation=2)
    ),
    "train.log_every": Effect(2, lambda s: s.series("step"), [1, 2, 3, 4], [2, 4]),
    "train.max_bad_steps": Effect(
        3, lambda s: s.error[:29], "the gradients of 2 steps in a", "the gradients of 3 steps in a", DIVERGES
    ),
    "model.config": Effect(MODEL | {"num_hidden_layers": 1}, lambda s: s.block_forwards, 4 * 2, 4),
    "model.freeze": Effect(["model.layers.0.*"], digest),
    "model.lora": Effect(
        {"rank": 8, "alpha": 16.0, "dropout": 0.0, "targets": ["q_proj"], "rslora": False}, digest
    ),
    "model.attn": Effect("eager", lambda s: s.eager_attention, 0, 4 * 2),
    "text.path": Effect("other.txt", lambda s: s.series("loss")),
    "text.format": Effect("text", lambda s: "60 documents," in s.log, True, False, text(path=JSONL)),
    "text.field": Effect("other", lambda s: s.series("loss"), base=text(path=JSONL)),
    "text.max_len": Effect(16, lambda s: s.shapes[0], (2, 32), (2, 16)),
    "text.validation": Effect(
        3, lambda s: (s.evaluated, s.summary["eval_loss"] is None), (0, True), (3, False)
    ),
    "text.validation_rows": Effect(2, lambda s: s.evaluated, 4, 2, text(validation=4)),
    "text.last_batch": Effect("drop", rows_per_step, [8, 4, 8, 4], [8] * 4, train(global_batch=8)),
    "text.shuffle": Effect(False, lambda s: s.ids[0] + s.ids[1] == (0, 1, 2, 3), False, True),
    "text.workers": Effect(2, lambda s: s.processes, 0, 2, text(path="large.txt", workers=0)),
    "text.cache": Effect("elsewhere", lambda s: (s.folder / "elsewhere").exists(), False, True),
    "dcp.background": Effect(False, lambda s: s.committed_at_return, False, True),
    "dcp.verify": Effect(False, lambda s: s.verified, 1, 0),
    "vault.background": Effect(False, lambda s: s.committed_at_return, False, True, plugins=VAULT),
    "vault.storage": Effect(
        "posix", lambda s: re.findall("packs are written in mode (.+)", s.log), plugins=VAULT
    ),
    "vault.compress": Effect(True, lambda s: s.codecs, {RAW}, {RAW, ZSTD}, plugins=VAULT),
    "vault.copies": Effect(0.0, lambda s: s.copied > 0, True, False, train(save_every=2), VAULT),
}
TESTED_ELSEWHERE = {
    "run.name": "tests/cases/test_c04_every_key_has_an_effect.py::test_the_name_is_that_of_the_folder",
    "run.device": "tests/cases/test_c04_every_key_has_an_effect.py::test_a_device_is_taken_or_refused",
    "run.devices": "tests/ranks/test_environment.py::test_devices_that_cannot_be",
    "model.hf": "tests/hf/test_weights.py::test_a_saved_folder_reads_as_from_pretrained",
    "model.factory": "tests/hf/test_factory.py::test_a_module_becomes_a_spec",
    "model.init_from": "tests/hf/test_init_from.py::"
    "test_only_weights_are_taken_over_and_the_step_is_written_down",
    "model.trust_remote_code": "tests/hf/test_own_code.py::test_it_trains_and_its_export_has_the_code",
    "model.experts": "tests/cases/test_c04_every_key_has_an_effect.py::test_experts_are_computed_as_said",
    "text.sources": "tests/text/test_sources_weights.py::test_whole_weights_repeat_all_rows",
    "text.dataset": "tests/text/test_registry.py::test_one_several_and_names_with_commas",
    "text.dataset_dir": "tests/text/test_registry.py::test_one_several_and_names_with_commas",
    "text.columns": "tests/text/test_formats.py::test_columns_and_tags_are_mapped_under_either_name",
    "text.tags": "tests/text/test_formats.py::test_columns_and_tags_are_mapped_under_either_name",
    "text.tokenizer": "tests/text/test_tokenizers.py::test_a_folder_gives_the_librarys_ids_and_an_end_token",
    "text.image_dir": "tests/text/test_image_rows.py::test_images_of_another_folder",
    "text.template": "tests/text/test_packed_rows.py::test_a_resume_with_other_labels_or_rows_is_refused",
    "text.train_on": "tests/text/test_labels.py::test_the_last_turn_or_everything",
    "text.too_long": "tests/text/test_packed_rows.py::test_cut_rows_are_used_and_counted",
    "text.packing": "tests/text/test_packed_rows.py::test_every_conversation_comes_whole_and_once_per_epoch",
    "text.strict": "tests/text/test_rows.py::test_strict_stops_at_the_first_bad_row",
    "text.worker_timeout": "tests/cases/test_c17_stuck_or_killed.py::test_a_tokenising_worker",
    "ddp.bucket_mb": "tests/cases/test_c23_one_sum_over_micro_batches.py::"
    "test_two_ranks_are_the_single_big_batch_with_one_reduction_per_bucket",
    "ddp.timeout": "tests/cases/test_c17_stuck_or_killed.py::test_a_rank",
    "run.host_memory": "tests/stream/test_plan_limits.py::"
    "test_a_run_is_refused_before_it_loads_unless_told_to_start",
    "stream.gpu_budget": "tests/stream/test_plan_command.py::"
    "test_a_budget_moves_blocks_and_the_start_report_says_where_and_how_fast",
    "stream.master": "tests/stream/test_plan_sizes.py::test_what_is_counted_is_what_is_allocated",
    "stream.slots": "tests/stream/test_plan_sizes.py::test_what_is_counted_is_what_is_allocated",
    "stream.grads": "tests/stream/test_plan_sizes.py::test_what_is_counted_is_what_is_allocated",
    "stream.inputs": "tests/stream/test_plan_command.py::test_where_inputs_wait_can_be_said",
    "stream.pin": "tests/stream/test_plan_command.py::test_page_locking_can_be_switched_off",
    "stream.oversubscribe": "tests/stream/test_plan_limits.py::"
    "test_a_run_is_refused_before_it_loads_unless_told_to_start",
    "cpu_adam.backend": "tests/cpu_adam/test_inputs.py::test_deepspeed_gets_fp32_slots_one_by_one",
    "cpu_adam.moments": "tests/cpu_adam/test_update.py::test_bf16_moments_are_rounded_to_the_nearest_even",
    "cpu_adam.threads": "tests/cpu_adam/test_threads.py::test_cores_are_shared_out",
    "vault.timeout": "tests/cases/test_c04_every_key_has_an_effect.py::test_vault_waits_for_others_as_long_as_said",
    "dcp.timeout": "tests/dcp/test_ranks.py::test_a_rank_that_never_writes_ends_the_save_within_the_timeout",
}


def known_keys() -> set[str]:
    """Every key of core's sections and of those of our installed distributions."""
    keys = {f"run.{name}" for name in RunSection.model_fields} | {
        f"train.{n}" for n in TrainSection.model_fields
    }
    catalog = scan()
    for sources in catalog.plugins.values():
        for source in sources:
            if source.distribution.startswith("trainforge"):
                for stage, provider in providers_of(catalog.load(source)).items():
                    section = "model" if stage == "model" else source.name
                    keys |= {f"{section}.{name}" for name in provider.config.model_fields}
    return keys


def test_every_key_has_a_test_of_its_effect():
    tested = EFFECTS.keys() | TESTED_ELSEWHERE.keys()
    assert known_keys() - tested == set(), "add them to EFFECTS, or name the test that shows their effect"
    assert tested - known_keys() == set()
    assert not EFFECTS.keys() & TESTED_ELSEWHERE.keys()


@pytest.mark.parametrize("key", TESTED_ELSEWHERE)
def test_the_tests_elsewhere_exist(key: str):
    file, name = TESTED_ELSEWHERE[key].split("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


_before: dict[str, Seen] = {}


def carried_out(folder: Path, sections: Sections, plugins: tuple[str, ...]) -> Seen:
    folder.mkdir()
    rows = [{"text": f"row {i} says {i * i}", "other": f"{i} is not {i + 1}"} for i in range(60)]
    (folder / JSONL).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "other.txt").write_text("".join(f"{i} boats, {i + 2} oars. " for i in range(60)))
    if sections.get("text", {}).get("path") == "large.txt":  # several units of work
        (folder / "large.txt").write_text("the whale swam by.\n" * 150_000)
    sections = copy.deepcopy(sections)
    sections["train"] = {"steps": 4, "epochs": None} | sections.get("train", {})
    for name in ("path", "cache"):
        if name in sections.get("text", {}):
            sections["text"][name] = str(folder / sections["text"][name])
    return probed(folder, sections, plugins=plugins)


@pytest.mark.parametrize("key", EFFECTS)
def test_a_changed_key_changes_what_happens(tmp_path: Path, key: str):
    effect, (section, name) = EFFECTS[key], key.split(".")
    if key == "run.threads" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    base = json.dumps([effect.base, effect.plugins])
    if base not in _before:
        _before[base] = carried_out(tmp_path / "before", effect.base, effect.plugins)
    changed = effect.base | {section: effect.base.get(section, {}) | {name: effect.value}}
    seen = carried_out(tmp_path / "after", changed, effect.plugins)
    before, after = effect.look(_before[base]), effect.look(seen)
    assert before != after
    assert effect.before is ANY or before == effect.before
    assert effect.after is ANY or after == effect.after
    if not seen.error and name not in ("path", "cache", "config"):
        assert seen.recipe[section][name] == effect.value  # the effective recipe says so


def test_the_name_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "other"):
        assert trainforge.run(write_recipe(tmp_path, run={"name": name}, train={"steps": 1})) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["one", "other"]


def test_a_device_is_taken_or_refused(tmp_path: Path):
    assert run(write_recipe(tmp_path, train={"steps": 1}), tmp_path / "run").summary["device"] == "cpu"
    for device in ("cuda:7", "mps"):
        with pytest.raises(ConfigError, match=device):
            run(write_recipe(tmp_path, run={"device": device}), tmp_path / "other")


def test_vault_waits_for_others_as_long_as_said(tmp_path: Path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    for timeout, said in ((0.2, "200 ms"), (0.6, "600 ms")):
        recipe = write_recipe(tmp_path, train={"steps": 1}, vault={"timeout": timeout})
        began = time.monotonic()
        with (
            locked(tmp_path / "run/checkpoints", 0),
            pytest.raises(CheckpointError, match=f"another process has been saving .* for {said}"),
        ):
            run(recipe, tmp_path / "run", plugins=VAULT)
        assert time.monotonic() - began > timeout


@pytest.mark.parametrize("share", [1.5, -0.5])
def test_a_share_of_ram_that_cannot_be_is_refused(tmp_path: Path, share: float):
    recipe = write_recipe(tmp_path, vault={"copies": share})
    with pytest.raises(ConfigError, match=f"vault.copies: must be .*, found {share}"):
        run(recipe, tmp_path / "run", plugins=VAULT)


def test_experts_are_computed_as_said(tmp_path: Path):
    mixture = MODEL | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    for experts in ("eager", "batched_mm"):
        recipe = write_recipe(tmp_path, model={"config": mixture, "experts": experts})
        spec, _ = describe_model(make_plan(recipe))
        assert spec.module.config._experts_implementation == experts


# ----------------------------------------------------------------------------------------- what could change nothing

NO_BLOCKS = """
import torch
from torch import nn
class Net(nn.Module):
    vocab_size = 264
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(264, 8), nn.Linear(8, 264)
    def hidden(self, batch): return self.embed(batch.input_ids)
def make(ctx): return Net()
"""
FACTORY = {"config": None, "factory": "noblocks:make"}
IN_VAIN = {
    "a decay that the schedule has not": (train(decay=0.5), "decay has no effect with schedule linear"),
    "an end that the schedule has not": (train(schedule="constant", lr_end=1e-4), "lr_end has no effect"),
    "evaluating nothing": (train(eval_every=2), "train.eval_every is 2, and the data holds no sample"),
    "a decay pattern that matches nothing": (
        train(decay_exclude=["norm", "embeding"]),
        "embeding is no kind of parameter (matrix, embedding, norm, bias) and matches no name: did you mean embedding?",
    ),
    "recomputing blocks that are not there": (
        train(recompute=True) | {"model": FACTORY},
        "train.recompute works block",
    ),
    "compiling blocks that are not there": (
        train(compile=True) | {"model": FACTORY},
        "train.compile works block",
    ),
    "experts of a dense model": ({"model": {"experts": "eager"}}, "model.experts is eager, but qwen2 has no"),
    "a kernel for a module of one's own": (
        {"model": FACTORY | {"attn": "eager"}},
        "attn and experts are for",
    ),
    "a field of plain text": (text(field="body"), "which has no fields"),
    "a card beside the CPU": ({"run": {"devices": [0]}}, "run.devices picks cards but run.device is cpu"),
    "keeping for ever what is never saved": (
        train(keep_every=2),
        "keep_every has no effect without save_every",
    ),
    "the best of no evaluations": (train(best="eval_loss"), "best has no effect without eval_every"),
    "patience with no evaluations": (train(early_stop={}), "early_stop has no effect without eval_every"),
    "saving every 0 steps": (train(save_every=0), "train.save_every"),
    "saving every -3 steps": (train(save_every=-3), "train.save_every"),
    "saving every no time": (train(save_every="0s"), "must be longer than nothing"),
    "failures that nothing is saved by": (train(mtbf="4h", save_every="10min"), "mtbf has no effect without"),
    "an average that forgets nothing": (train(betas=[0.9, 1.0]), "train.betas"),
    "an endless warm-up": (train(warmup=float("inf")), "train.warmup"),
    "half a row": (text(validation=1.5), "must be a share below 1, a whole number of rows, or a path"),
    "no time for workers": (text(worker_timeout=0), "text.worker_timeout"),
    "a seed that no generator takes": ({"run": {"seed": 2**63}}, "run.seed"),
    "a name that leaves runs/": ({"run": {"name": ".."}}, "run.name"),
    "an option of a plugin that is not there": ({"chekpoint": {"every": 3}}, "no section chekpoint"),
    "an option that the plugin has not": ({"dcp": {"pin": False}}, "dcp.pin: unknown key"),
}


@pytest.mark.parametrize("wish", IN_VAIN)
def test_what_could_change_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "noblocks.py").write_text(NO_BLOCKS)
    sections, says = IN_VAIN[wish]
    recipe = write_recipe(tmp_path, **sections)
    result = CliRunner().invoke(main, ["run", str(recipe), "--run-dir", "run"], prog_name="forge")
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


def test_a_changed_accumulate_is_not_dropped_on_resume(tmp_path: Path):
    """The folder's global batch is kept, so a changed cut must give it."""
    run(
        write_recipe(tmp_path, train={"global_batch": None, "micro_batch": 1, "accumulate": 4}),
        tmp_path / "run",
        max_steps=1,
    )
    cut = {"global_batch": None, "micro_batch": 2, "accumulate": 2}
    assert run(write_recipe(tmp_path, train=cut), tmp_path / "run", max_steps=1).summary["steps"] == 2
    changed = write_recipe(tmp_path, train=cut | {"accumulate": 3})
    with pytest.raises(ConfigError, match="global_batch 4 is not micro_batch 2 x accumulate 3"):
        run(changed, tmp_path / "run", max_steps=1)


def test_a_sample_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from trainforge_plugins.text.data import TextData

    monkeypatch.setattr(TextData, "encode", lambda self, text: None)
    run(write_recipe(tmp_path, run={"sample": "the"}, train={"steps": 1}), tmp_path / "run")
    assert "the data has no tokenizer for it (run.sample)" in (tmp_path / "run/log.txt").read_text()
