"""The rules of the checkpoint stage."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch

from trainforge.checkpoints import list_checkpoints
from trainforge.errors import CheckpointError
from trainforge.stages import Checkpoint, Extent, checkpoint_name, is_checkpoint_name
from trainforge.testing.bench import Stages
from trainforge.testing.conformance.base import PluginConformance, refusal
from trainforge.testing.conformance.boxes import Box, halves, same_bits, slots_of, values_of


class CheckpointConformance(PluginConformance):
    """Whether what comes back is what was saved, whatever happens in between.

    Attributes:
        dtypes: of the tensors that are saved.
    """

    stage = "checkpoint"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16", "int16", "int64", "uint8", "bool")

    def boxes(self) -> dict[str, Box]:
        """Two parts: tensors of every dtype and odd sizes, and nested data."""
        generator = torch.Generator().manual_seed(1)
        tensors = {}
        for dtype in self.dtypes:
            name = f"blocks.0.{dtype}"
            bits = torch.randint(0, 2, (37,), generator=generator)
            values = bits if dtype == "bool" else torch.randn(37, generator=generator) * 50
            tensors["value", Extent(name, (37,), 0, 37)] = values.to(getattr(torch, dtype))
        whole = Extent("big.weight", (64, 70), 0, 4480)
        tensors["master", whole] = torch.randn(4480, generator=generator)
        tensors["exp_avg", whole] = torch.randn(4480, generator=generator)
        tensors["step", whole.number] = torch.tensor(12345.0)
        tensors["master", Extent("empty", (0, 3), 0, 0)] = torch.zeros(0)
        odd = torch.tensor([float("inf"), -0.0, 1e-45, -1e38, 0.1])
        tensors["value", Extent("odd", (5,), 0, 5)] = odd
        data = {
            "position": 2**53 + 1,
            "ratio": 0.1,
            "names": ["ä", "b"],
            "nested": {"none": None, "yes": True},
        }
        return {"memory": Box(data, tensors), "data": Box({"consumed": 7}, {}, version=3)}

    def saved(self, folder: Path, step: int = 12) -> tuple[Stages, dict[str, Box], Path]:
        """A stage that has saved the boxes, the boxes, and where."""
        stages = self.build(folder)
        boxes = self.boxes()
        stages.checkpoint.save(step, boxes)
        stages.checkpoint.wait()
        return stages, boxes, folder / "checkpoints" / checkpoint_name(step)

    def test_what_comes_back_is_what_was_saved(self, tmp_path: Path) -> None:
        """Every dtype, bit for bit; plain data and version as they were; tensors filled before `load`."""
        stages, boxes, path = self.saved(tmp_path)
        fresh = {name: box.emptied() for name, box in boxes.items()}
        stages.checkpoint.restore(fresh, path)
        for name, box in boxes.items():
            assert fresh[name].loaded == (box.version, box.data), (
                f"load() of part {name} got {fresh[name].loaded}"
            )
            for place, tensor in box.tensors.items():
                assert same_bits(fresh[name].tensors[place], tensor), (
                    f"{place[0]} of {place[1].name} ({tensor.dtype}) came back different: fill the live tensor in place"
                )
        assert stages.checkpoint.verify(path) == [], "verify() finds problems in a fresh checkpoint"

    def test_another_layout_can_read_it(self, tmp_path: Path) -> None:
        """Extents cut in another way are filled from whichever saved ones overlap, both ways."""
        stages, boxes, path = self.saved(tmp_path / "whole")
        shape, whole = (64, 70), boxes["memory"].tensors["master", Extent("big.weight", (64, 70), 0, 4480)]
        cuts = (Extent("big.weight", shape, 0, 1001), Extent("big.weight", shape, 1001, 3479))
        split = Box({}, {("master", extent): torch.zeros(extent.length) for extent in cuts})
        stages.checkpoint.restore({"memory": split}, path)
        pieces = torch.cat([split.tensors["master", extent] for extent in cuts])
        assert torch.equal(pieces, whole), "a whole parameter restored into two extents differs"
        other = self.build(tmp_path / "split")
        other.checkpoint.save(1, {"memory": split})
        other.checkpoint.wait()
        middle = Extent("big.weight", shape, 900, 300)
        target = Box({}, {("master", middle): torch.zeros(300)})
        other.checkpoint.restore({"memory": target}, tmp_path / "split" / "checkpoints" / checkpoint_name(1))
        same = torch.equal(target.tensors["master", middle], whole[900:1200])
        assert same, "an extent that overlaps two saved ones was not put together from both"

    def test_split_masters_are_fp32_in_it(self, tmp_path: Path) -> None:
        """Masters kept in halves are saved as the fp32 values and filled from such: `NamedTensor.read`, `write`."""
        stages, shape = self.build(tmp_path), (31, 7)
        values = torch.randn(217, generator=torch.Generator().manual_seed(3))
        values[:4] = torch.tensor(
            [3.4e38, -0.0, 1e-45, 1.00390625]
        )  # the first: as bf16 it would be infinite
        extents = Extent("w", shape, 0, 100), Extent("w", shape, 100, 117)
        written = halves({("master", e): values[e.offset : e.offset + e.length] for e in extents})
        stages.checkpoint.save(1, {"memory": written})
        stages.checkpoint.wait()
        (info,) = stages.checkpoint.committed()
        assert info.finite, "split masters that are finite are called not finite: look at the fp32 values"
        whole = Box({}, {("master", Extent("w", shape, 0, 217)): torch.zeros(217)})
        again = halves({("master", Extent("w", shape, 90, 127)): torch.zeros(127)})
        for box in (whole, again):
            stages.checkpoint.restore({"memory": box}, info.path)
        (flat,), ((place, high),) = whole.tensors.values(), again.tensors.items()
        assert same_bits(flat, values), "split masters did not come back as the fp32 values that they are"
        wanted = halves({place: values[90:]})
        assert same_bits(high, wanted.tensors[place]), "the upper halves of split masters came back different"
        assert same_bits(again.low[place], wanted.low[place]), "the lower halves of split masters differ"

    def test_a_committed_folder(self, tmp_path: Path) -> None:
        """`checkpoints/step-00000012` with the fields of the contract; nothing else has such a name."""
        before = time.time()
        stages, _, path = self.saved(tmp_path)
        assert path.is_dir(), f"the checkpoint of step 12 must lie in checkpoints/{checkpoint_name(12)}"
        facts = json.loads((path / "checkpoint.json").read_text("utf-8"))
        for key, kind in {"step": int, "writer": str, "format": int, "saved_at": float | int}.items():
            assert isinstance(facts.get(key), kind), (
                f"checkpoint.json needs `{key}` as a {kind}; it has {facts.get(key)!r}"
            )
        assert facts["step"] == 12, f"checkpoint.json says step {facts['step']}"
        assert facts["writer"] == stages.ctx.plugin, (
            f"writer is {facts['writer']!r}; it is ctx.plugin, the plugin's name"
        )
        assert before - 1 <= facts["saved_at"] <= time.time() + 1, (
            "saved_at must be the time of the save (Unix seconds)"
        )

    def test_committed_tells_once(self, tmp_path: Path) -> None:
        """What was committed since the last call, with its size."""
        stages, _, path = self.saved(tmp_path)
        told = stages.checkpoint.committed()
        assert [(info.step, info.path) for info in told] == [(12, path)], f"committed() gave {told}"
        assert told[0].bytes > 2 * 4480 * 4, (
            f"CheckpointInfo.bytes is {told[0].bytes}, less than the tensors take"
        )
        assert stages.checkpoint.committed() == [], "committed() told of the same checkpoint twice"

    def test_a_save_is_a_snapshot(self, tmp_path: Path) -> None:
        """What changes after `save` returned is not in it, however late it is written."""
        stages = self.build(tmp_path)
        boxes = self.boxes()
        wanted = {place: t.clone() for place, t in boxes["memory"].tensors.items()}
        stages.checkpoint.save(1, boxes)
        for tensor in boxes["memory"].tensors.values():
            tensor.zero_()
        boxes["memory"].data["position"] = 0
        stages.checkpoint.wait()
        fresh = boxes["memory"].emptied()
        stages.checkpoint.restore({"memory": fresh}, tmp_path / "checkpoints" / checkpoint_name(1))
        for place, tensor in wanted.items():
            same = same_bits(fresh.tensors[place], tensor)
            assert same, f"{place[0]} of {place[1].name} holds what was written after save() had returned"
        assert fresh.loaded is not None
        assert fresh.loaded[1]["position"] != 0, (
            "plain data changed after save() had returned is in the checkpoint"
        )

    def test_a_flipped_bit_is_noticed(self, tmp_path: Path) -> None:
        """In any file: restore refuses or gives the exact bytes; `verify` names the file."""
        stages, boxes, path = self.saved(tmp_path)
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            content = file.read_bytes()
            noticed = 0
            for place in sorted({len(content) * i // 7 for i in range(7)} | {len(content) - 1}):
                file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
                noticed += self._notices(
                    stages.checkpoint, boxes, path, f"bit flip at byte {place} of {file.name}"
                )
                file.write_bytes(content)
            assert noticed or len(content) < 64, (
                f"no flipped bit in {file.name} was noticed: checksum every file"
            )
        assert stages.checkpoint.verify(path) == [], "the checkpoint is as it was, and verify() complains"

    def test_a_damaged_file_is_noticed(self, tmp_path: Path) -> None:
        """Missing, empty or cut short."""
        stages, boxes, path = self.saved(tmp_path)
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            content = file.read_bytes()
            for what, left in {
                "missing": None,
                "empty": b"",
                "cut short": content[: len(content) // 2],
            }.items():
                if left is None:
                    file.unlink()
                else:
                    file.write_bytes(left)
                noticed = self._notices(stages.checkpoint, boxes, path, f"{file.name} {what}")
                assert noticed, f"{file.name} is {what}, and neither restore() nor verify() noticed"
                file.write_bytes(content)

    @staticmethod
    def _notices(checkpoint: Checkpoint, boxes: Mapping[str, Box], path: Path, what: str) -> bool:
        problems = checkpoint.verify(path)
        fresh = {name: box.emptied() for name, box in boxes.items()}
        error = refusal(checkpoint.restore, fresh, path)
        if error is not None:
            kind = isinstance(error, CheckpointError)
            assert kind, f"{what}: restore() raised {error!r} instead of a CheckpointError"
            assert problems, f"{what}: restore() refuses it ({error}), verify() finds nothing"
            return True
        for name, box in boxes.items():
            for place, tensor in box.tensors.items():
                same = same_bits(fresh[name].tensors[place], tensor)
                assert same, (
                    f"{what}: restore() gave wrong bytes for {place[0]} of {place[1].name} without a word"
                )
            assert fresh[name].loaded == (box.version, box.data), f"{what}: restore() gave wrong plain data"
        return bool(problems)

    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        """A part, a tensor or a shape that the checkpoint does not have."""
        stages, _, path = self.saved(tmp_path)
        whole = Extent("big.weight", (64, 70), 0, 4480)
        lacking = {
            "residual": {"residual": Box({}, {})},
            "elsewhere": {"memory": Box({}, {("master", Extent("elsewhere", (3,), 0, 3)): torch.zeros(3)})},
            "big.weight": {
                "memory": Box({}, {("master", Extent("big.weight", (70, 64), 0, 4480)): torch.zeros(4480)})
            },
            "momentum": {"memory": Box({}, {("momentum", whole): torch.zeros(4480)})},
        }
        for name, parts in lacking.items():
            error = refusal(stages.checkpoint.restore, parts, path)
            assert error is not None, f"restore() filled {name} from a checkpoint that does not have it so"
            assert isinstance(error, CheckpointError), (
                f"restore() raised {error!r} instead of a CheckpointError"
            )
            assert name in str(error), f"the refusal must name {name}: {error}"

    def test_older_checkpoints_go(self, tmp_path: Path) -> None:
        """`train.keep` newest ones stay, each of them whole."""
        stages = self.build(tmp_path, train={"keep": 2})
        for step in (1, 2, 3, 4):
            stages.checkpoint.save(step, self.boxes())
            stages.checkpoint.wait()
        folder = tmp_path / "checkpoints"
        steps = sorted(s for p in folder.iterdir() if (s := is_checkpoint_name(p.name)) is not None)
        assert steps == [3, 4], f"after saving steps 1 to 4 with train.keep = 2 there are {steps}"
        for step in steps:
            assert stages.checkpoint.verify(folder / checkpoint_name(step)) == [], f"step {step} is damaged"

    def test_retention_follows_the_recipe(self, tmp_path: Path) -> None:
        """`keep_every` and `best` keep more; one whose masters are not finite is marked and takes nobody's place."""
        train = {"keep": 1, "keep_every": 4, "save_every": 1, "best": "eval_loss", "eval_every": 1}
        stages, extent = self.build(tmp_path, train=train), Extent("w", (3,), 0, 3)
        for step in range(1, 8):
            counters = {"step": step, "eval_step": step, "eval_loss": 1.0 + abs(step - 2)}
            weights = torch.tensor([1.0, 2.0, float("nan") if step == 7 else 3.0])
            parts = {
                "loop": Box({"counters": counters}, {}),
                "memory": Box({}, {("master", extent): weights}),
            }
            stages.checkpoint.save(step, parts)
            stages.checkpoint.wait()
        found = {info.step: info for info in list_checkpoints(tmp_path / "checkpoints")}
        assert sorted(found) == [2, 4, 6, 7], (
            f"after steps 1 to 7 with {train}, the lowest loss at 2 and NaN in the masters of 7, there are "
            f"{sorted(found)}"
        )
        assert [step for step in found if not found[step].finite] == [7], (
            "checkpoint.json must say `finite: false` when a tensor with the key `master` is not finite, and only then"
        )
        assert found[2].metrics == {"eval_loss": 1.0}, (
            "checkpoint.json needs `metrics` of `retention.measured`"
        )

    def test_an_update_may_overtake_the_writing(self, tmp_path: Path) -> None:
        """What changes after `before_write` was told of it is saved as it was: masters and every state of theirs."""
        stages = self.build(tmp_path, train={"keep": 3})
        slots = slots_of(stages)
        for step in (1, 2, 3):
            wanted = values_of(stages.memory.state())
            stages.checkpoint.save(step, stages.parts())
            for slot in slots if step % 2 else reversed(slots):
                stages.checkpoint.before_write([slot])
                slot.master.add_(step)
                for tensor in slot.state.values():
                    tensor.fill_(step)
            changed = values_of(stages.memory.state())
            assert not any(same_bits(wanted[place], tensor) for place, tensor in changed.items())
            stages.checkpoint.wait()
            stages.checkpoint.restore(
                {"memory": stages.memory}, tmp_path / "checkpoints" / checkpoint_name(step)
            )
            for (key, name), tensor in values_of(stages.memory.state()).items():
                same = same_bits(tensor, wanted[key, name])
                assert same, (
                    f"{key} of {name} is not what it was when step {step} was saved: before_write() must copy, or wait "
                    "for, all that belongs to the parameters of its slots and is not written yet"
                )

    def test_contents_are_what_was_saved(self, tmp_path: Path) -> None:
        """`contents`: every part and every tensor, in ranges of any kind; a plugin without it says so."""
        stages, boxes, path = self.saved(tmp_path)
        error = refusal(stages.checkpoint.contents, path)
        if error is not None:
            assert isinstance(error, CheckpointError), (
                f"contents() raised {error!r} instead of a CheckpointError"
            )
            return
        contents = stages.checkpoint.contents(path)
        assert sorted(contents) == sorted(boxes), f"contents() gives the parts {sorted(contents)}"
        for name, box in boxes.items():
            part = contents[name]
            assert (part.version, part.data) == (box.version, box.data), (
                f"contents() gives {name} as version {part.version} with {part.data}"
            )
            given = {(named.key, named.extent.name): named for named in part.tensors}
            wanted = {(key, extent.name): (extent, t) for (key, extent), t in box.tensors.items()}
            assert given.keys() == wanted.keys(), f"contents() gives {sorted(given)} of {name}"
            for place, (extent, tensor) in wanted.items():
                named = given[place]
                assert (named.extent, named.dtype) == (extent, tensor.dtype), (
                    f"contents() gives {place[0]} of {place[1]} as {named.extent} of {named.dtype}"
                )
                size = extent.length
                for start, stop in ((0, size), (size // 3, size // 2), (size - size // 4, size)):
                    out = torch.zeros(stop - start, dtype=tensor.dtype)
                    named.read(start, out)
                    assert same_bits(out, tensor.reshape(-1)[start:stop]), (
                        f"elements {start} to {stop} of {place[0]} of {place[1]} are not read as they were saved"
                    )

    def test_what_stays_needs_nothing_of_what_is_removed(self, tmp_path: Path) -> None:
        """`remove`: what is named goes, and every other checkpoint restores as before."""
        stages, folder = self.build(tmp_path, train={"keep": 4}), tmp_path / "checkpoints"
        place = "master", Extent("big.weight", (64, 70), 0, 4480)
        wanted = {}
        for step in (1, 2, 3, 4):
            boxes = self.boxes()
            boxes["memory"].tensors[place][: 1000 * step] += step  # the rest is the same in all of them
            wanted[step] = boxes["memory"].tensors
            stages.checkpoint.save(step, boxes)
            stages.checkpoint.wait()
        freed = stages.checkpoint.remove([folder / checkpoint_name(step) for step in (1, 3)])
        assert isinstance(freed, int), f"remove() gave {freed!r}; it gives the bytes freed"
        assert freed >= 0, f"remove() gave {freed}; it gives the bytes freed"
        stages.checkpoint.remove([])
        left = sorted(s for p in folder.iterdir() if (s := is_checkpoint_name(p.name)) is not None)
        assert left == [2, 4], f"after remove() of steps 1 and 3 of 4, and of none, there are {left}"
        for step in left:
            path = folder / checkpoint_name(step)
            problems = stages.checkpoint.verify(path)
            assert problems == [], f"remove() of other checkpoints has damaged step {step}: {problems}"
            fresh = self.boxes()["memory"].emptied()
            stages.checkpoint.restore({"memory": fresh}, path)
            for where, tensor in wanted[step].items():
                same = same_bits(fresh.tensors[where], tensor)
                assert same, (
                    f"remove() of other checkpoints has changed {where[0]} of {where[1].name} in step {step}"
                )

    def test_equal_digests_mean_equal_bits(self, tmp_path: Path) -> None:
        """`describe`, where it gives digests: every tensor has one, and one bit more or less makes it another."""
        stages, boxes, path = self.saved(tmp_path, step=1)
        first = stages.checkpoint.describe(path)
        if "tensors" not in first:
            return
        tensors = boxes["memory"].tensors
        names = {f"memory/{key}/{extent.name}": tensor for (key, extent), tensor in tensors.items()}
        assert set(first["tensors"]) == set(names), (
            f"describe() names the tensors {sorted(first['tensors'])}; saved were {sorted(names)}"
        )
        for name, tensor in names.items():
            size = first.get("tensor_bytes", {}).get(name, tensor.nbytes)
            assert size == tensor.nbytes, f"describe() says {name} has {size} bytes; it has {tensor.nbytes}"
        filled = [tensor.view(-1).view(torch.uint8) for tensor in tensors.values() if tensor.numel()]
        for content in filled:
            content[-1] ^= 1
        stages.checkpoint.save(2, boxes)
        stages.checkpoint.wait()
        second = stages.checkpoint.describe(path.parent / checkpoint_name(2))["tensors"]
        for name, tensor in names.items():
            differs = second[name] != first["tensors"][name]
            assert differs or not tensor.numel(), (
                f"{name} has one bit other than before and the same digest in describe()"
            )

    def test_a_save_can_be_repeated(self, tmp_path: Path) -> None:
        """Saving the same step again replaces it."""
        stages, boxes, path = self.saved(tmp_path)
        boxes["data"].data["consumed"] = 8
        stages.checkpoint.save(12, boxes)
        stages.checkpoint.wait()
        fresh = boxes["data"].emptied()
        stages.checkpoint.restore({"data": fresh}, path)
        assert fresh.loaded == (3, {"consumed": 8}), (
            f"after saving step 12 twice, restore() gave {fresh.loaded}"
        )

    def test_a_failed_save_is_told_and_leaves_no_checkpoint(self, tmp_path: Path) -> None:
        """By `save` or by `wait`, as a CheckpointError; nothing has a committed name."""
        stages = self.build(tmp_path)
        folder = tmp_path / "checkpoints"
        shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("a file where the folder should be")

        def save() -> None:
            stages.checkpoint.save(1, self.boxes())
            stages.checkpoint.wait()

        error = refusal(save)
        assert error is not None, "the folder cannot be written, and neither save() nor wait() said so"
        kind = isinstance(error, CheckpointError)
        assert kind, f"a save that fails must raise a CheckpointError, not {error!r}"
        assert stages.checkpoint.committed() == [], "a save that failed is told as committed"
